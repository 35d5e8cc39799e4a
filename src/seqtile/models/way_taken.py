"""Which way modules went while a model ran: computed chunk by chunk by an autograd Function of seqtile's, or untiled.

A Function whose node stands between a module's inputs and its outputs has computed its forward, and will compute its
backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from seqtile.ops.state import nodes_behind


class WayTaken:
    """A context in which the calls of modules are watched, each given more tokens than a chunk holds; of a module that
    is given no hidden states, such as a whole model, every call."""

    def __init__(self, modules: Sequence[nn.Module], chunk_tokens: int):
        self.chunked = self.untiled = 0
        self._modules, self._chunk_tokens = modules, chunk_tokens
        self._calls: list[tuple[nn.Module, bool, set[Node | None]]] = []

    def __enter__(self) -> "WayTaken":
        self._hooks = [module.register_forward_pre_hook(self._called, with_kwargs=True) for module in self._modules]
        self._hooks += [module.register_forward_hook(self._returned) for module in self._modules]
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def refusal(self) -> str | None:
        """Says why nothing follows from the run for modules that are to be tiled; None if something does."""
        if self.untiled:
            return "its forward went the untiled way"
        if not self.chunked:
            return "a small model of its class, given words, does not call it"
        return None

    def _called(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = _tensors_in((args, kwargs))
        states = [tensor for tensor in given if tensor.is_floating_point() and tensor.dim() > 1]
        is_short = bool(states) and states[0].shape[:-1].numel() <= self._chunk_tokens
        ends = {tensor.grad_fn for tensor in given}
        self._calls.append((module, is_short, ends | set(nodes_behind(ends))))

    def _returned(self, module: nn.Module, args: tuple, output: Any) -> None:
        called, is_short, before = self._calls.pop()
        assert called is module, "modules return in the reverse of the order in which they are called"
        ends = {tensor.grad_fn for tensor in _tensors_in(output)} - {None}
        if is_short or not ends:  # without a gradient there is nothing to compare
            return
        if any(_is_ours(node) for node in nodes_behind(ends) if node not in before):
            self.chunked += 1
        else:
            self.untiled += 1


def _is_ours(node: Node) -> bool:
    function = getattr(type(node), "_forward_cls", None)  # of a Function that is written in Python
    return function is not None and function.__module__.startswith("seqtile.")


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a forward is given or returns."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
