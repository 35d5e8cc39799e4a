"""Sequences with a shared prefix in a simulated step: `seqtile.share_prefixes` finds it in ids that have data."""

from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask


def register(name: str, attention: Callable) -> None:
    """Registers an attention that is called as FlashAttention is."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, flash_attention_mask)


def batch_of(rows: int, seq_len: int, shared_tokens: int) -> dict[str, torch.Tensor]:
    """Returns sequences that share their first `shared_tokens` tokens; the other tokens have labels."""
    own = torch.arange(seq_len) >= shared_tokens
    ids = 1 + torch.arange(rows)[:, None] * own
    return {"input_ids": ids, "labels": ids.masked_fill(~own, -100)}
