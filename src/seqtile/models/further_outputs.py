"""All outputs of a layer, chunk by chunk: what it returns, and what is recorded inside it.

Hugging Face records a router's logits by hooks, in a dict that is active during a model's forward. Each chunk runs with
a dict of its own; what it recorded leaves the tiled function as further outputs, with gradients, and is recorded whole.

    chunk       function(x [B, C, D])  ->  tree of tensors, recorded: {"router_logits": [[B * C, E]]}
    the whole                              the same tree,             {"router_logits": [[B * S, E]]}
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.utils.output_capturing import _active_collector

from seqtile.models.in_chunks import InChunks, call_in_chunks
from seqtile.ops.tiled import Outputs


def records_attentions() -> bool:
    """Returns whether Hugging Face is recording attention weights, which a tiled layer does not have."""
    return any("attentions" in name for name in _active_collector.get() or ())


@contextmanager
def recording(collected: dict[str, list] | None) -> Iterator[None]:
    """Makes Hugging Face record outputs into `collected`; None: nowhere."""
    if _active_collector.compiling:  # it holds the dict while a compiled model runs
        before, _active_collector.global_var = _active_collector.global_var, collected
    else:
        token = _active_collector.set(collected)
    try:
        yield
    finally:
        if _active_collector.compiling:
            _active_collector.global_var = before
        else:
            _active_collector.reset(token)


def call_with_further_outputs(
    function: Callable[..., tuple[Outputs, Any]],
    modules: InChunks,
    *inputs: torch.Tensor,
    rows: int,
    chunk_tokens: int | None,
) -> tuple[Outputs, Any]:
    """Returns function(*inputs), computed chunk by chunk, and records what it records.

    Args:
        function: called with inputs cut along dimension 1. It returns a tensor or a tuple of them, cut likewise, and a
            tree of None and of tensors with a row for each token, [B, C, ...], [B * C, ...] or [B, H, C, ...].
            ValueError for anything else.
        modules: those that function calls.
        inputs: their tokens are along dimension 1.
        rows: B, the sequences in a batch.
        chunk_tokens: tokens of a chunk.
    """
    collected = _active_collector.get()
    names = [name for name in collected or () if not name.lstrip("_").startswith("hidden_states")]
    form, own = _Form(modules.name), []

    def of_chunk(*pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recorded: dict[str, list] = {name: [] for name in names}
        with recording(recorded if names else None):
            made, further = function(*pieces)
        made = made if isinstance(made, tuple) else (made,)
        own[:] = [len(made)]
        return *made, *form.flat((further, recorded), rows, pieces[0].shape[1])

    outputs = call_in_chunks(of_chunk, modules, *inputs, chunk_tokens=chunk_tokens, dim=1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    made, further = outputs[: own[0]], outputs[own[0] :]
    tree, recorded = form.whole(further)
    for name in names:
        collected[name] += recorded[name]
    return made if len(made) > 1 else made[0], tree


class _Form:
    """The layout of the tensors in a tree, which is the same for every chunk."""

    def __init__(self, owner: str):
        self._owner, self._spec = owner, None

    def flat(self, tree: Any, rows: int, length: int) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of a chunk's tree, each [rows, length, ...]."""
        leaves, spec = tree_flatten(tree)
        if others := [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | None)]:
            raise self._error(f"a {type(others[0]).__name__}")
        if self._spec is None:
            self._spec, self._axes = spec, [x if x is None else self._axis_of(x, rows, length) for x in leaves]
        elif (spec, [x is None for x in leaves]) != (self._spec, [axis is None for axis in self._axes]):
            raise self._error("other outputs for one chunk than for another")
        made = [(x, axis) for x, axis in zip(leaves, self._axes, strict=True) if axis is not None]
        return tuple(x.unflatten(0, (rows, length)) if axis == 0 else x.movedim(axis, 1) for x, axis in made)

    def whole(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Returns the tree of the whole sequence, given its tensors [B, S, ...]."""
        left = iter(tensors)
        whole = [
            None if axis is None else (next(left).movedim(1, axis) if axis else next(left).flatten(0, 1))
            for axis in self._axes
        ]
        return tree_unflatten(whole, self._spec)

    def _axis_of(self, tensor: torch.Tensor, rows: int, length: int) -> int:
        """Returns the dimension of a chunk's tokens, 0 if all rows are one after the other along that."""
        shape = list(tensor.shape)
        axes = [axis for axis in (1, 2) if shape[:1] == [rows] and shape[axis : axis + 1] == [length]]
        if len(axes) > 1 and len(shape) > 3:
            raise self._error(f"a tensor {shape} for a chunk of {length} tokens, two dimensions of which are as long")
        if axes:
            return axes[0]
        if shape[:1] == [rows * length]:
            return 0
        raise self._error(f"a tensor {shape} for a chunk of {length} tokens in {rows} rows")

    def _error(self, got: str) -> ValueError:
        return ValueError(
            f"a {self._owner} is computed chunk by chunk: expected it to make tensors with a row for each token, or "
            f"None, got {got}; apply with layer=False"
        )
