"""A step of two layers and their head on a prompt and its completions, with `seqtile.share_prefixes` and without.

Eight sequences begin with the same prompt, 15 of every 16 tokens, and the completions have labels. The same models,
checkpointed: Hugging Face's, and one that is tiled as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmark.bench_decoder_layer import copied
from benchmark.device import DEVICE
from benchmark.models import build
from benchmark.shapes import Case, K, Lengths, Shape
from benchmark.subject import Forward, Subject
from transformers import PreTrainedModel

from seqtile import apply_seqtile, share_prefixes
from seqtile.memory.batch import Batch
from seqtile.renamed import enable_checkpointing

ROWS, LAYERS = 8, 2
LENGTHS: Lengths = {
    "small": {"tiny": (5000,)},
    "cpu": {"smollm2_135m": (8 * K,)},
    "quick": {"llama3_8b": (64 * K, 256 * K)},
    "full": {"llama3_8b": (64 * K, 256 * K), "qwen3_8b": (64 * K,)},
}
"""Tokens of all sequences together."""


@dataclass
class Work:
    ids: torch.Tensor  # [B, S]
    labels: torch.Tensor
    upstream: torch.Tensor
    model: PreTrainedModel
    """The copies that contestants make of it share its weights."""

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.model.parameters())


def batch_of(tokens: int) -> Batch:
    length = tokens // ROWS
    return Batch(ROWS, length, length * 15 // 16, 1)


def operands(shape: Shape, tokens: int, dtype: torch.dtype) -> Work:
    batch = batch_of(tokens)
    ids = torch.randint(1, shape.vocab, (batch.rows, batch.seq_len), device=DEVICE)
    ids[:, : batch.shared] = ids[0, : batch.shared]
    ids[:, batch.shared] = torch.arange(batch.rows, device=DEVICE)  # where they part
    labels = ids.clone()
    labels[:, : batch.shared] = -100
    model = build(shape, dtype, LAYERS)
    enable_checkpointing(model)
    return Work(ids, labels, torch.tensor(0.25, device=DEVICE), model)


def contestant(tiled: bool, shares: bool) -> Callable[[Work], Forward]:
    def ready(work: Work) -> Forward:
        model = copied(work.model)
        if tiled:
            apply_seqtile(model, layer=True, check=False)
        if shares:
            share_prefixes(model)
        return Forward(lambda: model(input_ids=work.ids, labels=work.labels, use_cache=False).loss)

    return ready


CONTESTANTS: dict[str, Callable[[Work], Forward]] = {
    "huggingface": contestant(tiled=False, shares=False),
    "seqtile_sharing_alone": contestant(tiled=False, shares=True),
    "seqtile_layer": contestant(tiled=True, shares=False),
    "seqtile_layer_sharing": contestant(tiled=True, shares=True),
}


def flops(shape: Shape, tokens: int) -> float:
    """Of each token that differs, once: as `bench_decoder_layer` has a layer, each query with its own sequence's keys;
    and the loss."""
    batch = batch_of(tokens)
    own = batch.seq_len - batch.shared
    pairs = batch.shared**2 / 2 + batch.rows * own * (batch.shared + own / 2)
    linear = batch.tokens * (11 * shape.hidden * shape.mlp + 4 * shape.attention_parameters)
    loss = 3 * batch.own * shape.head_parameters
    return 2.0 * (LAYERS * (linear + 9 * pairs * shape.q) + loss)


SUBJECT = Subject("shared_tokens", operands, CONTESTANTS, flops, lengths=LENGTHS)


def test_shared_tokens(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
