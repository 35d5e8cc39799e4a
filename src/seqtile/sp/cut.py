"""Batches that are cut before the model: shards of ranks, and the model's loss of them.

`shard` and `DataShardingCollator`: all ranks of the group get the same samples (sample by `ctx.data_parallel_rank` and
`ctx.data_parallel_size`), make the same batch, and keep their own part of the sequence. Labels are shifted before the
cut, because the label of a shard's last token is in the next shard.

`ShardedDataLoader`: ranks draw different samples, as in data parallelism. In a round every rank of the group draws one
batch, cuts it, and sends each other rank its shard: one gather of who has a batch, and one scatter for each. No rank
ever holds another rank's whole batch. The group then trains on the round's batches one after the other.

`CutBatches`: a model's loss of a shard is its part of the group's loss; `reduce_loss` makes the loss of the parts.
Source: Arctic Long Sequence Training, 4.2 and 4.3.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only

from seqtile.attention.layout import indices
from seqtile.attention.nodes import Nodes
from seqtile.ops.graph import nodes_behind
from seqtile.sp.attention import NAME
from seqtile.sp.groups import SequenceParallel, add_up, device_of
from seqtile.sp.layout import ShardedLayout
from seqtile.sp.sharding_hooks import BATCH_HASH, WHOLE_LENGTH, Forward, ShardingHooks
from seqtile.sp.shards import IGNORED, hash_of_tokens, marked, shards_of

CUTTERS = "sp.shard, sp.DataShardingCollator or sp.ShardedDataLoader"
_BALANCING = {"load_balancing_loss_func", "router_aux_loss_coef"}  # a forward that adds the loss uses these names


class DataShardingCollator:
    """Wraps a Hugging Face collator, and keeps this rank's part of every sequence of its batch.

    It pads sequences to a multiple of the group's size. It adds to the batch: `shift_labels`; global `position_ids` if
    there are none; `num_items_in_batch`, the group's number of labelled tokens, with which a model's loss is exactly
    this rank's part of the group's loss; `batch_hash`, with which the model detects shards of different batches;
    `whole_length` if sequences were padded. `labels` stay. Values without a sequence dimension are kept whole.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], ctx: SequenceParallel):
        self.collator = collator
        self.rank, self.nodes = ctx.rank, ctx.nodes  # not the group, which cannot be sent to a loader's workers

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        return parts_of(self.collator(samples), [self.rank], self.nodes)[0]


def shard(batch: dict[str, Any], ctx: SequenceParallel) -> dict[str, Any]:
    """Returns this rank's part of a whole batch, see `DataShardingCollator`. Raises ValueError for a batch without
    tokens and for a batch that is a shard already."""
    return parts_of(batch, [ctx.rank], ctx.nodes)[0]


def count_items(batches: list[dict[str, Tensor]], ctx: SequenceParallel) -> Tensor:
    """Returns the labelled tokens of an accumulation window, averaged over the data-parallel groups: the
    `num_items_in_batch` for losses that are summed over the window and averaged over the groups.

    `batches` are this rank's shards, with `shift_labels`. One all-reduce.
    """
    counts = torch.stack([(batch["shift_labels"] != IGNORED).sum() for batch in batches])
    total = counts.sum().to(device_of(ctx))
    dist.all_reduce(total)
    return (total * ctx.size / dist.get_world_size()).to(counts.device)  # ranks of one replica count the same labels


