"""Attention over a sequence whose tokens are sharded over ranks: an all-to-all from tokens to heads, the model's own
attention over whole sequences, and an all-to-all back.

With `layer=True`, ops/decoder_layer/qkv.py starts the first all-to-all, once per head chunk.
Source: Arctic Long Sequence Training, 3.2.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqtile.attention.backends import attend, check, computes_some_queries, warn_of_limits
from seqtile.attention.local import COMPUTED, SINKS, UNUSED, LocalAttention, call_attention, in_one_dtype
from seqtile.protocols import PendingTensors, SequenceParallelAttention, SequenceParallelFunction
from seqtile.sp.all_to_all import AllToAll, exchanged
from seqtile.sp.compressed import CompressedKeys
from seqtile.sp.groups import ALONE, device_of
from seqtile.sp.layout import LAYOUT, ShardedLayout, layout_in

NAME = "seqtile_ulysses"


@dataclass(frozen=True)
class UlyssesAttention(SequenceParallelAttention):
    """One call of a layer's attention over ranks, in steps. The protocol gives the shapes."""

    module: nn.Module
    layout: ShardedLayout
    window: int | None
    options: dict[str, Any]
    """As in `LocalAttention`."""
    q_heads: int
    kv_heads: int
    in_nodes: bool | None = None
    """True if heads are dealt within nodes, see nodes.py. None: where that takes fewer bytes across nodes, and the
    attention can compute the queries of one node's tokens."""

    def __post_init__(self) -> None:
        if self.in_nodes is None:
            fewer = self.layout.sp_group.nodes.chooses_in_nodes(self.q_heads, self.kv_heads)
            object.__setattr__(self, "in_nodes", fewer and computes_some_queries(self.layout.implementation))
        key = ("checked", type(self.module), self.window, self.q_heads, *self.options)
        self.layout.once(key, lambda: check(self.local, self.ranks, self.q_heads))

    @property
    def ranks(self) -> int:
        nodes = self.layout.sp_group.nodes
        return nodes.per_node if self.in_nodes else nodes.size

    @property
    def qkv(self) -> AllToAll:
        """The all-to-all of queries, keys and values."""
        return self.layout.all_to_all(self.q_heads, self.kv_heads, (False, True, True), self.in_nodes)

    @property
    def local(self) -> LocalAttention:
        heads = self.qkv.heads
        return LocalAttention(self.module, self.layout, heads, self.window, self.options).of_heads(heads.q)

    def in_groups(self, groups: int) -> "UlyssesAttention":
        if groups > 1 and SINKS in self.options:
            raise ValueError("head chunks over ranks: expected an attention without sinks; leave out head_groups")
        heads = {"q_heads": self.q_heads // groups, "kv_heads": self.kv_heads // groups}
        return replace(self, **heads, in_nodes=None)

    def start_to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> PendingTensors:
        return self.qkv.start(in_one_dtype(q, k, v), to_heads=True)

    def start_gradients_to_tokens(self, *d_qkv: Tensor) -> PendingTensors:
        return self.qkv.start(d_qkv, to_heads=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = ("limits", self.window, q.shape[1], q.requires_grad)
        self.layout.once(key, lambda: warn_of_limits(self.layout.implementation, self.layout, q))
        return attend(self.local, q, k, v)

    def to_tokens(self, out: Tensor) -> Tensor:
        of_queries = self.layout.all_to_all(self.q_heads, self.kv_heads, (False,), self.in_nodes)
        return exchanged(of_queries, False, out.transpose(1, 2))[0].transpose(1, 2)

    def agree_on_max(self, size: int) -> int:
        """Returns the maximum of `size` over all ranks. Costs one collective and one wait for the device per forward
        and window; later calls reuse the answer."""
        sp_group = self.layout.sp_group

        def largest() -> int:
            found = torch.tensor(size, device=device_of(sp_group))
            dist.all_reduce(found, dist.ReduceOp.MAX, sp_group.started())
            return int(found)

        return self.layout.once(("largest", self.window), largest)


class UlyssesFunction(SequenceParallelFunction):
    """The attention that is registered with Hugging Face.

    `fallback`: the attention used when no batch layout is passed. In a model that shares prefixes, a checkpoint may
    recompute a batch without shared prefixes. Without `fallback` such a call is an error.
    """

    def __init__(self, fallback: str | None = None):
        self.fallback = fallback

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Computes [B, S, H, K] from q [B, H, S, K], k and v [B, KV, S, K], with two all-to-alls.

        Keys and values may be compressed (`CompressedKeys`); they are then [B, 1, S, ...].

        Allocates q, k, v and the output of this rank's heads, and a send buffer for each all-to-all. Raises ValueError
        for anything except causal attention within documents, on every rank and before any rank waits.
        """
        if self.fallback is not None and LAYOUT not in options:
            return call_attention(self.fallback, module, query, key, value, attention_mask, **options)
        steps = self._steps(module, attention_mask, (query.shape[1], key.shape[1]), **options)
        q, k, v = exchanged(steps.qkv, True, *in_one_dtype(query, key, value))
        compressed = vars(module).get("expand_kv")
        if isinstance(compressed, CompressedKeys) and compressed.is_chosen:
            k, v = compressed.expand(k, v, steps.qkv.heads.q)
            steps = replace(steps, kv_heads=steps.q_heads)
        return steps.to_tokens(steps.attend(q, k, v)), None

    def steps(
        self, module: nn.Module, attention_mask: Any, heads: tuple[int, int], **options: Any
    ) -> UlyssesAttention | None:
        if self.fallback is not None or (LAYOUT in options and options[LAYOUT].sp_group is ALONE):
            return None
        return self._steps(module, attention_mask, heads, **options)

    def _steps(
        self, module: nn.Module, attention_mask: Any, heads: tuple[int, int], **options: Any
    ) -> UlyssesAttention:
        """Returns the steps of an attention call by Hugging Face's code. Raises ValueError unless it is causal
        attention within documents."""
        layout, window, causal = layout_in(options, module), options.get("sliding_window"), options.get("is_causal")
        wrong = []
        if attention_mask is not None:
            wrong.append("with a mask of its layer's own")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal and not layout.is_masked_outside:
            wrong.append("that is not causal")
        for name, option in options.items():
            if (name == "cache" and option is not None) or (isinstance(option, Tensor) and name not in UNUSED):
                wrong.append(f"with {name}")
        if wrong:
            raise ValueError(f"attention {', '.join(wrong)} is not sharded over ranks; leave this model whole")
        if window is None and (unsaid := _window_of(module)) is not None and unsaid < layout.length:
            raise ValueError(f"a window of {unsaid} is not passed on to attention by this model; leave it whole")
        kept = {name: options[name] for name in COMPUTED if options.get(name) is not None}
        return UlyssesAttention(module, layout, window, kept, *heads)


ulysses_attention = UlyssesFunction()


def _window_of(module: nn.Module) -> int | None:
    """Returns the window of this layer's masks, None without a window."""
    types, layer = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    slides = types is None or layer is None or types[layer] == "sliding_attention"
    return getattr(module.config, "sliding_window", None) if slides else None
