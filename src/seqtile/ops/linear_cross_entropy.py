"""Linear projection and cross-entropy, with the logits of one tile alive at a time; see `logit_tiles.py`."""

import math
from typing import NamedTuple

import torch

from seqtile.ops.head import prepare_head, run_head, spread
from seqtile.ops.head_checks import check_reduction
from seqtile.ops.logit_functions import TokenLossFunction, TotalLossFunction
from seqtile.ops.logit_tiles import Operands, Settings, Values

_OP = "linear_cross_entropy"


class LossMetrics(NamedTuple):
    """What the tiles know besides the loss.

    token_accuracy: share of the labelled tokens that are predicted right; a float32 scalar, NaN if none is labelled.
    predicted_tokens: the token of the largest logit; int64, target's shape, -1 for ignored tokens.
    mean_entropy: of the softmax over labelled tokens, in nats; a float32 scalar, NaN if none is labelled.
    logsumexp: of the logits; float32, target's shape, 0 for ignored tokens.

    The last two are differentiable, for a z-loss or an entropy bonus of one's own. Like a loss they hold the graph, so
    detach what is kept for longer than a step.
    """

    token_accuracy: torch.Tensor
    predicted_tokens: torch.Tensor
    mean_entropy: torch.Tensor
    logsumexp: torch.Tensor


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = torch.float32,
    chunk_tokens: int | None = None,
    return_metrics: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, LossMetrics]:
    """cross_entropy(logits, target) without the logits, which are logit_scale * hidden @ weight.T + bias, soft-capped.

    Args:
        hidden: [..., D], as [T, D] or [B, S, D]; float32, bfloat16 or float16.
        weight: [V, D], bias: [V] or None, the dtype of `hidden` (any of the three under autocast).
        target: [...], integers, int64 without a copy, already shifted: target[t] is the token that follows hidden[t].
        ignore_index: tokens with this target count for nothing and cost nothing. None: no token is ignored, and the
            device is never waited for.
        reduction: "mean" over labelled tokens (with `class_weight`, over their weights), "sum", or "none".
        num_items: divides the sum instead of that count (Hugging Face's `num_items_in_batch`); only with "mean".
        label_smoothing: in [0, 1], as torch's cross_entropy defines it.
        class_weight: [V], any floating dtype, as torch's cross_entropy defines it.
        z_loss: adds z_loss * logsumexp(logits)**2 to every labelled token's loss, under the same reduction: without its
            class_weight, but divided by what the sum is divided by. So with `class_weight` a "mean" divides it by the
            sum of the labels' weights, where Liger divides it by n, the number of labelled tokens: for Liger's value
            leave it 0 and add z_loss * metrics.logsumexp.square().sum() / n.
        logit_scale: multiplies hidden @ weight.T, before the bias.
        softcap: logits become softcap * tanh(logits / softcap); None for no cap.
        accumulate_dtype: of the gradients of weight and bias while they add up over tiles; None for their own dtype.
        chunk_tokens: labelled tokens a tile, see `ops/tiles.py`; None for its rule.
        return_metrics: return (loss, LossMetrics), from the same pass over the logits.

    Returns:
        The loss in float32: a scalar, or with "none" target's shape, 0 for ignored tokens. All tokens ignored: 0 with
        zero gradients for "sum" and for `num_items`; NaN with zero gradients for a plain "mean", as in torch.

    Gradients: of `hidden` in its dtype, of `weight` and `bias` summed over tiles in float32 and rounded once. The
    upstream gradient is applied in the backward, once, in float32; where all labelled tokens fit in one tile (not in
    float16), to d_weight as the product of bfloat16 operands rounds it. With "none" it differs from token to token, so
    the backward recomputes the tiles; so does a second backward (`retain_graph=True`), and one in which metrics have a
    gradient.

    FLOPs: n labelled tokens cost 3 u, where u = 2 n D V; 4 u with "none"; 1 u less for a frozen hidden or weight;
    1 u without gradients. Metrics cost none, but a backward in which they have a gradient costs 3 u more (with "none"
    no more). A compiled graph cannot know whether they will: `return_metrics` makes it 4 u there in any case.

    Memory: one tile of logits [chunk_tokens, V], d_hidden (the size of `hidden`), d_weight in float32 and its rounding.
    Where all labelled tokens fit in one tile, that tile is kept for the backward instead of a float32 d_weight. If some
    tokens are ignored also a tile [chunk_tokens, D]; under autocast the cast weight. Nothing else grows with T
    but 12 bytes a token. Without gradients only the tile. Until its backward has run, the operands are kept. (ROCm has
    no product of half precision with a float32 sum: there a tile is copied to float32 besides.)

    Under autocast the operands are cast, hidden tile by tile. Under torch.compile all of it is compiled, anew for each
    number of tokens (torch's limit is 8) and with one more sum of d_weight alive, if `ignore_index` is None; else
    counting the labelled tokens breaks the graph and the op runs eagerly.

    Raises:
        TypeError, ValueError: types, dtypes, devices, shapes or numbers that do not fit, an empty sequence, sparse or
            nested tensors, a transform of torch.func; on a CPU also a target outside [0, V). On a GPU, where such a
            target cannot be looked at without waiting for the device, and in a compiled graph, it makes its loss and
            the gradients NaN.
        RuntimeError: in a backward with `create_graph=True`.
    """
    check_reduction(_OP, reduction, num_items)
    operands, settings = prepare_head(
        _OP,
        hidden,
        weight,
        target,
        bias=bias,
        ignore_index=ignore_index,
        class_weight=class_weight,
        accumulate_dtype=accumulate_dtype,
        chunk_tokens=chunk_tokens,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    arguments = (target.shape, settings, reduction, num_items, return_metrics)
    loss, metrics = run_head(_OP, _loss, operands, ignore_index, *arguments)
    return (loss, metrics) if return_metrics else loss


def _loss(
    operands: Operands,
    shape: torch.Size,
    settings: Settings,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    return_metrics: bool,
) -> tuple[torch.Tensor, LossMetrics | None]:
    if reduction == "none":
        values = Values(*TokenLossFunction.apply(settings, return_metrics, return_metrics, *operands))
        loss = spread(values.losses, operands.rows, shape)
    else:
        values = Values(*TotalLossFunction.apply(settings, return_metrics, torch.is_grad_enabled(), *operands))
        loss = values.losses
        if reduction == "mean" and num_items is None and operands.labelled() == 0:
            loss = loss + math.nan  # torch's mean of nothing, whose gradients are zeros
        elif reduction == "mean":
            loss = loss / _divisor(operands, num_items)
    return loss, _metrics(operands, values, shape) if return_metrics else None


def _divisor(operands: Operands, num_items: int | float | torch.Tensor | None) -> float | torch.Tensor:
    """What the sum of the losses is divided by for their mean."""
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.reshape(()).float()  # a CPU's scalar divides a GPU's without being copied there
        return num_items.to(operands.hidden.device) if num_items.is_cuda else num_items
    if num_items is not None:
        return num_items
    if operands.class_weight is not None:
        labels = operands.target if operands.rows is None else operands.target[operands.rows]
        inside = labels.clamp(0, len(operands.class_weight) - 1)  # of a label outside, the loss is NaN already
        return operands.class_weight[inside].sum()
    return operands.labelled()


def _metrics(operands: Operands, values: Values, shape: torch.Size) -> LossMetrics:
    labels = operands.target if operands.rows is None else operands.target[operands.rows]
    return LossMetrics(
        token_accuracy=(values.predicted == labels).float().mean(),
        predicted_tokens=spread(values.predicted, operands.rows, shape, fill=-1),
        mean_entropy=values.entropy.mean(),
        logsumexp=spread(values.lse, operands.rows, shape),
    )
