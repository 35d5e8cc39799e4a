"""seqtile.evaluate: loss, perplexity and bits per byte of documents of any length, in all and by position."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from seqtile.models.apply import apply_seqtile, restore
from seqtile.models.status import status
from seqtile.unwrapped import unwrapped

logger = logging.get_logger(__name__)
FIRST = 1024
"""Tokens of the first span of positions; each further one ends at twice as many."""


@dataclass(frozen=True)
class Span:
    """Tokens with more than `start` and at most `stop` tokens before them, and their mean loss."""

    start: int
    stop: int
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts the tokens of documents."""

    tokens: int
    """The number of predicted tokens."""
    loss: float
    """Their mean cross-entropy, in nats."""
    by_position: tuple[Span, ...]
    text_bytes: int | None

    @property
    def total(self) -> Span:
        """All of them as one span."""
        return Span(0, max(span.stop for span in self.by_position), self.tokens, self.loss)

    @property
    def perplexity(self) -> float:
        return self.total.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        """None without `text_bytes`."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else None

    def figures(self) -> dict[str, Any]:
        """Returns all of it, for JSON."""
        spans = [vars(span) | {"perplexity": span.perplexity} for span in self.by_position]
        total = {"tokens": self.tokens, "loss": self.loss, "perplexity": self.perplexity}
        return total | {"bits_per_byte": self.bits_per_byte, "by_position": spans}

    def __str__(self) -> str:
        rows = [(f"{span.start:,} to {span.stop:,}", span) for span in self.by_position]
        lines = [f"{'tokens before':>22}{'predicted':>12}{'loss':>9}{'perplexity':>12}"]
        for name, span in (*rows, ("all", self.total)):
            lines.append(f"{name:>22}{span.tokens:>12,}{span.loss:>9.4f}{span.perplexity:>12.3f}")
        return "\n".join(lines + ([f"{self.bits_per_byte:.4f} bits per byte"] if self.text_bytes else []))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    documents: torch.Tensor | Sequence[int] | Sequence[torch.Tensor | Sequence[int]],
    *,
    context: int | None = None,
    stride: int | None = None,
    text_bytes: int | None = None,
    each: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Computes the loss of every token of documents, given the tokens before it, in evaluation mode.

    Args:
        model: a causal LM, alone or with a PEFT adapter; an untiled one is tiled during the call. After
            `sp.apply_ulysses(batches="whole")` it is evaluated over ranks, which all make the same call.
        documents: token ids of one document, a tensor [N] or [1, N] or a list of ints; or a list of several documents,
            each by itself and without padding.
        context: the most tokens that the model gets at once; None for whole documents.
        stride: with `context`, for longer documents: the tokens from the start of one window to the start of the next.
            A window predicts the tokens that no earlier window predicted, each from at least `context - stride` tokens.
            By default half the context.
        text_bytes: the bytes of the text of all documents, one number, for bits per byte.
        each: called with the number of finished windows and of all windows.

    Memory: that of the model's forward with a chunk of logits; no cache.

    Raises TypeError for anything but a Hugging Face model and token ids; ValueError for a document of fewer than two
    tokens, and for a stride without a context or not less than the context.
    """
    unwrapped(model)
    documents = _documents(documents)
    if not isinstance(text_bytes, Real | None):
        raise TypeError(
            "evaluate: text_bytes: expected one number, the bytes of the text of all documents, got "
            f"{type(text_bytes).__name__}; pass sum(len(text.encode()) for text in texts)"
        )
    longest = max(map(len, documents))
    if context is None and stride is not None:
        raise ValueError(
            f"evaluate: expected a context with a stride, got stride={stride} alone; pass context=, the most tokens "
            "that are given to the model at once, or leave stride out"
        )
    context = longest if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride < context:
        raise ValueError(
            f"evaluate: expected 1 <= stride < context, got context={context}, stride={stride}; pass a longer context, "
            "or leave stride out for half of it"
        )
    context = min(context, longest)
    if context > (most := positions_of(model)) and not (dist.is_initialized() and dist.get_rank() > 0):
        logger.warning_once(
            f"evaluate: {type(model).__name__} is configured for {most:,} positions at most, and is given {context:,} "
            f"tokens at once: losses of later positions mean little; pass context={most} (--context {most}) or less"
        )
    windows = [(document, *window) for document in documents for window in _windows(len(document), context, stride)]
    device = next(model.parameters()).device
    ends = FIRST * 2 ** torch.arange(1 + max(0, math.ceil(math.log2(context / FIRST))), device=device)
    sums = torch.zeros(2, len(ends), dtype=torch.float64, device=device)
    with _ready(model):
        for done, (document, start, stop, predicted) in enumerate(windows):
            losses, before = _losses(model, document[start:stop].to(device), predicted)
            span = torch.bucketize(before, ends)
            sums[0].index_add_(0, span, losses.double())
            sums[1].index_add_(0, span, torch.ones_like(losses, dtype=torch.float64))
            each(done + 1, len(windows))
    totals, counts = sums.tolist()
    stops = [min(end, context - 1) for end in ends.tolist()]
    rows = zip([0, *stops], stops, map(int, counts), totals, strict=False)
    spans = tuple(Span(start, stop, tokens, total / tokens) for start, stop, tokens, total in rows if tokens)
    return Evaluation(int(sum(counts)), sum(totals) / sum(counts), spans, text_bytes)


