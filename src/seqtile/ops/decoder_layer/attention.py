"""Attention and its projections as one node: norm, queries, keys, values, attention by groups, output projection's
gradient.

From x [T, D] to x and what attention returned for each group, [T, h K]. The backward is given the gradient of
h = x + scale o(attended), and computes from it, group by group, the gradient of what attention returned, that of
queries, keys and values, and that of x; likewise all gradients of norm, q, k, v and o:

    for each group   q, k, v again ─┐
                     d_attended = d_h o'[its columns] ─> attention's own backward ─> d_q, d_k, d_v ─> sums, d_normed

so that queries, keys and values, and their gradients, exist for one group at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqtile.ops.checks import check_first_derivative
from seqtile.ops.chunks import chunks
from seqtile.ops.decoder_layer.attention_graph import Attend, AttentionGraph, OutsideLeaves, record, too_large
from seqtile.ops.decoder_layer.params import AttentionParams, Layout
from seqtile.ops.decoder_layer.qkv import QKV, Inputs, QKVByGroup, QKVGradients
from seqtile.ops.linear import begin_sums, main_grad_of, main_grads_of, results_of, tensors_of, views_of, with_tensors
from seqtile.ops.state import ForwardState
from seqtile.protocols import SequenceParallelAttention


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: everything about it but its tensors; see `decoder_layer`."""

    layout: Layout
    attend: Attend
    over_ranks: SequenceParallelAttention | None
    grouped: bool
    """Queries, keys and values are computed again in the backward rather than kept."""
    may_repeat: bool
    given: Sequence[torch.Tensor]
    differentiate: bool

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Runs the attention on the heads that this rank computes."""
        return (self.attend if self.over_ranks is None else self.over_ranks.attend)(q, k, v)

    def by_token(self, attended: torch.Tensor) -> torch.Tensor:
        """Returns this rank's tokens [T, h K] of what attention returned."""
        own = attended if self.over_ranks is None else self.over_ranks.to_tokens(attended)
        return own.reshape(self.layout.tokens, -1)


class Run(NamedTuple):
    """One group's attention, as the backward needs it."""

    graph: AttentionGraph | None = None
    """None if it runs again in the backward."""
    saved: int = 0
    """How many tensors the graph has saved."""
    state: ForwardState | None = None
    """The state to run again in."""


def attend_by_groups(
    call: AttentionCall,
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    params: AttentionParams,
) -> tuple[torch.Tensor, ...]:
    """Returns x [T, D] handed through, and what attention returned for each group, [T, h K]."""
    views, leaves = views_of(params), []
    while True:
        try:
            return AttentionFunction.apply(call, params, cos, sin, tuple(leaves), x, *views, *leaves)
        except OutsideLeaves as found:  # as inputs of the node they get their gradients
            if call.over_ranks is not None:  # a rank of padding alone would not find them, and others would wait for it
                raise ValueError(
                    f"decoder_layer: attention over ranks uses a tensor {list(found.leaves[0].shape)} that requires a "
                    "gradient, expected none; leave this layer untiled (layer=False)"
                ) from found
            leaves += found.leaves


