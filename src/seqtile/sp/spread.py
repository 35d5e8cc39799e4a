"""One model's attention spread over ranks, and put back.

`apply_ulysses` gives the model an attention by name, through Hugging Face's registry. Before its forward a hook adds
the `Layout` to the keyword arguments, which Hugging Face passes to every attention, also in a checkpoint's replay.
Others tell rotary embeddings that depend on the length what it is, and check that every layer has attended and that
the loss is reduced over the ranks before its backward.
Source: Arctic Long Sequence Training, 3.2 and 4.2.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.sp.attention import NAME, ulysses_attention
from seqtile.sp.context import SequenceParallel
from seqtile.sp.documents import Layout, layout_of
from seqtile.sp.loss import share_of_loss
from seqtile.sp.same_batch import BATCH_HASH, check_same_batch

_APPLIED = "_seqtile_ulysses"  # on a model: what was applied to it
_BY_KEYWORD = "under sequence parallelism pass input_ids or inputs_embeds, and the rest by keyword"
_SPREAD = ("full_attention", "sliding_attention")  # kinds of layers that mix tokens in attention alone


class Applied(NamedTuple):
    ctx: SequenceParallel
    implementation: str
    """The attention that was there."""
    handles: list[RemovableHandle]


def apply_ulysses(model: PreTrainedModel, ctx: SequenceParallel) -> None:
    """Spreads the attention of this model, which may be in PEFT's wrapper, over the ranks of `ctx`. Applying twice
    changes nothing.

    Every forward then takes shards: `input_ids` [B, S / size], the shards of `position_ids` and, where rows are padded,
    of `attention_mask`, as `DataShardingCollator` cuts them. It raises ValueError, on every rank, where the ranks of a
    group are given other samples each, or whole sequences. The loss that it returns is this rank's share, whose
    backward raises RuntimeError unless it went through `reduce_loss`.

    Raises ValueError, and changes nothing, for a model that mixes tokens in another way than by an attention of Hugging
    Face's interface, and TypeError for anything but a Hugging Face model.
    """
    model = _without_adapter(model)
    if (applied := getattr(model, _APPLIED, None)) is not None:
        if applied.ctx is not ctx:
            raise ValueError("this model is spread over other ranks already: sp.restore(model) first")
        return
    implementation = model.config._attn_implementation
    _check(model, implementation)
    AttentionInterface.register(NAME, ulysses_attention)
    model.set_attn_implementation(NAME)
    setattr(model, _APPLIED, Applied(ctx, implementation, _hooks(model, ctx, implementation)))


def restore(model: PreTrainedModel) -> None:
    """Takes `apply_ulysses` back, of the model that it was given; of one that is not spread it changes nothing. Raises
    TypeError for anything but a Hugging Face model."""
    model = _without_adapter(model)
    if (applied := vars(model).pop(_APPLIED, None)) is not None:
        for handle in applied.handles:
            handle.remove()
        model.set_attn_implementation(applied.implementation)


def _without_adapter(model: nn.Module) -> nn.Module:
    """The model in PEFT's wrapper. Raises ValueError for an adapter that adds tokens, TypeError for what is no model of
    Hugging Face's."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("an adapter that puts tokens before a sequence would put them before every shard")
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a Hugging Face model, got a {type(model).__name__}; pass the model itself, which is "
            "model.module in the wrappers of DDP and DeepSpeed"
        )
    return model


def _check(model: PreTrainedModel, implementation: str) -> None:
    """Raises ValueError for a model that is not to be spread."""
    name, config = type(model).__name__, model.config.get_text_config()
    known = ("eager", *(name for name in ALL_ATTENTION_FUNCTIONS if not name.startswith("paged|")))
    if implementation not in known:
        raise ValueError(
            f"the model's attention is {implementation!r}, expected one of {', '.join(known)}; "
            "model.set_attn_implementation(...) first"
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_SPREAD))
    if others or getattr(model, "_is_stateful", False) or config.is_encoder_decoder:
        what = ", ".join(others) or ("an encoder" if config.is_encoder_decoder else "a state along the sequence")
        raise ValueError(f"{name} has {what}, expected causal attention, full or with a window, in every layer")
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(f"{name} makes its own position_ids, of a shard's tokens; leave this model whole")
    if {getattr(module, "is_causal", None) for module in model.modules()} - {None} == {False}:
        raise ValueError(f"the attention of {name} is not causal, which is needed")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not take its attention from Hugging Face's AttentionInterface, which is needed")


