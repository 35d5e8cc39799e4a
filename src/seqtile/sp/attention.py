"""Attention over a sequence whose tokens are spread over ranks: tokens are traded for heads, and back.

Source: Arctic Long Sequence Training, 3.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from seqtile.sp.backends import Attention, attend, check
from seqtile.sp.context import SequenceParallel, device_of, gather
from seqtile.sp.documents import Layout
from seqtile.sp.exchange import Exchange, Trade

NAME = "seqtile_ulysses"
# Tensors that come along and change no score; any other is refused.
_HARMLESS = {"position_ids", "cache_position", "input_ids", "labels", "shift_labels", "num_items_in_batch"}


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface: q [B, H, S, K], k and v [B, KV, S, K] to [B, S, H, K]. Two all-to-alls.

    Allocates on this rank its share of q, k, v and of the output, and a buffer to send each of the two from. Raises
    ValueError, alike on every rank and before any of them waits, for what is not causal attention within documents.
    """
    travel = stages(module, attention_mask, **options).of(query.shape[1], key.shape[1])
    q, k, v = travel.trade.to_heads(query, key, value)
    return travel.home(travel.core(q, k, v)), None


class Stages(NamedTuple):
    """Attention over ranks, of which heads are not yet told."""

    module: nn.Module
    layout: Layout
    window: int | None
    options: dict[str, Any]

    @property
    def ranks(self) -> int:
        return self.layout.ctx.size

    def of(self, q_heads: int, kv_heads: int) -> "Travel":
        heads = (q_heads, kv_heads)
        trade = self.layout.once(heads, lambda: Trade.of(*heads, self.layout.local, self.layout.ctx))
        attention = Attention(self.module, self.layout, trade.share, self.window, self.options)
        check(attention, self.ranks, q_heads)
        self.layout.asked.add(id(self.module))
        return Travel(attention, trade)


class Travel(NamedTuple):
    """The steps of attention over ranks for so many heads: there, attention itself, and back."""

    attention: Attention
    trade: Trade

    def send(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """q [B, H, S, K], k and v [B, KV, S, K] on their way; called, what returns waits for them: this rank's shares,
        q [B, h, rows, K], k and v [B, kv, length, K]. Without gradients."""
        return _by_heads(self.trade.send(q, k, v))

    def send_back(self, *d_qkv: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """The gradients of these shares on their way to the ranks that have the tokens."""
        return _by_heads(self.trade.send_back(*d_qkv))

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The attention that is wrapped, of a share: [B, rows, h, K]."""
        return attend(self.attention, q, k, v)

    def home(self, out: torch.Tensor) -> torch.Tensor:
        """What it returned, to all heads of this rank's tokens [B, S, H, K]."""
        return self.trade.to_tokens(out)

    def agreed(self, size: int) -> int:
        """The largest of what the ranks come with, so that all decide alike. One collective and one wait for the device
        a forward, and for each window that layers have: what is asked later has the same answer."""
        layout = self.attention.layout
        return layout.once(("agreed", self.attention.window), lambda: _largest(size, layout.ctx))


def _largest(size: int, ctx: SequenceParallel) -> int:
    sizes = gather(torch.tensor(size, device=device_of(ctx)), ctx)
    return max(int(each) for each in sizes)


def _by_heads(exchange: Exchange) -> Callable[[], list[torch.Tensor]]:
    return lambda: [x.transpose(1, 2) for x in exchange.result()]


def stages(
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    ulysses_layout: Layout | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> Stages:
    """What Hugging Face's code asks of attention. ValueError for what is not causal attention within documents."""
    if ulysses_layout is None:
        raise ValueError(
            "no layout came with the tokens: call the model that sp.apply_ulysses was given, as a whole; a model that "
            "does not pass keyword arguments on to its attention, or has an encoder of images, cannot be spread"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("attention that is not causal is not spread over ranks; leave this model whole")
    if attention_mask is not None:
        raise ValueError("attention with a mask of its layer's own is not spread over ranks; leave this model whole")
    for name, other in others.items():
        if (name == "cache" and other is not None) or (isinstance(other, torch.Tensor) and name not in _HARMLESS):
            raise ValueError(f"attention with {name} is not spread over ranks; leave this model whole")
    if sliding_window is None and (window := _window_of(module)) is not None and window < ulysses_layout.length:
        raise ValueError(f"a window of {window} is not passed on to attention by this model; leave it whole")
    options = {"scaling": scaling, "dropout": dropout} | ({} if softcap is None else {"softcap": softcap})
    return Stages(module, ulysses_layout, sliding_window, options)


ulysses_attention.stages = stages  # for layers that compute attention by groups of heads, one on its way at a time


def _window_of(module: nn.Module) -> int | None:
    """The window that this layer's masks would have."""
    types, layer = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    slides = types is None or layer is None or types[layer] == "sliding_attention"
    return getattr(module.config, "sliding_window", None) if slides else None
