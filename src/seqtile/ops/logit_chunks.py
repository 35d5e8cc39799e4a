"""The loop over chunks of logits, of one head or of several over the same tokens, and its autograd: values of every
token that counts, and at once the gradients of heads and hidden states.

For a chunk of C tokens: logits = hidden W' of each head, the row function turns them into values and, in place, into
their gradients, and then d_W += d_logits' hidden and d_hidden = d_logits W. Three matrix products a head, one chunk of
logits alive:

    hidden [C, D] ──mm──> logits [C, V] ──row function──> losses [C], d_logits [C, V] in the same memory
                                                                      ├──mm──> d_hidden [C, D]
                                                                      └──mm──> added to d_W [V, D], float32

Where all tokens that count fit in one chunk there is no sum, and d_W is one product in its own dtype.

If the loss is one total, the forward already computes the gradients, except for the factor of the upstream gradient. If
there is one value per token, the backward recomputes the chunks, because each token's upstream gradient is known only
then.
Source: Arctic Long Sequence Training, 3.1; Mini-Sequence Transformer, algorithms 2 and 4. Exact, not approximate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels import LossOptions
from seqtile.ops.checks import autocast_dtype, check_first_derivative, check_operands, check_shape
from seqtile.ops.chunks import chunks, to_be_filled
from seqtile.ops.linear import WeightGrad, main_grad_of, scale_

# MKL adds up the products of few rows one number after the other, in float32: of a real model's 49,152 words 9e-5 off.
_FEW_ROWS, _WORDS = 16, 1024


class Head(NamedTuple):
    hidden: torch.Tensor
    """[..., D]; [T, D] where it is computed."""
    weight: torch.Tensor
    """[V, D]"""
    bias: torch.Tensor | None
    """[V]"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its matrix products: the operands', or autocast's."""
        return autocast_dtype(self.hidden) or self.hidden.dtype

    def check(self, op: str, name: str = "") -> None:
        """Raises TypeError or ValueError for tensors that do not fit each other; `name` begins their names."""
        tensors = {f"{name}{part}": tensor for part, tensor in self._asdict().items() if tensor is not None}
        check_operands(op, f"{name}hidden", tensors)
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
        """Allocates [rows, V], each row at a multiple of 16 elements: elsewhere a GPU reads one element at a time."""
        vocab = self.weight.shape[0]
        length = vocab if torch.compiler.is_compiling() else -(-vocab // 16) * 16  # it compiles no product into a part
        buffer = self.hidden.new_empty(rows, length, dtype=dtype)
        if length > vocab and buffer.device.type == "cpu":
            buffer[:, vocab:] = 0  # oneDNN multiplies an odd row's next element, in half precision, by zero: NaN stays
        return buffer[:, :vocab]


class LogitChunk(NamedTuple):
    """What a row function takes: of a chunk of C tokens, and of each head in lists of logits, biases and
    `write_grads`."""

    logits: list[torch.Tensor]
    """[C, V]: products hidden W'. **Destroyed** where `write_grads` says so: they then hold the gradient of the sum of
    scales * values with respect to the capped logits' argument, times the temperature."""
    biases: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    """`ChunkedHeads.inputs` of these tokens."""
    class_weight: torch.Tensor | None
    values: list[torch.Tensor | None]
    """[C] each, **written**: the losses, and the values of `RowLossSpec.values`."""
    scales: list[torch.Tensor | None]
    """[C] float32 of each differentiable value; None for ones of the losses, for zeros of others."""
    write_grads: tuple[bool, ...]


class RowLossSpec(NamedTuple):
    """What to compute from each row of the heads' logits, and for how many rows at a time."""

    op: str
    row_function: Callable[[Sequence[LossOptions], LogitChunk], None]
    options: tuple[LossOptions, ...]
    """One for each head, with the same temperature."""
    dtypes: tuple[torch.dtype, ...]
    """One for each head, see `Head.dtype`."""
    chunk_tokens: int
    values: tuple[torch.dtype | None, ...] = ()
    """The dtypes of the values besides the losses; None where one is not wanted."""
    differentiable: int = 1
    """The number of values that have a gradient, the losses first."""
    accumulate_dtype: torch.dtype = torch.float32
    """The dtype of the sums of the gradients of weight and bias."""


@dataclass
class HeadGradients:
    """The gradients of one head, up to a factor; None if not needed."""

    hidden: torch.Tensor | None
    weight: WeightGrad | None
    bias: WeightGrad | None
    one_product: bool
    """True if there is only one chunk: the weight's gradient is then one product with `d_logits` [n, V], not a sum."""
    d_logits: torch.Tensor | None = None

    def add(self, d_logits: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, places: slice | torch.Tensor) -> None:
        """Adds those of a chunk: x [C, D] lies at `places` of the hidden states; a copy of them is **destroyed**."""
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
    """Returns d_logits [C, V] @ matrix [V, D], written to `out`."""
    if d_logits.device.type != "cpu" or len(d_logits) >= _FEW_ROWS or d_logits.dtype != torch.float32:
        return torch.mm(d_logits, matrix, out=out)
    out.zero_()
    for d_block, block in zip(d_logits.split(_WORDS, dim=1), matrix.split(_WORDS), strict=True):
        out.add_(d_block @ block)
    return out


class ChunkedHeads(NamedTuple):
    """Heads over the same T tokens, with the spec and the further inputs of their losses."""

    spec: RowLossSpec
    heads: tuple[Head, ...]
    inputs: tuple[torch.Tensor, ...] = ()
    """[T, ...] each, such as labels."""
    rows: torch.Tensor | None = None
    """[n] int64, the tokens that count; None if all do."""
    class_weight: torch.Tensor | None = None
    """[V] float32, by which losses are multiplied."""

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        return [*(tensor for head in self.heads for tensor in head), self.rows, self.class_weight, *self.inputs]

    @classmethod
    def of(cls, spec: RowLossSpec, tensors: Sequence[torch.Tensor | None]) -> "ChunkedHeads":
        """Returns a copy with these `tensors`."""
        end = 3 * len(spec.dtypes)
        rows, class_weight, *inputs = tensors[end:]
        return cls(spec, tuple(Head(*tensors[i : i + 3]) for i in range(0, end, 3)), tuple(inputs), rows, class_weight)

    @property
    def labelled(self) -> int:
        """n, how many tokens count."""
        return (self.heads[0].hidden if self.rows is None else self.rows).shape[0]

    def compute(self, grads_in_forward: bool) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Returns the sum of the losses, and the values of every token that counts; see `ChunkedHeadsFunction`."""
        grads_in_forward = grads_in_forward and torch.is_grad_enabled()
        total, *values = ChunkedHeadsFunction.apply(self.spec, grads_in_forward, *self.tensors)
        return total, values

    def new_values(self, others: bool = True) -> list[torch.Tensor | None]:
        """Allocates the losses of every token that counts, [n], and the `others` that are wanted, None elsewhere."""
        losses, dtypes = to_be_filled(self.heads[0].hidden, (self.labelled,), torch.float32), self.spec.values
        wanted = [dtype if others else None for dtype in dtypes]
        return [losses, *(None if dtype is None else torch.empty_like(losses, dtype=dtype) for dtype in wanted)]

    def run(
        self,
        values: Sequence[torch.Tensor | None],
        needs: Sequence[bool],
        main_grads: Sequence[torch.Tensor | None],
        scales: Sequence[torch.Tensor | None],
    ) -> list[HeadGradients]:
        """Goes over the chunks once, writes `values`, and returns those gradients of hidden, weight and bias of each
        head that are in `needs`: of the sum of scales * values, see `LogitChunk.scales`.

        Of each head 2 n D V FLOP for the logits, as many for d_hidden and for d_weight. Allocates one chunk of logits
        [C, V], d_hidden and d_weight; where some tokens are ignored, or autocast changes the dtype, one chunk [C, D]
        besides. If there is one chunk and no `main_grad`, `_scaled` computes d_weight later, so the chunk of d_logits
        is kept until then.
        """
        spec, heads, inputs, rows, class_weight = self
        per_head = list(zip(heads, spec.dtypes, strict=True))
        matrices = [head.weight.to(dtype) for head, dtype in per_head]  # copies only under autocast
        buffers = [head.logits_buffer(min(self.labelled, spec.chunk_tokens), dtype) for head, dtype in per_head]
        needs_by_head = [needs[i : i + 3] for i in range(0, len(needs), 3)]
        gradients = [self._no_gradients(i, needs, main_grads[2 * i]) for i, needs in enumerate(needs_by_head)]
        write_grads = tuple(map(any, needs_by_head))

        def add(chunk: slice) -> None:  # a function, so that what it allocates is free again before the next chunk
            places = chunk if rows is None else rows[chunk]
            hidden = [head.hidden[places].to(dtype) for head, dtype in per_head]  # views, if nothing changes
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
        """Returns the sums of a head's gradients, still empty."""
        (hidden, weight, bias), spec = self.heads[i], self.spec
        make, dtype = to_be_filled if self.rows is None else torch.zeros_like, spec.accumulate_dtype
        one_product = needs[1] and main_grad is None and 0 < self.labelled <= spec.chunk_tokens
        # It is rounded before it is scaled, which float16 has no range for.
        one_product &= weight.dtype != torch.float16 and weight.dtype in (spec.dtypes[i], torch.float32)
        return HeadGradients(
            hidden=make(hidden) if needs[0] else None,
            weight=WeightGrad(weight, dtype) if needs[1] and not one_product else None,
            bias=WeightGrad(bias, dtype) if needs[2] else None,
            one_product=one_product,
        )


class ChunkedHeadsFunction(torch.autograd.Function):
    """The sum of the losses of `ChunkedHeads`, and the values of every token that counts.

    With `grads_in_forward` 3 matrix products a head in all: the upstream gradient is applied in the backward, once, in
    float32, in place, and what it is applied to is given away: a second backward (`retain_graph=True`) recomputes the
    chunks. A backward also recomputes the chunks if the tokens' losses have different upstream gradients, or if a value
    other than the losses has one. Only the backward can tell. 3 products more.

    Without it one product in the forward, three in the backward; nothing but the operands is kept.
    """

    @staticmethod
    def forward(ctx, spec: RowLossSpec, grads_in_forward: bool, *tensors: torch.Tensor | None):
        chunked = ChunkedHeads.of(spec, tensors)
        ctx.spec, ctx.grads_in_forward = spec, grads_in_forward
        ctx.main_grads = [main_grad_of(parameter) for head in chunked.heads for parameter in head[1:]]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # one that is not there is None
        values = chunked.new_values()
        ctx.mark_non_differentiable(*[value for value in values[spec.differentiable :] if value is not None])
        needs = [grads_in_forward and needed for needed in ctx.needs_input_grad[2 : 2 + 3 * len(chunked.heads)]]
        gradients = _of_sum(ctx, chunked, values, needs)
        ctx.labelled, ctx.gradients = chunked.labelled, gradients if grads_in_forward else None
        total = values[0].sum()
        if torch.compiler.is_compiling() and grads_in_forward and not any(spec.values):
            values[0] = None  # a compiled backward gets zeros for it, and would recompute
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
            del gradients  # before there are others
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
    """Returns the factor that `d_losses` [n] holds for every token, and None; or None and `d_losses`, if they differ.

    Waits for the device, in a backward that has nothing else to do yet. In a simulation, without values, it is one.
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
    """Returns the gradients where every token has upstream gradients of its own, `d_values` [n] float32 of its losses
    and other differentiable values, up to a factor, and that factor. One pass over the chunks."""
    values, (d_losses, *d_others) = chunked.new_values(others=False), d_values
    d_losses = torch.zeros_like(values[0]) if d_losses is None else d_losses
    weight = chunked.class_weight
    grad_scale = pow2_grad_scale(d_losses if weight is None else d_losses * pow2_grad_scale(weight), *d_others)
    scales = [None if d_value is None else d_value.contiguous() / grad_scale for d_value in (d_losses, *d_others)]
    return chunked.run(values, needs, ctx.main_grads, scales), grad_scale


def _scaled(ctx, gradients: Sequence[HeadGradients], factor: torch.Tensor) -> list[torch.Tensor | None]:
    """Returns the gradients, multiplied once by `factor` (float32, one number) in float32, in place, and rounded.

    If no token is labelled all are zeros, whatever the factor is: 1/0 where nothing is divided must not make them NaN.
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
            like = d_logits.new_empty(1, 1, dtype=parameter.dtype)  # of the parameter ZeRO-3 may have left no shape
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

    The gradient of a chunk of logits is stored in the operands' dtype. What multiplies it is divided by this first and
    multiplied back in float32 at the end, exactly, so that it fits float16 whatever a GradScaler or class weights are;
    2**6 of float16's 2**16 are used, so that the smaller ones keep their digits and the products still fit.
    """
    finite = [factor.where(factor.isfinite(), 0.0).abs() for factor in factors if factor is not None]
    if finite[0].numel() == 0:
        return finite[0].new_ones(1)
    peak = torch.stack([factor.amax() for factor in finite]).amax().clamp(max=2.0**126).reshape(1)
    mantissa, _ = torch.frexp(peak)
    return torch.where(peak > 0, peak / mantissa / 64, 1.0)
