"""The hooks that tell a model's layers about a batch whose tokens are sharded over ranks, in the order of a forward:

    model      check_batch        finds the batch's `Layout`, from what the ranks hold
     base      add_layout         adds the `Layout` to the keyword arguments, which Hugging Face passes to every
                                  attention, also in a checkpoint's recomputation
      rotary   add, drop_last_position    tell embeddings that depend on the length what it is
     base      check_layers       checks that every layer has attended
    model      finish             marks the loss, which must be reduced over the ranks before its backward
               forget_layout      drops the `Layout`, also if the forward failed

If the base model is called by itself, add_layout finds the layout.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqtile.ops.state import exchanged
from seqtile.protocols import CHOICE, SHARDED
from seqtile.renamed import cache_in
from seqtile.sp.attention import NAME
from seqtile.sp.balance import Balance
from seqtile.sp.compressed import CompressedKeys, is_latent
from seqtile.sp.groups import ALONE, SequenceParallel, add_up
from seqtile.sp.layout import BATCH_HASH, CUTTERS, LAYOUT, WHOLE_LENGTH, Layout, check_same_batch, layout_of
from seqtile.sp.loss import PartialLossFunction
from seqtile.sp.outside_masks import OUTSIDE
from seqtile.sp.recurrence import Recurrence, is_recurrence


class ShardingHooks:
    """The hooks on a model, its base model and their rotary embeddings, for batches that were cut."""

    takes_whole = False
    """See `seqtile.protocols.ShardedSequences`."""
    of_forward = "layout last_position"
    """The attributes that belong to the running forward."""
    expected = (
        f"each rank's shard of the same batch, cut by {CUTTERS}. The ranks of a group draw the same samples (by "
        "ctx.data_parallel_rank of ctx.data_parallel_size), except with sp.ShardedDataLoader; for whole sequences on "
        "every rank call sp.restore(model) first"
    )
    """The expected batch, for error messages."""

    def __init__(self, given: PreTrainedModel, model: PreTrainedModel, sp_group: SequenceParallel, layers: int):
        self.given, self.model, self.sp_group = given, model, sp_group
        """The given model; the model whose forward is computed over ranks: the given one, or a part of it."""
        self.layers = layers
        """The number of modules that mix tokens."""
        self.implementation = model.config._attn_implementation
        """The attention that computes a rank's heads: the model's own, or the one chosen since."""
        self.layout: Layout | None = None
        """The layout of the running forward; None between forwards, also after a failed one."""
        self.last_position = 0
        """The last position of whole sequences in the running forward of the base model."""
        self.min_tokens: int | None = None
        """The shortest prefix that rows share and that is computed once; None: each row is computed by itself."""
        self.last_batch: tuple[int, int, str | None] = 0, 0, None
        """Of the last batch: its tokens, how many of them were saved by sharing, and why none was."""
        self.replaced: list[Recurrence | CompressedKeys] = []
        """The replaced functions of layers."""
        self.is_whole = False
        """True if the running forward is not cut: it has a cache, or no prefix is shared."""
        base = model.base_model
        for module in given.modules():
            if base in module.modules():  # it may be called by itself
                setattr(module, SHARDED, self)
        self.handles = [
            model.register_forward_pre_hook(self.check_batch, with_kwargs=True),
            model.register_forward_hook(partial(self._if_cut, self.finish), with_kwargs=True, prepend=self.takes_whole),
            model.register_forward_hook(self.forget_layout, always_call=True),
            base.register_forward_pre_hook(partial(self._if_cut, self.add_layout), with_kwargs=True),
            base.register_forward_hook(self.check_layers, with_kwargs=True),
        ]
        for module in model.modules():
            if is_recurrence(module):
                module.forward = Recurrence(module, sp_group is ALONE)
                self.replaced.append(module.forward)
            if is_latent(module):
                module.expand_kv = CompressedKeys(module, sp_group)
                self.replaced.append(module.expand_kv)
            kinds = str(getattr(module, "rope_type", ""))  # a name, or one per type of layer
            if "dynamic" in kinds or "longrope" in kinds:
                before, after = (partial(self._if_cut, x) for x in (self.add_last_position, self.drop_last_position))
                self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self.handles.append(module.register_forward_hook(after))
        self.at_rest = NAME
        """The name of the model's attention between two forwards."""
        self._use_attention()

    def _if_cut(self, hook: Callable[..., Any], *given: Any) -> Any:
        """Calls a hook, except in a forward that is not cut."""
        return None if self.is_whole else hook(*given)

    def _use_attention(self) -> None:
        self.model.config._attn_implementation = self.at_rest

    def take_chosen_attention(self) -> None:
        """Takes the attention that `set_attn_implementation` chose between two forwards."""
        chosen = self.model.config._attn_implementation
        is_of_forward = chosen in (NAME, OUTSIDE, self.at_rest) or (self.takes_whole and chosen == self.implementation)
        if not is_of_forward:
            self.implementation = chosen
            self._use_attention()

    def remove(self) -> None:
        """Removes the hooks."""
        self.take_chosen_attention()
        for handle in self.handles:
            handle.remove()
        for module in self.given.modules():
            vars(module).pop(SHARDED, None)
        for module in self.model.modules():
            for name, kind in (("forward", Recurrence), ("expand_kv", CompressedKeys)):
                if isinstance(vars(module).get(name), kind):
                    delattr(module, name)
        self.model.config._attn_implementation = self.implementation

    @property
    def shared_prefixes(self) -> tuple[int, int, int, str | None] | None:
        """See `seqtile.protocols.ShardedSequences`."""
        return None if self.min_tokens is None else (self.min_tokens, *self.last_batch)

    def stop_sharing_prefixes(self) -> None:
        """See `seqtile.protocols.ShardedSequences`."""

    @contextmanager
    def other_batch(self, before: Callable[[], None]) -> Iterator[None]:
        """See `seqtile.protocols.ShardedSequences`."""
        held = {name: getattr(self, name) for name in self.of_forward.split()}
        implementation = self.model.config._attn_implementation  # a forward may be about to make its masks with it
        self.forget_batch()
        try:
            with exchanged([(vars(self.sp_group), "before", before)]):
                yield
        finally:
            vars(self).update(held)
            self.model.config._attn_implementation = implementation

    def forget_batch(self) -> None:
        """Forgets what is known of the running forward's batch."""
        self.layout = None

    def averaged(self, gradient: Tensor) -> Tensor:
        """See `seqtile.protocols.ShardedSequences`."""
        return add_up(gradient, self.sp_group) / self.sp_group.size

    def check_batch(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Finds the layout. Raises ValueError for labels without the values that a shard's loss needs."""
        self.take_chosen_attention()
        missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
        if missing and self.sp_group.size > 1 and _labelled(kwargs):
            names = " and ".join(missing)
            raise ValueError(f"labels came without {names}, which a shard's loss needs; cut batches by {CUTTERS}")
        self.layout = self._layout(args, kwargs)
        return args, kwargs

    def _layout(self, args: tuple, kwargs: dict[str, Any]) -> Layout:
        """Returns the layout of a forward's batch, and removes the shard's extra values from the keyword arguments.
        Raises ValueError on every rank if the batch is no shard, or a shard of another batch."""
        batch_hash, whole_length = (kwargs.pop(name, None) for name in (BATCH_HASH, WHOLE_LENGTH))
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = ids if ids is not None else kwargs.get("inputs_embeds")
        if tokens is None or len(args) > 1:
            raise ValueError("over ranks pass input_ids or inputs_embeds, and the rest by keyword")
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None and self.sp_group.size == 1:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        _check_shard(kwargs, *tokens.shape[:2])
        last_position = self._same_batch(tokens, kwargs | {"position_ids": positions}, batch_hash)
        layout = self._layout_of(tokens.shape[1], positions, mask)
        layout.position_ids, layout.mask = positions, mask
        layout.whole_length, layout.last_position = whole_length, last_position
        if (lengths := kwargs.get("cu_seq_lens_q")) is not None:
            lengths = lengths.tolist()  # documents after the last length are padding
            if lengths != [0, *(stop for start, stop in layout.documents[0] if start < lengths[-1])]:
                raise ValueError("cu_seq_lens_q tells other documents than position_ids, which have to tell them here")
        return layout

    def _layout_of(self, local: int, positions: Tensor, mask: Tensor | None) -> Layout:
        return layout_of(local, positions, mask, self.sp_group, self.implementation)

    def _same_batch(self, tokens: Tensor, kwargs: dict[str, Any], batch_hash: Tensor | None) -> int:
        return check_same_batch(tokens, kwargs, batch_hash, self.sp_group, self.expected, self.choices())

    def choices(self) -> dict[str, str]:
        """Returns in which way each module computes that sends something else in another way."""
        found = {}
        for name, module in self.model.named_modules() if self.sp_group.size > 1 else ():
            if (choice := getattr(module.forward, CHOICE, None)) is not None:
                found[name] = choice(module)
            if isinstance(keys := vars(module).get("expand_kv"), CompressedKeys):
                found[name] = "with compressed keys" if keys.is_chosen else "with keys by heads"
        return found

    def add_layout(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives the base model the whole sequences' layout and global position_ids."""
        layout = self.layout
        if layout is None or layout.attended:  # called by itself, or again
            layout = self._layout(args, kwargs)
        self.last_position = layout.last_position
        if kwargs.get("output_router_logits") and not self.takes_whole:  # else the model around it computes that loss
            layout.balance = Balance.of(self.model)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = layout.position_ids
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):  # describe whole sequences
            kwargs.pop(name, None)
        return args, kwargs | {"attention_mask": None, "use_cache": False, LAYOUT: layout}

    def add_last_position(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives a rotary embedding the last position of the whole sequence in addition to this rank's positions."""
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        last = positions.new_full((*positions.shape[:-1], 1), self.last_position)
        return args[:1], kwargs | {"position_ids": torch.cat([positions, last], -1)}

    def drop_last_position(self, module: nn.Module, args: tuple, output: tuple) -> tuple:
        """Returns cos and sin without that position."""
        return tuple(values[..., :-1, :] for values in output)

    def check_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Raises ValueError if a layer mixed tokens in another way."""
        if LAYOUT in kwargs and (found := len(kwargs[LAYOUT].attended)) < self.layers:
            raise ValueError(f"{found} of {self.layers} layers attended over the whole sequence; leave it whole")

    def finish(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Returns the output, a dict or a tuple, with a loss that must be reduced before its backward."""
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
        """Drops the layout when the forward ends."""
        self.layout = None


def _labelled(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None


def _check_shard(kwargs: dict[str, Any], batch: int, local: int) -> None:
    """Raises ValueError for arguments that do not belong to a shard [batch, local]."""
    if cache_in(kwargs) is not None or kwargs.get("use_cache"):
        raise ValueError("a cache is not sharded over ranks: use_cache=False, or sp.restore(model) before generating")
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    expected = "expected this rank's shard of it"
    if positions is not None and positions.shape[-1] != local:
        raise ValueError(f"position_ids is {list(positions.shape)} for {local} tokens, {expected}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (batch, local)):
        kind = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {kind}, {expected}, {[batch, local]}")
