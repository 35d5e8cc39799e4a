"""Tests each part on a small model of the same class: does the tiled part compute the same as the untiled one?

small model, float32, untiled  ─> loss, gradients
the same, embeddings changed by one bit  ─> the size of rounding errors
the same, one part tiled in chunks of 7 tokens  ─> within what difference.py allows, or that part is refused
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from seqtile.models.parts import BASE, EXPERTS, LAYER, LOSS, MLP, NORM, Part
from seqtile.models.placement import Options, class_of, place
from seqtile.ops.graph import nodes_behind
from seqtile.proof.difference import Vectors, brief, difference, distance, loss_and_gradients
from seqtile.proof.small import WORDS

CHUNK, EPS = 7, torch.finfo(torch.float32).eps
Inputs = dict[str, Any]
Untiled = Callable[[float], Vectors]
"""Returns the loss and gradients of an untiled model whose embeddings change by this relative amount."""
PROVEN_ALONE = (LOSS, MLP, EXPERTS, LAYER)  # the other parts are tiled with layers


class Finding(NamedTuple):
    """The result for the modules of one class, tiled as one part."""

    part: Part
    cls: type
    modules: int
    """The number of these modules in the model."""
    chunked: str | None
    """Why the modules run in chunks; None if they are fused."""
    groups: bool
    """True if the modules are layers whose attention computes the same in head chunks."""
    refusal: str | None
    """Why the modules must stay untiled: what differs when they are tiled; None if nothing differs."""
    error: float
    """The tiled model's largest error of the loss or of a weight's gradient against float64, relative to its norm; NaN
    if the model fails."""
    untiled_error: float
    """The same for the untiled model."""

    @property
    def how(self) -> str:
        """refused, chunked or fused."""
        return "refused" if self.refusal else "chunked" if self.chunked else "fused"


def findings(model: PreTrainedModel) -> Iterator[Finding]:
    """Tiles each part of a small float32 model, one class after the other, and yields the results."""
    # On a copy: some models leave tensors with a graph on their modules, and such tensors cannot be copied.
    untiled = cache(lambda nudge: gradients_of(copy.deepcopy(model), nudge=nudge))
    plain = truth = untiled(0.0)
    with suppress(RuntimeError, ValueError, TypeError):  # some models compute in float32 whatever their input
        truth = gradients_of(copy.deepcopy(model).double())
    for part in PROVEN_ALONE:
        for cls in dict.fromkeys(class_of(module) for module in _tileable(model, part)):
            modules = _tileable(model, part, cls)
            found, refusal = _compare_part(model, part, cls, Options(chunk_tokens=CHUNK, check=False), untiled)
            verdict = part.verdict(modules[0])
            if verdict.how == "untiled" and verdict.error is None:  # by what a user put into Hugging Face's code
                refusal = None
            chunked = verdict.reason if refusal is None else None
            groups = False
            if part is LAYER and refusal is None and chunked is None:
                grouped = Options(layer=True, head_groups=2, chunk_tokens=CHUNK, check=False)
                groups = _compare_part(model, part, cls, grouped, untiled)[1] is None
            errors = _error(found, truth), _error(plain, truth)
            yield Finding(part, cls, len(modules), chunked, groups, refusal, *errors)


def _tileable(model: nn.Module, part: Part, cls: type | None = None) -> list[nn.Module]:
    """Returns the modules that can be tiled as a part; with `cls`, only those of that class."""
    modules = [module for module in part.modules(model) if cls is None or class_of(module) is cls]
    return [module for module in modules if part.refusal(module) is None]


def _compare_part(
    model: PreTrainedModel, part: Part, cls: type, options: Options, untiled: Untiled
) -> tuple[Vectors | None, str | None]:
    """Tiles the modules of a class as a part. Returns loss and gradients (None if the model fails), and what differs
    (None if nothing does)."""
    try:
        tiled = tiled_copy(model, part, cls, options)
        return compare(tiled, some_words(), _tileable(tiled, part, cls), CHUNK, untiled)
    except Exception as error:  # the model's own code may raise anything
        return None, f"it fails when it is tiled: {brief(error)}"


def compare(
    tiled: PreTrainedModel, inputs: Inputs, modules: Sequence[nn.Module], chunk_tokens: int, untiled: Untiled
) -> tuple[Vectors, str | None]:
    """Returns the loss and gradients of a tiled model, and what differs from the untiled model. If the tiled `modules`
    did not run in chunks, says so instead, because the comparison then proves nothing. None if nothing differs."""
    with WayTaken(modules, chunk_tokens) as way:
        found = gradients_of(tiled, inputs)
    plain = untiled(0.0)
    if not all(bool(vector.isfinite().all()) for vector in plain.values() if vector is not None):
        return found, "the loss or a gradient of a small model of its class is not finite"
    differs = difference(plain, found, plain, EPS)
    if differs is not None:  # compare with the size of rounding errors
        differs = difference(plain, found, untiled(EPS), EPS)
    return found, f"{differs.said} when it is tiled" if differs else way.refusal


class WayTaken:
    """A context that counts whether modules run chunked or untiled. A chunked call has a node of a seqtile autograd
    Function between its inputs and outputs. Calls that fit in one chunk do not count, except of modules that get no
    hidden states, such as a whole model."""

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
        """Says why the run proves nothing about the modules; None if it proves something."""
        if self.untiled:
            return "its forward ran untiled"
        if not self.chunked:
            return "a small model of its class, given token ids, does not call it"
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
        behind = (getattr(type(node), "_forward_cls", None) for node in nodes_behind(ends) if node not in before)
        if any(function and function.__module__.startswith("seqtile.") for function in behind):  # written in Python
            self.chunked += 1
        else:
            self.untiled += 1


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a forward's arguments or output."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _error(found: Vectors | None, truth: Vectors) -> float:
    """Returns the largest relative error over all vectors that are not tiny beside the largest."""
    if found is None:
        return math.nan
    sizes = {name: float(true.norm()) for name, true in truth.items() if true is not None}
    large = [name for name, size in sizes.items() if size > 1e-6 * max(sizes.values())]
    return max((distance(truth[name], found[name]) for name in large), default=math.nan)


def tiled_copy(model: PreTrainedModel, part: Part, cls: type, options: Options) -> PreTrainedModel:
    """Returns a copy of a model in which the modules of a class are tiled as a part."""
    tiled, classes = copy.deepcopy(model), {}
    found = [(part, module) for module in _tileable(tiled, part, cls)]
    found += [(other, module) for other in (NORM, BASE) if part is LAYER for module in other.modules(tiled)]
    for one, module in found:
        one.check(module, options)
        place(module, partial(one.tiled_forward, options), options, classes)
    return tiled


def some_words() -> Inputs:
    """Returns model inputs: a few random tokens, some without a label."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        ids = torch.randint(5, WORDS - 5, (2, 3 * CHUNK + 2))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def gradients_of(model: PreTrainedModel, inputs: Inputs | None = None, nudge: float = 0.0) -> Vectors:
    """Returns a model's loss on `inputs`, and the gradients of its parameters and of its embeddings' output. `nudge`
    changes that output by a relative amount."""
    leaves = {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad and leaf.numel()}
    inputs = some_words() if inputs is None else inputs
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        return loss_and_gradients(model.train(), type(model).__call__, inputs, leaves, nudge)
