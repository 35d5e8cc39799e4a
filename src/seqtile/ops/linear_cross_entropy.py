"""Linear projection and cross-entropy, with the logits of one chunk alive at a time; see `logit_chunks.py`.

    linear_cross_entropy ─ check, count the labelled tokens (`run_head`) ─ autograd Function over chunks ─ reduce

`prepare_head`, `run_head` and `scatter_to_tokens` serve `linear_log_probs` as well.
"""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels import LossOptions
from seqtile.ops.checks import (
    autocast_dtype,
    check_dense,
    check_device,
    check_no_transform,
    check_operands,
    check_shape,
)
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.ops.logit_chunks import Operands, PerTokenLossFunction, Settings, SummedLossFunction, Values

_OP = "linear_cross_entropy"
_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
"""The dtypes of a target: int64, and what becomes int64 exactly."""


class LossMetrics(NamedTuple):
    """Values that the chunks know besides the loss.

    `mean_entropy` and `logsumexp` are differentiable, for a z-loss or an entropy bonus of one's own. Like a loss they
    hold the graph, so detach what is kept for longer than a step.
    """

    token_accuracy: torch.Tensor
    """The share of the labelled tokens that are predicted right; a float32 scalar, NaN if none is labelled."""
    predicted_tokens: torch.Tensor
    """The token of the largest logit; int64, target's shape, -1 for ignored tokens."""
    mean_entropy: torch.Tensor
    """The mean entropy of the softmax over labelled tokens, in nats; a float32 scalar, NaN if none is labelled."""
    logsumexp: torch.Tensor
    """The log-sum-exp of the logits; float32, target's shape, 0 for ignored tokens."""


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
    """Computes cross_entropy(logits, target) without the logits: logit_scale * hidden @ weight.T + bias, soft-capped.

    Args:
        hidden: [..., D], as [T, D] or [B, S, D]; float32, bfloat16 or float16.
        weight: [V, D], the dtype of `hidden` (any of the three under autocast).
        target: [...], integers, int64 without a copy, already shifted: target[t] is the token that follows hidden[t].
        bias: [V] or None, the dtype of `hidden` likewise.
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
        accumulate_dtype: the dtype in which the gradients of weight and bias add up over chunks, torch.float32 or None
            for their own.
        chunk_tokens: labelled tokens of a chunk; None for max(2048, D).
        return_metrics: return (loss, LossMetrics), from the same pass over the logits.

    Returns:
        The loss, a float32 scalar, or with "none" float32 of target's shape, 0 for ignored tokens. If all tokens are
        ignored it is 0 with zero gradients for "sum" and for `num_items`, NaN with zero gradients for a plain "mean",
        as in torch.

    Gradients: of `hidden` in its dtype, of `weight` and `bias` summed over chunks in float32 and rounded once. The
    upstream gradient is applied in the backward, once, in float32; where all labelled tokens fit in one chunk (not in
    float16), to d_weight as the product of bfloat16 operands rounds it. With "none" it differs from token to token, so
    the backward recomputes the chunks; so does a second backward (`retain_graph=True`), and one in which metrics have a
    gradient.

    FLOPs: n labelled tokens cost 3 u, where u = 2 n D V; 4 u with "none"; 1 u less for a frozen hidden or weight;
    1 u without gradients. Metrics cost none, but a backward in which they have a gradient costs 3 u more (with "none"
    no more). A compiled graph cannot know whether they will: `return_metrics` makes it 4 u there in any case.

    Memory: one chunk of logits [chunk_tokens, V], d_hidden (the size of `hidden`), d_weight in float32 and its
    rounding. Where all labelled tokens fit in one chunk, that chunk is kept for the backward instead of a float32
    d_weight. If some tokens are ignored also a chunk [chunk_tokens, D]; under autocast the cast weight. Nothing else
    grows with T but 12 bytes a token. Without gradients only the chunk. Until its backward has run, the operands are
    kept. (ROCm has no product of half precision with a float32 sum: there a chunk is copied to float32 besides.)

    Under autocast the operands are cast, hidden chunk by chunk. Under torch.compile all of it is compiled, anew for
    each number of tokens (torch's limit is 8) and with one more sum of d_weight alive, if `ignore_index` is None; else
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
    wanted = ("lse", "entropy", "predicted") if return_metrics else ()
    if reduction == "none":
        values = Values(*PerTokenLossFunction.apply(settings, wanted, True, *operands))
        loss = scatter_to_tokens(values.losses, operands.rows, shape)
    else:
        loss, *values = SummedLossFunction.apply(settings, wanted, torch.is_grad_enabled(), *operands)
        values = Values(*values)
        if reduction == "mean" and num_items is None and operands.labelled() == 0:
            loss = loss + math.nan  # torch's mean of nothing, whose gradients are zeros
        elif reduction == "mean":
            loss = loss / _divisor(operands, num_items)
    return loss, _metrics(operands, values, shape) if return_metrics else None


def _divisor(operands: Operands, num_items: int | float | torch.Tensor | None) -> float | torch.Tensor:
    """Returns what the sum of the losses is divided by for their mean."""
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
        predicted_tokens=scatter_to_tokens(values.predicted, operands.rows, shape, fill=-1),
        mean_entropy=values.entropy.mean(),
        logsumexp=scatter_to_tokens(values.lse, operands.rows, shape),
    )


def prepare_head(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    ignore_index: int | None,
    class_weight: torch.Tensor | None = None,
    accumulate_dtype: torch.dtype | None,
    chunk_tokens: int | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Operands, Settings]:
    """Checks every argument, for TypeError or ValueError, and makes them what the loop over chunks takes.

    They are made flat, and searched for labelled tokens, by `run_head`.
    """
    check_head(op, hidden, weight, target, bias, ignore_index, accumulate_dtype)
    if class_weight is not None:
        check_class_weight(op, class_weight, hidden, weight.shape[0])
    options = LossOptions(
        logit_scale=check_number(op, "logit_scale", logit_scale, -math.inf),
        softcap=0.0 if softcap is None else check_number(op, "softcap", softcap, 0, above=True),
        temperature=check_number(op, "temperature", temperature, 0, above=True),
        label_smoothing=check_number(op, "label_smoothing", label_smoothing, 0, 1),
        z_loss=check_number(op, "z_loss", z_loss, 0),
    )
    dtype = autocast_dtype(hidden) or hidden.dtype
    own_dtype = dtype if dtype == weight.dtype else torch.float32  # autocast's weights are usually float32
    settings = Settings(
        options, resolve_chunk_tokens(chunk_tokens, hidden.shape[-1]), dtype, accumulate_dtype or own_dtype
    )
    return Operands(hidden, weight, bias, target, None, class_weight), settings


def run_head(op: str, run: Callable, operands: Operands, ignore_index: int | None, *args: Any) -> Any:
    """Returns run(operands, *args), the operands made flat and knowing which tokens are labelled.

    Under torch.compile, `run` is compiled only if `ignore_index` is None: otherwise the number of chunks follows from
    the labels, and compiling it anew for every batch would cost more than it brings.
    """
    run_operands = _run_operands if ignore_index is None else _run_labelled_operands
    return run_operands(op, run, operands, ignore_index, *args)


def _run_operands(op: str, run: Callable, operands: Operands, ignore_index: int | None, *args: Any) -> Any:
    check_no_transform(op)  # here, since asking would put a node into a graph that breaks before it has another
    hidden, weight, bias, target, _, class_weight = operands
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long().contiguous()
    check_labels(op, target, weight.shape[0], ignore_index)
    rows = None if ignore_index is None else labelled_rows(target, ignore_index)
    bias = None if bias is None else bias.contiguous()
    class_weight = None if class_weight is None else class_weight.float().contiguous()
    return run(Operands(hidden, weight, bias, target, rows, class_weight), *args)


@torch.compiler.disable(reason="seqtile counts the labelled tokens; with ignore_index=None it need not")
def _run_labelled_operands(*args: Any) -> Any:
    return _run_operands(*args)


def labelled_rows(target: torch.Tensor, ignore_index: int) -> torch.Tensor | None:
    """Returns where `target` [T] is not `ignore_index`: [n] int64, or None if that is everywhere.

    The one wait for the device in a call: the loop over chunks must know n. A simulation, where n is not known, takes
    all tokens down the path that some would take.
    """
    if isinstance(target, FakeTensor) or target.is_meta:
        return torch.arange(target.shape[0], device=target.device)
    rows = (target != ignore_index).nonzero().squeeze(1)
    return None if rows.shape[0] == target.shape[0] else rows


def scatter_to_tokens(
    values: torch.Tensor, rows: torch.Tensor | None, shape: torch.Size, fill: float = 0
) -> torch.Tensor:
    """Returns `values` [n] of the labelled tokens as `shape`, a target's; `fill` for the ignored. Differentiable."""
    if rows is not None:
        values = values.new_full((shape.numel(),), fill).index_copy(0, rows, values)
    return values.view(shape)


