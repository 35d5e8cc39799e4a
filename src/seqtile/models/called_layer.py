"""A decoder layer whose weights cannot be read: its modules are called, tile by tile.

This costs the projections to queries, keys and values, and down, once more than reading the weights does.
"""

from collections.abc import Callable

import torch
from torch import nn

from seqtile.arch import Arch
from seqtile.models.called_again import called_again
from seqtile.models.projections import trained
from seqtile.ops.tiled import tiled


def called_layer(
    arch: Arch,
    layer: nn.Module,
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    attend: Callable[..., torch.Tensor],
    scale: float,
    chunk_tokens: int | None,
) -> torch.Tensor:
    """The output [B, S, D] of an input [B, S, D]. `rotary` are cos and sin [B or 1, S, K]; `scale` is of what attention
    and MLP add."""
    attention = layer.self_attn

    def heads_of(x: torch.Tensor, name: str) -> torch.Tensor:
        heads = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim))
        return getattr(attention, f"{name}_norm")(heads) if hasattr(attention, f"{name}_norm") else heads

    def into(x: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = layer.input_layernorm(x)
        q, k, v = (heads_of(normed, name) for name in "qkv")
        if angles:
            q, k = arch.modeling.apply_rotary_pos_emb(q, k, *angles, unsqueeze_dim=2)
        return q, k, v

    def onward(x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        h = x + attention.o_proj(attended) * scale
        return h + layer.mlp(layer.post_attention_layernorm(h)) * scale

    of_heads = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    first = (layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, *of_heads)
    tiles = {"chunk_tokens": chunk_tokens, "dim": 1}
    q, k, v = tiled(called_again(into, *first), x, *(rotary or ()), params=trained(*first), **tiles)
    attended = attend(*(heads.transpose(1, 2) for heads in (q, k, v))).flatten(2)
    then = (attention.o_proj, layer.post_attention_layernorm, layer.mlp)
    return tiled(called_again(onward, *then), x, attended, params=trained(*then), **tiles)
