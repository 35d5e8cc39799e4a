"""A decoder layer whose weights cannot be read: its modules are called, tile by tile.

This costs the products before attention, and those of output and down, once more than reading the weights does.
"""

from collections.abc import Callable

import torch
from torch import nn

from seqtile.models.arch import Arch
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

    def trained(*modules: nn.Module) -> list[nn.Parameter]:
        return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]

    of_heads = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    first = trained(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, *of_heads)
    q, k, v = tiled(into, x, *(rotary or ()), params=first, chunk_tokens=chunk_tokens, dim=1)
    attended = attend(*(heads.transpose(1, 2) for heads in (q, k, v))).flatten(2)
    then = trained(attention.o_proj, layer.post_attention_layernorm, layer.mlp)
    return tiled(onward, x, attended, params=then, chunk_tokens=chunk_tokens, dim=1)