def parts_of(batch: dict[str, Any], ranks: Sequence[int], nodes: Nodes) -> list[dict[str, Any]]:
    """Cuts a whole batch into equal parts for all ranks, wherever its documents end, and returns the shards of `ranks`,
    each with position_ids, shift_labels, num_items_in_batch and the batch's hash."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"expected a dict of tensors as batch, got a {type(batch).__name__}")
    if BATCH_HASH in batch:
        raise ValueError(f"this batch is a shard already, expected a whole one: cut it once, by one of {CUTTERS}")
    tokens = batch.get("inputs_embeds") if batch.get("input_ids") is None else batch["input_ids"]
    if tokens is None:
        raise ValueError(f"the batch has {', '.join(batch) or 'nothing'}, expected input_ids or inputs_embeds in it")
    batch, (rows, length) = dict(batch), tokens.shape[:2]
    if "labels" in batch and "shift_labels" not in batch:
        batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    if "shift_labels" in batch and "num_items_in_batch" not in batch:
        batch["num_items_in_batch"] = (batch["shift_labels"] != IGNORED).sum()
    if "position_ids" not in batch:
        batch["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
    batch[BATCH_HASH] = marked(hash_of_tokens(batch, rows, length), nodes)
    if length % nodes.size:
        batch[WHOLE_LENGTH] = torch.tensor(length)
    return shards_of(batch, rows, length, ranks, nodes)


class ShardedDataLoader:
    """Iterates over this rank's shards of the batches of all ranks of the group, in the same order on every rank.

    Args:
        dataloader: yields batches (dicts), different ones on different ranks; ranks may have different numbers of them.
        ctx: the group.
        device: the device of the shards; by default the device that the group's collectives use.

    An epoch has as many steps as the group's loaders together have batches. All data-parallel groups must have the same
    number; a DistributedSampler with drop_last ensures this if the number of groups divides the batches. `state_dict`
    holds the progress. A run that loads it continues with the next step, if the loader's order depends only on torch's
    random state at the start of the epoch, on its generator's state, or on its sampler's epoch.

    Raises ValueError on every rank, without a deadlock, if a rank fails to load or to cut a batch.
    """

    def __init__(
        self, dataloader: Iterable[dict[str, Any]], ctx: SequenceParallel, device: torch.device | str | None = None
    ):
        self.dataloader, self.sp_group, self.device = dataloader, ctx, device or device_of(ctx)
        self.epoch = self.steps = 0
        """The current or next epoch, and the number of its finished steps."""
        self._generator: torch.Generator | None = getattr(dataloader, "generator", None)
        self._start: dict[str, Any] | None = None
        self._resume = False
        try:
            length, self._no_length = len(dataloader), None
        except Exception as error:  # raised when the length is read; the other ranks would wait for this one
            length, self._no_length = None, error
        self._lengths: list[int | None] = [None] * ctx.size
        dist.all_gather_object(self._lengths, length, group=ctx.group)

    def __len__(self) -> int:
        """Returns the steps per epoch, from the dataloaders' lengths when this object was created."""
        if None in self._lengths:
            rank = self._lengths.index(None)
            raise TypeError(
                f"the dataloader of rank {rank} of the group has no len(), expected one with a length on every rank; "
                "iterate without asking for it"
            ) from self._no_length
        return sum(self._lengths)

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch. It starts from its first step, unless a state of this epoch was loaded."""
        if epoch != self.epoch:
            self.epoch, self.steps, self._resume = epoch, 0, False
        sampler = getattr(self.dataloader, "batch_sampler", None)
        for holder in (self.dataloader, getattr(self.dataloader, "sampler", None), getattr(sampler, "sampler", None)):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "steps": self.steps, "start": self._start or self._random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.steps, self._start = state["epoch"], state["steps"], state["start"]
        self._resume = True
        self.set_epoch(self.epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.steps = self.steps if self._resume else 0
        yield from self._shards(self._batches())
        self.epoch, self.steps, self._start = self.epoch + 1, 0, None

    def _random_state(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "loader": self._generator and self._generator.get_state()}

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yields the loader's batches, drawn with the random state at the start of this epoch."""
        resume, self._resume = self._resume, False
        self._start = self._start if resume else self._random_state()
        with torch.random.fork_rng(devices=(), enabled=resume):
            torch.set_rng_state(self._start["torch"])
            if self._generator is not None:
                self._generator.set_state(self._start["loader"])
            batches = iter(self.dataloader)
            first = list(islice(batches, 1))  # samplers draw their order with the first batch
        yield from chain(first, batches)

    def _shards(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields this rank's shards of the batches that the group's ranks draw, round by round, rank by rank, without
        the finished steps. Raises ValueError on every rank if one of them fails to draw or to cut its batch."""
        size, group, skip = self.sp_group.size, self.sp_group.group, self.steps
        while True:
            shards, error, states = None, None, [None] * size
            try:
                if (batch := next(batches, None)) is not None:
                    batch = tree_map_only(Tensor, Tensor.cpu, batch)  # another rank may not have this rank's device
                    shards = parts_of(batch, range(size), self.sp_group.nodes)
            except Exception as failed:  # raised on every rank, after all have been told
                error = failed
            dist.all_gather_object(states, (shards is not None, error and str(error)), group=group)
            for rank, (_, said) in enumerate(states):
                if said is not None:
                    raise ValueError(f"rank {rank} of the group has no batch that can be cut: {said}") from error
            found = [rank for rank, (has_batch, _) in enumerate(states) if has_batch]
            if not found:
                return
            for rank in found[skip:]:
                arrived: list = [None]
                sent = shards if rank == self.sp_group.rank else None
                dist.scatter_object_list(arrived, sent, group=group, group_src=rank)
                self.steps += 1
                yield tree_map_only(Tensor, lambda value: value.to(self.device), arrived[0])
            skip = max(0, skip - len(found))


class CutBatches:
    """Takes each rank's shard of a batch, and returns this rank's part of the loss."""

    takes_whole = False
    expected = (
        f"each rank's shard of the same batch, cut by {CUTTERS}. The ranks of a group draw the same samples (by "
        "ctx.data_parallel_rank of ctx.data_parallel_size), except with sp.ShardedDataLoader; for whole sequences on "
        "every rank call sp.restore(model) first"
    )

    def __init__(self, sharding: ShardingHooks):
        self.sharding = sharding

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Finds the layout. Raises ValueError for labels without the values that a shard's loss needs, and for an
        unknown loss that balances experts."""
        sharding = self.sharding
        sharding.take_chosen_attention()
        balances = kwargs.get("output_router_logits")
        if balances is None:
            balances = getattr(module.config.get_text_config(), "output_router_logits", False)
        sharding.run(Forward(NAME, balance=Balance.of(module) if balances else None))
        missing = [name for name in ("shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
        if missing and sharding.sp_group.size > 1 and _is_labelled(kwargs):
            names = " and ".join(missing)
            raise ValueError(f"labels came without {names}, which a shard's loss needs; cut batches by {CUTTERS}")
        sharding.forward.layout = sharding.layout_of_shards(args, kwargs)
        return args, kwargs

    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Returns the output, a dict or a tuple, with a loss that must be reduced before its backward."""
        sp_group, forward, is_tuple = self.sharding.sp_group, self.sharding.forward, isinstance(output, tuple)
        if sp_group.size == 1:
            return output
        if forward.balance is not None and is_tuple:
            raise ValueError(
                "the loss that balances experts is not found in a tuple; expected return_dict=True over ranks"
            )
        if forward.balance is not None and output.get("aux_loss") is not None:
            counted = _counted(output["router_logits"][0], forward.layout, kwargs.get("attention_mask"))
            forward.balance.over_ranks(output, counted, sp_group)
        loss = output[0] if is_tuple else output.get("loss")
        if not _is_labelled(kwargs) or loss is None or not loss.requires_grad:
            return output
        partial = PartialLossFunction.apply(loss, sp_group.size)
        if is_tuple:
            return (partial, *output[1:])
        output["loss"] = partial
        return output


def _is_labelled(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None


def _counted(router_logits: Tensor, layout: ShardedLayout, mask: Tensor | None) -> Tensor:
    """Returns which of this rank's tokens [B S] with router logits are not padding."""
    places = indices(layout.tokens, router_logits.device)
    inside = places < (layout.length if layout.whole_length is None else layout.whole_length.to(places.device))
    rows = inside.expand(len(router_logits) // layout.local, -1) if mask is None else inside & mask.bool()
    return rows.flatten()


class PartialLossFunction(torch.autograd.Function):
    """Returns the loss of a shard unchanged. Its backward raises RuntimeError unless the gradient comes from what
    `reduce_loss` returned."""

    @staticmethod
    def forward(node, loss: Tensor, size: int) -> Tensor:
        node.size, node.is_reduced = size, False
        return loss.clone()  # a view could not be changed in place, as Trainer does

    @staticmethod
    def backward(node, d_loss: Tensor) -> tuple[Tensor, None]:
        if not node.is_reduced:
            raise RuntimeError(
                f"a rank's partial loss leaves 1/{node.size} of the gradients once ranks average them; expected "
                "loss = sp.reduce_loss(loss, ctx) before loss.backward(), or sp.SequenceParallelTrainerMixin"
            )
        node.is_reduced = False  # so that the next backward of this graph is checked too
        return d_loss, None


def _is_partial(node: Node) -> bool:
    return hasattr(node, "is_reduced")


def reduce_loss(loss: Tensor, ctx: SequenceParallel) -> Tensor:
    """Returns the group's loss, on every rank, from the ranks' partial losses. One all-reduce.

    A partial loss is the sum over a rank's tokens divided by the group's number of labelled tokens. A model computes it
    if it gets `num_items_in_batch` from `DataShardingCollator`. The gradient is multiplied by the size of the group, so
    that a reducer that averages over all ranks (DDP, FSDP2, ZeRO) produces the gradient of one process: the average of
    the data-parallel groups' gradients. With DeepSpeed call `engine.backward(loss, scale_wrt_gas=False)`. Do not call
    `reduce_loss` with Hugging Face's Trainer and the mixin, which scale by themselves. Without it, the backward of a
    partial loss that a model returned raises RuntimeError. Nothing can check this for a loss that you compute from
    logits.
    """
    if loss is None:
        raise ValueError("the model returned no loss: the batch has no labels")
    reduced = loss * ctx.size  # for the gradient; the value is the sum of the ranks' losses
    with torch.no_grad():
        dist.all_reduce(reduced.copy_(loss), group=ctx.group)
    if ctx.size > 1 and reduced.requires_grad:
        partials = list(filter(_is_partial, nodes_behind([reduced.grad_fn], stops=_is_partial)))

        def mark_reduced(d_loss: Tensor) -> None:
            for node in partials:
                node.is_reduced = True

        reduced.register_hook(mark_reduced)
    return reduced


class Balance(NamedTuple):
    """The factor and the experts per token of a model's loss that balances a mixture's experts.

    Hugging Face computes it from the router logits of all layers: experts * sum(f p), where f is the fraction of tokens
    sent to an expert and p the expert's mean probability (Switch Transformer, arXiv:2101.03961, 2.2). Both are means
    over tokens, so ranks exchange only sums over their tokens, [experts] each, and no logits.
    """

    factor: float
    top_k: int

    @classmethod
    def of(cls, model: nn.Module) -> "Balance":
        """Returns the model's balancing loss. ValueError unless its class adds it as Hugging Face's do."""
        forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind)]
        codes = [forward.__code__ for forward in forwards if hasattr(forward, "__code__")]
        config = model.config.get_text_config()
        names = "router_aux_loss_coef", "num_experts_per_tok"
        factor, top_k = (getattr(model, name, getattr(config, name, None)) for name in names)
        if factor is None or top_k is None or not any(set(code.co_names) >= _BALANCING for code in codes):
            raise ValueError(
                "the router's balancing loss of this model is not known; expected output_router_logits=False over ranks"
            )
        return cls(factor, top_k)

    def over_ranks(self, output: Any, counted: Tensor, sp_group: SequenceParallel) -> None:
        """Replaces this rank's balancing loss in a model's output by the loss over all ranks' tokens: `aux_loss` gets
        the whole, `loss` this rank's part. `counted` [B S] is False for padding. One all-reduce."""
        own, whole = output["aux_loss"], self._whole(output["router_logits"], counted, sp_group)
        if output.get("loss") is not None:
            # The value is 1 / size of the whole; the gradient is that of this rank's tokens.
            part = whole - whole.detach() * (1 - 1 / sp_group.size)
            output["loss"] = output["loss"] + self.factor * (part - own)
        output["aux_loss"] = whole.detach()

    def _whole(self, router_logits: tuple[Tensor, ...], counted: Tensor, sp_group: SequenceParallel) -> Tensor:
        experts = router_logits[0].shape[-1]
        chosen, probability = (router_logits[0].new_zeros(experts, dtype=torch.float32) for _ in range(2))
        weight = counted.to(router_logits[0].device, torch.float32)
        for logits in router_logits:
            probabilities = logits.softmax(-1)
            picked = probabilities.detach().topk(self.top_k, -1).indices
            chosen = chosen.scatter_add(0, picked.flatten(), weight.repeat_interleave(self.top_k))
            probability = probability + (probabilities.float() * weight[:, None]).sum(0)
        tokens = weight.sum() * len(router_logits)
        sums = add_up(torch.cat([chosen, probability, tokens[None]]), sp_group)
        of_all = sums[experts:-1] - probability.detach() + probability  # the gradient is that of this rank's tokens
        return experts * (sums[:experts] / sums[-1] * (of_all / sums[-1])).sum()
