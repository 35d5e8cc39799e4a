"""Calls the attention functions that Hugging Face registers, each with its kind of mask, for some queries of a
sequence.

The kinds are boolean and additive masks (sdpa, eager), cumulative document lengths (flash attention), and a BlockMask
(flex attention). An attention without a mask function computes only causal squares. With every kind, a query sees its
own document up to itself, no further back than the window, and no padding.

All kinds are made from segments, see segments.py. No mask of length x length is ever made.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import masking_utils

from seqtile.attention.by_block_mask import by_block_mask
from seqtile.attention.by_lengths import by_lengths
from seqtile.attention.by_masks import by_masks
from seqtile.attention.local import SINKS, LocalAttention, joined


def attend(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention from this rank's queries q [B, h, rows, K] to k and v [B, kv, length, K]: [B, rows, h, K].

    Outputs of padding are zeros.
    """
    compute = _form_of(attention.layout.implementation) or by_masks
    groups = attention.heads.groups
    out = joined([compute(attention.of_heads(heads), q[:, heads], k[:, kv], v[:, kv]) for heads, kv in groups], 2)
    return _kept_in_graph(out, q)


def _kept_in_graph(out: Tensor, q: Tensor) -> Tensor:
    """Returns `out`, which depends on q also if it is padding only: the collectives of q's backward must run on every
    rank."""
    if out.requires_grad or not q.requires_grad:
        return out
    return torch.cat([out, q.transpose(1, 2)[:, :0, :, :1].expand(-1, -1, -1, out.shape[3])], 1)


def averages_padding(model: nn.Module, implementation: str) -> bool:
    """Returns whether a model's attention gives queries that see no key the mean of all values, as a softmax over an
    additive mask does, rather than zeros."""
    is_additive = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) == masking_utils.eager_mask
    return is_additive and not any(hasattr(module, "sinks") for module in model.modules())


FORMS = {
    masking_utils.sdpa_mask: by_masks,
    masking_utils.eager_mask: partial(by_masks, additive=True),
    masking_utils.flash_attention_mask: by_lengths,
    masking_utils.flex_attention_mask: by_block_mask,
}


def _form_of(implementation: str) -> Callable[..., Tensor] | None:
    return FORMS.get(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation))


def check_has_masks(implementation: str) -> None:
    """Raises ValueError if an attention takes no masks, and so computes only causal squares."""
    if _form_of(implementation) is None:
        raise ValueError(
            f"{implementation!r} has no mask function, which queries after a shared prefix need; "
            'register one in AttentionMaskInterface, or model.set_attn_implementation("sdpa")'
        )


def check(attention: LocalAttention, ranks: int, q_heads: int) -> None:
    """Raises ValueError, the same on every rank, if the wrapped attention cannot compute this layout."""
    name, window = attention.layout.implementation, attention.window
    longest = max((stop - start for row in attention.layout.documents for start, stop in row), default=0)
    for option, what in (("softcap", "soft cap of scores"), (SINKS, "sinks")):
        if option in attention.options and name == "sdpa":
            raise ValueError(f'sdpa has no {what}, which this model needs; model.set_attn_implementation("eager")')
    if SINKS in attention.options and name == "eager" and "sinks" not in attention.eager.__code__.co_names:
        raise ValueError(
            f"the eager attention of {type(attention.module).__name__} has no sinks; leave this model whole"
        )
    if attention.spans and _form_of(name) in (None, by_lengths):
        raise ValueError(
            f"{name!r} does not support spans of tokens that see each other both ways, such as images; "
            'model.set_attn_implementation("sdpa")'
        )
    if _form_of(name) is None and (ranks > q_heads or (window is not None and window < longest)):
        what = "a sliding window" if ranks <= q_heads else f"{q_heads} heads over {ranks} ranks"
        raise ValueError(
            f"{name!r} has no mask function, so it computes only whole causal documents, not {what}; register "
            'one in AttentionMaskInterface, or model.set_attn_implementation("sdpa")'
        )
