"""The kernels in plain PyTorch, for CPUs, for machines without Triton and for `use_triton(False)`.

`dispatch.py` documents each function under the same name.
"""

import math
from collections.abc import Iterator

import torch

from seqtile.kernels import LossOptions, RowVectors

BLOCK_BYTES = 2**20  # a float32 copy of some rows, small enough for a core's cache
BLOCK_BYTES_ON_GPU = 2**25  # so large that an operation on it takes longer than its launch


def cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    options: LossOptions,
    vectors: RowVectors,
    write_grad: bool,
) -> None:
    bias, class_weight, lse, entropy, predicted, mean, squares, row_scale, lse_scale, entropy_scale = vectors
    vocab = logits.shape[1]
    weights = torch.ones((), device=logits.device) if class_weight is None else class_weight
    class_coef = options.label_smoothing / vocab
    for rows in _row_blocks(logits):
        labels = target[rows].unsqueeze(1)
        in_range = (labels >= 0) & (labels < vocab)
        labels = labels.where(in_range, 0)

        x, slope = logits_of(logits[rows], bias, options)
        row_lse = x.logsumexp(dim=1, keepdim=True).masked_fill_(~in_range, torch.nan)
        logp = x.log_softmax(dim=1).masked_fill_(~in_range, torch.nan)  # x - row_lse would lose digits
        target_coef = 1.0 - options.label_smoothing
        target_coef = torch.full_like(row_lse, target_coef) if class_weight is None else target_coef * weights[labels]
        loss = -target_coef * logp.gather(1, labels) + options.z_loss * row_lse * row_lse
        if class_coef > 0:
            loss -= class_coef * (weights * logp).sum(dim=1, keepdim=True)
        losses[rows] = loss.squeeze(1)
        if lse is not None:
            lse[rows] = row_lse.squeeze(1)
        if predicted is not None:
            predicted[rows] = x.argmax(dim=1)
        if mean is not None:
            mean[rows] = x.mean(dim=1).masked_fill_(~in_range.squeeze(1), torch.nan)
        probability = logp.exp()
        if squares is not None:
            squares[rows] = probability.square().sum(dim=1)
        if entropy is not None or entropy_scale is not None:
            row_entropy = -(probability * logp).masked_fill_(probability == 0, 0.0).sum(dim=1, keepdim=True)
        if entropy is not None:
            entropy[rows] = row_entropy.squeeze(1)
        if not write_grad:
            continue
        softmax_coef = target_coef + 2 * options.z_loss * row_lse
        if class_coef > 0:
            softmax_coef = softmax_coef + class_coef * weights.expand(vocab).sum()
        gradient = probability * softmax_coef
        gradient.scatter_add_(1, labels, -target_coef)
        if class_coef > 0:
            gradient -= class_coef * weights
        if row_scale is not None:
            gradient *= row_scale[rows].unsqueeze(1)
        if lse_scale is not None:
            gradient += lse_scale[rows].unsqueeze(1) * probability
        if entropy_scale is not None:
            surprise = (probability * (logp + row_entropy)).masked_fill_(probability == 0, 0.0)
            gradient -= entropy_scale[rows].unsqueeze(1) * surprise
        logits[rows] = gradient if slope is None else gradient.mul_(slope)


