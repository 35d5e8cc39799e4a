"""Linear projection and cross-entropy. Only one chunk of logits exists at a time, see `chunks.py`.

    linear_cross_entropy ─ check, count the labelled tokens (`run_head`) ─ autograd Function over chunks ─ reduce

`linear_log_probs` uses `prepare_head`, `run_head` and `scatter_to_tokens` too.
"""

from collections.abc import Callable, Collection, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from seqtile.kernels import LossOptions, RowVectors
from seqtile.kernels.dispatch import cross_entropy_
from seqtile.ops.checks import check_beside, check_loss_options, check_no_transform, check_reduction, values_known
from seqtile.ops.head.chunks import ChunkedHeads, Head, LogitChunk
from seqtile.ops.head.reduction import Divisor, labelled_rows, reduced, scatter_to_tokens
from seqtile.ops.torch_function import dispatched

_OP = "linear_cross_entropy"
_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
"""The dtypes of a target: int64 and those that convert to int64 exactly."""


class Values(NamedTuple):
    """Values of every labelled token, float32 [n]; None if not requested. The first three have gradients."""

    losses: torch.Tensor
    lse: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    """int64 [n], the token of the largest logit."""
    mean: torch.Tensor | None = None
    """The mean logit."""
    squares: torch.Tensor | None = None
    """The sum of the squared probabilities."""


class LossMetrics(NamedTuple):
    """Values from the same pass as the loss.

    `mean_entropy` and `logsumexp` are differentiable, for your own z-loss or entropy bonus. Like a loss, they hold the
    graph, so detach what you keep for longer than a step.
    """

    token_accuracy: torch.Tensor
    """The fraction of labelled tokens whose prediction is right; a float32 scalar, NaN if no token is labelled."""
    predicted_tokens: torch.Tensor
    """The token with the largest logit; int64, target's shape, -1 for ignored tokens."""
    mean_entropy: torch.Tensor
    """The mean entropy of the softmax over labelled tokens, in nats; a float32 scalar, NaN if none is labelled."""
    logsumexp: torch.Tensor
    """The log-sum-exp of the logits; float32, target's shape, 0 for ignored tokens."""


