"""Asks the table of `seqtile.limits` about the tensors of an attention call."""

import torch
from torch.nn.attention import SDPBackend

from seqtile.limits import flash_limit, mask_limit


def attention_warning(attention: str, q: torch.Tensor, mask: object, length: int | None = None) -> str | None:
    """Says what is wrong with an attention call of this length in the installed releases; None if nothing is, and on a
    CPU.

    Args:
        attention: Hugging Face's name, such as "sdpa".
        q: the queries [B, h, S, K] of all heads that are computed at once.
        mask: None, or what masks keys; sdpa reads one of [B, 1 or H, S, keys].
        length: tokens of the longest document, if they are computed one by one.

    Raises ValueError if sdpa would compute a wrong result.
    """
    if not (q.is_cuda or q.is_meta):
        return None
    under_mask = attention == "sdpa" and isinstance(mask, torch.Tensor)
    if under_mask:  # never FlashAttention
        if (said := mask_limit(attention, mask.shape[-2], mask.shape[-1])) is None:
            return None
        if _takes_efficient(q, mask):
            raise ValueError(said)
        return f"{said}. This call takes another kernel, untested at this size"
    if not q.requires_grad or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    length = q.shape[2] if length is None else length
    found = flash_limit(attention, q.shape[1], q.shape[3])
    return found[1] if found is not None and length >= found[0] else None


def _takes_efficient(q: torch.Tensor, mask: torch.Tensor) -> bool:
    """Returns whether sdpa chooses its efficient kernel for queries q under a mask, as far as their device shows."""
    return not q.is_cuda or torch._fused_sdp_choice(q, q, q, mask) == int(SDPBackend.EFFICIENT_ATTENTION)
