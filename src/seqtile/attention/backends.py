"""Chooses the attention that computes some heads and queries of a batch, among those that Hugging Face registers, each
with its kind of mask.

The kinds are boolean and additive masks (sdpa, eager), cumulative document lengths (flash attention, and torch's
kernel for them), and a BlockMask (flex attention). An attention without a mask function computes only causal squares.
With every kind, a query sees its own document up to itself, no further back than the window, and no padding.

All kinds are made from segments, see segments.py. No mask of length x length is ever made.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils, utils
from transformers.utils import logging

from seqtile.attention import torch_varlen
from seqtile.attention.by_block_mask import by_block_mask
from seqtile.attention.by_lengths import by_lengths
from seqtile.attention.by_masks import by_masks
from seqtile.attention.layout import VARLEN, Layout
from seqtile.attention.local import SINKS, LocalAttention, joined
from seqtile.attention.sdpa_lengths import FEW_LENGTHS
from seqtile.ops.attention_limits import attention_warning
from seqtile.sdpa import may_choose_cudnn

logger = logging.get_logger(__name__)


class _Flash(NamedTuple):
    """A release of FlashAttention."""

    name: str
    """Hugging Face's name."""
    available: str
    """Hugging Face's function that says whether it is installed."""
    capabilities: tuple[int, ...]
    """The compute capabilities of GPUs on which its backward takes cumulative lengths."""
    lacks: frozenset[str]


_FLASH = (
    _Flash("flash_attention_4", "is_flash_attn_4_available", (10,), frozenset(("dropout", "softcap", SINKS))),
    _Flash("flash_attention_3", "is_flash_attn_3_available", (9,), frozenset(("dropout", SINKS))),
    _Flash("flash_attention_2", "is_flash_attn_2_available", (8, 9, 10, 12), frozenset((SINKS,))),
)


def attend(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention from this rank's queries q [B, h, rows, K] to k and v [B, kv, length, K]: [B, rows, h, K].

    Outputs of padding are zeros, unless an eager attention gives padding in front of a row the mean of its values.
    """
    attention, width = attention._replace(kernel=kernel_of(attention, q, v)), v.shape[3]
    if attention.kernel == "sdpa" and width != q.shape[3] and attention.layout.implementation != "sdpa":
        attention, q, k, v = _in_one_width(attention, q, k, v)
    compute = _form_of(attention.kernel) or by_masks
    groups = attention.heads.groups
    out = joined([compute(attention.of_heads(heads), q[:, heads], k[:, kv], v[:, kv]) for heads, kv in groups], 2)
    return _kept_in_graph(out[..., :width], q)


def _in_one_width(attention: LocalAttention, *heads: Tensor) -> tuple[LocalAttention, Tensor, Tensor, Tensor]:
    """Returns an attention and its q, k and v, padded with zeros to one width, which changes no score: on a CPU torch's
    sdpa computes unequal widths, as in latent attention, by scores of length x length."""
    width = max(x.shape[3] for x in heads)
    options = {"scaling": heads[0].shape[3] ** -0.5} | attention.options
    return attention._replace(options=options), *(F.pad(x, (0, width - x.shape[3])) for x in heads)


def kernel_of(attention: LocalAttention, q: Tensor, v: Tensor) -> str:
    """Returns the name of the attention that computes queries q [B, h, rows, K] and values v [B, kv, length, Kv].

    That is the layout's own, with two exceptions. In the place of sdpa, documents, padding and windows are computed by
    torch's kernel for them, where it can; up to four documents stay with sdpa where that may be cuDNN, which takes half
    the time for long ones. The attention without masks chooses in this order: for rows that are one document each sdpa,
    which needs no mask for them; FlashAttention; torch's kernel; blocks by sdpa, or by eager attention if the model has
    sinks or a soft cap of scores.
    """
    name, options = attention.layout.implementation, attention.options
    if name != "sdpa" and not name.startswith(VARLEN):
        return name
    needs_eager = SINKS in options or bool(options.get("softcap"))
    blocks = "eager" if needs_eager else "sdpa"
    if name == VARLEN + "eager" and attention.has_padding_in_front and SINKS not in options:
        return "eager"  # gives padding the mean of its row
    if attention.spans or (attention.is_whole and not needs_eager):
        return blocks
    if name != "sdpa" and (flash := _flash_of(name.removeprefix(VARLEN), options, q, v)) is not None:
        return flash
    documents, rows = attention.layout.documents, attention.heads.rows
    are_squares = attention.window is None and rows == ((0, attention.layout.length),)
    if name == "sdpa" and are_squares and sum(map(len, documents)) <= FEW_LENGTHS and may_choose_cudnn(name, q):
        return name
    return torch_varlen.register() if torch_varlen.reason_against(q, v, options) is None else blocks


def warn_of_limits(name: str, layout: Layout, q: Tensor) -> None:
    """Warns once if a document is longer than the attention of this name computes in the installed releases."""
    longest = max((stop - start for row in layout.documents for start, stop in row), default=0)
    if (said := attention_warning(name, q, None, longest)) is not None:
        logger.warning_once(said)


def _flash_of(former: str, options: dict[str, Any], q: Tensor, v: Tensor) -> str | None:
    """Returns the name of an installed FlashAttention that can compute a call: the model's former attention, or the
    latest release for this GPU; None if there is none."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if not q.is_cuda or not is_half or q.shape[3] != v.shape[3] or q.shape[3] > 256:
        return None
    if "flash" in former:
        return former
    asked = {name for name in ("dropout", "softcap") if options.get(name)} | (options.keys() & {SINKS})
    capability = torch.cuda.get_device_capability(q.device)[0]
    for flash in _FLASH:
        is_installed = getattr(utils.import_utils, flash.available, None)
        if capability in flash.capabilities and not asked & flash.lacks and is_installed is not None and is_installed():
            return flash.name
    return None


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


def computes_some_queries(implementation: str) -> bool:
    """Returns whether an attention computes some of a document's queries; without masks it computes causal squares."""
    return _form_of(implementation) is not None or implementation.startswith(VARLEN)


def check_has_masks(implementation: str) -> None:
    """Raises ValueError if an attention takes no masks, and so computes only causal squares."""
    if not computes_some_queries(implementation):
        raise ValueError(
            f"{implementation!r} has no mask function, which queries after a shared prefix need; "
            'register one in AttentionMaskInterface, or model.set_attn_implementation("sdpa")'
        )


def check(attention: LocalAttention, ranks: int, q_heads: int) -> None:
    """Raises ValueError, the same on every rank, if the wrapped attention cannot compute this layout."""
    name, window = attention.layout.implementation, attention.window
    if name.startswith(VARLEN):
        return
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
