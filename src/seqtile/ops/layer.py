"""A decoder layer of Llama's shape, everything but attention tile by tile, and attention by groups of heads.

Only attention mixes tokens. So norms, projections, rotary embedding, residuals and MLP run in tiles, and what is kept
of a layer is its input, and what attention saves. With groups, queries, keys and values, and their gradients, exist for
one group of kv heads at a time: what attention saves is kept but for these, which its backward has computed again.

FLOPs: under non-reentrant checkpointing those of the untiled layer, since its replay ends with the last attention
(`saver.py`): neither the output projection nor the MLP runs again before the backward does it. Queries and keys that
are normed by head cost their product once more; groups cost the three projections once more, norms or not.
Source: Arctic Long Sequence Training, 3.1; Mini-Sequence Transformer, 3; the groups are our own.
"""

from collections.abc import Callable, Sequence

import torch
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from seqtile.ops.after_attention import KeepFunction, OnwardFunction
from seqtile.ops.checks import autocast_dtype, check_operands
from seqtile.ops.into_attention import EnterFunction, ProjectFunction, project_again
from seqtile.ops.kept import attend_and_keep, too_large
from seqtile.ops.layer_parts import LayerWeights, Layout, Pass, Travel
from seqtile.ops.saver import Saved, save_input, save_inputs
from seqtile.ops.tiles import resolve_chunk_tokens
from seqtile.ops.weight_grad import main_grad_of

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [B, h, S, K], keys and values [B, kv, S, K] to [B, S, h, K]."""


@torch.compiler.disable(reason="seqtile.decoder_layer saves its input in a node of its own")
def decoder_layer(
    x: torch.Tensor,
    weights: LayerWeights,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    attend: Attend,
    *,
    head_dim: int,
    head_groups: int | None = None,
    travel: Travel | None = None,
    may_repeat: bool = False,
    given: Sequence[torch.Tensor] = (),
    activation: str = "silu",
    scale: float = 1.0,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """A layer's output [B, S, D] of its input x [B, S, D].

    Args:
        weights: of x's dtype (any under autocast); of one device; adapters in any dtype.
        rotary: cos and sin, [B or 1, S, K]; None for a layer without positions.
        attend: the attention, of all heads or of a group of them.
        head_groups: how many groups of kv heads attend one after the other; None: all at once, and attention keeps what
            it saves. It divides the number of kv heads. The attention must treat every head alike: it is not told which
            heads it is given.
        travel: with groups, where the tokens are spread over ranks: the steps of an attention over ranks for a group,
            taken in the place of `attend`; one group travels while attention computes with the one before.
        may_repeat: whether an attention that saves more than what it was given, its output and small change is run once
            more in its backward; else it is refused. In each pass the first group finds out, and runs twice then.
        given: tensors that the attention uses besides, such as masks.
        activation, chunk_tokens: as in `gated_mlp`. scale: of what attention and MLP add.

    Memory: saves x and attention's output, with its log-sum-exp; without groups q, k and v too. Allocates in the
    backward gradients of the MLP's input and of what is projected, [T, D] each, and of one group's q, k, v and output;
    float32 sums of the weights' gradients; tiles.

    Raises:
        TypeError, ValueError: dtypes or devices that do not fit; angles that require a gradient, which they would not
            get; in groups a mask with heads, and an attention that saves something else of the size of its output,
            unless `may_repeat`.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`).
    """
    _check(x, weights, rotary, head_groups, given)
    layout = _layout(x, weights, head_dim, head_groups, activation, scale, chunk_tokens)
    rows = x.contiguous().view(-1, x.shape[-1])
    cos, sin = (None, None) if rotary is None else (_by_token(angles, layout) for angles in rotary)
    into, onward = weights.into, weights.onward
    leaves = _views(into)
    (rows, cos, sin, *parameters), saved = save_inputs([rows, cos, sin, *into, *onward])
    needs = tuple(tensor is not None and tensor.requires_grad for tensor in (rows, *leaves))
    main_grads = tuple(main_grad_of(tensor) for tensor in into)
    scales = weights.with_tensors([None] * len(into), [None] * len(onward))
    state = Pass(layout, scales, needs, main_grads, saved, travel, grouped=head_groups is not None)
    state.tensors = (rows.detach(), cos, sin, *(None if tensor is None else tensor.detach() for tensor in parameters))
    entered = EnterFunction.apply(state, rows, *leaves)
    outs, tokens = [], []
    for group in range(layout.groups):
        out, rest = _attended(state, entered, group, attend, may_repeat, given)
        if state.saved is None and out.requires_grad:  # all that is before it is frozen, attention itself is not
            out, node = save_input(out, *state.tensors)
            state.saved = Saved(node, None)
        outs.append(out)
        tokens.append(KeepFunction.apply(out, state, group, *rest))
    of_onward = [main_grad_of(tensor) for tensor in onward]
    kept = [out.detach() for out in outs]
    y = OnwardFunction.apply(state, kept, of_onward, 1 + len(tokens), entered, *tokens, *_views(onward))
    state.tensors = ()
    return y


class TouchFunction(torch.autograd.Function):
    """An identity that asks for something saved in its backward, so that a checkpoint around it is replayed on every
    rank, even on one whose attention saves nothing, such as that of queries which are all padding: the replay has
    collectives."""

    @staticmethod
    def forward(ctx, out: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(out.new_zeros(()))
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out: torch.Tensor) -> torch.Tensor:
        assert len(ctx.saved_tensors) == 1
        return d_out


def _attended(
    state: Pass, entered: torch.Tensor, group: int, attend: Attend, may_repeat: bool, given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """What attention returns for a group, [T, h K], and what it saved besides if that is to be kept elsewhere."""
    travel, bases = state.travel, []
    core = attend if travel is None else travel.core

    def by_tokens(out: torch.Tensor) -> torch.Tensor:
        return (out if travel is None else travel.home(out)).reshape(state.layout.tokens, -1)

    def attend_to_group() -> torch.Tensor:
        return by_tokens(TouchFunction.apply(core(*ProjectFunction.apply(entered, state, group, []))))

    if not (state.grouped and entered.requires_grad and torch.is_grad_enabled()):
        return attend_to_group(), ()
    if state.repeats:
        return _repeated(attend_to_group, entered), ()
    random = (torch.get_rng_state(), *get_device_states(entered)) if may_repeat else None
    qkv = ProjectFunction.apply(entered, state, group, bases)
    out, rest = attend_and_keep(core, qkv, bases, lambda: project_again(state, group), lambda: state.kept[group][1:])
    size = too_large(out, rest, given)
    if travel is not None:
        size = travel.agreed(size)
    if not size:
        return by_tokens(out), rest
    if not may_repeat:
        raise ValueError(
            f"this attention saves {size} bytes for its backward besides queries, keys, values and its output of "
            f"{out.numel() * out.element_size()} bytes; by groups of heads it would have to be computed once more: "
            f"pass head_groups={state.layout.groups} to have it so, or use flash attention, or sdpa without a mask"
        )
    state.repeats = True
    del qkv, out, rest
    bases.clear()
    torch.set_rng_state(random[0])  # so that what is drawn is what a pass without this trial would draw
    set_device_states(*random[1:])
    return _repeated(attend_to_group, entered), ()


def _repeated(function: Callable[[], torch.Tensor], entered: torch.Tensor) -> torch.Tensor:
    """function(), computed again in the backward. By its argument a checkpoint knows whose random numbers to replay."""
    return checkpoint(lambda token: function(), entered, use_reentrant=False)


def _check(
    x: torch.Tensor,
    weights: LayerWeights,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    head_groups: int | None,
    given: Sequence[torch.Tensor],
) -> None:
    operands = {"x": x, "norm": weights.norm.weight, "mlp_norm": weights.mlp_norm.weight}
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        operands[f"{name}_weight"] = getattr(weights, name).weight
    check_operands("decoder_layer", "x", operands)
    if rotary is not None and any(angles.requires_grad for angles in rotary):
        raise ValueError("decoder_layer: expected fixed angles, got some that require a gradient; leave it untiled")
    if head_groups is not None and any(tensor.dim() == 4 and tensor.shape[1] > 1 for tensor in given):
        raise ValueError("decoder_layer: a mask for each head cannot be cut into groups; expected head_groups=None")


def _layout(
    x: torch.Tensor,
    weights: LayerWeights,
    head_dim: int,
    head_groups: int | None,
    activation: str,
    scale: float,
    chunk_tokens: int | None,
) -> Layout:
    batch, length, hidden = x.shape
    return Layout(
        batch,
        length,
        heads=len(weights.q.weight) // head_dim,
        kv_heads=len(weights.k.weight) // head_dim,
        head_dim=head_dim,
        groups=head_groups or 1,
        chunk_tokens=resolve_chunk_tokens(chunk_tokens, hidden),
        activation=activation,
        scale=scale,
        dtype=autocast_dtype(x) or x.dtype,
    )


def _by_token(angles: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[B or 1, S, K] as [T, K]: a copy if a batch shares them."""
    return angles.expand(layout.batch, -1, -1).reshape(layout.tokens, -1).contiguous()


def _views(parameters: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """A node of its own for each parameter, so that gradients arrive in the reverse of this order; see `gated_mlp`."""
    return [None if tensor is None else tensor.view_as(tensor) for tensor in parameters]
