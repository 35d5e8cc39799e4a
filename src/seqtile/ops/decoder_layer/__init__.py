"""A decoder layer of Llama's shape, everything but attention chunk by chunk, and attention in head chunks.

Only attention mixes tokens. So norms, projections, rotary embedding, residuals and MLP run in chunks. For the backward
a layer keeps its input and the tensors that attention saves. With groups, queries, keys and values, and their
gradients, exist for one group of kv heads at a time; the layer does not keep q, k and v, its backward computes them
again.

    x ─┬─ AttentionFunction ───── x, attn_output by groups ─ SaveEarlyFunction ─ PostAttentionFunction ─ y
       owns norm, q, k, v and o                           saves both          owns norm, gate, up and down

Once one node has returned a parameter's gradient, no other node reads that parameter. An optimizer may therefore step
during the backward.

FLOPs: those of the untiled layer under non-reentrant checkpointing, since the recomputation ends at the second node:
only the backward runs the output projection and the MLP again. If queries and keys have norms per
head, the backward projects them once more. With groups, it projects queries, keys and values once more, with or without
such norms.
Source: Arctic Long Sequence Training, 3.1; Mini-Sequence Transformer, 3; the groups are in neither.
"""

from collections.abc import Sequence

import torch

from seqtile.ops.checks import autocast_dtype, check_device, check_operands
from seqtile.ops.chunks import is_trial, mlp_chunk_tokens
from seqtile.ops.decoder_layer.attention import AttentionCall, attend_by_groups
from seqtile.ops.decoder_layer.attention_graph import Attend
from seqtile.ops.decoder_layer.params import LayerParams, LayerSizes
from seqtile.ops.decoder_layer.post_attention import PostAttentionFunction
from seqtile.ops.linear import tensors_of, views_of
from seqtile.ops.save_early import save_early
from seqtile.protocols import SequenceParallelAttention

_PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@torch.compiler.disable(reason="seqtile.decoder_layer saves its input in a node of its own")
def decoder_layer(
    x: torch.Tensor,
    params: LayerParams,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    attend: Attend,
    *,
    head_dim: int,
    head_groups: int | None = None,
    sp_attention: SequenceParallelAttention | None = None,
    allow_recompute: bool = False,
    extra_tensors: Sequence[torch.Tensor] = (),
    activation: str = "silu",
    scale: float = 1.0,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Computes a layer's output [B, S, D] of its input x [B, S, D].

    Args:
        params: of x's dtype (any under autocast); of one device; norms and adapters in any dtype. What a norm computes
            is rounded to x's dtype (autocast's under autocast).
        rotary: cos and sin, [B or 1, S, K]; None for a layer without positions.
        attend: the attention, of all heads or of a group of them: [B, h, S, K] and twice [B, kv, S, K] to [B, S, h, K].
            Leaves that it uses get their gradients. If such a leaf is not among `extra_tensors`, attention runs twice
            in a forward.
        head_groups: the number of groups of kv heads that attend one after the other; it divides the number of kv
            heads. None: all heads at once, and everything that attention saves is kept. Attention must treat every
            head alike: it is not told which heads it gets.
        sp_attention: replaces `attend` where ranks hold parts of the sequence: the steps of attention over ranks for a
            group. One group is sent while attention computes the one before.
        allow_recompute: if attention saves more than its inputs, its output and small tensors, True runs it once more
            in its backward, False refuses it. The first group of each forward finds out.
        extra_tensors: tensors that the attention uses besides q, k and v, such as masks.
        activation, chunk_tokens: as in `gated_mlp`. scale: multiplies the outputs of attention and MLP before they are
            added.

    Memory: saves x and attention's output with its log-sum-exp; without groups also q, k and v. The backward allocates
    the gradients of the MLP's input and of the projections' input, [T, D] each; the gradients of one group's q, k, v
    and output; float32 sums of the parameters' gradients; chunks.

    Raises:
        TypeError, ValueError: dtypes or devices do not match; angles require a gradient, which they would not get;
            with groups: a mask has heads, or attention saves another tensor of its output's size without
            `allow_recompute`; attention uses a tensor that was computed from others that require a gradient.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`), or if attention changes in place
            what it has saved.
    """
    _check(x, params, rotary, head_groups, extra_tensors)
    (attention, mlp), (batch, length, hidden) = params, x.shape
    sizes = LayerSizes(
        batch,
        length,
        heads=attention.q.shape[0] // head_dim,
        kv_heads=attention.k.shape[0] // head_dim,
        head_dim=head_dim,
        groups=head_groups or 1,
        chunk_tokens=mlp_chunk_tokens(chunk_tokens, x, mlp.down.shape[1]),
        activation=activation,
        scale=scale,
        dtype=autocast_dtype(x) or x.dtype,
        trial=is_trial(),
    )
    cos, sin = (None, None) if rotary is None else (angles.flatten(0, 1).contiguous() for angles in rotary)
    call = AttentionCall(
        sizes, attend, sp_attention, head_groups is not None, allow_recompute, extra_tensors, torch.is_grad_enabled()
    )
    tensors = attend_by_groups(call, x.contiguous().view(-1, hidden), cos, sin, attention)
    tensors, node = save_early(tensors, tensors_of((attention.o, *mlp)))
    return PostAttentionFunction.apply(node, sizes, attention.o, mlp, *tensors, *views_of(mlp))


def _check(
    x: torch.Tensor,
    params: LayerParams,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    head_groups: int | None,
    extra_tensors: Sequence[torch.Tensor],
) -> None:
    """Raises TypeError or ValueError, see `decoder_layer`."""
    attention, mlp = params
    projections = zip(_PROJECTIONS, (attention.q, attention.k, attention.v, attention.o, *mlp[1:]), strict=True)
    operands = {"x": x} | {f"{name}_weight": one.weight for name, one in projections if one.quantized is None}
    check_operands("decoder_layer", operands)
    for name, norm in (("norm", attention.norm), ("mlp_norm", mlp.norm)):
        check_operands("decoder_layer", {name: norm.weight})
        check_device("decoder_layer", name, norm.weight, "x", x)
    if rotary is not None and any(angles.requires_grad for angles in rotary):
        raise ValueError("decoder_layer: expected fixed angles, got some that require a gradient; leave it untiled")
    if head_groups is not None and any(tensor.dim() == 4 and tensor.shape[1] > 1 for tensor in extra_tensors):
        raise ValueError("decoder_layer: a mask for each head cannot be cut into groups; expected head_groups=None")