@dispatched
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
        target: [...], any integer dtype (int64 is not copied), already shifted: target[t] is the token after hidden[t].
        bias: [V] or None, dtype as `weight`.
        ignore_index: tokens with this target do not count and cost nothing. None: no token is ignored, and the op does
            not wait for the device.
        reduction: "mean" over labelled tokens (with `class_weight`, weighted by it), "sum", or "none".
        num_items: divides the sum instead of the token count (Hugging Face's `num_items_in_batch`); only with "mean".
        label_smoothing: in [0, 1], as torch's cross_entropy defines it.
        class_weight: [V], any floating dtype, as torch's cross_entropy defines it.
        z_loss: adds z_loss * logsumexp(logits)**2 to every labelled token's loss, under the same reduction.
            `class_weight` does not multiply it, but "mean" then divides it too by the sum of the labels' weights.
            Liger divides by n, the number of labelled tokens: for Liger's value leave z_loss at 0 and add
            z_loss * metrics.logsumexp.square().sum() / n.
        logit_scale: multiplies hidden @ weight.T, before the bias.
        softcap: logits become softcap * tanh(logits / softcap); None for no cap.
        accumulate_dtype: the dtype in which the gradients of weight and bias are summed over chunks: torch.float32, or
            None for their own.
        chunk_tokens: labelled tokens per chunk; None for max(2048, D).
        return_metrics: return (loss, LossMetrics), from the same pass over the logits.

    Returns:
        The loss, a float32 scalar, or with "none" float32 of target's shape, 0 for ignored tokens. If all tokens are
        ignored, it is 0 with zero gradients for "sum" and for `num_items`, NaN with zero gradients for a plain "mean",
        as in torch.

    Gradients: of `hidden` in its dtype; of `weight` and `bias` summed over chunks in float32 and rounded once. The
    backward multiplies them by the upstream gradient once, in float32. If all labelled tokens fit in one chunk (and the
    dtype is not float16), d_weight is one product in the operands' dtype, rounded before that multiplication. With
    "none" the upstream gradient differs between tokens, so the backward recomputes the chunks. A second backward
    (`retain_graph=True`) and one in which metrics have a gradient do so too.

    FLOPs: n labelled tokens cost 3 u, where u = 2 n D V; 4 u with "none"; 1 u less for a frozen hidden or weight;
    1 u without gradients. Metrics cost nothing, but a backward in which they have a gradient costs 3 u more (with
    "none" no more). A compiled graph cannot know this in advance, so there `return_metrics` always costs 4 u.

    Memory: one chunk of logits [chunk_tokens, V], d_hidden (the size of `hidden`), d_weight in float32 and its rounded
    copy. If all labelled tokens fit in one chunk, that chunk is kept for the backward instead of a float32 d_weight. If
    some tokens are ignored, also a chunk [chunk_tokens, D]; under autocast, the cast weight. Only 12 bytes per token
    otherwise grow with T. Without gradients, only the chunk. The operands are kept until the backward has run. (ROCm
    has no half-precision product with a float32 sum, so a chunk is also copied to float32 there.)

    Autocast casts the operands, hidden chunk by chunk. torch.compile with `ignore_index=None` compiles the whole op,
    anew for each number of tokens (torch's limit is 8), and keeps one more sum of d_weight. With an `ignore_index`,
    counting the labelled tokens breaks the graph, and the op runs eagerly.

    Raises:
        TypeError, ValueError: invalid types, dtypes, devices, shapes or numbers, an empty sequence, sparse or nested
            tensors, a transform of torch.func; on a CPU also a target outside [0, V). On a GPU, where a check would
            wait for the device, and in a compiled graph, such a target makes its loss and the gradients NaN.
        RuntimeError: in a backward with `create_graph=True`.
    """
    check_reduction(_OP, reduction, num_items)
    options = check_loss_options(_OP, logit_scale, softcap, label_smoothing=label_smoothing, z_loss=z_loss)
    head, wanted = Head(hidden, weight, bias), ("lse", "entropy", "predicted") if return_metrics else ()
    chunked = prepare_head(
        _OP, head, target, ignore_index, options, wanted, accumulate_dtype, chunk_tokens, class_weight
    )
    return run_head(_loss, chunked, ignore_index, target.shape, reduction, num_items, return_metrics)


def _loss(
    chunked: ChunkedHeads, shape: torch.Size, reduction: str, num_items: Divisor, return_metrics: bool
) -> torch.Tensor | tuple[torch.Tensor, LossMetrics]:
    if reduction == "mean" and num_items is None and chunked.class_weight is not None and chunked.labelled > 0:
        labels = labels_of(chunked).clamp(0, len(chunked.class_weight) - 1)  # the loss of one outside is NaN anyway
        num_items = chunked.class_weight[labels].sum()
    loss, values = reduced(chunked, shape, reduction, num_items)
    if not return_metrics:
        return loss
    values = Values(*values)
    return loss, LossMetrics(
        token_accuracy=(values.predicted == labels_of(chunked)).float().mean(),
        predicted_tokens=scatter_to_tokens(values.predicted, chunked.rows, shape, fill=-1),
        mean_entropy=values.entropy.mean(),
        logsumexp=scatter_to_tokens(values.lse, chunked.rows, shape),
    )


def labels_of(chunked: ChunkedHeads) -> torch.Tensor:
    """Returns the labels of the labelled tokens, [n]."""
    return chunked.inputs[0] if chunked.rows is None else chunked.inputs[0][chunked.rows]


def prepare_head(
    op: str,
    head: Head,
    target: torch.Tensor,
    ignore_index: int | None,
    options: LossOptions,
    wanted: Collection[str],
    accumulate_dtype: torch.dtype | None,
    chunk_tokens: int | None,
    class_weight: torch.Tensor | None = None,
) -> ChunkedHeads:
    """Checks the tensors (TypeError, ValueError) and prepares them for the loop over chunks. `wanted` are fields of
    `Values`.

    `run_head` later flattens the tensors and finds the labelled tokens.
    """
    head.check(op)
    hidden, weight, _ = head
    check_target(op, head, target, ignore_index)
    if accumulate_dtype not in (None, torch.float32, weight.dtype):
        raise ValueError(
            f"{op}: accumulate_dtype is {accumulate_dtype}, expected torch.float32, or None for the weight's dtype"
        )
    if class_weight is not None:
        check_class_weight(op, class_weight, hidden, weight.shape[0])
    own_dtype = head.dtype if head.dtype == weight.dtype else torch.float32  # autocast's weights are usually float32
    dtypes = {name: torch.int64 if name == "predicted" else torch.float32 for name in wanted}
    more = {"differentiable": 3, "accumulate_dtype": accumulate_dtype or own_dtype}
    more["values"] = tuple(map(dtypes.get, Values._fields[1:]))
    chunked = ChunkedHeads.make((head,), (target,), chunk_tokens, op, cross_entropies, (options,), **more)
    # Not by _replace, of whose result the compiler of torch 2.11 does not know the class when the graph breaks.
    return ChunkedHeads(chunked.spec, chunked.heads, chunked.inputs, None, class_weight)


def cross_entropies(options: Sequence[LossOptions], chunk: LogitChunk) -> None:
    """The row function of one head: computes `Values`."""
    losses, *values = chunk.values
    vectors = RowVectors(chunk.biases[0], chunk.class_weight, *values, *chunk.scales)
    labels, write_grad = chunk.inputs[0], chunk.write_grads[0]
    cross_entropy_(chunk.logits[0], labels, losses, options[0], write_grad=write_grad, **vectors._asdict())


def run_head(run: Callable, chunked: ChunkedHeads, ignore_index: int | None, *args: Any) -> Any:
    """Flattens the tensors, finds the labelled tokens and returns run(chunked, *args).

    torch.compile compiles `run` only if `ignore_index` is None. Otherwise the labels determine the number of chunks,
    and compiling anew for every batch would cost more than it saves.
    """
    run_flat = _run_flat if ignore_index is None else _run_labelled
    return run_flat(run, chunked, ignore_index, *args)


def _run_flat(run: Callable, chunked: ChunkedHeads, ignore_index: int | None, *args: Any) -> Any:
    op = chunked.spec.op
    check_no_transform(op)  # check here: later it would put a node into a graph that breaks
    (head,), (target,), class_weight = chunked.heads, chunked.inputs, chunked.class_weight
    target = target.reshape(-1).long().contiguous()
    check_labels(op, target, head.weight.shape[0], ignore_index)
    rows = None if ignore_index is None else labelled_rows(target, ignore_index)
    class_weight = None if class_weight is None else class_weight.float().contiguous()
    return run(ChunkedHeads(chunked.spec, (head.flat(),), (target,), rows, class_weight), *args)


_run_labelled = torch.compiler.disable(
    _run_flat, reason="seqtile counts the labelled tokens; with ignore_index=None it need not"
)


def check_target(op: str, head: Head, target: torch.Tensor, ignore_index: int | None) -> None:
    """Raises TypeError or ValueError for labels that do not match the head."""
    check_beside(op, "target", target, head.hidden, tuple(head.hidden.shape[:-1]), "hidden's shape without D")
    if target.dtype not in _LABELS:
        raise TypeError(f"{op}: target is {target.dtype}, expected torch.int64 or a smaller integer; use target.long()")
    if ignore_index is not None and (not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool)):
        raise TypeError(f"{op}: ignore_index is {ignore_index!r}, expected an int, or None if nothing is ignored")


def check_class_weight(op: str, class_weight: torch.Tensor, hidden: torch.Tensor, vocab: int) -> None:
    check_beside(op, "class_weight", class_weight, hidden, (vocab,), "[V]")
    if not class_weight.is_floating_point():
        raise TypeError(
            f"{op}: class_weight is {class_weight.dtype}, expected a floating-point tensor of one weight a token id"
        )
    if class_weight.requires_grad:
        raise ValueError(f"{op}: class_weight requires a gradient, which it does not get; pass class_weight.detach()")


def check_labels(op: str, target: torch.Tensor, vocab: int, ignore_index: int | None) -> None:
    """On a CPU, raises ValueError for a label outside the vocabulary; on a GPU this would wait for the device."""
    if target.device.type != "cpu" or not values_known(target):
        return
    outside = (target < 0) | (target >= vocab)
    if ignore_index is not None:
        outside &= target != ignore_index
    if outside.any():
        remedy = "pass ignore_index" if ignore_index is None else f"or ignore_index ({ignore_index}); mask such tokens"
        raise ValueError(f"{op}: target holds {target[outside][0].item()}, expected 0 <= target < {vocab}; {remedy}")
