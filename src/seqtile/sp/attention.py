"""Attention over a sequence whose tokens are sharded over ranks: from tokens to heads, attention of whole sequences by
the model's own attention, and back.

Source: Arctic Long Sequence Training, 3.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from seqtile.protocols import Arriving, SequenceParallelAttention, SequenceParallelFunction
from seqtile.sp.all_to_all import AllToAll, Pending
from seqtile.sp.backends import LocalAttention, attend, check
from seqtile.sp.groups import device_of, gather
from seqtile.sp.layout import Layout

NAME = "seqtile_ulysses"
# Tensors that come along and change no score; any other is refused.
_HARMLESS = {"position_ids", "cache_position", "input_ids", "labels", "shift_labels", "num_items_in_batch"}


@dataclass(frozen=True)
class UlyssesAttention(SequenceParallelAttention):
    """One call of a layer's attention over ranks, in steps; for shapes see the protocol."""

    module: nn.Module
    layout: Layout
    window: int | None
    options: dict[str, Any]
    """As in `LocalAttention`."""
    q_heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        check(self.local, self.ranks, self.q_heads)

    @property
    def ranks(self) -> int:
        return self.layout.ctx.size

    @property
    def all_to_all(self) -> AllToAll:
        heads, layout = (self.q_heads, self.kv_heads), self.layout
        return layout.once(heads, lambda: AllToAll.create(*heads, layout.local, layout.ctx))

    @property
    def local(self) -> LocalAttention:
        return LocalAttention(self.module, self.layout, self.all_to_all.share, self.window, self.options)

    def in_groups(self, groups: int) -> "UlyssesAttention":
        return replace(self, q_heads=self.q_heads // groups, kv_heads=self.kv_heads // groups)

    def start_to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Arriving:
        return _by_heads(self.all_to_all.start_to_heads(q, k, v))

    def start_gradients_to_tokens(self, *d_qkv: torch.Tensor) -> Arriving:
        return _by_heads(self.all_to_all.start_to_tokens(*d_qkv))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.layout.attended.add(id(self.module))
        return attend(self.local, q, k, v)

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        return self.all_to_all.to_tokens(out)

    def agree_on_max(self, size: int) -> int:
        """One collective and one wait for the device a forward, and for each window that layers have: what is asked
        later has the same answer."""
        ctx = self.layout.ctx

        def largest() -> int:
            return max(int(each) for each in gather(torch.tensor(size, device=device_of(ctx)), ctx))

        return self.layout.once(("largest", self.window), largest)


def _by_heads(pending: Pending) -> Callable[[], list[torch.Tensor]]:
    return lambda: [x.transpose(1, 2) for x in pending.wait()]


class UlyssesFunction(SequenceParallelFunction):
    """The attention that is registered with Hugging Face, see `ulysses_attention`."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Computes q [B, H, S, K], k and v [B, KV, S, K] to [B, S, H, K]. Two all-to-alls.

        Allocates on this rank its share of q, k, v and of the output, and a buffer to send each of the two from. Raises
        ValueError, alike on every rank and before any of them waits, for what is not causal attention within documents.
        """
        steps = self.steps(module, attention_mask, (query.shape[1], key.shape[1]), **options)
        return steps.to_tokens(steps.attend(*steps.all_to_all.to_heads(query, key, value))), None

    def steps(
        self,
        module: nn.Module,
        attention_mask: torch.Tensor | None,
        heads: tuple[int, int],
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        ulysses_layout: Layout | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> UlyssesAttention:
        """Returns the steps of what Hugging Face's code asks of attention. ValueError for what is not causal attention
        within documents."""
        if ulysses_layout is None:
            raise ValueError(
                "no layout came with the tokens: call the model that sp.apply_ulysses was given, as a whole; a model "
                "that does not pass keyword arguments on to its attention, or has an encoder of images, cannot be "
                "sharded over ranks"
            )
        wrong = None
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            wrong = "that is not causal"
        if attention_mask is not None:
            wrong = "with a mask of its layer's own"
        for name, other in others.items():
            if (name == "cache" and other is not None) or (isinstance(other, torch.Tensor) and name not in _HARMLESS):
                wrong = f"with {name}"
        if wrong is not None:
            raise ValueError(f"attention {wrong} is not sharded over ranks; leave this model whole")
        if sliding_window is None and (window := _window_of(module)) is not None and window < ulysses_layout.length:
            raise ValueError(f"a window of {window} is not passed on to attention by this model; leave it whole")
        options = {"scaling": scaling, "dropout": dropout} | ({} if softcap is None else {"softcap": softcap})
        return UlyssesAttention(module, ulysses_layout, sliding_window, options, *heads)


ulysses_attention = UlyssesFunction()


def _window_of(module: nn.Module) -> int | None:
    """Returns the window that this layer's masks would have."""
    types, layer = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    slides = types is None or layer is None or types[layer] == "sliding_attention"
    return getattr(module.config, "sliding_window", None) if slides else None