def check_head(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int | None,
    accumulate_dtype: torch.dtype | None,
) -> None:
    """Raises TypeError or ValueError for tensors that do not fit each other."""
    operands = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    check_operands(op, "hidden", operands)
    if hidden.dim() == 0:
        raise ValueError(f"{op}: hidden has shape [], expected [..., D]")
    if hidden.numel() == 0:
        raise ValueError(f"{op}: hidden has shape {list(hidden.shape)}, an empty sequence; pass at least one token")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}, expected [V, D] with D = {hidden.shape[-1]}")
    if bias is not None:
        check_shape(op, "bias", bias, (weight.shape[0],), "[V]")
    check_dense(op, "target", target)
    check_shape(op, "target", target, tuple(hidden.shape[:-1]), "hidden's shape without D")
    if target.dtype not in _LABELS:
        raise TypeError(f"{op}: target is {target.dtype}, expected torch.int64 or a smaller integer; use target.long()")
    check_device(op, "target", target, "hidden", hidden)
    if ignore_index is not None and (not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool)):
        raise TypeError(f"{op}: ignore_index is {ignore_index!r}, expected an int, or None if nothing is ignored")
    if accumulate_dtype not in (None, torch.float32, weight.dtype):
        raise ValueError(
            f"{op}: accumulate_dtype is {accumulate_dtype}, expected torch.float32, or None for the weight's dtype"
        )


