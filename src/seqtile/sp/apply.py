"""Sequence parallelism applied to one model, its loss over the ranks, and the model put back.

`apply_ulysses` gives the model an attention by name, through Hugging Face's registry, and recurrent layers the forward
of recurrence.py. Its hooks, in the order in which a forward meets them:

    model      check_batch        keeps the batch's hash, which layers are not given
      base     add_layout         the `Layout` joins the keyword arguments, which Hugging Face passes to every
                                  attention, also in a checkpoint's recomputation
        rotary add, drop_last_position    tell embeddings that depend on the length what it is
      base     check_layers       every layer has attended
    model      guard_loss         the loss is to be reduced over the ranks before its backward
               forget_batch       what check_batch kept is dropped, also where the forward failed

Source: Arctic Long Sequence Training, 3.2 and 4.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.protocols import SHARDED
from seqtile.sp.attention import NAME, ulysses_attention
from seqtile.sp.balance import Balance
from seqtile.sp.compressed import CompressedKeys, is_latent
from seqtile.sp.groups import SequenceParallel
from seqtile.sp.layout import BATCH_HASH, CUTTERS, WHOLE_LENGTH, check_same_batch, layout_of
from seqtile.sp.recurrence import BY_TOKEN, Recurrence, is_known, is_recurrence, mixers

_APPLIED = SHARDED  # on a model: what was applied to it
_BY_KEYWORD = "under sequence parallelism pass input_ids or inputs_embeds, and the rest by keyword"
_ATTENTIONS = {"full_attention", "sliding_attention"}  # kinds of layers that mix tokens in attention alone
_RECURRENCES = {"linear_attention", "hybrid", "conv"}  # in a recurrence or a convolution, too


def apply_ulysses(model: PreTrainedModel, ctx: SequenceParallel) -> None:
    """Shards the sequences of this model, which may be in PEFT's wrapper, over the ranks of `ctx`. Applying twice
    changes nothing.

    Every forward then takes shards: `input_ids` [B, S / size], the shards of `position_ids` and, where rows are padded,
    of `attention_mask`, as `DataShardingCollator` cuts them. It raises ValueError, on every rank, where the ranks of a
    group are given other samples each, or whole sequences. The loss that it returns is this rank's share, whose
    backward raises RuntimeError unless it went through `reduce_loss`.

    Raises ValueError, and changes nothing, for a model whose tokens meet in anything but an attention of Hugging Face's
    interface and the layers of recurrence.py, and TypeError for anything but a Hugging Face model.
    """
    model = _without_adapter(model)
    if (applied := getattr(model, _APPLIED, None)) is not None:
        if applied.ctx is not ctx:
            raise ValueError("this model is sharded over other ranks already: sp.restore(model) first")
        return
    implementation = model.config._attn_implementation
    _check(model, implementation)
    AttentionInterface.register(NAME, ulysses_attention)
    model.set_attn_implementation(NAME)
    layers = len(mixers(model)) if is_recurrent(model) else model.config.get_text_config().num_hidden_layers
    applied = Applied(ctx, implementation, layers)
    applied.hook(model)
    setattr(model, _APPLIED, applied)


def restore(model: PreTrainedModel) -> None:
    """Takes `apply_ulysses` back, of the model that it was given; any other model it leaves as it is. What
    `apply_seqtile` did stays, see `seqtile.restore`. Raises TypeError for anything but a Hugging Face model."""
    model = _without_adapter(model)
    if (applied := vars(model).pop(_APPLIED, None)) is not None:
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


def _check(model: PreTrainedModel, implementation: str) -> None:
    """Raises ValueError for a model that cannot be sharded over ranks."""
    name, config = type(model).__name__, model.config.get_text_config()
    known = ("eager", *(name for name in ALL_ATTENTION_FUNCTIONS if not name.startswith("paged|")))
    if implementation not in known:
        expected = f"expected one of {', '.join(known)}; model.set_attn_implementation(...) first"
        raise ValueError(f"the model's attention is {implementation!r}, {expected}")
    modules = list(model.modules())
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted({type(x).__name__ for x in mixers(model) if not is_known(x)}) if is_recurrent(model) else []
    others = sorted(kinds - _ATTENTIONS - _RECURRENCES - BY_TOKEN)
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


@dataclass
class Batch:
    """What a forward of the model was called with, for the hooks of its base model and for those at its end."""

    batch_hash: Tensor | None = None
    position_ids: Tensor | None = None
    """This rank's, which a model without attention does not hand on to its base model."""
    mask: Tensor | None = None
    """This rank's shard of the attention mask."""
    whole_length: Tensor | None = None
    """Tokens of a sequence before it was padded to be cut, if it was."""
    balance: Balance | None = None
    has_balance: bool = False
    """True if it is asked for."""
    shape: tuple[int, int] = (0, 0)
    """The batch's rows, and its tokens on this rank."""

    def counted(self, ctx: SequenceParallel, device: torch.device) -> Tensor:
        """Returns which of this rank's tokens [B, S] are no padding."""
        batch, local = self.shape
        places = torch.arange(ctx.rank * local, (ctx.rank + 1) * local, device=device)
        inside = places < (ctx.size * local if self.whole_length is None else self.whole_length.to(device))
        return inside.expand(batch, -1) if self.mask is None else inside & self.mask.bool()


