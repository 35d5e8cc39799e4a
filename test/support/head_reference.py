"""References for the row kernel and the ops that use it: what torch computes from whole logits."""

import torch
import torch.nn.functional as F

IGNORE = -100
D, V = 64, 1000


def make(
    tokens: int, dtype: torch.dtype = torch.float32, device: str = "cpu", vocab: int = V
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden [T, D], weight [V, D], and target [T] of which a third is ignored."""
    hidden = torch.randn(tokens, D, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, D, device=device) * 0.3).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), device=device)
    target[torch.rand(tokens, device=device) < 0.3] = IGNORE
    target[0] = 1
    return hidden, weight, target


def logits_of(
    products: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Returns the logits of products hidden W' [T, V]. Adds the bias in their dtype, as nn.Linear does; the rest is
    computed in float32 or wider, as in models' loss functions."""
    x = products if bias is None else products + bias.to(products.dtype) / logit_scale
    x = (x if x.dtype == torch.float64 else x.float()) * logit_scale
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    return x / temperature


def losses_of(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int | None = IGNORE,
    label_smoothing: float = 0.0,
    class_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Returns the loss of each token, 0 for ignored ones."""
    weight = None if class_weight is None else class_weight.to(logits.dtype)
    index = -(2**62) if ignore_index is None else ignore_index
    losses = F.cross_entropy(
        logits, target, weight, ignore_index=index, reduction="none", label_smoothing=label_smoothing
    )
    return losses + z_loss * logits.logsumexp(1).square().where(target != index, 0)


def entropies_of(logits: torch.Tensor) -> torch.Tensor:
    logp = logits.log_softmax(1)
    return -(logp.exp() * logp).sum(1)


def divergences_of(logp: torch.Tensor, logq: torch.Tensor, beta: float) -> torch.Tensor:
    """Returns the divergence of each row of a student's log-probabilities from a teacher's, `logq`."""
    if beta in (0, 1):
        a, b = (logq, logp) if beta == 0 else (logp, logq)
        return (a.exp() * (a - b)).sum(1)
    logm = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
    return beta * (logq.exp() * (logq - logm)).sum(1) + (1 - beta) * (logp.exp() * (logp - logm)).sum(1)


def reduced(
    losses: torch.Tensor,
    target: torch.Tensor,
    *,
    reduction: str = "mean",
    num_items: int | None = None,
    ignore_index: int | None = IGNORE,
    class_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    labelled = target if ignore_index is None else target[target != ignore_index]
    divisor = labelled.numel() if class_weight is None else class_weight.to(losses.dtype)[labelled].sum()
    return losses.sum() / (divisor if num_items is None else num_items)


def cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_items: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = IGNORE,
    class_weight: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Computes linear_cross_entropy from whole logits, in the dtype of its operands."""
    both = {"ignore_index": ignore_index, "class_weight": class_weight}
    logits = logits_of(hidden @ weight.T, bias, logit_scale=logit_scale, softcap=softcap)
    losses = losses_of(logits, target, label_smoothing=label_smoothing, z_loss=z_loss, **both)
    return reduced(losses, target, reduction=reduction, num_items=num_items, **both)


def values_and_gradients(
    function,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    dtype: torch.dtype,
    upstream=1.0,
    **options,
) -> list[torch.Tensor]:
    """Casts the operands to `dtype`. Returns the values of `function`, then the gradients of their sum times `upstream`
    with respect to hidden, weight and, if given, bias."""
    bias = options.pop("bias", None)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias) if x is not None]
    values = function(leaves[0], leaves[1], target, bias=leaves[2] if bias is not None else None, **options)
    upstream = upstream.to(values.dtype) if isinstance(upstream, torch.Tensor) else upstream
    return [values.detach(), *torch.autograd.grad((values * upstream).sum(), leaves)]
