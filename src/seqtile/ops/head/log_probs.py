"""Log-probabilities of given tokens under a linear head. Only one chunk of logits exists at a time."""

from collections.abc import Collection
from typing import NamedTuple

import torch

from seqtile.ops.checks import check_loss_options
from seqtile.ops.head.chunks import ChunkedHeads, Head
from seqtile.ops.head.cross_entropy import Values, labels_of, prepare_head, run_head
from seqtile.ops.head.reduction import scatter_to_tokens
from seqtile.ops.torch_function import dispatched

_OP = "linear_log_probs"
_VALUES = {"entropy": "entropy", "is_largest": "predicted", "mean_logit": "mean", "sum_squared_probs": "squares"}
"""Maps the fields of `TokenValues` to those of `linear_cross_entropy.Values`."""


class TokenValues(NamedTuple):
    """Further values of each token, from the same pass over the logits as the log-probability; None if not requested.

    They have target's shape, are 0 (False) for ignored tokens, and are float32 unless stated otherwise. The
    distribution is softmax(logits / temperature). Only `entropy` is differentiable.
    """

    entropy: torch.Tensor | None = None
    """The entropy of the distribution, in nats."""
    is_largest: torch.Tensor | None = None
    """bool: whether the target is the token with the largest logit (the first of equal ones)."""
    mean_logit: torch.Tensor | None = None
    """The mean of logits / temperature over the vocabulary."""
    sum_squared_probs: torch.Tensor | None = None
    """The sum of the squared probabilities."""


@dispatched
def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    outputs: Collection[str] = (),
    to_be_summed: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: torch.dtype | None = torch.float32,
    chunk_tokens: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, TokenValues]:
    """Computes each token's log softmax(logits / temperature)[target] without the logits, for RL and distillation.

    The logits are logit_scale * hidden @ weight.T + bias, soft-capped. Arguments, dtypes, errors, autocast and
    torch.compile are as in `linear_cross_entropy`. In addition:

    Args:
        temperature: divides the logits after the soft cap, as in sampling; more than 0.
        outputs: names of fields of `TokenValues`. If any, the function returns (log_probs, TokenValues).
        to_be_summed: True if you will sum or average the log-probabilities, so that all have the same upstream
            gradient. The forward then computes the gradients. If the upstream gradients differ after all, the backward
            computes the gradients again: slower, and as exact.

    Returns:
        float32 of target's shape, 0 for ignored tokens.

    FLOPs for n labelled tokens, with u = 2 n D V: 4 u, 1 in the forward and 3 in the backward. The backward recomputes
    the chunks, because each token's upstream gradient is known only then. With `to_be_summed` 3 u, all in the forward;
    6 u if the upstream gradients differ or entropies have one (in a compiled graph always 4 u).

    Memory: in the forward one chunk of logits [chunk_tokens, V]; in the backward that chunk, d_hidden (the size of
    `hidden`), d_weight in float32 and its rounded copy. If some tokens are ignored, also a chunk [chunk_tokens, D].
    Only a few bytes per token otherwise grow with T. The operands are kept until the backward has run. With
    `to_be_summed` the forward allocates all of it, as in `linear_cross_entropy`.

    Raises TypeError and ValueError as `linear_cross_entropy` does; RuntimeError in a backward with `create_graph=True`.
    """
    if isinstance(outputs, str) or not set(outputs) <= set(_VALUES):
        raise ValueError(f"{_OP}: outputs is {outputs!r}, expected some of {', '.join(_VALUES)}")
    outputs = tuple(outputs)
    options, wanted = check_loss_options(_OP, logit_scale, softcap, temperature), [_VALUES[name] for name in outputs]
    head = Head(hidden, weight, bias)
    chunked = prepare_head(_OP, head, target, ignore_index, options, wanted, accumulate_dtype, chunk_tokens)
    return run_head(_log_probs, chunked, ignore_index, target.shape, outputs, to_be_summed)


def _log_probs(
    chunked: ChunkedHeads, shape: torch.Size, outputs: tuple[str, ...], to_be_summed: bool
) -> torch.Tensor | tuple[torch.Tensor, TokenValues]:
    values = Values(*chunked.compute(to_be_summed and not torch.compiler.is_compiling())[1])
    if values.predicted is not None:
        values = values._replace(predicted=values.predicted == labels_of(chunked))
    found = {name: scatter_to_tokens(getattr(values, _VALUES[name]), chunked.rows, shape) for name in outputs}
    log_probs = scatter_to_tokens(-values.losses, chunked.rows, shape)
    return (log_probs, TokenValues(**found)) if outputs else log_probs
