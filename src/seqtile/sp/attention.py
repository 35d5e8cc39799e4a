"""Attention over a sequence whose tokens are spread over ranks: tokens are traded for heads, and back.

`apply_ulysses` gives one model an attention of this name through Hugging Face's registry. Around its forward a hook
adds the `Layout` to the keyword arguments, which Hugging Face passes to every attention, also in a checkpoint's replay.
Source: Arctic Long Sequence Training, 3.2 and 4.2.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.sp.backends import Attention, attend, check
from seqtile.sp.context import SequenceParallel
from seqtile.sp.documents import Layout, layout_of
from seqtile.sp.exchange import Trade

NAME = "seqtile_ulysses"
_UNKNOWN = ("position_bias", "s_aux", "cache")  # what changes the scores, and is not passed on
_APPLIED = "_seqtile_ulysses"  # on a model: the attention that was there, and the hook's handle


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
    known = ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    if implementation not in known or implementation.startswith("paged|"):
        raise ValueError(
            f"the model's attention is {implementation!r}, expected one of {', '.join(known)}; "
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
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != (batch, local)):
        kind = list(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {kind}, expected this rank's shard of it, {[batch, local]}")
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
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface: q [B, H, S, K], k and v [B, KV, S, K] to [B, S, H, K]. Two all-to-alls."""
    if ulysses_layout is None:
        raise ValueError("no layout came with the tokens: call the model that sp.apply_ulysses was given, as a whole")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("attention that is not causal is not spread over ranks; leave this model whole")
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise ValueError(f"attention with {name} is not spread over ranks; leave this model whole")
    ctx = ulysses_layout.ctx
    heads = (query.shape[1], key.shape[1])
    trade = ulysses_layout.once(heads, lambda: Trade.of(*heads, ulysses_layout.local, ctx))
    options = {"scaling": scaling, "dropout": dropout} | ({} if softcap is None else {"softcap": softcap})
    attention = Attention(module, ulysses_layout, trade.share, sliding_window, options)
    check(attention, ctx.size, query.shape[1])
    q, k, v = trade.to_heads(query, key, value)
    return trade.to_tokens(attend(attention, q, k, v)), None
