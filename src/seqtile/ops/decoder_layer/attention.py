"""Attention and its projections as one node: norm, queries, keys, values, attention by groups, output projection's
gradient.

From x [T, D] to x and what attention returned for each group, [T, h K]. The backward is given the gradient of
h = x + scale o(attended), and computes from it, group by group, the gradient of what attention returned, that of
queries, keys and values, and that of x; likewise all gradients of norm, q, k, v and o.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from seqtile.ops.checks import check_first_derivative
from seqtile.ops.decoder_layer.attention_graph import Attend, AttentionGraph, record, too_large
from seqtile.ops.decoder_layer.params import AttentionParams, Layout, gathered, scaled
from seqtile.ops.decoder_layer.qkv import QKV, Inputs, QKVByGroup, QKVGradients
from seqtile.ops.projection import ProjectionGrad
from seqtile.ops.rerun import ForwardState
from seqtile.ops.tiles import tiles
from seqtile.ops.weight_grad import WeightGrad, main_grad_of
from seqtile.protocols import Arriving, SequenceParallelAttention


@dataclass
class AttentionCall:
    """What the node is asked for, besides x; see `decoder_layer`."""

    layout: Layout
    params: AttentionParams | None
    cos: torch.Tensor | None
    """[T, K]; None for a layer without positions."""
    sin: torch.Tensor | None
    attend: Attend
    exchange: SequenceParallelAttention | None
    grouped: bool
    """Whether queries, keys and values are computed again in the backward rather than kept."""
    may_repeat: bool
    given: Sequence[torch.Tensor]
    differentiate: bool
    leaves: tuple[torch.Tensor, ...] = ()
    """That attention uses besides and that require a gradient."""

    def learn(self, leaves: Sequence[torch.Tensor]) -> None:
        """Adds leaves that attention was found to use."""
        if self.exchange is not None:  # a rank of padding alone would not find them, and others would wait for it
            raise ValueError(
                f"decoder_layer: attention over ranks uses a tensor {list(leaves[0].shape)} that requires a gradient, "
                "expected none; leave this layer untiled (layer=False)"
            )
        self.leaves = (*self.leaves, *leaves)

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (self.attend if self.exchange is None else self.exchange.attend)(q, k, v)

    def by_token(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention returned, of this rank's tokens [T, h K]."""
        own = attended if self.exchange is None else self.exchange.to_tokens(attended)
        return own.reshape(self.layout.tokens, -1)


class Run(NamedTuple):
    """One group's attention, as the backward needs it."""

    graph: AttentionGraph | None
    """None if it runs again in the backward."""
    saved: int
    """How many tensors the graph has saved."""
    state: ForwardState | None
    """Where it runs again."""


