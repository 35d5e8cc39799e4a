"""Log-probabilities of given tokens under a linear head, with the logits of one chunk alive at a time."""

import torch

from seqtile.ops.linear_cross_entropy import prepare_head, run_head, scatter_to_tokens
from seqtile.ops.logit_chunks import Operands, PerTokenLossFunction, Settings, Values

_OP = "linear_log_probs"


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = torch.float32,
    chunk_tokens: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes log softmax(logits / temperature)[target] of every token without the logits: for RL and distillation.

    The logits are logit_scale * hidden @ weight.T + bias, soft-capped. Arguments, dtypes, errors, autocast and
    torch.compile as in `linear_cross_entropy`, and:

    Args:
        temperature: divides the logits after the cap, as sampling does; more than 0.
        return_entropy: return (log_probs, entropies), the entropies in nats and differentiable too.

    Returns:
        float32 of target's shape, 0 for ignored tokens.

    FLOPs: 4 u, where u = 2 n D V for n labelled tokens: 1 in the forward, 3 in the backward, which recomputes the
    chunks since only there each token's upstream gradient is known.

    Memory: forward one chunk of logits [chunk_tokens, V]; backward the chunk, d_hidden (the size of `hidden`), d_weight
    in float32 and its rounding; if some tokens are ignored also a chunk [chunk_tokens, D]. Nothing else grows with T
    but a few numbers a token. Until the backward has run, the operands are kept.

    Raises TypeError, ValueError as `linear_cross_entropy`; RuntimeError in a backward with `create_graph=True`.
    """
    operands, settings = prepare_head(
        _OP,
        hidden,
        weight,
        target,
        bias=bias,
        ignore_index=ignore_index,
        accumulate_dtype=accumulate_dtype,
        chunk_tokens=chunk_tokens,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
    )
    log_probs, entropies = run_head(_OP, _log_probs, operands, ignore_index, target.shape, settings, return_entropy)
    return (log_probs, entropies) if return_entropy else log_probs


def _log_probs(
    operands: Operands, shape: torch.Size, settings: Settings, return_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    values = Values(*PerTokenLossFunction.apply(settings, return_entropy, False, *operands))
    entropies = scatter_to_tokens(values.entropy, operands.rows, shape) if return_entropy else None
    return scatter_to_tokens(-values.losses, operands.rows, shape), entropies
