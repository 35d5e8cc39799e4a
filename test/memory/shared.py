"""A step of rows that begin alike, see `seqtile.share_prefixes`, simulated: what is told by ids is known, all else has no
data."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

import seqtile
from seqtile.memory.measure import tensors_of
from seqtile.memory.setup import Setup
from seqtile.sp import apply_ulysses, initialize

ATTENTION = "no_scores_by_lengths"


class KnownIntegers(FakeTensorMode):
    """Floating-point tensors have no data, integers have."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = tensors_of((args, kwargs))
        if given and not any(isinstance(x, FakeTensor) or x.is_floating_point() or x.is_meta for x in given):
            return func(*args, **(kwargs or {}))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if given or any(x.is_floating_point() for x in tensors_of(found)):
            return found
        return func(*args, **(kwargs or {}))


def register(attention: Any) -> None:
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)


def share(model: nn.Module, setup: Setup) -> None:
    if setup.sequence_parallel > 1:
        apply_ulysses(model, initialize(setup.sequence_parallel), batches="whole")
    seqtile.share_prefixes(model, min_tokens=setup.shared_tokens)


def batch(rows: int, seq_len: int, shared_tokens: int) -> dict[str, torch.Tensor]:
    """Rows that begin alike, of which what they do not share has labels."""
    ids = torch.arange(rows)[:, None] + torch.zeros(seq_len, dtype=torch.long)
    ids[:, :shared_tokens] = 0
    ids += 1
    labels = ids.clone()
    labels[:, :shared_tokens] = -100
    return {"input_ids": ids, "labels": labels}