def _documents(documents: Any) -> list[torch.Tensor]:
    """Returns the token ids [N] of each document that `evaluate` was given."""
    documents = list(documents) if isinstance(documents, Iterator) else documents
    one = not isinstance(documents, Sequence) or isinstance(documents, str | bytes) or _is_ids(documents)
    return [_document(each) for each in ([documents] if one else documents)]


def _document(ids: Any) -> torch.Tensor:
    ids = torch.tensor(ids, dtype=torch.long) if _is_ids(ids) else ids
    if not isinstance(ids, torch.Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise TypeError(
            "evaluate: expected the token ids of a document, a tensor [N] of integers or a list of ints, or a list of "
            f"several, got {getattr(ids, 'dtype', type(ids).__name__)}; pass tokenizer(text).input_ids"
        )
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1 or len(ids) < 2:
        raise ValueError(
            f"evaluate: expected token ids [N] of at least 2 tokens, got {list(ids.shape)}; pass several documents as "
            "a list, each without padding, and leave out shorter ones"
        )
    return ids.long()


def _is_ids(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return listed and all(isinstance(each, Integral) for each in value)


def positions_of(model: nn.Module) -> float:
    """Returns how many tokens a model is configured for at most, as far as its config tells. Where its RoPE is scaled,
    that may be more than `max_position_embeddings`."""
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else None
    most, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    scaled = [each for each in (rope, *rope.values()) if isinstance(each, dict) and each.get("factor")]
    if most is None or any(each.get("rope_type") == "dynamic" for each in scaled):
        return math.inf
    longer = [int(each["factor"] * each.get("original_max_position_embeddings", most)) for each in scaled]
    return max([most, *longer])


def _windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields the start and the stop of each window, and how many tokens it does not predict, its first."""
    for start in range(0, length, stride):
        stop, before = min(start + context, length), 1 if start == 0 else context - stride
        yield start, stop, max(1, before)
        if stop == length:
            return


def _losses(model: nn.Module, ids: torch.Tensor, known: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses [n] of the tokens behind the first `known`, and how many tokens came before each."""
    before = torch.arange(known, len(ids), device=ids.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, known - 1 : -1]
    return -logits.float().log_softmax(-1).gather(-1, ids[known:].unsqueeze(-1)).squeeze(-1), before


@contextmanager
def _ready(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, tiled, and back."""
    training = [module for module in model.modules() if module.training]
    parts = status(model)
    untiled = not any(part is not None and part.tiled for part in (parts.loss, parts.mlp, parts.layer))
    if untiled:
        apply_seqtile(model)
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        if untiled:
            restore(model)
