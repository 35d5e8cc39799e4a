"""Attention without a mask, for packed, padded and windowed batches, on any device: `apply_seqtile(model,
attention="varlen")` chooses it.

    model    create_causal_mask ── VarlenMasks ── a `BatchLayout` in the mask's place: documents, padding, window
    layers   attention_mask=layout, also in a checkpoint's recomputation and in tiled layers ── VarlenAttention

Where there is no layout, as in a forward with a cache that holds tokens, and where an attention asks for something that
is not known here, the model's former attention runs with its own mask.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from seqtile.attention.backends import attend, kernel_of, warn_of_limits
from seqtile.attention.heads import Rows, rank_heads
from seqtile.attention.layout import VARLEN, Layout, edges_of, rows_between
from seqtile.attention.local import COMPUTED, SCORED, SINKS, LocalAttention, call_attention, in_one_dtype
from seqtile.attention.mask_functions import MaskRecipe, recipe_of, spans_of


def register(former: str) -> str:
    """Registers the attention that takes the place of the attention `former` with Hugging Face; returns its name."""
    name = Chosen(VARLEN + former)
    AttentionInterface.register(name, VarlenAttention(former))
    AttentionMaskInterface.register(name, VarlenMasks(former))
    return name


class Chosen(str):
    """The name of this attention in a config. A copy of the config has it, too; pickled it is the former attention's
    name, which any process knows."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict) -> "Chosen":
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[str]]:
        return str, (self.removeprefix(VARLEN),)


class BatchLayout(Layout):
    """The layout of a batch for layers with one kind of mask."""

    ndim = 4
    """For `generate`, which makes masks in advance: Hugging Face hands one of four dimensions back to `VarlenMasks`."""

    def __init__(
        self, length: int, documents: tuple[Rows, ...], name: str, recipe: MaskRecipe, mask: Callable[[], Any]
    ):
        same = all(row == documents[0] for row in documents)
        super().__init__(length, documents[:1] if same else documents, name)
        self.shape = (len(documents), 1, length, length)
        self.recipe = recipe
        self.has_mask = recipe.padding is not None
        self._mask = mask

    def mask(self, device: torch.device) -> Any:
        """Returns the mask that the former attention takes in the layout's place, made once for a device."""
        mask = self.once("mask", self._mask)
        return self.once(("mask", device), lambda: mask.to(device)) if isinstance(mask, Tensor) else mask

    def with_lengths(self, ends: Tensor) -> "BatchLayout":
        """Returns the layout in which documents end at `ends`, cumulative lengths of all rows from 0 on, if neither
        positions nor a mask tell documents; else this one. One wait for the device, once."""

        def found() -> BatchLayout:
            edges, rows, recipe = ends.tolist(), self.shape[0], self.recipe
            if recipe.padding is not None or recipe.documents is not None or len(edges) <= 2:
                return self
            edges = sorted({*edges, *(self.length * row for row in range(rows + 1))})  # behind the last is padding
            pairs = [(start % self.length, start % self.length + stop - start) for start, stop in pairwise(edges)]
            starts = [i for i, (start, _) in enumerate(pairs) if start == 0]
            documents = tuple(tuple(pairs[i:j]) for i, j in pairwise([*starts, len(pairs)]))
            layout = BatchLayout(self.length, _in_chunks(documents, recipe), self.implementation, recipe, self._mask)
            return _with_spans(layout, self.spans[0], rows)

        return self.once("with lengths", found)


