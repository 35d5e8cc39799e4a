"""The parameters of a decoder layer as plain tensors, and the sizes of one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqtile.ops.projection import Projection

Tensors = tuple[torch.Tensor | None, ...]


class Norm(NamedTuple):
    """x / sqrt(mean(x**2) + eps) * weight."""

    weight: torch.Tensor
    eps: float


class AttentionParams(NamedTuple):
    """Of x + scale o(attention(q(n), k(n), v(n))) with n = norm(x); queries and keys are normed head by head where
    there are norms for that."""

    norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    o: Projection

    @property
    def tensors(self) -> Tensors:
        """In the order in which an untiled layer uses them."""
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        return (self.norm.weight, *self.q.tensors, q_norm, *self.k.tensors, k_norm, *self.v.tensors, *self.o.tensors)

    def with_tensors(self, tensors: Sequence[torch.Tensor | None]) -> "AttentionParams":
        """The same of other tensors, in the order of `tensors`."""
        norm, *q, q_norm, k0, k1, k2, k3, k_norm, v0, v1, v2, v3, o0, o1, o2, o3 = tensors
        return AttentionParams(
            Norm(norm, self.norm.eps),
            self.q.with_tensors(q),
            self.k.with_tensors((k0, k1, k2, k3)),
            self.v.with_tensors((v0, v1, v2, v3)),
            None if self.q_norm is None else Norm(q_norm, self.q_norm.eps),
            None if self.k_norm is None else Norm(k_norm, self.k_norm.eps),
            self.o.with_tensors((o0, o1, o2, o3)),
        )


class MLPParams(NamedTuple):
    """Of h + scale down(act(gate(n)) * up(n)) with n = norm(h)."""

    norm: Norm
    gate: Projection
    up: Projection
    down: Projection

    @property
    def tensors(self) -> Tensors:
        """In the order in which an untiled layer uses them."""
        return (self.norm.weight, *self.gate.tensors, *self.up.tensors, *self.down.tensors)

    def with_tensors(self, tensors: Sequence[torch.Tensor | None]) -> "MLPParams":
        """The same of other tensors, in the order of `tensors`."""
        norm, *projections = tensors
        parts = (projections[start : start + 4] for start in (0, 4, 8))
        return MLPParams(
            Norm(norm, self.norm.eps),
            *(old.with_tensors(part) for old, part in zip((self.gate, self.up, self.down), parts, strict=True)),
        )


class LayerParams(NamedTuple):
    """Of a whole layer."""

    attention: AttentionParams
    mlp: MLPParams


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
    """Of what attention and MLP add to the residual stream."""
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


def views_of(parameters: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """A node of its own for each parameter, so that gradients arrive in the reverse of this order, as untiled: ZeRO-1
    and -2 fill their buckets as gradients arrive, so ranks with and without tiles must agree."""
    return [None if tensor is None else tensor.view_as(tensor) for tensor in parameters]


def scaled(d: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tile of the residual stream's gradient as that of a branch: times `scale`, in the dtype of the products."""
    d = d.to(layout.dtype)
    return d if layout.scale == 1 else d * layout.scale


def gathered(outs: Sequence[torch.Tensor], tile: slice, dtype: torch.dtype) -> torch.Tensor:
    """A tile [C, H K] of what attention returned by groups."""
    pieces = [out[tile] for out in outs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).to(dtype)
