"""Attention and its projections as one node: norm, queries, keys, values, attention by groups, output projection's
gradient.

From x [T, D] to x and attention's output for each group, [T, h K]. The backward receives the gradient of
h = x + scale o(attn_output). It computes, group by group, the gradients of attention's output and of o's columns, then
those of queries, keys and values and of their projections; last those of norm and x:

    for each group   q, k, v again ─┐
                     d_attn_output = d_h o'[its columns] ─> attention's own backward ─> d_q, d_k, d_v ─> sums, d_normed

so that queries, keys and values, and their gradients, exist for one group at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from seqtile.ops.checks import check_first_derivative
from seqtile.ops.chunks import chunks, to_be_filled
from seqtile.ops.decoder_layer.attention_graph import (
    Attend,
    AttentionGraph,
    UntrackedLeaves,
    excess_saved_bytes,
    run_and_record,
)
from seqtile.ops.decoder_layer.params import AttentionParams, LayerSizes
from seqtile.ops.decoder_layer.qkv import QKV, Inputs, QKVByGroup, QKVGradients
from seqtile.ops.linear import NodeParams, tensors_of, views_of
from seqtile.ops.save_early import Unchanged
from seqtile.ops.state import ForwardState
from seqtile.ops.weight_grads import finish_weight_grads, main_grad_of, weight_grads
from seqtile.protocols import SequenceParallelAttention


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: everything about it but its tensors; see `decoder_layer`."""

    sizes: LayerSizes
    attend: Attend
    sp_attention: SequenceParallelAttention | None
    grouped: bool
    """Queries, keys and values are computed again in the backward rather than kept."""
    allow_recompute: bool
    extra_tensors: Sequence[torch.Tensor]
    differentiate: bool

    def attend_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Runs the attention on the heads that this rank computes."""
        return (self.attend if self.sp_attention is None else self.sp_attention.attend)(q, k, v)

    def own_tokens(self, attn_output: torch.Tensor) -> torch.Tensor:
        """Returns attention's output for this rank's tokens, [T, h K]."""
        own = attn_output if self.sp_attention is None else self.sp_attention.to_tokens(attn_output)
        return own.reshape(self.sizes.tokens, -1)


class GroupAttention(NamedTuple):
    """One group's attention, as the backward needs it."""

    graph: AttentionGraph | None = None
    """None if it runs again in the backward."""
    saved: int = 0
    """The number of tensors that the graph has saved."""
    state: ForwardState | None = None
    """The state to run again in."""


def attend_by_groups(
    call: AttentionCall, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, params: AttentionParams
) -> tuple[torch.Tensor, ...]:
    """Returns x [T, D] unchanged, and attention's output for each group, [T, h K]."""
    views, leaves = views_of(params), []
    if call.sp_attention is None:
        leaves += [tensor for tensor in call.extra_tensors if tensor.is_leaf and tensor.requires_grad]
    while True:
        try:
            return AttentionFunction.apply(call, params, cos, sin, tuple(leaves), x, *views, *leaves)
        except UntrackedLeaves as found:  # as inputs of the node they get their gradients
            if call.sp_attention is not None:  # a rank of padding alone would not run again, and others would wait
                raise ValueError(
                    f"decoder_layer: attention over ranks uses a tensor {list(found.args[0][0].shape)} that requires a "
                    "gradient, expected none; leave this layer untiled (layer=False)"
                ) from found
            leaves += found.args[0]