def divergence_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    losses: torch.Tensor,
    beta: float,
    options: tuple[LossOptions, LossOptions],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    entropy: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    write: tuple[bool, bool],
) -> None:
    heads = student, teacher
    for rows in _row_blocks(student):
        logits = [logits_of(head[rows], *own) for head, *own in zip(heads, biases, options, strict=True)]
        logp, logq = (x.log_softmax(dim=1) for x, _ in logits)
        p, q = logp.exp(), logq.exp()
        if entropy is not None:
            entropy[rows] = -(p * logp).masked_fill_(p == 0, 0.0).sum(dim=1)
        log_mixed = None if beta in (0, 1) else ((1 - beta) * p + beta * q).clamp_(min=1e-38).log_()
        p_term = (logp - (logq if log_mixed is None else log_mixed)).masked_fill_(p == 0, 0.0)
        q_term = (logq - (logp if log_mixed is None else log_mixed)).masked_fill_(q == 0, 0.0)
        of_student, of_teacher = (p * p_term).sum(dim=1, keepdim=True), (q * q_term).sum(dim=1, keepdim=True)
        losses[rows] = (
            (beta * of_teacher + (1 - beta) * of_student).squeeze(1)
            if log_mixed is not None
            else (of_student if beta else of_teacher).squeeze(1)
        )
        of_p, of_q = (beta, 1 - beta) if log_mixed is None else (1 - beta, beta)
        gradients = (
            p - q if beta == 0 else of_p * p * (p_term - of_student),
            q - p if beta == 1 else of_q * q * (q_term - of_teacher),
        )
        for head, gradient, (_, slope), wanted in zip(heads, gradients, logits, write, strict=True):
            if wanted:
                if row_scale is not None:
                    gradient = gradient * row_scale[rows].unsqueeze(1)
                head[rows] = gradient if slope is None else gradient * slope


def _row_blocks(rows_of: torch.Tensor) -> Iterator[slice]:
    rows = max(1, (BLOCK_BYTES_ON_GPU if rows_of.is_cuda else BLOCK_BYTES) // (4 * rows_of.shape[1:].numel()))
    for start in range(0, len(rows_of), rows):
        yield slice(start, start + rows)


def logits_of(
    products: torch.Tensor, bias: torch.Tensor | None, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns float32 logits of products, [C, V] or some of their columns, and the slope of the soft cap (None without
    cap)."""
    x = products.float() * options.logit_scale
    if bias is not None:
        x += bias
    slope = None
    if options.softcap > 0:
        capped = (x / options.softcap).tanh_()
        slope = 1 - capped.square()
        x = capped * options.softcap
    return x / options.temperature, slope


def gated_activation_(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    for rows in _row_blocks(gate):
        g = gate[rows].float()
        sigmoid, _ = _sigmoid(g, activation)
        gate[rows] = sigmoid.mul_(g).mul_(up[rows])


def gated_activation_backward_(gate: torch.Tensor, up: torch.Tensor, d_product: torch.Tensor, activation: str) -> None:
    for rows in _row_blocks(gate):
        g, u, d = gate[rows].float(), up[rows].float(), d_product[rows].float()
        sigmoid, slope = _sigmoid(g, activation)
        activated = g * sigmoid
        product = activated * u
        gate[rows] = d * u * sigmoid * (1 + g * (1 - sigmoid) * slope)
        up[rows] = d * activated
        d_product[rows] = product


def _sigmoid(gate: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns s = sigmoid(v) and v' of the activation gate * s, see `gated_activation.py`."""
    if activation == "silu":
        return gate.sigmoid(), 1.0
    root = 2 * math.sqrt(2 / math.pi)
    square = gate.square()
    return (gate * (root + root * 0.044715 * square)).sigmoid_(), root + 3 * root * 0.044715 * square


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    for rows in _row_blocks(x):
        part = x[rows].float()
        out[rows] = part * _scale(part, eps) * weight


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    d_y: torch.Tensor,
    out: torch.Tensor,
    add: torch.Tensor | None,
    d_weight: torch.Tensor | None,
) -> None:
    for rows in _row_blocks(x):
        part, d = x[rows].float(), d_y[rows].float()
        scale = _scale(part, eps)
        normed = part * scale
        if d_weight is not None:
            d_weight += (d * normed).flatten(0, -2).sum(0)
        d = d * weight
        d_x = (d - normed * (d * normed).mean(-1, keepdim=True)) * scale
        out[rows] = d_x if add is None else d_x.add_(add[rows])


def _scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> None:
    half = x.shape[2] // 2
    for rows in _row_blocks(x):
        c, s, part = cos[rows].float().unsqueeze(1), sin[rows].float().unsqueeze(1), x[rows].float()
        if backward:
            turned = part * s
            turned = torch.cat((turned[..., half:], -turned[..., :half]), -1)
        else:
            turned = torch.cat((-part[..., half:], part[..., :half]), -1) * s
        x[rows] = part * c + turned
