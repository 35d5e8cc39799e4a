"""What a decoder layer is made of, as plain tensors, and the state of one pass through it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from seqtile.ops.projection import Projection
from seqtile.ops.saver import Saved
from seqtile.ops.weight_grad import WeightGrad

Arriving = Callable[[], Sequence[torch.Tensor]]
"""Waits for tensors that are on their way."""


class Norm(NamedTuple):
    """x / sqrt(mean(x**2) + eps) * weight."""

    weight: torch.Tensor
    eps: float


class LayerWeights(NamedTuple):
    """h = x + scale o(attention(q(n), k(n), v(n))) with n = norm(x), y = h + scale down(act(gate(m)) * up(m)) with
    m = mlp_norm(h). Queries and keys are normed by the head where there are norms for it."""

    norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    o: Projection
    mlp_norm: Norm
    gate: Projection
    up: Projection
    down: Projection

    @property
    def into(self) -> tuple[torch.Tensor | None, ...]:
        """The parameters before attention, in the order in which an untiled layer uses them."""
        norms = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        return (self.norm.weight, *self.q.tensors, norms[0], *self.k.tensors, norms[1], *self.v.tensors)

    @property
    def onward(self) -> tuple[torch.Tensor | None, ...]:
        """The parameters after attention."""
        mlp = (*self.gate.tensors, *self.up.tensors, *self.down.tensors)
        return (*self.o.tensors, self.mlp_norm.weight, *mlp)

    def with_tensors(
        self, into: Sequence[torch.Tensor | None], onward: Sequence[torch.Tensor | None]
    ) -> "LayerWeights":
        """The same layer of other tensors, in the order of `into` and `onward`."""

        def norm(old: Norm | None, weight: torch.Tensor | None) -> Norm | None:
            return None if old is None else Norm(weight, old.eps)

        return LayerWeights(
            norm(self.norm, into[0]),
            self.q.with_tensors(into[1:5]),
            self.k.with_tensors(into[6:10]),
            self.v.with_tensors(into[11:15]),
            norm(self.q_norm, into[5]),
            norm(self.k_norm, into[10]),
            self.o.with_tensors(onward[:4]),
            norm(self.mlp_norm, onward[4]),
            self.gate.with_tensors(onward[5:9]),
            self.up.with_tensors(onward[9:13]),
            self.down.with_tensors(onward[13:17]),
        )


@dataclass(frozen=True)
class Layout:
    """Sizes, and how the work is cut."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    groups: int
    """Of kv heads with their queries: so many attentions one after the other."""
    chunk_tokens: int
    activation: str
    scale: float
    """Of what attention and MLP add."""
    dtype: torch.dtype
    """Of the products."""

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def group_heads(self) -> tuple[int, int]:
        """Query heads and kv heads of a group."""
        return self.heads // self.groups, self.kv_heads // self.groups

    def columns(self, group: int) -> tuple[slice, slice]:
        """What of the widths of q and of k is a group's."""
        widths = (count * self.head_dim for count in self.group_heads)
        return tuple(slice(group * width, (group + 1) * width) for width in widths)


class Travel(Protocol):
    """An attention over ranks in steps: queries [B, h, S, K], keys and values go out, and its result comes home."""

    def send(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Arriving: ...
    def send_back(self, *d_qkv: torch.Tensor) -> Arriving: ...
    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...
    def home(self, out: torch.Tensor) -> torch.Tensor: ...
    def agreed(self, size: int) -> int: ...


class Made(NamedTuple):
    """Queries, keys and values of a group."""

    qkv: Sequence[torch.Tensor]
    """As attention takes them."""
    bases: Sequence[torch.Tensor]
    """What they are views of."""
    raw: torch.Tensor | None
    """Queries and keys before their norms, of this rank's tokens [T, (h + kv) K], where these are kept."""


@dataclass
class Pass:
    """One pass through a layer: what its parts tell each other.

    It holds no node but the first of the layer's, on which all others depend: no cycle, so that a graph that is
    dropped is freed.
    """

    layout: Layout
    scales: LayerWeights
    """Eps and scales; its tensors are not used."""
    needs: tuple[bool, ...]
    """Of what is before attention, x first: whether it requires a gradient."""
    main_grads: tuple[torch.Tensor | None, ...]
    saved: Saved | None
    travel: Travel | None
    """Where tokens are spread over ranks and heads are in groups."""
    grouped: bool
    """Whether queries, keys and values are not kept."""
    tensors: tuple[torch.Tensor | None, ...] = ()
    """While the forward runs, or the backward: x, cos, sin, and the parameters."""
    kept: dict[int, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    """By group, in the backward: attention's output until it is used, and what it saved but that and q, k, v."""
    projected: dict[int, Made] = field(default_factory=dict)
    """By group, in the backward: queries, keys and values again."""
    ahead: dict[int, Callable[[], Made]] = field(default_factory=dict)
    """By group: what was sent before it is asked for."""
    returning: Callable[[], None] | None = None
    """Waits for the gradients of the last group's queries, keys and values, and goes on with them."""
    repeats: bool = False
    """Whether attention is computed again in its backward."""
    d_h: torch.Tensor | None = None
    """The gradient of what the MLP's part begins with: x and what attention adds."""
    d_normed: torch.Tensor | None = None
    """The gradient of what is projected to queries, keys and values."""
    sums: list[WeightGrad | None] | None = None
    """Gradients of the parameters before attention."""

    def read(self) -> None:
        """Begins the backward, afresh. A checkpoint lets what was saved be read once."""
        self.d_h = self.d_normed = self.sums = self.returning = None
        self.projected, self.ahead = {}, {}
        if self.saved is not None:
            self.tensors = self.saved.tensors

    @property
    def x(self) -> torch.Tensor:
        return self.tensors[0]

    @property
    def weights(self) -> LayerWeights:
        _, _, _, *parameters = self.tensors
        into = len(self.scales.into)
        return self.scales.with_tensors(parameters[:into], parameters[into:])
