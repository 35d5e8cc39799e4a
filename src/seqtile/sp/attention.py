"""Attention over a sequence whose tokens are spread over ranks: tokens are traded for heads, and back.

Source: Arctic Long Sequence Training, 3.2.
"""

from typing import Any

import torch
from torch import nn

from seqtile.sp.backends import Attention, attend, check
from seqtile.sp.documents import Layout
from seqtile.sp.exchange import Trade

NAME = "seqtile_ulysses"
# Tensors that come along and change no score; any other is refused.
_HARMLESS = {"position_ids", "cache_position", "input_ids", "labels", "shift_labels", "num_items_in_batch"}


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    ulysses_layout: Layout | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface: q [B, H, S, K], k and v [B, KV, S, K] to [B, S, H, K]. Two all-to-alls.

    Allocates on this rank its share of q, k, v and of the output, and a buffer to send each of the two from. Raises
    ValueError, alike on every rank and before any of them waits, for what is not causal attention within documents.
    """
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
    ctx = ulysses_layout.ctx
    heads = (query.shape[1], key.shape[1])
    trade = ulysses_layout.once(heads, lambda: Trade.of(*heads, ulysses_layout.local, ctx))
    options = {"scaling": scaling, "dropout": dropout} | ({} if softcap is None else {"softcap": softcap})
    attention = Attention(module, ulysses_layout, trade.share, sliding_window, options)
    check(attention, ctx.size, query.shape[1])
    ulysses_layout.asked.add(id(module))
    q, k, v = trade.to_heads(query, key, value)
    return trade.to_tokens(attend(attention, q, k, v)), None


def _window_of(module: nn.Module) -> int | None:
    """The window that this layer's masks would have."""
    types, layer = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    slides = types is None or layer is None or types[layer] == "sliding_attention"
    return getattr(module.config, "sliding_window", None) if slides else None
