"""The loop over tiles of logits: values of every labelled token, and at once the gradients of head and hidden states.

For a tile of C labelled tokens: logits = hidden W', the row kernel turns them into values and, in place, into their
gradient, and then d_W += d_logits' hidden and d_hidden = d_logits W. Three matrix products, one tile of logits alive.
Source: Arctic Long Sequence Training, 3.1; Mini-Sequence Transformer, algorithms 2 and 4. Exact, not approximate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqtile.kernels.launch import cross_entropy_
from seqtile.kernels.loss_options import LossOptions
from seqtile.ops.tiles import tiles
from seqtile.ops.weight_grad import WeightGrad, scale_


@dataclass(frozen=True)
class Settings:
    """What does not change from tile to tile and is no tensor."""

    loss: LossOptions
    chunk_tokens: int
    dtype: torch.dtype
    """Of the matrix products: that of the operands, or autocast's."""
    accumulate_dtype: torch.dtype
    """Of the sums of the gradients of weight and bias."""


class Operands(NamedTuple):
    hidden: torch.Tensor
    """[T, D]"""
    weight: torch.Tensor
    """[V, D]"""
    bias: torch.Tensor | None
    """[V]"""
    target: torch.Tensor
    """[T] int64"""
    rows: torch.Tensor | None
    """[n] int64, the tokens that are labelled; None if all are."""
    class_weight: torch.Tensor | None
    """[V] float32"""

    def labelled(self) -> int:
        """n, how many tokens are labelled."""
        return (self.target if self.rows is None else self.rows).shape[0]

    def part(self, tile: slice, settings: Settings) -> torch.Tensor:
        """[C, D], hidden states of labelled tokens: a view, unless some are ignored or the dtype is another."""
        return (self.hidden[tile] if self.rows is None else self.hidden[self.rows[tile]]).to(settings.dtype)

    def new_values(self, entropy: bool = False, metrics: bool = False) -> "Values":
        """Room for the losses and for what else is wanted."""
        losses = self.hidden.new_empty(self.labelled(), dtype=torch.float32)
        return Values(
            losses,
            lse=torch.empty_like(losses) if metrics else None,
            entropy=torch.empty_like(losses) if entropy else None,
            predicted=torch.empty_like(losses, dtype=torch.int64) if metrics else None,
        )


class Values(NamedTuple):
    """Of every labelled token, float32 [n]; None where not wanted."""

    losses: torch.Tensor
    lse: torch.Tensor | None
    entropy: torch.Tensor | None
    predicted: torch.Tensor | None
    """int64 [n], the token of the largest logit."""


