"""The divergence between a student's next-token distribution and the k most likely tokens of a teacher. Only one chunk
of the student's logits exists at a time, see `chunks.py`.

The k tokens that the teacher knows, [C, k], are removed from a chunk's logits [C, V]. The other tokens form the tail;
the cross-entropy kernel computes the tail's log-sum-exp and gradient. Because the k tokens are removed before the sum,
not subtracted from it, the tail's probability is exact even when it is tiny.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch

from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import cross_entropy_
from seqtile.kernels.eager import logits_of
from seqtile.ops.checks import check_dense, check_device, check_loss_options, check_mask, check_reduction, values_known
from seqtile.ops.head.chunks import ChunkedHeads, Head, LogitChunk
from seqtile.ops.head.reduction import masked_loss
from seqtile.ops.torch_function import dispatched

_OP = "linear_topk_divergence"
_SLACK = 1e-2  # half-precision log-probabilities may sum up to this much more than 1


@dispatched
def linear_topk_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    tail: bool = True,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    num_items: int | float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Computes KL(teacher, student) from the teacher's log-probabilities of k tokens, without the student's logits.

    Let q be the teacher's probabilities of the tokens `ids`, and p = softmax(student's logits / temperature). The
    divergence is the sum of q log(q / p) over these tokens. `tail` adds r log(r / s), where r and s are the
    probabilities that teacher and student give to all other tokens together. Without `tail` the teacher's other tokens
    are ignored, so `log_probs` may be normalised over the k tokens.

    Args:
        hidden, weight, bias, softcap, logit_scale, mask, reduction, num_items, chunk_tokens: as in `linear_divergence`,
            for the student.
        ids: [..., k] integers, the tokens' shape and k < V; the k ids of a token must differ.
        log_probs: [..., k] floating point, the teacher's at the same temperature; -inf for ids that do not count. They
            get no gradient.
        tail: whether the remaining probability counts, as one more outcome.

    Returns:
        As `linear_divergence`.

    FLOPs, with u = 2 n D V: 3 u; with "none" 4 u; without gradients 1 u.

    Memory: as `linear_divergence`, for one head. The function breaks the graph of torch.compile.

    Raises:
        TypeError, ValueError: as `linear_divergence`; on a CPU also for ids outside [0, V), ids that occur twice in a
            row, and invalid log-probabilities: positive, NaN, or more than 1 in total. On a GPU a check would wait for
            the device: there such a token's divergence and gradients are NaN, except for ids that occur twice.
        RuntimeError: in a backward with `create_graph=True`.
    """
    check_reduction(_OP, reduction, num_items)
    options = check_loss_options(_OP, logit_scale, softcap, temperature)
    if options.logit_scale == 0:
        raise ValueError(f"{_OP}: logit_scale is 0, expected another number: all logits would be the same")
    head = Head(hidden, weight, bias)
    head.check(_OP)
    check_mask(_OP, mask, hidden)
    _check_teacher(hidden, weight.shape[0], ids, log_probs)
    inputs, row_function = (ids, log_probs), partial(_divergences, tail)
    chunked = ChunkedHeads.make((head,), inputs, chunk_tokens, _OP, row_function, (options,))
    return masked_loss(chunked, mask, reduction, num_items)[0]