def check_class_weight(op: str, class_weight: torch.Tensor, hidden: torch.Tensor, vocab: int) -> None:
    check_dense(op, "class_weight", class_weight)
    if not class_weight.is_floating_point():
        raise TypeError(
            f"{op}: class_weight is {class_weight.dtype}, expected a floating-point tensor of one weight a token id"
        )
    check_shape(op, "class_weight", class_weight, (vocab,), "[V]")
    check_device(op, "class_weight", class_weight, "hidden", hidden)
    if class_weight.requires_grad:
        raise ValueError(f"{op}: class_weight requires a gradient, which it does not get; pass class_weight.detach()")


def check_reduction(op: str, reduction: str, num_items: int | float | torch.Tensor | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{op}: reduction is {reduction!r}, expected "mean", "sum" or "none"')
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f'{op}: num_items divides the sum, so it goes with reduction="mean", not with "{reduction}"')
    if isinstance(num_items, torch.Tensor):  # its value is not known without waiting for its device
        if num_items.numel() != 1:
            raise ValueError(f"{op}: num_items has shape {list(num_items.shape)}, expected one number of tokens")
    elif isinstance(num_items, bool) or not isinstance(num_items, Real):
        raise TypeError(f"{op}: num_items is {num_items!r}, expected a number of tokens or a tensor of one")
    elif not 0 < num_items < math.inf:
        raise ValueError(f"{op}: num_items is {num_items}, expected a positive number of tokens")


def check_number(op: str, name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """Returns `value` as a float, if it is finite, at most `high` and at least `low` (more than `low` if `above`)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op}: {name} is {value!r}, expected a Python number")
    if not (-math.inf < value < math.inf and (low < value if above else low <= value) and value <= high):
        bound = f"{'more than' if above else 'at least'} {low:g}" if low > -math.inf else "finite"
        bound += f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{op}: {name} is {value}, expected {bound}")
    return float(value)


def check_labels(op: str, target: torch.Tensor, vocab: int, ignore_index: int | None) -> None:
    """Raises ValueError for a label outside the vocabulary, on a CPU; on a GPU this would wait for the device."""
    if target.device.type != "cpu" or not values_known(target):
        return
    outside = (target < 0) | (target >= vocab)
    if ignore_index is not None:
        outside &= target != ignore_index
    if outside.any():
        remedy = "pass ignore_index" if ignore_index is None else f"or ignore_index ({ignore_index}); mask such tokens"
        raise ValueError(f"{op}: target holds {target[outside][0].item()}, expected 0 <= target < {vocab}; {remedy}")


def values_known(tensor: torch.Tensor) -> bool:
    """Tells if a tensor holds numbers: not in a simulation, nor while torch.compile traces."""
    return not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)
