"""A decoder layer of any shape, tiled around its attention: its own forward runs chunk by chunk, twice.

    1. each chunk   forward(x) up to the attention function ──> queries, keys, values of the chunk; the rest is not run
    2. the whole    the model's attention function, as the layer asked for it ──> attn_output
    3. each chunk   forward(x) whose attention function returns the chunk of attn_output ──> output of the chunk

For layers whose attention is Hugging Face's, once, and who treat every token alike otherwise. The projections to
queries, keys and values are computed once more by 3.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.models.fallback import call_tiled
from seqtile.models.forms import source_of
from seqtile.models.further_outputs import call_with_further_outputs, recording
from seqtile.models.placement import computed_forward
from seqtile.models.shared_containers import SharedContainers

_ASKS = "ALL_ATTENTION_FUNCTIONS.get_interface("
_WHOLE = ("attention_mask", "past_key_values")  # what is not of a chunk's tokens alone


class _Reached(Exception):
    """Ends a forward at its attention function."""


def any_layer_refusal(layer: nn.Module) -> str | None:
    """Says why a layer cannot be tiled around its attention, as far as can be seen without running it."""
    asking = [module for module in layer.modules() if _ASKS in (source_of(computed_forward(module)) or "")]
    if len(asking) != 1:
        return f"expected one attention that asks for Hugging Face's attention function, got {len(asking)}"
    names = getattr(computed_forward(asking[0]), "__globals__", {})
    if names.get("ALL_ATTENTION_FUNCTIONS") is not ALL_ATTENTION_FUNCTIONS:
        return "its attention looks its function up in a table of its own"
    if any(isinstance(module, _ConvNd) for module in layer.modules()):
        return "it has a convolution along the sequence"
    return None


@torch.compiler.disable(reason="seqtile runs a layer's forward in two parts")
def call_layer_tiled(
    layer: nn.Module, forward: Callable, hidden: torch.Tensor, given: dict[str, Any], chunk_tokens: int | None
) -> Any:
    """Returns forward(layer, hidden [B, S, D], **given), chunk by chunk around its attention."""
    _install_look_up()
    asked: dict[str, Any] = {}
    containers = SharedContainers(given)
    cut = _Cut(containers.others, hidden.shape[1])

    def before_attention(hidden: torch.Tensor, *pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads: list[torch.Tensor] = []

        def stop(module: nn.Module, *qkv: torch.Tensor, **options: Any) -> None:
            named = dict(zip(("query", "key", "value", "attention_mask"), qkv, strict=False)) | options
            parts = [named.pop(name) for name in ("query", "key", "value")]
            wholes = [containers.holds(part) for part in parts]
            heads.extend(part.transpose(1, 2) for part, whole in zip(parts, wholes, strict=True) if not whole)
            if "module" not in asked:
                asked["wholes"] = [part if whole else None for part, whole in zip(parts, wholes, strict=True)]
                asked.update(module=module, mask=named.pop("attention_mask", None), options=cut.whole(named, pieces))
            raise _Reached

        stand_ins = containers.stand_ins()
        try:
            with recording(None), _attention_function(stop, asked):
                forward(layer, hidden.contiguous(), **cut.with_pieces(pieces), **stand_ins)
        except _Reached:
            return tuple(heads)
        raise ValueError(f"a {type(layer).__name__} asked for no attention function; apply with layer=False")

    def whole_layer(hidden: torch.Tensor, attn_output: torch.Tensor, *pieces: torch.Tensor) -> Any:
        stand_ins = containers.stand_ins()
        with _attention_function(lambda *_, **__: (attn_output.contiguous(), None), {}):
            output = forward(layer, hidden.contiguous(), **cut.with_pieces(pieces), **stand_ins)
        return output, containers.written(stand_ins)

    heads = call_tiled(before_attention, [layer], hidden, *cut.tensors, chunk_tokens=chunk_tokens, dim=1)
    of_chunks = iter(heads if isinstance(heads, tuple) else (heads,))
    q, k, v = (next(of_chunks).transpose(1, 2) if whole is None else whole for whole in asked.pop("wholes"))
    attn_output = asked["function"](asked["module"], q, k, v, asked["mask"], **asked["options"])[0]
    inputs = (hidden, attn_output, *cut.tensors)
    output, written = call_with_further_outputs(whole_layer, [layer], *inputs, chunk_tokens=chunk_tokens)
    containers.write(written)
    return output


_instead: ContextVar[tuple[Callable, dict[str, Any]] | None] = ContextVar("attention_function", default=None)


def _install_look_up() -> None:
    """Puts a look-up of attention functions in place of Hugging Face's, once: it finds what the thread that asks was
    given by `_attention_function`, and else what there was to be found before."""
    find = ALL_ATTENTION_FUNCTIONS.get_interface
    if hasattr(find, "_seqtile"):
        return

    def get_interface(name: str, default: Callable) -> Callable:
        found = find(name, default)
        if torch.compiler.is_compiling() or (instead := _instead.get()) is None:
            return found
        function, asked = instead
        asked.setdefault("function", found)
        return function

    get_interface._seqtile = True
    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface


@contextmanager
def _attention_function(function: Callable, asked: dict[str, Any]) -> Iterator[None]:
    """Has layers that this thread runs find `function` as the attention function, and notes which they would have
    found. To be entered inside what a backward calls again: threads of autograd's inherit nothing."""
    token = _instead.set((function, asked))
    try:
        yield
    finally:
        _instead.reset(token)


class _Cut:
    """What a layer is given besides its hidden states: tensors with a row a token, to be cut, and the rest."""

    def __init__(self, given: dict[str, Any], length: int):
        leaves, self._spec = tree_flatten({name: value for name, value in given.items() if name not in _WHOLE})
        self._rest = {name: given[name] for name in _WHOLE if name in given}
        self._leaves = leaves
        self._places = {i: axis for i, leaf in enumerate(leaves) if (axis := _axis_of(leaf, length)) is not None}
        self.tensors = [self._moved(leaves[i], axis) for i, axis in self._places.items()]
        """Each with its tokens along dimension 1, and one dimension behind that at least."""

    def with_pieces(self, pieces: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """Returns what the layer is given for a chunk."""
        leaves = list(self._leaves)
        for (i, axis), piece in zip(self._places.items(), pieces, strict=True):
            leaves[i] = piece.squeeze(-1) if self._leaves[i].dim() == 2 else piece.movedim(1, axis)
        self._given = {id(leaf): whole for leaf, whole in zip(leaves, self._leaves, strict=True)}
        return tree_unflatten(leaves, self._spec) | self._rest

    def whole(self, options: dict[str, Any], pieces: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """Returns what an attention function was given for a chunk as it is given for the whole sequence."""
        found = {}
        for name, value in options.items():
            known = not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter)
            if not known and id(value) not in self._given:
                raise ValueError(f"expected an attention that is given no tensor computed from its tokens, got {name}")
            found[name] = value if known else self._given[id(value)]
        return found

    @staticmethod
    def _moved(leaf: torch.Tensor, axis: int) -> torch.Tensor:
        return leaf.unsqueeze(-1) if leaf.dim() == 2 else leaf.movedim(axis, 1)


def _axis_of(leaf: Any, length: int) -> int | None:
    """Returns the dimension of a tensor along which it has a row a token; None if there is none."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
        return None
    return next((axis for axis in (1, 2) if axis < leaf.dim() and leaf.shape[axis] == length), None)
