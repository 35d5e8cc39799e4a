"""Losses and log-probabilities of tokens that are sharded over ranks. Each rank computes its own rows with the head's
weights. Then one all-reduce produces the loss, or one all-gather of a number per token produces the values."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from seqtile.ops.head.cross_entropy import LossMetrics, linear_cross_entropy
from seqtile.ops.head.divergence import linear_divergence
from seqtile.ops.head.log_probs import linear_log_probs
from seqtile.ops.head.topk import linear_topk_divergence
from seqtile.sp.owners import gathered, summed
from seqtile.tensor_like import CrossEntropy

_IGNORED = -100


def _of_counted(loss: Callable[..., Any], counted: Tensor | None, hidden: Any, along: Any) -> Any:
    """Returns loss(hidden, along), where `along` holds values of the same tokens. If tokens share hidden states, the
    loss gets only the counted ones: it copies shared rows, and does not need those of a prompt. Values of other tokens
    are then zeros."""
    if counted is None or not hidden.owners.is_shared:
        return loss(hidden, along)
    found = loss(hidden[counted], tree_map_only(Tensor, lambda each: each[counted], along))

    def scattered(values: Tensor) -> Tensor:
        return values if values.dim() == 0 else values.new_zeros(counted.shape).masked_scatter(counted, values)

    return tree_map_only(Tensor, scattered, found)


def _labelled(loss: Callable[..., Any], hidden: Any, weight: Tensor, target: Tensor, **options: Any) -> Any:
    """Returns a loss of labelled tokens. If more is asked for, it may need all tokens."""
    asks_more = any(isinstance(value, bool) and value for value in options.values())
    ignored = options.setdefault("ignore_index", _IGNORED)
    labelled = None if asks_more or ignored is None else target != ignored
    return _of_counted(partial(loss, weight=weight, **options), labelled, hidden, target)


def _cross_entropy(hidden: Any, target: Tensor, weight: Tensor, ignore_index: int | None, **options: Any) -> Any:
    """Computes `linear_cross_entropy`. Means of metrics are computed from sums over ranks."""
    owners, metrics = hidden.owners.by_token(), options.pop("return_metrics", False)
    counted = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    if options.get("reduction", "mean") == "mean" and options.get("num_items") is None:
        options["num_items"] = _divisor(target, counted, options.get("class_weight"))
    ignored = _IGNORED if ignore_index is None else ignore_index
    rows, labels, own = _never_empty(hidden.connected_rows(), owners.own(target), ignored)
    found = linear_cross_entropy(rows, weight, labels, ignore_index=ignored, return_metrics=metrics, **options)
    loss, of_rows = found if metrics else (found, None)
    loss = gathered(loss[own], owners) if options.get("reduction") == "none" else summed(loss, owners.sp_group)
    if of_rows is None:
        return loss
    predicted, lse = (gathered(values[own], owners) for values in (of_rows.predicted_tokens, of_rows.logsumexp))
    labelled = (labels != ignored).sum()
    # Without labels it is a 0 that keeps the graph, so that all ranks run the same collectives.
    entropy = of_rows.mean_entropy * labelled if labelled else of_rows.logsumexp.sum()
    right = (predicted == target)[counted].float().mean()
    return loss, LossMetrics(right, predicted, summed(entropy, owners.sp_group) / counted.sum(), lse)


def _divisor(target: Tensor, counted: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the divisor of the mean over all ranks' tokens."""
    return counted.sum() if weight is None else weight.float()[target.long().where(counted, 0)].where(counted, 0).sum()


def _never_empty(rows: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor, slice]:
    """Returns rows, their labels, and the slice of the rank's own rows. A rank without rows gets one ignored row, so
    that the head's weights have a gradient on every rank."""
    if len(rows):
        return rows, labels, slice(None)
    return F.pad(rows, (0, 0, 0, 1)), labels.new_full((1, *labels.shape[1:]), ignored), slice(0, 0)


