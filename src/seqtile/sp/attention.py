"""Attention over a sequence whose tokens are spread over ranks: tokens are traded for heads, and back.

`apply_ulysses` gives one model an attention of this name through Hugging Face's registry. Around its forward a hook
adds the `Layout` to the keyword arguments, which Hugging Face passes to every attention, also in a checkpoint's replay.
Source: Arctic Long Sequence Training, 3.2 and 4.2.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from seqtile.sp.context import SequenceParallel
from seqtile.sp.documents import Layout, blocks, layout_of
from seqtile.sp.exchange import to_heads, to_tokens
from seqtile.sp.heads import count, share_of

NAME = "seqtile_ulysses"
_APPLIED = "_seqtile_ulysses"  # on a model: the attention that was there, and the hook's handle
_WRAPPED = ("sdpa",)


def apply_ulysses(model: PreTrainedModel, ctx: SequenceParallel) -> None:
    """Spreads the attention of this model over the ranks of `ctx`. Applying twice changes nothing.

    Every forward then takes shards: `input_ids` [B, S / size] and, where documents are packed or rows are padded, the
    shards of `position_ids` and `attention_mask`, as `DataShardingCollator` cuts them.

    Raises ValueError, and changes nothing, for an attention that cannot be wrapped, and TypeError for anything but a
    Hugging Face model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a Hugging Face model, got a {type(model).__name__}; pass the model itself")
    if (applied := getattr(model, _APPLIED, None)) is not None:
        if applied[2] is not ctx:
            raise ValueError("this model is spread over other ranks already: sp.restore(model) first")
        return
    implementation = model.config._attn_implementation
    if implementation not in _WRAPPED:
        raise ValueError(
            f"the model's attention is {implementation!r}, expected one of {', '.join(_WRAPPED)}; "
            "model.set_attn_implementation(...) first"
        )
    AttentionInterface.register(NAME, ulysses_attention)
    model.set_attn_implementation(NAME)

    def add_layout(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, with_layout(args, kwargs, ctx, implementation)

    handle = model.base_model.register_forward_pre_hook(add_layout, with_kwargs=True)
    setattr(model, _APPLIED, (implementation, handle, ctx))


def restore(model: PreTrainedModel) -> None:
    """Takes `apply_ulysses` back."""
    if (applied := vars(model).pop(_APPLIED, None)) is not None:
        implementation, handle, _ = applied
        handle.remove()
        model.set_attn_implementation(implementation)


def with_layout(args: tuple, kwargs: dict[str, Any], ctx: SequenceParallel, implementation: str) -> dict[str, Any]:
    """The keyword arguments of a base model's forward with the whole sequences' layout, and global position_ids."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    tokens = ids if ids is not None else kwargs.get("inputs_embeds")
    if tokens is None or len(args) > 1:
        raise ValueError("under sequence parallelism pass input_ids or inputs_embeds, and the rest by keyword")
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError("a cache is not spread over ranks: use_cache=False, or sp.restore(model) before generating")
    batch, local = tokens.shape[:2]
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(ctx.rank * local, (ctx.rank + 1) * local, device=tokens.device)[None]
    if positions.shape[-1] != local:
        raise ValueError(
            f"position_ids is {list(positions.shape)} for {local} tokens, expected this rank's shard of it"
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.shape != (batch, local):
        raise ValueError(f"attention_mask is {list(mask.shape)}, expected this rank's shard of it, {[batch, local]}")
    layout = layout_of((batch, local), positions if positions.ndim == 2 else positions[0], mask, ctx, implementation)
    return kwargs | {"position_ids": positions, "attention_mask": None, "use_cache": False, "ulysses_layout": layout}


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    ulysses_layout: Layout | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface: q [B, H, S, K], k and v [B, KV, S, K] to [B, S, H, K]. Two all-to-alls."""
    if ulysses_layout is None:
        raise ValueError("no layout came with the tokens: call the model that sp.apply_ulysses was given, as a whole")
    if softcap is not None:
        raise ValueError("sdpa has no soft cap of attention scores, which this model asks for")
    ctx, length = ulysses_layout.ctx, ulysses_layout.length
    shares = [share_of(rank, ctx.size, query.shape[1], key.shape[1], length) for rank in range(ctx.size)]
    mine = shares[ctx.rank]
    q, k, v = to_heads(query, key, value, shares, ctx)
    groups = torch.tensor(mine.kv_of_q, device=q.device)
    if len(groups) != k.shape[1]:
        k, v = k.index_select(1, groups), v.index_select(1, groups)
    options = {"scale": scaling, "dropout_p": dropout}
    out = attend(q, k, v, mine.rows, ulysses_layout, sliding_window, options)
    return to_tokens(out, ulysses_layout.local, shares, ctx).transpose(1, 2).contiguous(), None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: tuple[tuple[int, int], ...],
    layout: Layout,
    window: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """The queries q [B, h, rows, K] of the tokens in `rows` against k and v [B, h, length, K], within their documents.

    Queries of padding get zeros.
    """
    if layout.is_plain and rows == ((0, layout.length),) and (window is None or layout.length <= window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    if len(layout.documents) == 1:
        return _attend_row(q, k, v, rows, layout.documents[0], window, options)
    found = [
        _attend_row(q[i : i + 1], k[i : i + 1], v[i : i + 1], rows, documents, window, options)
        for i, documents in enumerate(layout.documents)
    ]
    return torch.cat(found)


def _attend_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: tuple[tuple[int, int], ...],
    documents: tuple[tuple[int, int], ...],
    window: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    places, done = [], 0
    for first, last in rows:
        places.append((first, last, done))
        done += last - first
    found, filled = [], 0
    for block in blocks(rows, documents, window):
        at = next(done + block.q0 - first for first, last, done in places if first <= block.q0 < last)
        if at > filled:
            found.append(_nothing(q, v, at - filled))
        keys = slice(block.k0, block.k1)
        how = {"is_causal": True} if block.is_square(window) else {"attn_mask": block.mask(window, q.device)}
        here = slice(at, at + block.q1 - block.q0)
        found.append(F.scaled_dot_product_attention(q[:, :, here], k[:, :, keys], v[:, :, keys], **how, **options))
        filled = here.stop
    if filled < count(rows) or not found:
        found.append(_nothing(q, v, count(rows) - filled))
    return torch.cat(found, 2)


def _nothing(q: torch.Tensor, v: torch.Tensor, rows: int) -> torch.Tensor:
    return q.new_zeros(q.shape[0], q.shape[1], rows, v.shape[3])
