"""The attentions that Hugging Face registers, each asked in its own form for some queries of a sequence.

An attention's form is that of the masks Hugging Face makes for it: booleans or addends (sdpa, eager), cumulative
lengths of documents (flash attention), a BlockMask (flex attention). One that is registered without masks is asked for
causal squares only. In every form a query sees its own document, up to itself, no further back than the window, and no
padding.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)

from seqtile.sp.block_mask import by_block_mask
from seqtile.sp.blocks import Block, blocks
from seqtile.sp.heads import count
from seqtile.sp.lengths import by_lengths
from seqtile.sp.wrapped import Attention, nothing

Mask = Callable[[torch.Tensor], torch.Tensor]
"""What an attention takes for booleans that tell which key a query sees."""


def attend(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The queries q [B, h, rows, K] of a share against k and v [B, kv, length, K], to [B, rows, h, K].

    Queries of padding get zeros.
    """
    compute, groups = _form(attention.layout.implementation), attention.share.groups
    parts = [compute(attention, q[:, queries], k[:, kv], v[:, kv]) for queries, kv in groups]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    if q.requires_grad and not out.requires_grad:  # nothing but padding here; the backward's collectives must still run
        out = torch.cat([out, q.transpose(1, 2)[:, :0].expand(-1, -1, -1, v.shape[3])], 1)
    return out


def by_masks(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Booleans; none for a causal square."""
    return _by_blocks(attention, q, k, v, lambda seen: seen, squares=True)


def by_addends(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = q.new_tensor(torch.finfo(q.dtype).min)
    return _by_blocks(attention, q, k, v, lambda seen: hidden.new_zeros(()).where(seen, hidden), squares=False)


def _masked(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, mask: Mask
) -> torch.Tensor:
    return attention.compute(q, k, v, mask(block.mask(attention.window, q.device))[None, None])


def by_squares(attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _by_blocks(attention, q, k, v, None, squares=True)


def _by_blocks(
    attention: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None,
    squares: bool,
) -> torch.Tensor:
    """Block by block; rows of the batch together if they have the same documents."""
    documents = attention.layout.documents
    if len(documents) > 1:
        rows = [attention.of(row) for row in range(len(documents))]
        split = zip(rows, q.split(1), k.split(1), v.split(1), strict=True)
        return torch.cat([_by_blocks(*row, mask, squares) for row in split])
    window, share = attention.window, attention.share
    found, filled = [], 0
    for block in blocks(share.rows, documents[0], window, squares):
        at = share.place(block.q0)
        if at > filled:
            found.append(nothing(q, v, at - filled))
        filled, keys = at + block.q1 - block.q0, slice(block.k0, block.k1)
        parts = (q[:, :, at:filled], k[:, :, keys], v[:, :, keys])
        if squares and block.is_square(window):
            found.append(attention.compute(*parts))
        else:  # a mask kept for the backward, block after block, would grow with the square of the length
            found.append(checkpoint(_masked, attention, *parts, block, mask, use_reentrant=False))
    if (missing := count(share.rows) - filled) or not found:
        found.append(nothing(q, v, missing))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


FORMS = {
    sdpa_mask: by_masks,
    eager_mask: by_addends,
    flash_attention_mask: by_lengths,
    flex_attention_mask: by_block_mask,
}


def _form(implementation: str) -> Callable[..., torch.Tensor]:
    return FORMS.get(ALL_MASK_ATTENTION_FUNCTIONS.get(implementation), by_squares)


def check(attention: Attention, ranks: int, q_heads: int) -> None:
    """Raises ValueError, alike on every rank, for what the wrapped attention cannot express."""
    name, window = attention.layout.implementation, attention.window
    longest = max((stop - start for row in attention.layout.documents for start, stop in row), default=0)
    if "softcap" in attention.options and name == "sdpa":
        raise ValueError('sdpa has no soft cap of scores, which this model has; model.set_attn_implementation("eager")')
    if _form(name) is by_squares and (ranks > q_heads or (window is not None and window < longest)):
        what = "a sliding window" if ranks <= q_heads else f"{q_heads} heads over {ranks} ranks"
        raise ValueError(
            f"{name!r} is registered without a mask function and can be asked for whole causal documents only, not for "
            f'{what}; register one in AttentionMaskInterface, or model.set_attn_implementation("sdpa")'
        )