@dataclass
class Applied:
    """The hooks that were applied to a model, and what they tell one another in a forward."""

    ctx: SequenceParallel
    implementation: str
    """The attention that was there."""
    layers: int
    """How many modules tokens meet in."""
    handles: list[RemovableHandle] = field(default_factory=list)
    batch: Batch | None = None
    """Of the model's forward that runs; None between two, also after one that failed."""
    last_position: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64, device="cpu"))
    """The last position of the whole sequences; on the host, where reading it is free."""

    def hook(self, model: PreTrainedModel) -> None:
        """Registers the hooks on a model, its base model and their rotary embeddings."""
        base = model.base_model
        for module in [module for module in model.modules() if is_recurrence(module)]:
            module.forward = Recurrence(module)
        for module in [module for module in model.modules() if is_latent(module)]:
            module.expand_kv = CompressedKeys(module, self.ctx)
        self.handles += [
            model.register_forward_pre_hook(self.check_batch, with_kwargs=True),
            model.register_forward_hook(self.guard_loss, with_kwargs=True),
            model.register_forward_hook(self.forget_batch, always_call=True),
            base.register_forward_pre_hook(self.add_layout, with_kwargs=True),
            base.register_forward_hook(self.check_layers, with_kwargs=True),
        ]
        for module in base.modules():
            kinds = str(getattr(module, "rope_type", ""))  # a name, or one for each kind of layers
            if "dynamic" in kinds or "longrope" in kinds:
                self.handles.append(module.register_forward_pre_hook(self.add_last_position, with_kwargs=True))
                self.handles.append(module.register_forward_hook(self.drop_last_position))

    def check_batch(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Keeps what the hooks below need to know, and refuses labels of which a shard's loss cannot be computed."""
        missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
        if len(args) > 1:
            raise ValueError(_BY_KEYWORD)
        if missing and self.ctx.size > 1 and _labelled(kwargs):
            names = " and ".join(missing)
            raise ValueError(f"labels came without {names}, which a shard's loss needs; cut batches by {CUTTERS}")
        self.batch = Batch(
            kwargs.pop(BATCH_HASH, None),
            kwargs.get("position_ids"),
            kwargs.get("attention_mask"),
            kwargs.pop(WHOLE_LENGTH, None),
            Balance.of(module),
        )
        return args, kwargs

    @contextmanager
    def other_batch(self) -> Iterator[None]:
        """See `seqtile.protocols.ShardedSequences`."""
        held, last = self.batch, int(self.last_position)
        self.batch = Batch(balance=None if held is None else held.balance)
        try:
            yield
        finally:
            self.batch = held
            self.last_position.fill_(last)

    def add_layout(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives the base model the whole sequences' layout, and global position_ids."""
        batch = self.batch or Batch()  # the base model may be called by itself
        batch_hash, batch.batch_hash = kwargs.pop(BATCH_HASH, batch.batch_hash), None
        positions, batch.position_ids = batch.position_ids, None
        if kwargs.get("position_ids") is None and positions is not None:
            kwargs["position_ids"] = positions
        kwargs.pop(WHOLE_LENGTH, None)
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = ids if ids is not None else kwargs.get("inputs_embeds")
        if tokens is None or len(args) > 1:
            raise ValueError(_BY_KEYWORD)
        _check_shard(kwargs, *tokens.shape[:2])
        batch.shape = tokens.shape[0], tokens.shape[1]
        batch.has_balance = bool(kwargs.get("output_router_logits"))
        if batch.has_balance and batch.balance is None:
            raise ValueError(
                "the router's balancing loss of this model is not known; expected output_router_logits=False over ranks"
            )
        if kwargs.get("position_ids") is None and self.ctx.size == 1:
            kwargs["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        last = check_same_batch(tokens, kwargs, batch_hash, self.ctx)
        sharded = (tokens.shape[1], kwargs["position_ids"], kwargs.get("attention_mask"))
        layout = layout_of(*sharded, self.ctx, self.implementation)
        if (lengths := kwargs.get("cu_seq_lens_q")) is not None:
            length = int(lengths[-1])  # what follows pads to a multiple of ranks
            if lengths.tolist() != [0, *(stop for start, stop in layout.of_row(0) if start < length)]:
                raise ValueError("cu_seq_lens_q tells other documents than position_ids, which have to tell them here")
        self.last_position.fill_(last)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):  # of whole sequences
            kwargs.pop(name, None)
        return args, kwargs | {"attention_mask": None, "use_cache": False, "ulysses_layout": layout}

    def add_last_position(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives a rotary embedding the last position of the whole sequence besides this rank's."""
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        last = positions.new_full((*positions.shape[:-1], 1), int(self.last_position))
        return args[:1], kwargs | {"position_ids": torch.cat([positions, last], -1)}

    def drop_last_position(self, module: nn.Module, args: tuple, output: tuple) -> tuple:
        """Returns cos and sin without that position."""
        return tuple(values[..., :-1, :] for values in output)

    def check_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Raises ValueError if a layer mixed tokens in another way."""
        if (found := len(kwargs["ulysses_layout"].attended)) < self.layers:
            raise ValueError(f"{found} of {self.layers} layers attended over the whole sequence; leave it whole")

    def guard_loss(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Returns the output, a dict or a tuple, with a loss that has to be reduced before its backward."""
        batch = self.batch
        if self.ctx.size > 1 and batch.has_balance and isinstance(output, tuple):
            raise ValueError(
                "the loss that balances experts is not found in a tuple; expected return_dict=True over ranks"
            )
        if self.ctx.size > 1 and batch.has_balance and output.get("aux_loss") is not None:
            counted = batch.counted(self.ctx, output["router_logits"][0].device)
            batch.balance.over_ranks(output, counted, self.ctx)
        loss = output[0] if isinstance(output, tuple) else output.get("loss")
        if self.ctx.size == 1 or not _labelled(kwargs) or loss is None or not loss.requires_grad:
            return output
        share = LossShareFunction.apply(loss, self.ctx.size)
        if isinstance(output, tuple):
            return (share, *output[1:])
        output["loss"] = share
        return output

    def forget_batch(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Drops what was kept of the batch, also where the forward failed."""
        self.batch = None


def _labelled(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None


def _check_shard(kwargs: dict[str, Any], batch: int, local: int) -> None:
    """Raises ValueError for arguments of the base model that are not of a shard [batch, local]."""
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError("a cache is not sharded over ranks: use_cache=False, or sp.restore(model) before generating")
    positions, mask, expected = (
        kwargs.get("position_ids"),
        kwargs.get("attention_mask"),
        "expected this rank's shard of it",
    )
    if positions is not None and positions.shape[-1] != local:
        raise ValueError(f"position_ids is {list(positions.shape)} for {local} tokens, {expected}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (batch, local)):
        kind = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {kind}, {expected}, {[batch, local]}")


class LossShareFunction(torch.autograd.Function):
    """The loss of a shard, as it is. Its backward raises RuntimeError, unless the gradient comes from a loss that
    `allow_backward` was given."""

    @staticmethod
    def forward(ctx, loss: Tensor, size: int) -> Tensor:
        ctx.size, ctx.is_reduced = size, False
        return loss.clone()  # a view could not be changed in place, as Trainer does

    @staticmethod
    def backward(ctx, d_loss: Tensor) -> tuple[Tensor, None]:
        if not ctx.is_reduced:
            raise RuntimeError(
                f"a share of the loss leaves 1/{ctx.size} of the gradients once ranks average them; expected "
                "loss = sp.reduce_loss(loss, ctx) before loss.backward(), or sp.SequenceParallelTrainerMixin"
            )
        ctx.is_reduced = False  # the next backward of this graph has to come the same way
        return d_loss, None


def allow_backward(loss: Tensor, ctx: SequenceParallel) -> Tensor:
    """Returns `loss`, whose gradient may go to the shares that it was computed from: it is scaled by the size of the
    group."""
    if ctx.size == 1 or not loss.requires_grad:
        return loss
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [] if hasattr(node, "is_reduced") else [before for before, _ in node.next_functions]
    shares = [node for node in seen if hasattr(node, "is_reduced")]

    def let(d_loss: Tensor) -> None:
        for share in shares:
            share.is_reduced = True

    loss.register_hook(let)
    return loss


class ReduceLossFunction(torch.autograd.Function):
    """The sum of the ranks' losses; its gradient is multiplied by the size of the group."""

    @staticmethod
    def forward(ctx, loss: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.size = size
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, d_total: Tensor) -> tuple[Tensor, None, None]:
        return d_total * ctx.size, None, None


def reduce_loss(loss: Tensor, ctx: SequenceParallel) -> Tensor:
    """Returns the group's loss, on every rank, from the ranks' shares of it. One all-reduce.

    A share is what a rank's tokens add to the loss: their sum divided by the group's number of labelled tokens, as a
    model computes it that is given `num_items_in_batch` by `DataShardingCollator`. Its gradient is multiplied by the
    size of the group, so that a reducer that averages over all ranks (DDP, FSDP2, ZeRO) ends with the gradient that
    one process would have: the average over data-parallel groups of their groups' gradients. A DeepSpeed engine is told
    `backward(loss, scale_wrt_gas=False)`. Hugging Face's Trainer scales by itself: with its mixin, this is not called.
    The backward of a share that a model returned and that did not come here raises RuntimeError; of a share that is
    computed from logits by hand nobody can tell.
    """
    if loss is None:
        raise ValueError("the model returned no loss: the batch has no labels")
    return allow_backward(ReduceLossFunction.apply(loss, ctx.group, ctx.size), ctx)
