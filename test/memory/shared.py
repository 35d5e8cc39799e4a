"""Sequences that begin alike, in a simulated step: `seqtile.share_prefixes` finds them in ids that have data."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from seqtile.memory.measure import tensors_of


class KnownIntegers(FakeTensorMode):
    """Tensors of integers have data, and those of floating-point numbers have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = tensors_of((args, kwargs))
        if given and not any(isinstance(x, FakeTensor) or x.is_floating_point() or x.is_meta for x in given):
            return func(*args, **(kwargs or {}))
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if given or any(x.is_floating_point() for x in tensors_of(found)):
            return found
        return func(*args, **(kwargs or {}))


def register(name: str, attention: Callable) -> None:
    """Registers an attention that is asked as FlashAttention is."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, flash_attention_mask)


def batch_of(rows: int, seq_len: int, shared_tokens: int) -> dict[str, torch.Tensor]:
    """Returns sequences that begin with `shared_tokens` tokens alike, of which the others have labels."""
    own = torch.arange(seq_len) >= shared_tokens
    ids = 1 + torch.arange(rows)[:, None] * own
    return {"input_ids": ids, "labels": ids.masked_fill(~own, -100)}