def _teacher(
    ids: torch.Tensor, log_probs: torch.Tensor, tail: bool, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns ids [C, k] int64, clamped to the vocabulary; log-probabilities [C, k] float32, NaN in rows with invalid
    ids or log-probabilities; and the probability of all other tokens [C, 1], 0 without `tail`."""
    ids, logq = ids.long(), log_probs.float()
    total = logq.exp().sum(1, keepdim=True)
    bad = ((ids < 0) | (ids >= vocab)).any(1, keepdim=True) | ~(total <= 1 + _SLACK)
    rest = (1 - total).clamp(min=0) if tail else torch.zeros_like(total)
    return ids.clamp(0, vocab - 1), logq.masked_fill(bad, torch.nan), rest


def _divergences(tail: bool, of_head: Sequence[LossOptions], chunk: LogitChunk) -> None:
    """The row function: computes the divergences."""
    (options,), (products,), (bias,) = of_head, chunk.logits, chunk.biases
    (losses,), (scale,) = chunk.values, chunk.scales
    _check_values(*chunk.inputs, products.shape[1])
    ids, logq, rest = _teacher(*chunk.inputs, tail, products.shape[1])
    x, slope = logits_of(products.gather(1, ids), None if bias is None else bias[ids], options)  # [C, k]
    products.scatter_(1, ids, -math.copysign(math.inf, options.logit_scale))
    lse = torch.empty_like(losses)
    unused, target = torch.empty_like(losses), torch.zeros_like(losses, dtype=torch.int64)
    cross_entropy_(products, target, unused, options, lse=lse, bias=bias)
    kernel_lse = lse  # with a soft cap -inf becomes -softcap, so this still counts the k removed tokens
    if options.softcap > 0:
        taken_out = ids.shape[1] * (-options.softcap / options.temperature - lse).exp()
        lse = lse + torch.log1p(-taken_out.clamp(max=1))
    log_tail = lse.unsqueeze(1)
    log_sum = torch.logaddexp(log_tail, x.logsumexp(1, keepdim=True))  # [C, 1]
    logp, logs = x - log_sum, log_tail - log_sum
    q = logq.exp()
    terms = torch.where(q == 0, 0.0, q * (logq - logp)).sum(1, keepdim=True)
    losses.copy_((terms + torch.where(rest == 0, 0.0, rest * (rest.log() - logs))).squeeze(1))
    if not chunk.write_grads[0]:
        return
    total = q.sum(1, keepdim=True) + rest
    of_row = torch.ones_like(rest) if scale is None else scale.unsqueeze(1)
    # The kernel multiplies the softmax over the other tokens by this: total * s - rest, times the tail's share of the
    # kernel's sum.
    of_tail = of_row * (total * logs.exp() - rest) * (kernel_lse.unsqueeze(1) - log_tail).exp()
    of_tail = torch.where(log_tail == -math.inf, 0.0, of_tail).squeeze(1).contiguous()
    none = torch.zeros_like(losses)
    cross_entropy_(products, target, unused, options, write_grad=True, bias=bias, row_scale=none, lse_scale=of_tail)
    products.scatter_(1, ids, (of_row * (1 if slope is None else slope) * (total * logp.exp() - q)).to(products.dtype))


def _check_teacher(hidden: torch.Tensor, vocab: int, ids: torch.Tensor, log_probs: torch.Tensor) -> None:
    """Raises TypeError or ValueError for ids or log-probabilities that do not match."""
    tokens = tuple(hidden.shape[:-1])
    for name, tensor in (("ids", ids), ("log_probs", log_probs)):
        check_dense(_OP, name, tensor)
        check_device(_OP, name, tensor, "hidden", hidden)
        if tensor.dim() == 0 or tuple(tensor.shape[:-1]) != tokens:
            raise ValueError(f"{_OP}: {name} has shape {list(tensor.shape)}, expected {[*tokens, 'k']}")
    if ids.shape != log_probs.shape or not 0 < ids.shape[-1] < vocab:
        raise ValueError(
            f"{_OP}: ids has shape {list(ids.shape)} and log_probs {list(log_probs.shape)}, expected the same, with "
            f"0 < k < {vocab}"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"{_OP}: ids is {ids.dtype}, expected torch.int64 or a smaller integer")
    if not log_probs.is_floating_point():
        raise TypeError(f"{_OP}: log_probs is {log_probs.dtype}, expected a floating-point dtype")
    if log_probs.requires_grad:
        raise ValueError(f"{_OP}: log_probs requires a gradient, which it does not get; pass log_probs.detach()")


def _check_values(ids: torch.Tensor, log_probs: torch.Tensor, vocab: int) -> None:
    """On a CPU, raises ValueError for invalid ids or log-probabilities [n, k]."""
    if ids.device.type != "cpu" or not values_known(ids) or ids.numel() == 0:
        return
    outside, ordered = ids[(ids < 0) | (ids >= vocab)], ids.sort(1).values
    if outside.numel():
        raise ValueError(f"{_OP}: ids holds {outside[0].item()}, expected 0 <= id < {vocab}; mask such tokens")
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError(f"{_OP}: ids holds a token twice in a row, expected k different ones")
    total = log_probs.double().exp().sum(1)
    if not (total <= 1 + _SLACK).all():  # also true for NaN
        worst = total[~(total <= 1 + _SLACK)][0].item()
        raise ValueError(f"{_OP}: log_probs of a token have a total probability of {worst:g}, expected at most 1")