class AttentionFunction(torch.autograd.Function):
    """`tensors` stand for the parameters, and for the `leaves` that attention uses besides, and take their
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
        order = range(call.layout.groups)
        qkv_of_groups = QKVByGroup(Inputs(x, cos, sin, params, call.layout), order, call.over_ranks, keep_normed=True)
        outs, runs, saved = [], [], []
        for _ in order:
            repeats = bool(runs) and runs[-1].state is not None  # as the first group found out
            out, run, kept = _attended(call, qkv_of_groups.take(), leaves, repeats=repeats, first=not outs)
            outs.append(out)
            runs.append(run)
            saved += kept
        ctx.layout, ctx.grouped, ctx.over_ranks, ctx.runs = call.layout, call.grouped, call.over_ranks, runs
        ctx.call = None if runs[-1].state is None else call  # which holds what attention is given, such as masks
        own = tensors_of(params)
        ctx.params, ctx.leaves = with_tensors(params, [None] * len(own)), len(leaves)
        if call.differentiate:
            ctx.main_grads = [*main_grads_of(params), *map(main_grad_of, leaves)]
            ctx.save_for_backward(x, cos, sin, *own, *leaves, *outs, *saved)
        return x.view_as(x), *outs

    @staticmethod
    def backward(ctx, d_h: torch.Tensor, *_: torch.Tensor):
        check_first_derivative("decoder_layer")
        return None, None, None, None, None, *_Backward(ctx, d_h).gradients()


def _attended(
    call: AttentionCall, qkv: QKV, leaves: Sequence[torch.Tensor], *, repeats: bool, first: bool
) -> tuple[torch.Tensor, Run, list[torch.Tensor]]:
    """Returns what attention returned for a group, how its backward goes, and what is to be saved for that."""
    if not call.differentiate:
        return call.by_token(call.core(*qkv.views)), Run(), []
    state = ForwardState.now(qkv.views[0].device) if call.grouped and call.may_repeat else None
    if repeats:
        return call.by_token(call.core(*qkv.views)), Run(state=state), []
    run = record(call.core, call.by_token, qkv.views, qkv.bases, keep_qkv=not call.grouped, known=leaves)
    size = too_large(run.attended, run.saved, call.given) if call.grouped and first else 0
    if call.grouped and first and call.over_ranks is not None:
        size = call.over_ranks.agree_on_max(size)
    if size and not call.may_repeat:
        raise ValueError(
            f"this attention saves {size} bytes for its backward besides queries, keys, values and its output of "
            f"{run.out.numel() * run.out.element_size()} bytes; by groups of heads it would have to be computed once "
            f"more: pass head_groups={call.layout.groups} to have it so, or use flash attention, or sdpa without a mask"
        )
    if size:
        return run.out, Run(state=state), []
    return run.out, Run(run.graph, len(run.saved)), run.saved


class _Backward:
    """One backward of the node. Holds each large tensor no longer than it is needed."""

    def __init__(self, ctx, d_h: torch.Tensor):
        self.layout, self.runs, self.over_ranks, self.call = ctx.layout, ctx.runs, ctx.over_ranks, ctx.call
        self.grouped, self.needs_x, self.d_h = ctx.grouped, ctx.needs_input_grad[5], d_h
        x, cos, sin, *saved = ctx.saved_tensors
        count = len(tensors_of(ctx.params))
        self.params, saved = with_tensors(ctx.params, saved[:count]), saved[count:]
        self.leaves, saved = saved[: ctx.leaves], saved[ctx.leaves :]
        self.outs, self.saved = saved[: self.layout.groups], saved[self.layout.groups :]
        self.inputs = Inputs(x, cos, sin, self.params, self.layout)
        both = begin_sums((self.params, self.leaves), ctx.needs_input_grad[6:], ctx.main_grads)
        self.sums, self.leaf_sums = both

    def gradients(self) -> list[torch.Tensor | None]:
        """Returns the gradients of x, of the parameters and of the leaves."""
        d_o = self._of_o()
        self.sums = self.sums._replace(o=None)  # its sum is rounded; of the others, none has begun
        qkv = QKVGradients(self.inputs, self.sums, self.needs_x)
        order = range(self.layout.groups - 1, -1, -1)
        again = QKVByGroup(self.inputs, order, self.over_ranks, keep_unnormed=True) if self.grouped else None
        arriving = None
        for group in order:
            d_qkv, unnormed = self._through_attention(group, again)
            if self.over_ranks is None:
                qkv.add(group, d_qkv, unnormed)
            else:
                if arriving is not None:  # the gradients of the group before, sent while attention ran
                    qkv.add(arriving[0], arriving[1](), arriving[2])
                arriving = group, self.over_ranks.start_gradients_to_tokens(*d_qkv), unnormed
            del d_qkv, unnormed  # before the next are there
        if arriving is not None:
            qkv.add(arriving[0], arriving[1](), arriving[2])
        qkv.add_to_x(self.d_h)  # in place: it comes from a node of ours
        d_x = self.d_h if self.needs_x else None
        return [d_x, *results_of(self.sums)[:-1], *d_o, *results_of(self.leaf_sums)]

    def _of_o(self) -> list[torch.Tensor | None]:
        """Returns the gradients of the output projection."""
        layout, o, sums = self.layout, self.params.o.to(self.layout.dtype), self.sums.o
        if any(total is not None for total in sums):
            for chunk in chunks(len(self.d_h), layout.chunk_tokens):
                o.add_gradients(sums, layout.scaled(self.d_h[chunk]), layout.joined(self.outs, chunk))
        return results_of(sums)

    def _through_attention(
        self, group: int, again: QKVByGroup | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Returns the gradients of a group's queries, keys and values; and `QKV.unnormed`."""
        graph, count, state = self.runs[group]
        qkv = None if again is None else again.take()
        saved = self.saved[len(self.saved) - count :]
        del self.saved[len(self.saved) - count :]
        bases = () if qkv is None else qkv.bases
        if graph is None:
            with state.autocast_as_then(), state.random_as_then():
                run = record(self.call.core, self.call.by_token, qkv.views, qkv.bases, keep_qkv=True, known=self.leaves)
            graph, saved, bases = run.graph, run.saved, ()
            del run
        found = graph.backward(lambda: self._of_attended(group), bases, saved, self.leaves)
        for total, gradient in zip(self.leaf_sums, found[3:], strict=True):
            if total is not None and gradient is not None:
                total.add_whole(gradient)
        return found[:3], None if qkv is None else qkv.unnormed

    def _of_attended(self, group: int) -> torch.Tensor:
        """Returns the gradient of attention's output of a group. The output itself is let go of here: under
        checkpointing its memory is free then, else when the node's backward ends."""
        layout, out = self.layout, self.outs[group]
        self.outs[group] = None
        projection = self.params.o.columns(layout.columns(group)[0]).to(layout.dtype)
        d_out = torch.empty_like(out, dtype=layout.dtype)
        for chunk in chunks(len(out), layout.chunk_tokens):
            projection.backward(self.d_h[chunk].to(layout.dtype), out=d_out[chunk])
        if layout.scale != 1:
            d_out.mul_(layout.scale)
        return d_out.to(out.dtype)