class AttentionFunction(torch.autograd.Function):
    """The first node: norm, q, k, v, attention, and the output projection's gradient.

    `tensors` stand for the parameters, and for the `leaves` that attention uses besides, and take their
    gradients."""

    @staticmethod
    def forward(
        ctx,
        call: AttentionCall,
        params: AttentionParams,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        leaves: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # those of attention's outputs are computed here
        order, inputs = range(call.sizes.groups), Inputs(x, cos, sin, params.dequantized("q", "k", "v"), call.sizes)
        qkv_of_groups = QKVByGroup(inputs, order, call.sp_attention, keep_normed=True)
        outs, runs, saved = [], [], []
        for _ in order:
            repeats = bool(runs) and runs[-1].state is not None  # as the first group found out
            out, run, kept = _attend(call, qkv_of_groups.next_group(), leaves, repeats=repeats, first=not outs)
            outs.append(out)
            runs.append(run)
            saved += kept
        # What the attention holds, such as masks, is kept where it runs again.
        ctx.call = replace(call, attend=None, extra_tensors=()) if runs[-1].state is None else call
        ctx.runs, ctx.leaves = runs, leaves  # not saved: what is unpacked may lack a leaf's hooks
        if call.differentiate:
            ctx.params, ctx.main_grads = NodeParams.of(params), [main_grad_of(leaf) for leaf in leaves]
            own = tensors_of(params)
            ctx.save_for_backward(x, cos, sin, *own, *outs, *saved)
            ctx.unchanged = Unchanged.parameters(own)
        return x.view_as(x), *outs

    @staticmethod
    def backward(ctx, d_h: torch.Tensor, *_: torch.Tensor):
        check_first_derivative("decoder_layer")
        return None, None, None, None, None, *_Backward(ctx, d_h).gradients()


def _attend(
    call: AttentionCall, qkv: QKV, leaves: Sequence[torch.Tensor], *, repeats: bool, first: bool
) -> tuple[torch.Tensor, GroupAttention, list[torch.Tensor]]:
    """Returns attention's output for a group, its recorded graph, and what its backward needs saved."""
    repeatable = call.differentiate and call.grouped and call.allow_recompute
    state = ForwardState.now(qkv.views[0].device) if repeatable else None
    if repeats or not call.differentiate:
        return call.own_tokens(call.attend_heads(*qkv.views)), GroupAttention(state=state), []
    run = run_and_record(call.attend_heads, call.own_tokens, qkv, keep_qkv=not call.grouped, known=leaves)
    size = excess_saved_bytes(run.raw_output, run.saved, call.extra_tensors) if call.grouped and first else 0
    if call.grouped and first and call.sp_attention is not None:
        size = call.sp_attention.agree_on_max(size)
    if size and not call.allow_recompute:
        raise ValueError(
            f"this attention saves {size} bytes for its backward besides queries, keys, values and its output of "
            f"{run.local_output.nbytes} bytes, as eager attention does, and sdpa under a mask or in several calls "
            "(documents, padding, nodes): so head_groups='auto' refuses it. Use FlashAttention, or pass "
            f"head_groups={call.sizes.groups}: the backward then computes attention once more"
        )
    if size:
        return run.local_output, GroupAttention(state=state), []
    return run.local_output, GroupAttention(run.graph, len(run.saved)), run.saved


class _Backward:
    """One backward of the node. Holds each large tensor no longer than it is needed."""

    def __init__(self, ctx, d_h: torch.Tensor):
        self.call, self.sizes, self.sp_attention = ctx.call, ctx.call.sizes, ctx.call.sp_attention
        self.runs, self.leaves, self.needs_x, self.d_h = ctx.runs, ctx.leaves, ctx.needs_input_grad[5], d_h
        x, cos, sin, *saved = ctx.saved_tensors
        ctx.unchanged.check()
        count, needs = len(ctx.params.main_grads), ctx.needs_input_grad[6:]
        params, sums = (AttentionParams(*parts) for parts in ctx.params.restored(saved[:count], needs[:count]))
        self.outs, self.saved = saved[count : count + self.sizes.groups], saved[count + self.sizes.groups :]
        self.sums, self.leaf_sums = sums, weight_grads(self.leaves, needs[count:], ctx.main_grads)
        self.params = params.dequantized("q", "k", "v", "o")
        self.inputs = Inputs(x, cos, sin, self.params, self.sizes)

    def gradients(self) -> list[torch.Tensor | None]:
        """Returns the gradients of x, of the parameters and of the leaves."""
        d_o = self._grad_o_proj()
        self.sums = self.sums._replace(o=None)  # its sum is rounded; of the others, none has begun
        qkv = QKVGradients(self.inputs, self.sums, self.needs_x)
        order = range(self.sizes.groups - 1, -1, -1)
        again = QKVByGroup(self.inputs, order, self.sp_attention, keep_pre_norm_qk=True) if self.call.grouped else None
        arriving = None
        for group in order:
            d_qkv, pre_norm_qk = self._through_attention(group, again)
            if self.sp_attention is None:
                qkv.add(group, d_qkv, pre_norm_qk)
            else:
                if arriving is not None:  # the gradients of the group before, sent while attention ran
                    qkv.add(arriving[0], arriving[1](), arriving[2])
                arriving = group, self.sp_attention.start_gradients_to_tokens(*d_qkv), pre_norm_qk
            del d_qkv, pre_norm_qk  # before the next are there
        if arriving is not None:
            qkv.add(arriving[0], arriving[1](), arriving[2])
        qkv.add_to_x(self.d_h)  # in place: it comes from a node of ours
        d_x = self.d_h if self.needs_x else None
        d_params, d_leaves = finish_weight_grads(tensors_of(self.sums)), finish_weight_grads(self.leaf_sums)
        return [d_x, *d_params, *d_o, *d_leaves]

    def _grad_o_proj(self) -> list[torch.Tensor | None]:
        """Returns the gradients of the output projection."""
        sizes, o, sums = self.sizes, self.params.o.to(self.sizes.dtype), self.sums.o
        if any(total is not None for total in sums[: sums.TENSORS]):
            for chunk in chunks(len(self.d_h), sizes.chunk_tokens):
                o.add_gradients(sums, sizes.branch_gradient(self.d_h[chunk]), sizes.concat_groups(self.outs, chunk))
        return finish_weight_grads(sums[: sums.TENSORS])

    def _through_attention(
        self, group: int, again: QKVByGroup | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Returns the gradients of a group's queries, keys and values; and `QKV.pre_norm_qk`."""
        graph, count, state = self.runs[group]
        qkv = None if again is None else again.next_group()
        saved = self.saved[len(self.saved) - count :]
        del self.saved[len(self.saved) - count :]
        bases = () if qkv is None else qkv.bases
        if graph is None:
            with state.forward_autocast(), state.forward_random():
                attend, finish = self.call.attend_heads, self.call.own_tokens
                run = run_and_record(attend, finish, qkv, keep_qkv=True, known=self.leaves)
            graph, saved, bases = run.graph, run.saved, ()
            del run
        found = graph.backward([self._grad_attn_output(group)], bases, saved, self.leaves)
        for total, gradient in zip(self.leaf_sums, found[3:], strict=True):
            if total is not None and gradient is not None:
                total.add_gradient(gradient)
        return found[:3], None if qkv is None else qkv.pre_norm_qk

    def _grad_attn_output(self, group: int) -> torch.Tensor:
        """Returns the gradient of a group's attention output. Drops the output itself: under checkpointing this frees
        its memory, else the end of the node's backward does."""
        sizes, out = self.sizes, self.outs[group]
        self.outs[group] = None
        projection = self.params.o.slice_in(sizes.group_columns(group)[0][0]).to(sizes.dtype)
        d_out = to_be_filled(out, dtype=sizes.dtype, trial=sizes.trial)
        for chunk in chunks(len(out), sizes.chunk_tokens):
            projection.backward(self.d_h[chunk].to(sizes.dtype), out=d_out[chunk])
        if sizes.scale != 1:
            d_out.mul_(sizes.scale)
        return d_out.to(out.dtype)