class VarlenMasks:
    """The function that Hugging Face calls for a mask; returns a `BatchLayout` instead, or what the former attention's
    function returns."""

    def __init__(self, former: str):
        self.former = former

    @torch.compiler.disable(reason="seqtile reads where documents begin")
    def __call__(self, *, q_length: int, kv_length: int, q_offset: Any = 0, **given: Any) -> Any:
        if isinstance(given.get("attention_mask"), BatchLayout):  # made in advance
            return given["attention_mask"]
        former = ALL_MASK_ATTENTION_FUNCTIONS.get(self.former)
        arguments = given | {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
        make = partial(former, **arguments) if former is not None else lambda: None
        if q_length != kv_length or isinstance(q_offset, Tensor) or q_offset or given.get("kv_offset"):
            return make()
        recipe = recipe_of(given["mask_function"], given.get("attention_mask"))
        if isinstance(recipe, str):
            return make()
        layout = _layout_of(recipe, given["batch_size"], q_length, VARLEN + self.former, make)
        return make() if layout is None else layout


def _layout_of(recipe: MaskRecipe, rows: int, length: int, name: str, mask: Callable[[], Any]) -> BatchLayout | None:
    """Returns the layout that a recipe describes; None for one that only a mask can. Waits for the device unless each
    row is one document."""
    documents: tuple[Rows, ...] = (((0, length),),) * rows
    if (told := recipe.documents if recipe.padding is None else recipe.padding) is not None:
        places = torch.arange(length, device=told.device).expand(rows, length)
        if recipe.padding is None:
            places, valid = places + 2 * told, torch.ones_like(places, dtype=torch.bool)  # a gap where a document ends
        else:
            valid = told.bool()
        documents = rows_between(edges_of(places, valid))
        if recipe.padding is not None and any(len(row) > 1 for row in documents):
            return None  # a mask with holes
    try:
        spans = spans_of(recipe, recipe.window)
    except ValueError:
        return None
    layout = BatchLayout(length, _in_chunks(documents, recipe), name, recipe, mask)
    return _with_spans(layout, spans, rows)


def _with_spans(layout: BatchLayout, spans: tuple[Rows, ...], rows: int) -> BatchLayout:
    """Returns the layout with spans of each row, if there are any, and then the documents of each row."""
    if spans:
        layout.documents = layout.documents * (rows // len(layout.documents))
        layout.spans = (spans, spans)
    return layout


def _in_chunks(documents: tuple[Rows, ...], recipe: MaskRecipe) -> tuple[Rows, ...]:
    """Returns documents cut where a chunk of their positions ends. One wait for the device if they have positions."""
    if (size := recipe.chunk) is None:
        return documents
    positions = None if recipe.positions is None else recipe.positions.expand(len(documents), -1).tolist()
    found = []
    for i, row in enumerate(documents):
        pieces = []
        for start, stop in row:
            first = start if positions is None else positions[i][start]
            first = 0 if recipe.padding is not None else first  # of a padded row the first token has 0
            edges = [start, *range(start + size - first % size, stop, size), stop]
            pieces += pairwise(edges)
        found.append(tuple(pieces))
    return tuple(found)


class VarlenAttention:
    """The attention function that Hugging Face's layers call."""

    def __init__(self, former: str):
        self.former = former

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Computes [B, S, H, K] from q [B, H, S, K], k and v [B, KV, S, K], and a `BatchLayout` in the mask's place.

        Queries of padding get zeros; in front of a row, if the former attention is eager, the mean of its values, as
        there. Allocates attention's own tensors, and a copy of q, k and v for kernels that take
        documents of several rows, or padded ones, one after the other.
        """
        if not isinstance(attention_mask, BatchLayout):
            return call_attention(self.former, module, query, key, value, attention_mask, **options)
        if self._is_unknown(module, query, key, options):
            return call_attention(self.former, module, query, key, value, attention_mask.mask(query.device), **options)
        return self._compute(module, query, key, value, attention_mask, options), None

    @staticmethod
    def _is_unknown(module: nn.Module, q: Tensor, k: Tensor, options: dict[str, Any]) -> bool:
        """Returns whether a call asks for more than scores of causal attention, such as for its weights."""
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        others = [name for name, value in options.items() if isinstance(value, Tensor) and name in SCORED]
        wants_weights = options.get("output_attentions", getattr(module.config, "output_attentions", False))
        return bool(not causal or others or wants_weights or q.shape[2] != k.shape[2] or options.get("cache"))

    @torch.compiler.disable(reason="seqtile computes attention document by document")
    def _compute(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, layout: BatchLayout, options: dict[str, Any]
    ) -> Tensor:
        if (ends := options.get("cu_seq_lens_q")) is not None:
            layout = layout.with_lengths(ends)
        numbers = q.shape[1], k.shape[1]
        heads = layout.once(("heads", numbers), lambda: rank_heads(0, 1, *numbers, ((0, layout.length),)))
        kept = {name: options[name] for name in COMPUTED if options.get(name) is not None}
        if SINKS in kept and len(kept[SINKS]) != q.shape[1]:
            raise ValueError(
                f"expected sinks of {q.shape[1]} heads, got {len(kept[SINKS])}: head chunks need an attention "
                "without sinks; leave out head_groups"
            )
        attention = LocalAttention(module, layout, heads, layout.recipe.window, kept)
        key = ("limits", q.shape[1], q.requires_grad)
        layout.once(key, lambda: warn_of_limits(kernel_of(attention, q, v), layout, q))
        return attend(attention, *in_one_dtype(q, k, v))
