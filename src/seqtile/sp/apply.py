"""Sequence parallelism applied to one model, and the model put back.

`apply_ulysses` gives the model an attention by name, through Hugging Face's registry, and recurrent layers the forward
of recurrence.py. Its hooks, in the order in which a forward meets them:

    model      check_batch        finds the batch's `Layout`, from what the ranks hold
      base     add_layout         the `Layout` joins the keyword arguments, which Hugging Face passes to every
                                  attention, also in a checkpoint's recomputation
        rotary add, drop_last_position    tell embeddings that depend on the length what it is
      base     check_layers       every layer has attended
    model      guard_loss         the loss is to be reduced over the ranks before its backward
               forget_layout      the hooks let go of the `Layout`, also where the forward failed

A base model that is called by itself finds the layout in add_layout.

Source: Arctic Long Sequence Training, 3.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.protocols import SHARDED
from seqtile.sp.attention import NAME, ulysses_attention
from seqtile.sp.balance import Balance
from seqtile.sp.compressed import CompressedKeys, is_latent
from seqtile.sp.groups import SequenceParallel
from seqtile.sp.layout import BATCH_HASH, CUTTERS, LAYOUT, WHOLE_LENGTH, Layout, check_same_batch, layout_of
from seqtile.sp.loss import PartialLossFunction
from seqtile.sp.recurrence import BY_TOKEN, Recurrence, is_known, is_recurrence, mixers

_ATTENTIONS = {"full_attention", "sliding_attention"}  # kinds of layers that mix tokens in attention alone
_RECURRENCES = {"linear_attention", "hybrid", "conv"}  # in a recurrence or a convolution, too


def apply_ulysses(model: PreTrainedModel, ctx: SequenceParallel) -> None:
    """Shards the sequences of this model, which may be in PEFT's wrapper, over the ranks of `ctx`. Applying twice
    changes nothing.

    Every forward then takes shards: `input_ids` [B, S / size], the shards of `position_ids` and, where rows are padded,
    of `attention_mask`, as `DataShardingCollator` cuts them. It raises ValueError, on every rank, where the ranks of a
    group are given other samples each, or whole sequences. The loss that it returns is this rank's part, whose
    backward raises RuntimeError unless it went through `reduce_loss`.

    Raises ValueError, and changes nothing, for a model whose tokens meet in anything but an attention of Hugging Face's
    interface and the layers of recurrence.py, and TypeError for anything but a Hugging Face model.
    """
    model = _without_adapter(model)
    if (applied := getattr(model, SHARDED, None)) is not None:
        if applied.sp_group is not ctx:
            raise ValueError("this model is sharded over other ranks already: sp.restore(model) first")
        return
    recurrent = mixers(model) if is_recurrent(model) else []
    _check(model, recurrent)
    AttentionInterface.register(NAME, ulysses_attention)
    layers = len(recurrent) or model.config.get_text_config().num_hidden_layers
    setattr(model, SHARDED, ShardingHooks(model, ctx, layers))
    model.set_attn_implementation(NAME)


def restore(model: PreTrainedModel) -> None:
    """Takes `apply_ulysses` back, of the model that it was given; any other model it leaves as it is. What
    `apply_seqtile` did stays, see `seqtile.restore`. Raises TypeError for anything but a Hugging Face model."""
    model = _without_adapter(model)
    if (applied := vars(model).pop(SHARDED, None)) is not None:
        for handle in applied.handles:
            handle.remove()
        for module in model.modules():
            if isinstance(vars(module).get("forward"), Recurrence):
                del module.forward
            if isinstance(vars(module).get("expand_kv"), CompressedKeys):
                del module.expand_kv
        model.set_attn_implementation(applied.implementation)


def _without_adapter(model: nn.Module) -> nn.Module:
    """Returns the model in PEFT's wrapper. Raises ValueError for an adapter that adds tokens, TypeError for what is no
    model of Hugging Face's."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("an adapter that puts tokens before a sequence would put them before every shard")
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a Hugging Face model, got a {type(model).__name__}; of a wrapper pass its .module")
    return model