class AttentionFunction(torch.autograd.Function):
    """`leaves` stand for `call.params.tensors` and take their gradients, as do `call.leaves`, which follow."""

    @staticmethod
    def forward(ctx, call: AttentionCall, x: torch.Tensor, *leaves: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        layout, params = call.layout, call.params
        outs, runs, saved = [], [], []
        order = range(layout.groups)
        qkv_of_groups = QKVByGroup(
            Inputs(x, call.cos, call.sin, params, layout), order, call.exchange, keep_normed=True
        )
        repeats = False
        for _ in order:
            out, run, kept = _attended(call, qkv_of_groups.take(), repeats, first=not outs)
            repeats = run.state is not None and run.graph is None
            outs.append(out)
            runs.append(run)
            saved += kept
        ctx.layout, ctx.runs, ctx.grouped, ctx.exchange = layout, runs, call.grouped, call.exchange
        stripped = replace(call, params=None, cos=None, sin=None, leaves=())
        ctx.call = stripped if repeats else None  # which holds what attention is given, such as masks
        ctx.params, ctx.main_grads = params.with_tensors([None] * len(params.tensors)), None
        if call.differentiate:
            ctx.main_grads = [main_grad_of(tensor) for tensor in (*params.tensors, *call.leaves)]
            ctx.save_for_backward(x, call.cos, call.sin, *params.tensors, *call.leaves, *outs, *saved)
        return x.view_as(x), *outs

    @staticmethod
    def backward(ctx, d_h: torch.Tensor, *_: torch.Tensor):
        check_first_derivative("decoder_layer")
        return None, *_Backward(ctx, d_h).gradients()


def _attended(
    call: AttentionCall, qkv: QKV, repeats: bool, first: bool
) -> tuple[torch.Tensor, Run, list[torch.Tensor]]:
    """What attention returned for a group, how its backward goes, and what is to be saved for that."""
    if not call.differentiate:
        return call.by_token(call.core(*qkv.views)), Run(None, 0, None), []
    state = ForwardState.now(qkv.views[0].device) if call.grouped and call.may_repeat else None
    if repeats:
        return call.by_token(call.core(*qkv.views)), Run(None, 0, state), []
    run = record(call.core, call.by_token, qkv.views, qkv.bases, keep_qkv=not call.grouped, known=call.leaves)
    if call.grouped and first:
        size = too_large(run.attended, run.saved, call.given)
        if call.exchange is not None:
            size = call.exchange.agree_on_max(size)
        if size and not call.may_repeat:
            raise ValueError(
                f"this attention saves {size} bytes for its backward besides queries, keys, values and its output of "
                f"{run.out.numel() * run.out.element_size()} bytes; by groups of heads it would have to be computed "
                f"once more: pass head_groups={call.layout.groups} to have it so, or use flash attention, or sdpa "
                "without a mask"
            )
        if size:
            return run.out, Run(None, 0, state), []
    return run.out, Run(run.graph, len(run.saved), None), run.saved


class _Backward:
    """One backward of the node. Holds each large tensor no longer than it is needed."""

    def __init__(self, ctx, d_h: torch.Tensor):
        self.layout, self.runs, self.exchange, self.call = ctx.layout, ctx.runs, ctx.exchange, ctx.call
        self.grouped, self.needs, self.main_grads = ctx.grouped, ctx.needs_input_grad[1:], ctx.main_grads
        self.d_h = d_h
        x, cos, sin, *others = ctx.saved_tensors
        count, groups = len(ctx.params.tensors), self.layout.groups
        self.params = ctx.params.with_tensors(others[:count])
        leaves = len(self.main_grads) - count
        self.leaves = others[count : count + leaves]
        self.outs = others[count + leaves : count + leaves + groups]
        self.saved = others[count + leaves + groups :]
        self.inputs = Inputs(x, cos, sin, self.params, self.layout)
        self.grads = QKVGradients(self.inputs, self.needs, self.main_grads)
        needs = self.needs[1 + count :]
        self.of_leaves = [
            WeightGrad(leaf, main_grad=main_grad) if need else None
            for leaf, need, main_grad in zip(self.leaves, needs, self.main_grads[count:], strict=True)
        ]

    def gradients(self) -> list[torch.Tensor | None]:
        """Of x, of the parameters and of the leaves."""
        of_o = self._of_o()
        order = range(self.layout.groups - 1, -1, -1)
        again = QKVByGroup(self.inputs, order, self.exchange, keep_unnormed=True) if self.grouped else None
        arriving: tuple[int, Arriving, torch.Tensor | None] | None = None
        for group in order:
            d_qkv, unnormed = self._through_attention(group, again)
            if self.exchange is None:
                self.grads.add(group, d_qkv, unnormed)
            else:
                if arriving is not None:  # the gradients of the group before, sent while attention ran
                    self.grads.add(arriving[0], arriving[1](), arriving[2])
                arriving = group, self.exchange.start_gradients_to_tokens(*d_qkv), unnormed
            del d_qkv, unnormed  # before the next are there
        if arriving is not None:
            self.grads.add(arriving[0], arriving[1](), arriving[2])
        self.grads.add_to_x(self.d_h)  # in place: it comes from a node of ours
        of_leaves = [None if total is None else total.result() for total in self.of_leaves]
        return [self.d_h if self.needs[0] else None, *self.grads.results(), *of_o, *of_leaves]

    def _of_o(self) -> list[torch.Tensor | None]:
        """The gradients of the output projection."""
        count, layout = len(self.params.tensors), self.layout
        place = slice(count - 4, count)
        grad = ProjectionGrad(self.params.o, layout.dtype, self.needs[1:][place], self.main_grads[place])
        if any(self.needs[1:][place]):
            for tile in tiles(len(self.d_h), layout.chunk_tokens):
                grad.add(scaled(self.d_h[tile], layout), gathered(self.outs, tile, layout.dtype))
        return list(grad.results())

    def _through_attention(
        self, group: int, again: QKVByGroup | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The gradients of a group's queries, keys and values; and what `QKV.unnormed` is."""
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
        for total, gradient in zip(self.of_leaves, found[3:], strict=True):
            if total is not None and gradient is not None:
                total.add_whole(gradient)
        return found[:3], None if qkv is None else qkv.unnormed

    def _of_attended(self, group: int) -> torch.Tensor:
        """The gradient of what attention returned for a group, which is let go of."""
        layout, out = self.layout, self.outs[group]
        self.outs[group] = None
        projection = self.params.o.columns(layout.columns(group)[0]).to(layout.dtype)
        d_out = torch.empty_like(out, dtype=layout.dtype)
        for tile in tiles(len(out), layout.chunk_tokens):
            projection.backward(self.d_h[tile].to(layout.dtype), out=d_out[tile])
        if layout.scale != 1:
            d_out.mul_(layout.scale)
        return d_out.to(out.dtype)
