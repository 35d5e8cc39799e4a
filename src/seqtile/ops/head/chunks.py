"""The loop over chunks of logits, for one or several heads over the same tokens, and its autograd Function.

For a chunk of C tokens and each head: logits = hidden W'. The row function computes values from them and overwrites
them with their gradients. Then d_W += d_logits' hidden and d_hidden = d_logits W. Each head costs three matrix
products, and only one chunk of logits exists at a time:

    hidden [C, D] ──mm──> logits [C, V] ──row function──> losses [C], d_logits [C, V] in the same memory
                                                                      ├──mm──> d_hidden [C, D]
                                                                      └──mm──> added to d_W [V, D], float32

If all tokens that count fit in one chunk, d_W is one product in its own dtype, without a sum.
If the loss is one total, the forward already computes the gradients up to the factor of the upstream gradient. If each
token has its own value, the backward recomputes the chunks, because only then are the upstream gradients known.
Source: Arctic Long Sequence Training, 3.1; Mini-Sequence Transformer, algorithms 2 and 4. Exact, not approximate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels import LossOptions
from seqtile.ops.checks import autocast_dtype, check_first_derivative, check_operands, check_shape
from seqtile.ops.chunks import chunks, is_trial, resolve_chunk_tokens, to_be_filled
from seqtile.ops.weight_grads import WeightGrad, main_grad_of, scale_

# For few rows MKL sums the products one by one in float32: with a real model's 49,152 words the error is 9e-5.
_FEW_ROWS, _WORDS = 16, 1024


class Head(NamedTuple):
    hidden: torch.Tensor  # [..., D]; [T, D] during the computation
    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None  # [V]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its matmuls: autocast's, else that of the operands."""
        return autocast_dtype(self.hidden) or self.hidden.dtype

    def check(self, op: str, name: str = "") -> None:
        """Raises TypeError or ValueError for tensors that do not match each other; `name` begins their names."""
        tensors = {f"{name}{part}": tensor for part, tensor in self._asdict().items() if tensor is not None}
        check_operands(op, tensors)
        shape = list(self.hidden.shape)
        if self.hidden.dim() == 0 or self.hidden.numel() == 0:
            kind = ", an empty sequence" if shape else ""
            raise ValueError(f"{op}: {name}hidden has shape {shape}{kind}, expected [..., D] with tokens")
        if self.weight.dim() != 2 or self.weight.shape[1] != shape[-1]:
            found = list(self.weight.shape)
            raise ValueError(f"{op}: {name}weight has shape {found}, expected [V, D] with D = {shape[-1]}")
        if self.bias is not None:
            check_shape(op, f"{name}bias", self.bias, (self.weight.shape[0],), "[V]")

    def flat(self) -> "Head":
        bias = None if self.bias is None else self.bias.contiguous()
        return Head(self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, bias)

    def logits_buffer(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates [rows, V] with rows aligned to 16 elements; a GPU reads unaligned rows one element at a time."""
        vocab = self.weight.shape[0]
        length = vocab if torch.compiler.is_compiling() else -(-vocab // 16) * 16  # it compiles no product into a part
        buffer = self.hidden.new_empty(rows, length, dtype=dtype)
        if length > vocab and buffer.device.type == "cpu":
            buffer[:, vocab:] = 0  # oneDNN multiplies the element after an odd row by zero in half precision: NaN stays
        return buffer[:, :vocab]


class LogitChunk(NamedTuple):
    """The arguments of a row function for a chunk of C tokens. `logits`, `biases` and `write_grads` have one entry per
    head."""

    logits: list[torch.Tensor]
    """[C, V]: products hidden W'. **Destroyed** where `write_grads` is True: they then hold temperature * dL/dz, where
    L is the sum of scales * values and z = logit_scale * products + bias."""
    biases: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    """`ChunkedHeads.inputs` of the chunk's tokens."""
    class_weight: torch.Tensor | None
    values: list[torch.Tensor | None]
    """[C] each, **written**: the losses, then the values of `RowLossSpec.values`."""
    scales: list[torch.Tensor | None]
    """[C] float32 for each differentiable value. None means ones for the losses and zeros for the others."""
    write_grads: tuple[bool, ...]


class RowLossSpec(NamedTuple):
    """What to compute from each row of the heads' logits, and how many rows form a chunk."""

    op: str
    row_function: Callable[[Sequence[LossOptions], LogitChunk], None]
    options: tuple[LossOptions, ...]
    """One per head, all with the same temperature."""
    dtypes: tuple[torch.dtype, ...]
    """One per head, see `Head.dtype`."""
    chunk_tokens: int
    trial: bool
    """See `to_be_filled`."""
    values: tuple[torch.dtype | None, ...] = ()
    """The dtypes of the values other than the losses; None for values that are not requested."""
    differentiable: int = 1
    """The number of values that have a gradient, the losses first."""
    accumulate_dtype: torch.dtype = torch.float32
    """The dtype in which the gradients of weight and bias are summed."""


@dataclass
class HeadGradients:
    """The gradients of one head, up to a factor; None if not needed."""

    hidden: torch.Tensor | None
    weight: WeightGrad | None
    bias: WeightGrad | None
    one_product: bool
    """True if there is only one chunk: d_weight is then one product with `d_logits` [n, V], not a sum."""
    d_logits: torch.Tensor | None = None

    def add(self, d_logits: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, places: slice | torch.Tensor) -> None:
        """Adds a chunk's gradients. x [C, D] are the hidden states at `places`; if x is a copy, it is **destroyed**."""
        if self.one_product:
            self.d_logits = d_logits
        elif self.weight is not None:
            self.weight.add(d_logits, x)
        if self.bias is not None:
            self.bias.add(d_logits)
        if self.hidden is None:
            return
        if not isinstance(places, slice):
            self.hidden.index_copy_(0, places, _over_words(d_logits, matrix, x).to(self.hidden.dtype))
        elif x.dtype != self.hidden.dtype:
            self.hidden[places].copy_(_over_words(d_logits, matrix, x))
        else:
            _over_words(d_logits, matrix, self.hidden[places])


def _over_words(d_logits: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes d_logits [C, V] @ matrix [V, D] to `out` and returns it."""
    if d_logits.device.type != "cpu" or len(d_logits) >= _FEW_ROWS or d_logits.dtype != torch.float32:
        return torch.mm(d_logits, matrix, out=out)
    out.zero_()
    for d_block, block in zip(d_logits.split(_WORDS, dim=1), matrix.split(_WORDS), strict=True):
        out.add_(d_block @ block)
    return out


class ChunkedHeads(NamedTuple):
    """Heads over the same T tokens, with the spec and the other inputs of their losses."""

    spec: RowLossSpec
    heads: tuple[Head, ...]
    inputs: tuple[torch.Tensor, ...] = ()
    """[T, ...] each, such as labels."""
    rows: torch.Tensor | None = None
    """[n] int64, the positions of the tokens that count; None if all do."""
    class_weight: torch.Tensor | None = None
    """[V] float32, multiplies the losses."""

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        return [*chain(*self.heads), self.rows, self.class_weight, *self.inputs]

    @classmethod
    def make(
        cls, heads: tuple[Head, ...], inputs: tuple[Any, ...], chunk_tokens: int | None, *spec: Any, **more: Any
    ) -> "ChunkedHeads":
        """Returns heads in chunks. `spec` are the first three fields of `RowLossSpec`, `more` its optional ones."""
        size = resolve_chunk_tokens(chunk_tokens, max([head.hidden.shape[-1] for head in heads]))
        return cls(RowLossSpec(*spec, tuple([head.dtype for head in heads]), size, is_trial(), **more), heads, inputs)

    @classmethod
    def of(cls, spec: RowLossSpec, tensors: Sequence[torch.Tensor | None]) -> "ChunkedHeads":
        """Returns a copy with these `tensors`."""
        end = 3 * len(spec.dtypes)
        rows, class_weight, *inputs = tensors[end:]
        return cls(
            spec, tuple([Head(*tensors[i : i + 3]) for i in range(0, end, 3)]), tuple(inputs), rows, class_weight
        )

    @property
    def labelled(self) -> int:
        """n, the number of tokens that count."""
        return (self.heads[0].hidden if self.rows is None else self.rows).shape[0]

    def compute(self, grads_in_forward: bool) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Returns the sum of the losses and the values of every token that counts, see `ChunkedHeadsFunction`."""
        grads_in_forward = grads_in_forward and torch.is_grad_enabled()
        total, *values = ChunkedHeadsFunction.apply(self.spec, grads_in_forward, *self.tensors)
        return total, values

    def new_values(self, others: bool = True) -> list[torch.Tensor | None]:
        """Allocates the losses of the tokens that count, [n], and with `others` the requested other values; else
        None."""
        losses = to_be_filled(self.heads[0].hidden, (self.labelled,), torch.float32, trial=self.spec.trial)
        wanted = [dtype if others else None for dtype in self.spec.values]
        return [losses, *[None if dtype is None else torch.empty_like(losses, dtype=dtype) for dtype in wanted]]

    def run(
        self,
        values: Sequence[torch.Tensor | None],
        needs: Sequence[bool],
        main_grads: Sequence[torch.Tensor | None],
        scales: Sequence[torch.Tensor | None],
    ) -> list[HeadGradients]:
        """Goes over the chunks once, writes `values`, and returns the gradients that `needs` requests of each head's
        hidden, weight and bias. The gradients are those of the sum of scales * values, see `LogitChunk.scales`.

        Each head costs 2 n D V FLOP for the logits, and as many for d_hidden and for d_weight. Allocates one chunk of
        logits [C, V], d_hidden and d_weight; if some tokens are ignored or autocast changes the dtype, also one chunk
        [C, D]. If there is one chunk and no `main_grad`, `_scaled` computes d_weight later, and the chunk of d_logits
        is kept until then.
        """
        spec, heads, inputs, rows, class_weight = self
        per_head = list(zip(heads, spec.dtypes, strict=True))
        matrices = [head.weight.to(dtype) for head, dtype in per_head]  # copies only under autocast
        buffers = [head.logits_buffer(min(self.labelled, spec.chunk_tokens), dtype) for head, dtype in per_head]
        needs_by_head = [needs[i : i + 3] for i in range(0, len(needs), 3)]
        gradients = [self._no_gradients(i, needs, main_grads[2 * i]) for i, needs in enumerate(needs_by_head)]
        write_grads = tuple(map(any, needs_by_head))

        def add(chunk: slice) -> None:  # a function: its allocations are freed before the next chunk
            places = chunk if rows is None else rows[chunk]
            hidden = [head.hidden[places].to(dtype) for head, dtype in per_head]  # views if nothing changes
            pairs = zip(hidden, matrices, buffers, strict=True)
            logits = [torch.mm(x, matrix.t(), out=buffer[: x.shape[0]]) for x, matrix, buffer in pairs]
            row_chunk = LogitChunk(
                logits,
                [head.bias for head in heads],
                [tensor[places] for tensor in inputs],
                class_weight,
                [None if vector is None else vector[chunk] for vector in values],
                [None if vector is None else vector[chunk] for vector in scales],
                write_grads,
            )
            spec.row_function(spec.options, row_chunk)
            for of_head, d_logits, x, matrix in zip(gradients, logits, hidden, matrices, strict=True):
                of_head.add(d_logits, x, matrix, places)

        for chunk in chunks(self.labelled, spec.chunk_tokens):
            add(chunk)
        return gradients

    def _no_gradients(self, i: int, needs: Sequence[bool], main_grad: torch.Tensor | None) -> HeadGradients:
        """Returns a head's gradient sums, still empty."""
        (hidden, weight, bias), spec = self.heads[i], self.spec
        make = partial(to_be_filled, trial=spec.trial) if self.rows is None else torch.zeros_like
        one_product = needs[1] and main_grad is None and 0 < self.labelled <= spec.chunk_tokens
        # One product is rounded before it is scaled, and float16 has too little range for that.
        one_product &= weight.dtype != torch.float16 and weight.dtype in (spec.dtypes[i], torch.float32)
        return HeadGradients(
            hidden=make(hidden) if needs[0] else None,
            weight=WeightGrad(weight, spec.accumulate_dtype) if needs[1] and not one_product else None,
            bias=WeightGrad(bias, spec.accumulate_dtype) if needs[2] else None,
            one_product=one_product,
        )


class ChunkedHeadsFunction(torch.autograd.Function):
    """The sum of the losses of `ChunkedHeads`, and the values of every token that counts.

    With `grads_in_forward`, each head costs 3 matmuls in all. The backward multiplies the gradients by the
    upstream gradient once, in float32, in place, and returns these buffers, so a second backward (`retain_graph=True`)
    recomputes the chunks. The backward also recomputes them (3 more products) if the upstream gradients differ between
    tokens, or if a value other than the losses has one. Only the backward can know that.

    Without it, the forward costs one product and the backward three; only the operands are kept.
    """

    @staticmethod
    def forward(ctx, spec: RowLossSpec, grads_in_forward: bool, *tensors: torch.Tensor | None):
        chunked = ChunkedHeads.of(spec, tensors)
        ctx.spec, ctx.grads_in_forward = spec, grads_in_forward
        ctx.main_grads = [main_grad_of(parameter) for head in chunked.heads for parameter in head[1:]]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # missing gradients are None
        values = chunked.new_values()
        ctx.mark_non_differentiable(*[value for value in values[spec.differentiable :] if value is not None])
        needs = [grads_in_forward and needed for needed in ctx.needs_input_grad[2 : 2 + 3 * len(chunked.heads)]]
        gradients = _of_sum(ctx, chunked, values, needs)
        ctx.labelled, ctx.gradients = chunked.labelled, gradients if grads_in_forward else None
        total = values[0].sum()
        if torch.compiler.is_compiling() and grads_in_forward and not any(spec.values):
            values[0] = None  # a compiled backward would get zeros for it and recompute
        return total, *values

    @staticmethod
    def backward(ctx, upstream: torch.Tensor | None, *d_values: torch.Tensor | None):
        check_first_derivative(ctx.spec.op)
        gradients, ctx.gradients = ctx.gradients, None
        needs, inputs = ctx.needs_input_grad[2 : 2 + 3 * len(ctx.spec.dtypes)], len(ctx.needs_input_grad)
        d_losses, *d_others = d_values[: ctx.spec.differentiable]
        if ctx.grads_in_forward and upstream is None and d_losses is not None:
            upstream, d_losses = one_factor(d_losses)
        if d_losses is not None or any(d_value is not None for d_value in d_others):
            del gradients  # free them before new ones are allocated
            chunked = _saved(ctx)
            if upstream is not None:
                d_losses = upstream.expand(chunked.labelled) + (0 if d_losses is None else d_losses)
            found = _scaled(ctx, *_of_values(ctx, chunked, [d_losses, *d_others], needs))
        elif upstream is None:
            return (None,) * inputs
        else:
            if gradients is None:
                chunked = _saved(ctx)
                gradients = _of_sum(ctx, chunked, chunked.new_values(others=False), needs)
            found = _scaled(ctx, gradients[0], upstream * gradients[1])
        return None, None, *found, *(None,) * (inputs - 2 - len(needs))


def one_factor(d_losses: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns (the factor, None) if `d_losses` [n] has one value for all tokens, else (None, `d_losses`).

    Waits for the device, at a time when the backward has nothing else to do. A simulation, without values, assumes one
    factor.
    """
    first = d_losses[0] if len(d_losses) else d_losses.new_ones(())
    equal = isinstance(d_losses, FakeTensor) or d_losses.is_meta or bool((d_losses == first).all())
    return (first, None) if equal else (None, d_losses)


def _of_sum(
    ctx, chunked: ChunkedHeads, values: Sequence[torch.Tensor | None], needs: Sequence[bool]
) -> tuple[list[HeadGradients], torch.Tensor | float]:
    """Writes `values`; returns the gradients of the sum of the losses, up to a factor, and that factor."""
    grad_scale, scales = 1.0, [None] * chunked.spec.differentiable
    if chunked.class_weight is not None and any(needs):
        grad_scale = pow2_grad_scale(chunked.class_weight)
        scales[0] = (1 / grad_scale).expand_as(values[0]).contiguous()
    return chunked.run(values, needs, ctx.main_grads, scales), grad_scale


def _of_values(
    ctx, chunked: ChunkedHeads, d_values: Sequence[torch.Tensor | None], needs: Sequence[bool]
) -> tuple[list[HeadGradients], torch.Tensor]:
    """Returns the gradients, up to a factor, and that factor, if every token has its own upstream gradients `d_values`
    ([n] float32 for the losses and each other differentiable value). One pass over the chunks."""
    values, (d_losses, *d_others) = chunked.new_values(others=False), d_values
    d_losses = torch.zeros_like(values[0]) if d_losses is None else d_losses
    weight = chunked.class_weight
    grad_scale = pow2_grad_scale(d_losses if weight is None else d_losses * pow2_grad_scale(weight), *d_others)
    scales = [None if d_value is None else d_value.contiguous() / grad_scale for d_value in (d_losses, *d_others)]
    return chunked.run(values, needs, ctx.main_grads, scales), grad_scale


def _scaled(ctx, gradients: Sequence[HeadGradients], factor: torch.Tensor) -> list[torch.Tensor | None]:
    """Returns the gradients, multiplied once by `factor` (float32, one element) in float32, in place, and rounded.

    If no token is labelled, all gradients are zeros; a factor of 1/0 must not turn them into NaN.
    """
    spec, found = ctx.spec, []
    factor = factor if ctx.labelled else torch.ones_like(factor)
    factor = factor.reshape(1) / spec.options[0].temperature  # one dimension: a scalar would first be rounded
    for i, of_head in enumerate(gradients):
        of_products, weight = factor * spec.options[i].logit_scale, of_head.weight
        if of_head.hidden is not None:
            scale_(of_head.hidden, of_products)
        if (d_logits := of_head.d_logits) is not None:
            chunked = ChunkedHeads.of(spec, ctx.saved_tensors)
            (hidden, parameter, _), rows = chunked.heads[i], chunked.rows
            hidden = (hidden if rows is None else hidden[rows]).to(spec.dtypes[i])
            like = d_logits.new_empty(1, 1, dtype=parameter.dtype)  # ZeRO-3 may have left the parameter without a shape
            weight = WeightGrad(like.expand(d_logits.shape[1], hidden.shape[1]), parameter.dtype)
            weight.add(d_logits, hidden)
        found += [
            of_head.hidden,
            None if weight is None else weight.scaled(of_products, ctx.main_grads[2 * i]),
            None if of_head.bias is None else of_head.bias.scaled(factor, ctx.main_grads[2 * i + 1]),
        ]
    return found


def _saved(ctx) -> ChunkedHeads:
    chunked = ChunkedHeads.of(ctx.spec, ctx.saved_tensors)
    for head in chunked.heads:
        if head.weight.dim() != 2:
            raise RuntimeError(
                f"this backward recomputes logits, but the weight has become {list(head.weight.shape)} since the "
                "forward: under ZeRO-3, gather it (deepspeed.zero.GatheredParameters) around forward and backward"
            )
    return chunked


def pow2_grad_scale(*factors: torch.Tensor | None) -> torch.Tensor:
    """Returns a power of two [1] near the largest finite magnitude in `factors` (float32), divided by 2**6.

    The gradient of a chunk of logits is stored in the operands' dtype. Its factors are first divided by this power, and
    the result is multiplied back in float32 at the end, exactly. So it fits float16 whatever the GradScaler or class
    weights are. Of float16's 2**16 only 2**6 are used: smaller values keep their digits, and the products still fit.
    """
    finite = [factor.where(factor.isfinite(), 0.0).abs() for factor in factors if factor is not None]
    if finite[0].numel() == 0:
        return finite[0].new_ones(1)
    peak = torch.stack([factor.amax() for factor in finite]).amax().clamp(max=2.0**126).reshape(1)
    mantissa, _ = torch.frexp(peak)
    return torch.where(peak > 0, peak / mantissa / 64, 1.0)