def is_recurrent(model: PreTrainedModel) -> bool:
    """Says if tokens meet in more than attention."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    stateful = bool(kinds & _RECURRENCES) or getattr(model, "_is_stateful", False)
    return stateful or any(map(is_recurrence, model.modules()))


def _check(model: PreTrainedModel, recurrent: list[nn.Module]) -> None:
    """Raises ValueError for a model that cannot be sharded over ranks; `recurrent` are the modules in which the tokens
    of one with recurrences meet."""
    name, config, modules = type(model).__name__, model.config.get_text_config(), list(model.modules())
    known = ("eager", *(name for name in ALL_ATTENTION_FUNCTIONS if not name.startswith("paged|")))
    if (implementation := model.config._attn_implementation) not in known:
        expected = f"expected one of {', '.join(known)}; model.set_attn_implementation(...) first"
        raise ValueError(f"the model's attention is {implementation!r}, {expected}")
    unknown = sorted({type(module).__name__ for module in recurrent if not is_known(module)})
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTIONS - _RECURRENCES - BY_TOKEN)
    others += ["an encoder"] if config.is_encoder_decoder else []
    others += [f"{', '.join(unknown)}, whose recurrence is not known"] if unknown else []
    refused = {
        f"{name} has {', '.join(others)}": others,
        f"{name} makes its own position_ids": any(hasattr(x, "create_position_ids_from_input_ids") for x in modules),
        f"the attention of {name} is not causal": {getattr(x, "is_causal", None) for x in modules} - {None} == {False},
        f"{name} does not take its attention from AttentionInterface": not model._can_set_attn_implementation(),
    }
    if found := [what for what, is_so in refused.items() if is_so]:
        expected = "expected causal attention, full or with a window, or a known recurrence; leave this model whole"
        raise ValueError(f"{found[0]}, {expected}")


class ShardingHooks:
    """The hooks that are put on a model, its base model and their rotary embeddings."""

    def __init__(self, model: PreTrainedModel, sp_group: SequenceParallel, layers: int):
        self.model, self.sp_group = model, sp_group
        self.layers = layers
        """How many modules tokens meet in."""
        self.implementation = model.config._attn_implementation
        """The attention that was there."""
        self.layout: Layout | None = None
        """Of the model's forward that runs; None between two, also after one that failed."""
        self.last_position = 0
        """Of whole sequences, in the base model's forward that runs."""
        base = model.base_model
        self.handles = [
            model.register_forward_pre_hook(self.check_batch, with_kwargs=True),
            model.register_forward_hook(self.guard_loss, with_kwargs=True),
            model.register_forward_hook(self.forget_layout, always_call=True),
            base.register_forward_pre_hook(self.add_layout, with_kwargs=True),
            base.register_forward_hook(self.check_layers, with_kwargs=True),
        ]
        for module in model.modules():
            if is_recurrence(module):
                module.forward = Recurrence(module)
            if is_latent(module):
                module.expand_kv = CompressedKeys(module, sp_group)
            kinds = str(getattr(module, "rope_type", ""))  # a name, or one for each kind of layers
            if "dynamic" in kinds or "longrope" in kinds:
                self.handles.append(module.register_forward_pre_hook(self.add_last_position, with_kwargs=True))
                self.handles.append(module.register_forward_hook(self.drop_last_position))

    @contextmanager
    def other_batch(self) -> Iterator[None]:
        """See `seqtile.protocols.ShardedSequences`."""
        held, self.layout = self.layout, None
        try:
            yield
        finally:
            self.layout = held

    def check_batch(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Finds the layout, and refuses labels of which a shard's loss cannot be computed."""
        missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
        if missing and self.sp_group.size > 1 and _labelled(kwargs):
            names = " and ".join(missing)
            raise ValueError(f"labels came without {names}, which a shard's loss needs; cut batches by {CUTTERS}")
        self.layout = self._layout(args, kwargs)
        return args, kwargs

    def _layout(self, args: tuple, kwargs: dict[str, Any]) -> Layout:
        """Returns the layout of the batch that a forward is called with, and takes what it tells of the shards out of
        the keyword arguments. Raises ValueError, on every rank, for what is no shard, or of another batch."""
        batch_hash, whole_length = (kwargs.pop(name, None) for name in (BATCH_HASH, WHOLE_LENGTH))
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = ids if ids is not None else kwargs.get("inputs_embeds")
        if tokens is None or len(args) > 1:
            raise ValueError("over ranks pass input_ids or inputs_embeds, and the rest by keyword")
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None and self.sp_group.size == 1:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        _check_shard(kwargs, *tokens.shape[:2])
        last_position = check_same_batch(tokens, kwargs | {"position_ids": positions}, batch_hash, self.sp_group)
        layout = layout_of(tokens.shape[1], positions, mask, self.sp_group, self.implementation)
        layout.position_ids, layout.mask = positions, mask
        layout.whole_length, layout.last_position = whole_length, last_position
        if (lengths := kwargs.get("cu_seq_lens_q")) is not None:
            lengths = lengths.tolist()  # what follows pads to a multiple of ranks
            if lengths != [0, *(stop for start, stop in layout.documents[0] if start < lengths[-1])]:
                raise ValueError("cu_seq_lens_q tells other documents than position_ids, which have to tell them here")
        return layout

    def add_layout(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives the base model the whole sequences' layout, and global position_ids."""
        layout = self.layout
        if layout is None or layout.attended:  # called by itself, or once more
            layout = self._layout(args, kwargs)
        self.last_position = layout.last_position
        layout.balance = Balance.of(self.model) if kwargs.get("output_router_logits") else None
        if kwargs.get("output_router_logits") and layout.balance is None:
            raise ValueError(
                "the router's balancing loss of this model is not known; expected output_router_logits=False over ranks"
            )
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = layout.position_ids
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):  # of whole sequences
            kwargs.pop(name, None)
        return args, kwargs | {"attention_mask": None, "use_cache": False, LAYOUT: layout}

    def add_last_position(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives a rotary embedding the last position of the whole sequence besides this rank's."""
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        last = positions.new_full((*positions.shape[:-1], 1), self.last_position)
        return args[:1], kwargs | {"position_ids": torch.cat([positions, last], -1)}

    def drop_last_position(self, module: nn.Module, args: tuple, output: tuple) -> tuple:
        """Returns cos and sin without that position."""
        return tuple(values[..., :-1, :] for values in output)

    def check_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Raises ValueError if a layer mixed tokens in another way."""
        if (found := len(kwargs[LAYOUT].attended)) < self.layers:
            raise ValueError(f"{found} of {self.layers} layers attended over the whole sequence; leave it whole")

    def guard_loss(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Returns the output, a dict or a tuple, with a loss that has to be reduced before its backward."""
        size, balance, is_tuple = self.sp_group.size, self.layout.balance, isinstance(output, tuple)
        if size == 1:
            return output
        if balance is not None and is_tuple:
            raise ValueError(
                "the loss that balances experts is not found in a tuple; expected return_dict=True over ranks"
            )
        if balance is not None and output.get("aux_loss") is not None:
            balance.over_ranks(output, self.layout.counted(output["router_logits"][0]), self.sp_group)
        loss = output[0] if is_tuple else output.get("loss")
        if not _labelled(kwargs) or loss is None or not loss.requires_grad:
            return output
        partial = PartialLossFunction.apply(loss, size)
        if is_tuple:
            return (partial, *output[1:])
        output["loss"] = partial
        return output

    def forget_layout(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Lets go of the layout that was found for the model's forward."""
        self.layout = None


def _labelled(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None


def _check_shard(kwargs: dict[str, Any], batch: int, local: int) -> None:
    """Raises ValueError for arguments that are not of a shard [batch, local]."""
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError("a cache is not sharded over ranks: use_cache=False, or sp.restore(model) before generating")
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    expected = "expected this rank's shard of it"
    if positions is not None and positions.shape[-1] != local:
        raise ValueError(f"position_ids is {list(positions.shape)} for {local} tokens, {expected}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (batch, local)):
        kind = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {kind}, {expected}, {[batch, local]}")