@dataclass
class Gradients:
    """Of hidden, weight and bias, up to one factor that they share (and the bias's own); None if not needed."""

    hidden: torch.Tensor | None
    weight: WeightGrad | None
    bias: WeightGrad | None
    labelled: int
    """How many tokens contributed."""
    d_logits: torch.Tensor | None = None
    """[n, V] of the only tile, of which the weight's gradient is one product, with no sum over tiles."""

    def scaled(
        self,
        factor: torch.Tensor,
        settings: Settings,
        main_grads: Sequence[torch.Tensor | None],
        only_tile: Callable[[], Operands],
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients, multiplied once by `factor` (float32, one number) in float32, in place, and rounded.

        `main_grads`: of weight and bias, where they have one, to add to. `only_tile` returns the operands that d_logits
        belong to. If no token is labelled all are zeros, whatever the factor is: 1/0 where nothing is divided must not
        make them NaN.
        """
        if self.labelled == 0:
            factor = torch.ones_like(factor)
        factor = factor.reshape(1) / settings.loss.temperature  # one dimension: a scalar would first be rounded
        of_products = factor * settings.loss.logit_scale
        if self.hidden is not None:
            scale_(self.hidden, of_products)
        if self.d_logits is not None:
            operands = only_tile()
            self.weight = WeightGrad(operands.weight, operands.weight.dtype)
            self.weight.add(self.d_logits, operands.part(slice(0, self.labelled), settings))
        return (
            self.hidden,
            None if self.weight is None else self.weight.scaled(of_products, main_grads[0]),
            None if self.bias is None else self.bias.scaled(factor, main_grads[1]),
        )


def sweep(
    operands: Operands,
    settings: Settings,
    values: Values,
    needs: Sequence[bool] = (False, False, False),
    row_scale: torch.Tensor | None = None,
    lse_scale: torch.Tensor | None = None,
    entropy_scale: torch.Tensor | None = None,
    main_grads: Sequence[torch.Tensor | None] = (None, None),
) -> Gradients:
    """Goes over the tiles once, writes `values`, and returns those gradients of hidden, weight and bias that are in
    `needs`: of sum(row_scale * losses + lse_scale * lse + entropy_scale * entropies). None stands for ones as
    `row_scale`, for zeros as the others.

    2 n D V FLOP for the logits, as many for d_hidden and for d_weight. Allocates one tile of logits [C, V], d_hidden
    and d_weight; where some tokens are ignored, or autocast changes the dtype, one tile [C, D] besides. Of a single
    tile d_weight is left to `scaled`, and the gradients keep the tile, unless it goes to one of `main_grads`.
    """
    hidden, weight, bias, target, rows, class_weight = operands
    count = operands.labelled()
    matrix = weight.to(settings.dtype)  # a copy only under autocast
    buffer = _logits_buffer(min(count, settings.chunk_tokens), operands, settings)
    one_product = needs[1] and main_grads[0] is None and _is_one_product(operands, settings)
    gradients = _empty_gradients(operands, settings, (needs[0], needs[1] and not one_product, needs[2]))

    def add_tile(tile: slice) -> None:  # a function, so that what it allocates is free again before the next tile
        labels = target[tile] if rows is None else target[rows[tile]]
        x = operands.part(tile, settings)
        logits = torch.mm(x, matrix.t(), out=buffer[: x.shape[0]])
        cross_entropy_(
            logits,
            labels,
            values.losses[tile],
            settings.loss,
            bias=bias,
            class_weight=class_weight,
            lse=_part(values.lse, tile),
            entropy=_part(values.entropy, tile),
            predicted=_part(values.predicted, tile),
            write_grad=any(needs),
            row_scale=_part(row_scale, tile),
            lse_scale=_part(lse_scale, tile),
            entropy_scale=_part(entropy_scale, tile),
        )
        d_logits = logits
        if one_product:
            gradients.d_logits = d_logits
        elif gradients.weight is not None:
            gradients.weight.add(d_logits, x)
        if gradients.bias is not None:
            gradients.bias.add(d_logits)
        if gradients.hidden is None:
            return
        if rows is not None:
            gradients.hidden.index_copy_(0, rows[tile], torch.mm(d_logits, matrix, out=x).to(hidden.dtype))
        elif x.dtype != hidden.dtype:
            gradients.hidden[tile].copy_(torch.mm(d_logits, matrix, out=x))
        else:
            torch.mm(d_logits, matrix, out=gradients.hidden[tile])

    for tile in tiles(count, settings.chunk_tokens):
        add_tile(tile)
    return gradients


def _logits_buffer(rows: int, operands: Operands, settings: Settings) -> torch.Tensor:
    """[rows, V], each row at a multiple of 16 elements: elsewhere a GPU reads one element at a time."""
    vocab = operands.weight.shape[0]
    length = vocab if torch.compiler.is_compiling() else -(-vocab // 16) * 16  # it compiles no product into a part
    return operands.hidden.new_empty(rows, length, dtype=settings.dtype)[:, :vocab]


def _is_one_product(operands: Operands, settings: Settings) -> bool:
    """Whether d_weight may be the product of one tile, rounded before it is scaled, which float16 has no range for."""
    fits = 0 < operands.labelled() <= settings.chunk_tokens
    dtype = operands.weight.dtype
    return fits and dtype != torch.float16 and dtype in (settings.dtype, torch.float32)


def _empty_gradients(operands: Operands, settings: Settings, needs: Sequence[bool]) -> Gradients:
    hidden, weight, bias, _, rows, _ = operands
    needs_hidden, needs_weight, needs_bias = needs
    d_hidden = None
    if needs_hidden:
        d_hidden = torch.empty_like(hidden) if rows is None else torch.zeros_like(hidden)
    return Gradients(
        hidden=d_hidden,
        weight=WeightGrad(weight, settings.accumulate_dtype) if needs_weight else None,
        bias=WeightGrad(bias, settings.accumulate_dtype) if needs_bias else None,
        labelled=operands.labelled(),
    )


def _part(vector: torch.Tensor | None, tile: slice) -> torch.Tensor | None:
    return None if vector is None else vector[tile]
