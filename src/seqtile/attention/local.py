"""The model's original attention, as one rank calls it for its heads and queries."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

from seqtile.attention.heads import RankHeads, Rows
from seqtile.attention.layout import Layout
from seqtile.attention.segments import Block, segments
from seqtile.ops.state import Overridden

SINKS = "s_aux"  # Hugging Face's argument for sinks [H], logits that take a share of every softmax
COMPUTED = ("scaling", "dropout", "softcap", SINKS)
"""The arguments of an attention call that change what is computed, besides its window."""
SCORED = {"position_bias", "attention_bias", "alibi", "attn_bias", "rel_pos_bias"}
"""Tensors among the arguments that change scores: position_bias and alibi in Hugging Face's models, and usual names."""
UNUSED = {"position_ids", "cache_position", "input_ids", "labels", "shift_labels", "num_items_in_batch", SINKS}
"""Tensors among the arguments that change no score, and the sinks; a call with any other is not known."""


class LocalAttention(NamedTuple):
    """The model's original attention, called for this rank's heads and queries."""

    module: nn.Module
    layout: Layout
    heads: RankHeads
    window: int | None
    options: dict[str, Any]
    """scaling, dropout and, if the model has them, softcap and sinks, as Hugging Face passes them."""
    kernel: str = ""
    """The name of the attention that computes it, see backends.py."""

    @property
    def is_whole(self) -> bool:
        """True if each row is one document, of which every query is computed and sees all keys up to its own."""
        whole = ((0, self.layout.length),)
        alone = not self.layout.parents and not self.spans and self.heads.rows == whole
        return alone and self.layout.documents == (whole,) and self.reach >= self.layout.length

    @property
    def reach(self) -> int:
        """The maximum number of keys that a query sees, including its own."""
        return self.layout.length if self.window is None else self.window

    @property
    def spans(self) -> tuple[Rows, ...]:
        """The spans whose tokens see each other in both directions in this layer, see `Layout`."""
        return self.layout.spans[self.window is not None]

    @property
    def has_padding_in_front(self) -> bool:
        """True if there is padding in front of a row's first token, which a shifted loss reads."""
        return self.layout.has_mask and any(not row or row[0][0] for row in self.layout.documents)

    def of_heads(self, heads: slice) -> "LocalAttention":
        """Returns this attention with only the sinks of these heads."""
        if SINKS not in self.options:
            return self
        return self._replace(options=self.options | {SINKS: self.options[SINKS][heads]})

    @property
    def sinks(self) -> Tensor | None:
        return self.options.get(SINKS)

    @property
    def draws(self) -> bool:
        """True if the attention draws random numbers."""
        return bool(self.options.get("dropout"))

    def with_sinks(self, sinks: Tensor | None) -> "LocalAttention":
        return self if sinks is None else self._replace(options=self.options | {SINKS: sinks})

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **others: Any) -> Tensor:
        """Calls the attention as Hugging Face does: from q [B, h, n, K], k and v [B, kv, m, K] to [B, n, h, K]."""
        name = self.kernel
        function = self.eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        config = Overridden(self.module.config, _attn_implementation=name)
        groups = q.shape[1] // k.shape[1]
        own = {"sinks": self.options[SINKS]} if SINKS in self.options else {}
        module = Overridden(self.module, config=config, num_key_value_groups=groups, head_dim=q.shape[3], **own)
        return function(module, q, k, v, mask, sliding_window=self.window, is_causal=True, **self.options, **others)[0]

    @property
    def eager(self) -> Callable[..., Any]:
        """The eager attention, which is not registered: the model's own if it has sinks, else Gemma 2's."""
        modeling = sys.modules[type(self.module).__module__] if SINKS in self.options else modeling_gemma2
        return modeling.eager_attention_forward


def call_attention(name: str, module: nn.Module, *heads_and_mask: Any, **options: Any) -> Any:
    """Calls an attention that Hugging Face registers, or the model's own eager one, as the model's layers do."""
    eager = sys.modules[type(module).__module__].eager_attention_forward if name == "eager" else None
    function = ALL_ATTENTION_FUNCTIONS[name] if eager is None else eager
    config = Overridden(module.config, _attn_implementation=name)
    return function(Overridden(module, config=config), *heads_and_mask, **options)


def in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Returns q, k and v in the one dtype that attention computes in."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if dtype == torch.float32 and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    return [x.to(dtype) for x in (q, k, v)]


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Returns the concatenated parts; does not copy a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_parts(tensors: Sequence[Tensor], sizes: list[int], dim: int) -> list[Sequence[Tensor]]:
    """Splits each tensor into parts. Does not split a single part, because that would copy its gradient."""
    return [tensors] if len(sizes) == 1 else list(zip(*(x.split(sizes, dim) for x in tensors), strict=True))


def zeros(q: Tensor, v: Tensor) -> Tensor:
    """Returns zeros [B, n, h, K], the outputs for queries q [B, h, n, K] of padding."""
    return q.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[3])


def visible(attention: LocalAttention, batch: int) -> Iterator[tuple[int, int, Block]]:
    """Yields each segment of each row of the batch, except padding: the row, the index of the segment's first query
    among this rank's queries, and the segment."""
    found = segments(attention.layout, attention.heads.rows, attention.reach, attention.spans)
    for row in range(batch):
        at = 0
        for segment in found[row if len(found) > 1 else 0]:
            if segment.keys:
                yield row, at, segment
            at += segment.q1 - segment.q0
