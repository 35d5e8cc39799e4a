"""The hooks that tell a model's layers about a batch whose tokens are sharded over ranks, in the order of a forward:

    model      batches.enter      finds the batch's `ShardedLayout`: `CutBatches` from the shards of the ranks,
                                  `WholeBatches` from the batch, which it cuts
     base      add_layout         adds the `ShardedLayout` to the keyword arguments, which Hugging Face passes to every
                                  attention, also in a checkpoint's recomputation
      rotary   add, drop_last_position    tell embeddings that depend on the length what it is
     base      check_layers       checks that every layer has attended
    model      batches.leave      makes the output of this rank's tokens what the code around the model expects
               forget             drops what is known of the forward, also if it failed

If the base model is called by itself, add_layout finds the layout.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from seqtile.attention.backends import computes_some_queries
from seqtile.attention.layout import document_edges, documents_at
from seqtile.attention.nodes import Nodes
from seqtile.ops.state import exchanged
from seqtile.protocols import CHOICE, SHARDED
from seqtile.renamed import cache_in
from seqtile.sp.attention import NAME, UlyssesFunction
from seqtile.sp.compressed import CompressedKeys, is_latent
from seqtile.sp.groups import ALONE, SequenceParallel, add_up
from seqtile.sp.layout import LAYOUT, ShardedLayout, gathered_positions
from seqtile.sp.owners import Owners
from seqtile.sp.prefixes import PrefixTree
from seqtile.sp.recurrence import Recurrence, is_recurrence
from seqtile.sp.same_batch import check_same_batch
from seqtile.sp.shards import per_node_in

BATCH_HASH = "batch_hash"  # in a shard: the hash of its whole batch
WHOLE_LENGTH = "whole_length"  # in a shard of padded sequences: their tokens before padding


@dataclass
class Forward:
    """What is known of the running forward; between two forwards an empty one."""

    attention: str
    """The name of the model's attention: `NAME` over ranks, the model's own in a forward that is bypassed, `OUTSIDE` in
    code around a text model that gets whole batches, and `ShardingHooks.at_rest` between two forwards."""
    last_position: int = 0
    """The largest position_id of all ranks; stays for a recomputation."""
    layout: ShardedLayout | None = None
    """The layout of the batch in the model that is computed over ranks."""
    is_bypassed: bool = False
    """True if that model runs as it is: it has a cache, or no prefix is shared."""
    balance: Any = None
    """The `Balance` of experts of a cut batch, if it is wanted."""
    has_gradient: bool = False
    """True if the outer model got tensors that require a gradient: no prefix is shared."""
    batch_hash: Tensor | None = None
    """The hash of all tensors that the outer model got."""
    position_ids: Tensor | None = None
    """Those that the outer model got; not every model passes them on."""
    calls: int = 0
    """How often the outer model has called the text model."""
    is_compared: bool = False
    """True if the ranks of the group are known to have the same batch."""
    tree: PrefixTree | None = None
    """The prefix tree of the batch in the text model."""
    owners: Owners | None = None
    """The owners of the tokens of the batch in the text model."""


class ShardingHooks:
    """The hooks on a model, its base model and their rotary embeddings. `kind`, `CutBatches` or `WholeBatches`, says
    how this rank's tokens come into the model and out of it."""

    def __init__(
        self, outer: PreTrainedModel, model: PreTrainedModel, sp_group: SequenceParallel, layers: int, kind: type
    ):
        self.outer, self.model, self.sp_group = outer, model, sp_group
        """The model that users call; the model whose forward is computed over ranks: the same, or a part of it."""
        self.layers = layers
        """The number of modules that mix tokens."""
        self.min_tokens: int | None = None
        """The shortest prefix that rows share and that is computed once; None: each row is computed by itself."""
        self.last_batch: tuple[int, int, str | None] = 0, 0, None
        """Of the last batch: its tokens, how many of them were saved by sharing, and why none was."""
        self.forward = Forward(model.config._attn_implementation)
        self.is_another_batch = False
        """True in `other_batch`, whose shards are made by who calls it."""
        self.handles: list[Any] = []
        """What `remove` removes."""
        self.replaced: list[Recurrence | CompressedKeys] = []
        """The replaced functions of layers."""
        self.batches = kind(self)
        self._add_hooks()
        self.choose(self.forward.attention)

    def _add_hooks(self) -> None:
        model, base, unless_bypassed = self.model, self.model.base_model, self._unless_bypassed
        for module in self.outer.modules():
            if base in module.modules():  # it may be called by itself
                setattr(module, SHARDED, self)
        # Other hooks of the model come after `leave`: they get tokens of whole batches.
        leave, is_first = partial(unless_bypassed, self.batches.leave), self.takes_whole
        self.handles += [
            model.register_forward_pre_hook(self.batches.enter, with_kwargs=True),
            model.register_forward_hook(leave, with_kwargs=True, prepend=is_first),
            model.register_forward_hook(self.forget, always_call=True),
            base.register_forward_pre_hook(partial(unless_bypassed, self.add_layout), with_kwargs=True),
            base.register_forward_hook(self.check_layers, with_kwargs=True),
        ]
        for module in model.modules():
            if is_recurrence(module):
                module.forward = Recurrence(module, self.is_alone)
                self.replaced.append(module.forward)
            if is_latent(module):
                module.expand_kv = CompressedKeys(module, self.sp_group)
                self.replaced.append(module.expand_kv)
            kinds = str(getattr(module, "rope_type", ""))  # a name, or one per type of layer
            if "dynamic" in kinds or "longrope" in kinds:
                before, after = (
                    partial(unless_bypassed, hook) for hook in (self.add_last_position, self.drop_last_position)
                )
                self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self.handles.append(module.register_forward_hook(after))

    def _unless_bypassed(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        return None if self.forward.is_bypassed else hook(*arguments)

    @property
    def takes_whole(self) -> bool:
        """See `seqtile.protocols.ShardedSequences`."""
        return self.batches.takes_whole

    @property
    def is_alone(self) -> bool:
        """True in a single process, which shares prefixes of rows."""
        return self.sp_group is ALONE

    def choose(self, implementation: str) -> None:
        """See `seqtile.protocols.ShardedSequences`."""
        self.implementation = implementation
        self.at_rest = f"{NAME}_or_{implementation}" if self.is_alone else NAME
        """The name of the model's attention between two forwards. In a single process it uses `NAME` for calls with a
        layout and the original attention for others, because a checkpoint may recompute either."""
        if self.is_alone:
            AttentionInterface.register(self.at_rest, UlyssesFunction(fallback=implementation))
            if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
                AttentionMaskInterface.register(self.at_rest, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
        self.run(replace(self.forward, attention=self.at_rest))

    def take_chosen_attention(self) -> None:
        """Takes the attention that `set_attn_implementation` chose since the last forward."""
        if (chosen := self.model.config._attn_implementation) != self.forward.attention:
            self.choose(chosen)

    def bypass(self) -> None:
        """Makes the model run this forward as it is."""
        self.run(replace(self.forward, is_bypassed=True, attention=self.implementation))

    def run(self, forward: Forward) -> None:
        """Makes the model's layers run this forward."""
        self.forward, self.model.config._attn_implementation = forward, forward.attention
        for each in self.replaced:
            each.is_bypassed = forward.is_bypassed

    def remove(self) -> None:
        """Removes the hooks."""
        self.take_chosen_attention()
        for handle in self.handles:
            handle.remove()
        for module in self.outer.modules():
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

    @property
    def _recurrences(self) -> int:
        return sum(isinstance(each, Recurrence) for each in self.replaced)

    @property
    def _sends_latents(self) -> bool:
        return any(isinstance(each, CompressedKeys) and each.is_chosen for each in self.replaced)

    def _heads(self, groups: int) -> tuple[int, int] | None:
        """Returns how many heads of queries and of keys a group has; None without attention."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if heads is None or self._recurrences == self.layers:
            return None
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return heads // groups, 1 if self._sends_latents else kv_heads // groups

    def sharers(self, groups: int = 1) -> int:
        """See `seqtile.protocols.ShardedSequences`."""
        nodes, heads = self.sp_group.nodes, self._heads(groups)
        can = heads is not None and computes_some_queries(self.implementation)
        return nodes.sharers(*heads) if can else nodes.size

    def describe_ranks(self, groups: int) -> str | None:
        """See `seqtile.protocols.ShardedSequences`."""
        nodes, said = self.sp_group.nodes, []
        if nodes.size == 1:
            return None
        if nodes.number == 1:
            return f"{nodes.size} ranks share a sequence"
        if self._heads(groups) is not None:
            keys = "latents" if self._sends_latents else "keys and values"
            sent = keys if self.sharers(groups) < nodes.size else f"queries, {keys}, outputs"
            said.append(f"{sent} of attention")
        if self._recurrences:
            said.append("all inputs and outputs of recurrences")
        where = f"{nodes.size} ranks share a sequence, {nodes.per_node} on each of {nodes.number} nodes"
        return f"{where}; across nodes go {', and '.join(said)}"

    def stop_sharing_prefixes(self) -> None:
        """See `seqtile.protocols.ShardedSequences`."""
        self.min_tokens = None
        if self.is_alone:
            self.remove()

    @contextmanager
    def other_batch(self, before: Callable[[], None]) -> Iterator[None]:
        """See `seqtile.protocols.ShardedSequences`."""
        running = self.forward
        self.forward = Forward(running.attention, is_bypassed=running.is_bypassed)
        try:
            with exchanged([(vars(self.sp_group), "before", before), (vars(self), "is_another_batch", True)]):
                yield
        finally:
            self.run(running)

    def averaged(self, gradient: Tensor) -> Tensor:
        """See `seqtile.protocols.ShardedSequences`."""
        return add_up(gradient, self.sp_group) / self.sp_group.size

    def layout_of_shards(self, args: tuple, kwargs: dict[str, Any]) -> ShardedLayout:
        """Returns the layout of the batch of which each rank has a shard, and removes the shard's extra values from the
        keyword arguments. Two or three small collectives and two waits for the device. Raises ValueError on every rank
        if the batch is no shard, or a shard of another batch."""
        batch_hash, whole_length = (kwargs.pop(name, None) for name in (BATCH_HASH, WHOLE_LENGTH))
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = ids if ids is not None else kwargs.get("inputs_embeds")
        if tokens is None or len(args) > 1:
            raise ValueError("over ranks pass input_ids or inputs_embeds, and the rest by keyword")
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None and self.sp_group.size == 1:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        check_tokens(kwargs, *tokens.shape[:2])
        hashes = [] if batch_hash is None else [torch.as_tensor(batch_hash).view(1)]
        given = kwargs | {"position_ids": positions}
        self.forward.last_position, *hashes = self.compare(tokens, given, batch_hash, *hashes)
        if not self.is_another_batch:
            _check_nodes(hashes, self.sp_group.nodes)
        documents = documents_at(document_edges(*gathered_positions(positions, mask, self.sp_group)), mask is not None)
        layout = ShardedLayout(self.sp_group, tokens.shape[1], documents, self.implementation)
        layout.position_ids, layout.whole_length, layout.has_mask = positions, whole_length, mask is not None
        check_lengths(kwargs, layout)
        return layout

    def compare(self, tokens: Tensor, kwargs: dict[str, Any], batch_hash: Tensor | None, *along: Tensor) -> tuple:
        """Compares the ranks' batches, unless they were compared in this forward, see `check_same_batch`."""
        if torch.is_grad_enabled():
            _check_averaged(self.outer, self.sp_group)
        sp_group, choices = (ALONE, {}) if self.forward.is_compared else (self.sp_group, self.choices())
        return check_same_batch(tokens, kwargs, batch_hash, sp_group, self.batches.expected, choices, *along)

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
        layout = self.forward.layout
        if layout is None or layout.attended:  # called by itself, or again
            layout = self.layout_of_shards(args, kwargs)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = layout.position_ids
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):  # describe whole sequences
            kwargs.pop(name, None)
        return args, kwargs | {"attention_mask": None, "use_cache": False, LAYOUT: layout}

    def add_last_position(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives a rotary embedding the last position of the whole sequence in addition to this rank's positions."""
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        last = positions.new_full((*positions.shape[:-1], 1), self.forward.last_position)
        return args[:1], kwargs | {"position_ids": torch.cat([positions, last], -1)}

    def drop_last_position(self, module: nn.Module, args: tuple, output: tuple) -> tuple:
        """Returns cos and sin without that position."""
        return tuple(values[..., :-1, :] for values in output)

    def check_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Raises ValueError if a layer mixed tokens in another way."""
        if LAYOUT in kwargs and (found := len(kwargs[LAYOUT].attended)) < self.layers:
            raise ValueError(f"{found} of {self.layers} layers attended over the whole sequence; leave it whole")

    def forget(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Drops the batch of the model over ranks when its forward ends."""
        known = {"layout": None, "balance": None, "tree": None, "owners": None}
        self.run(replace(self.forward, attention=self.at_rest, is_bypassed=False, **known))


def _check_averaged(model: nn.Module, sp_group: SequenceParallel) -> None:
    """Raises ValueError, on all ranks alike, if FSDP2 averages gradients over only a part of a sequence's ranks."""
    if sp_group.size == 1:
        return
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    # Before torch 2.13 a module has one group of parameters, or None. Weights may be gathered by now.
    lists = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    groups = [each for some in lists for each in some]
    trained = [each for each in groups if each and any(x.sharded_param.requires_grad for x in each.fsdp_params)]
    for mesh in {each.mesh_info.mesh for each in trained}:
        found, ranks = mesh.mesh.flatten().tolist(), dist.get_process_group_ranks(sp_group.group)
        if not {*ranks} <= {*found}:
            raise ValueError(
                f"FSDP2 averages gradients over the ranks of its mesh, {found}, expected among them all that share a "
                f"sequence, {ranks}: the others' tokens would be left out. Give fully_shard a mesh over all ranks, or "
                "none"
            )


def _check_nodes(hashes: list[Tensor], nodes: Nodes) -> None:
    """Raises ValueError for a shard that was cut for other nodes, or on several nodes for one that does not say so."""
    found = per_node_in(int(hashes[0])) if hashes else None
    if found != nodes.per_node and (found is not None or nodes.number > 1):
        cut_for = "by hand" if found is None else f"for {found} ranks on each node"
        raise ValueError(
            f"this shard was cut {cut_for}, expected one for {nodes.per_node} ranks on each: it holds other tokens. "
            "Cut it by sp.shard and the like with the ctx of the model, or take one node, "
            f"sp.initialize(per_node={nodes.size})"
        )


def check_tokens(kwargs: dict[str, Any], batch: int, local: int, expected: str = "this rank's shard of it") -> None:
    """Raises ValueError for arguments that do not belong to [batch, local] tokens without a cache."""
    if cache_in(kwargs) is not None or kwargs.get("use_cache"):
        raise ValueError("a cache is not sharded over ranks: use_cache=False, or sp.restore(model) before generating")
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None and positions.shape[-1] != local:
        raise ValueError(f"position_ids is {list(positions.shape)} for {local} tokens, expected {expected}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (batch, local)):
        kind = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {kind}, expected {expected}, {[batch, local]}")


def check_lengths(kwargs: dict[str, Any], layout: ShardedLayout) -> None:
    """Raises ValueError if cumulative lengths, which a batch may have besides, tell other documents."""
    if (lengths := kwargs.get("cu_seq_lens_q")) is not None:
        lengths = lengths.tolist()  # documents after the last length are padding
        if lengths != [0, *(stop for start, stop in layout.documents[0] if start < lengths[-1])]:
            raise ValueError("cu_seq_lens_q tells other documents than position_ids, which have to tell them here")