def _log_probs(hidden: Any, target: Tensor, weight: Tensor, ignore_index: int | None, **options: Any) -> Any:
    owners, ignored = hidden.owners.by_token(), _IGNORED if ignore_index is None else ignore_index
    rows, labels, own = _never_empty(hidden.connected_rows(), owners.own(target), ignored)
    if own.stop == 0:  # this rank has none
        ignore_index = ignored
    found = linear_log_probs(rows, weight, labels, ignore_index=ignore_index, **options)
    return tree_map_only(Tensor, lambda values: gathered(values[own], owners), found)


def _divergence(
    student_hidden: Any, student_weight: Tensor, teacher_hidden: Any, teacher_weight: Tensor, **options: Any
) -> Any:
    if not hasattr(student_hidden, "owners"):  # every rank has the whole student
        return linear_divergence(student_hidden, student_weight, teacher_hidden.whole(), teacher_weight, **options)

    of_rows = partial(linear_divergence, student_weight=student_weight, teacher_weight=teacher_weight)
    return _masked(of_rows, student_hidden, {"teacher_hidden": teacher_hidden}, **options)


def _topk_divergence(hidden: Any, weight: Tensor, ids: Tensor, log_probs: Tensor, **options: Any) -> Any:
    of_rows = partial(linear_topk_divergence, weight=weight)
    return _masked(of_rows, hidden, {"ids": ids, "log_probs": log_probs}, **options)


def _masked(of_rows: Callable[..., Any], hidden: Any, along: dict[str, Tensor], **options: Any) -> Any:
    """Returns a loss of heads over tokens, without those that a mask excludes."""
    owners, mask = hidden.owners.by_token(), options.pop("mask", None)
    if mask is not None and hidden.owners.is_shared:
        return _of_counted(partial(_masked, of_rows, **options), mask, hidden, along)
    if mask is None:
        mask = torch.ones(owners.shape, dtype=torch.bool, device=hidden.device)
    if options.get("reduction", "mean") == "mean" and options.get("num_items") is None:
        options["num_items"] = mask.sum()
    rows, counts, own = _never_empty(hidden.connected_rows(), owners.own(mask), 0)
    others = {name: hidden.own(each) for name, each in along.items()}
    if own.stop == 0:
        others = {name: each.new_zeros(1, *each.shape[1:]) for name, each in others.items()}
    found = of_rows(rows, **others, mask=counts, **options)
    loss, entropies = found if isinstance(found, tuple) else (found, None)
    loss = gathered(loss[own], owners) if options.get("reduction") == "none" else summed(loss, owners.sp_group)
    return loss if entropies is None else (loss, gathered(entropies[own], owners))


def _cross_entropy_of_logits(input: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's cross_entropy of logits [n, V]."""
    asked, owners = CrossEntropy(*args, **kwargs), getattr(input, "owners", None)
    if owners is None or target.shape != owners.shape or len(owners.shape) != 1 or asked.is_deprecated:
        return F.cross_entropy(input if owners is None else input.whole(), target, *asked)
    counted = target != asked.ignore_index
    return _of_counted(partial(_over_ranks, asked=asked), counted, input, target)


def _over_ranks(input: Any, target: Tensor, asked: CrossEntropy) -> Tensor:
    """torch's cross_entropy of logits [n, V] whose tokens are sharded over ranks or share rows."""
    of_rows, owners = asked if asked.reduction == "none" else asked._replace(reduction="sum"), input.owners.by_token()
    losses = F.cross_entropy(input.connected_rows(), owners.own(target), *of_rows)
    if asked.reduction == "none":
        return gathered(losses, owners)
    total, counted = summed(losses, owners.sp_group), target != asked.ignore_index
    return total / _divisor(target, counted, asked.weight) if asked.reduction == "mean" else total


LOSSES: dict[Callable, Callable] = {
    linear_cross_entropy: partial(_labelled, _cross_entropy),
    linear_log_probs: partial(_labelled, _log_probs),
    linear_divergence: _divergence,
    linear_topk_divergence: _topk_divergence,
    F.cross_entropy: _cross_entropy_of_logits,
}
"""The versions of these functions for hidden states or logits that are sharded over ranks."""