def _hooks(model: PreTrainedModel, ctx: SequenceParallel, implementation: str) -> list[RemovableHandle]:
    layers = model.config.get_text_config().num_hidden_layers
    last = torch.zeros((), dtype=torch.int64, device="cpu")  # of this forward; on the host, where reading it is free
    held: dict[str, torch.Tensor] = {}  # what the model was given and its layers are not

    def check_batch(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        needed = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
        if len(args) > 1:
            raise ValueError(_BY_KEYWORD)
        if needed and ctx.size > 1 and _labelled(kwargs):
            raise ValueError(
                f"labels came without {' and '.join(needed)}, which a shard's loss needs; cut batches by sp.shard, "
                "sp.DataShardingCollator or sp.ShardedDataLoader, and drop none of their entries"
            )
        held.clear()
        held.update({BATCH_HASH: kwargs[BATCH_HASH]} if BATCH_HASH in kwargs else {})
        return args, {name: value for name, value in kwargs.items() if name != BATCH_HASH}

    def add_layout(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = with_layout(args, dict(held) | kwargs, ctx, implementation)
        held.clear()
        last.fill_(kwargs["ulysses_layout"].last_position)
        return args, kwargs

    def guard_loss(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        return _with_guarded_loss(output, ctx) if ctx.size > 1 and _labelled(kwargs) else output

    def check_layers(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if (asked := len(kwargs["ulysses_layout"].asked)) < layers:
            raise ValueError(f"{asked} of {layers} layers attended over the whole sequence; leave this model whole")

    def add_last_position(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        extended = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), int(last))], -1)
        return args[:1], kwargs | {"position_ids": extended}

    def drop_last_position(module: nn.Module, args: tuple, output: tuple) -> tuple:
        return tuple(values[..., :-1, :] for values in output)

    base = model.base_model
    handles = [
        model.register_forward_pre_hook(check_batch, with_kwargs=True),
        model.register_forward_hook(guard_loss, with_kwargs=True),
        base.register_forward_pre_hook(add_layout, with_kwargs=True),
        base.register_forward_hook(check_layers, with_kwargs=True),
    ]
    for module in base.modules():
        kinds = str(getattr(module, "rope_type", ""))  # a name, or one for each kind of layers
        if "dynamic" in kinds or "longrope" in kinds:
            handles.append(module.register_forward_pre_hook(add_last_position, with_kwargs=True))
            handles.append(module.register_forward_hook(drop_last_position))
    return handles


def _labelled(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None


def _with_guarded_loss(output: Any, ctx: SequenceParallel) -> Any:
    """What a model returned, a dict or a tuple, with a loss that has to be reduced before its backward."""
    key = 0 if isinstance(output, tuple) else "loss"
    loss = output[0] if key == 0 else output.get(key)
    if loss is None or not loss.requires_grad:
        return output
    if key == 0:
        return (share_of_loss(loss, ctx), *output[1:])
    output[key] = share_of_loss(loss, ctx)
    return output


def with_layout(args: tuple, kwargs: dict[str, Any], ctx: SequenceParallel, implementation: str) -> dict[str, Any]:
    """The keyword arguments of a base model's forward with the whole sequences' layout, and global position_ids."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    tokens = ids if ids is not None else kwargs.get("inputs_embeds")
    if tokens is None or len(args) > 1:
        raise ValueError(_BY_KEYWORD)
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError("a cache is not spread over ranks: use_cache=False, or sp.restore(model) before generating")
    if kwargs.get("output_router_logits"):
        raise ValueError("the router's balancing loss is not spread over ranks: output_router_logits=False")
    batch, local = tokens.shape[:2]
    positions = kwargs.get("position_ids")
    if positions is None and ctx.size == 1:
        positions = torch.arange(local, device=tokens.device)[None]
    if positions is not None and positions.shape[-1] != local:
        raise ValueError(
            f"position_ids is {list(positions.shape)} for {local} tokens, expected this rank's shard of it"
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != (batch, local)):
        kind = list(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {kind}, expected this rank's shard of it, {[batch, local]}")
    items, batch_hash = kwargs.get("num_items_in_batch"), kwargs.get(BATCH_HASH)
    last = check_same_batch(tokens, positions, mask is not None, items, batch_hash, ctx)
    layout = layout_of(local, positions, mask, ctx, implementation, last)
    if (lengths := kwargs.get("cu_seq_lens_q")) is not None and lengths.tolist() != _ends(layout, int(lengths[-1])):
        raise ValueError("cu_seq_lens_q tells other documents than position_ids, which have to tell them here")
    whole = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # of whole sequences, as the layout is
    kwargs = {name: value for name, value in kwargs.items() if name not in (*whole, BATCH_HASH)}
    return kwargs | {"position_ids": positions, "attention_mask": None, "use_cache": False, "ulysses_layout": layout}


def _ends(layout: Layout, length: int) -> list[int]:
    """Where the documents of the one row end that begin before `length`; what follows pads to a multiple of ranks."""
    return [0, *(stop for start, stop in layout.of(0) if start < length)]
