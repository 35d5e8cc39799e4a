"""Reduces the losses of the tokens that count."""

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.ops.checks import check_no_transform
from seqtile.ops.head.chunks import ChunkedHeads

Divisor = int | float | torch.Tensor | None
"""Divides a mean's sum; None for the number of tokens that count."""


@torch.compiler.disable(reason="seqtile counts the tokens, and writes logits and gradients in one memory")
def masked_loss(
    chunked: ChunkedHeads, mask: torch.Tensor | None, reduction: str, num_items: Divisor
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Returns the losses of heads over the same tokens, reduced as `reduction` says, and the other values of each
    token. Tokens outside `mask` do not count."""
    check_no_transform(chunked.spec.op)
    shape = chunked.heads[0].hidden.shape[:-1]
    chunked = chunked._replace(
        heads=tuple(head.flat() for head in chunked.heads),
        inputs=tuple(tensor.reshape(-1, *tensor.shape[len(shape) :]) for tensor in chunked.inputs),
        rows=None if mask is None else labelled_rows(mask.reshape(-1), False),
    )
    loss, (_, *others) = reduced(chunked, shape, reduction, num_items)
    return loss, [None if value is None else scatter_to_tokens(value, chunked.rows, shape) for value in others]


def reduced(
    chunked: ChunkedHeads, shape: torch.Size, reduction: str, num_items: Divisor
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Returns the losses of the tokens that count, reduced by "none", "sum" or "mean", and all values of these tokens,
    the losses first. A mean is the sum divided by `num_items`, or by n."""
    total, values = chunked.compute(reduction != "none")
    if reduction == "none":
        return scatter_to_tokens(values[0], chunked.rows, shape), values
    if reduction == "sum":
        return total, values
    if num_items is None and chunked.labelled == 0:
        return total + math.nan, values  # like torch's mean of nothing; its gradients are zeros
    return divided(total, chunked.labelled if num_items is None else num_items), values


def divided(total: torch.Tensor, num_items: int | float | torch.Tensor) -> torch.Tensor:
    """Returns total / num_items, a scalar. A tensor `num_items` has one element, on any device."""
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.reshape(()).float()  # a CPU scalar divides a GPU tensor without a copy
        num_items = num_items.to(total.device) if num_items.is_cuda else num_items
    return total / num_items


def labelled_rows(labels: torch.Tensor, ignored: int) -> torch.Tensor | None:
    """Returns the positions [n] int64 where `labels` [T] is not `ignored`; None if all are labelled.

    This waits for the device, as nothing else in the loss's forward: the loop over chunks must know n. A simulation
    does not know n and assumes that all tokens count, on the code path for some.
    """
    if isinstance(labels, FakeTensor) or labels.is_meta:
        return torch.arange(labels.shape[0], device=labels.device)
    rows = (labels != ignored).nonzero().squeeze(1)
    return None if rows.shape[0] == labels.shape[0] else rows


def scatter_to_tokens(
    values: torch.Tensor, rows: torch.Tensor | None, shape: torch.Size, fill: float = 0
) -> torch.Tensor:
    """Scatters `values` [n] of the tokens that count into a tensor of all tokens' `shape`; the others get `fill`.
    Differentiable."""
    if rows is not None:
        values = values.new_full((shape.numel(),), fill).index_copy(0, rows, values)
    return values.view(shape)
