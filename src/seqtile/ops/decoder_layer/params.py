"""The parameters of a decoder layer, and the sizes of one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from seqtile.ops.linear import Projection


class Norm(NamedTuple):
    """An RMSNorm: x / sqrt(mean(x**2) + eps) * weight."""

    weight: torch.Tensor
    eps: float
    TENSORS = 1


class AttentionParams(NamedTuple):
    """The parameters of h = x + scale o(attention(q(n), k(n), v(n))) with n = norm(x), in the order in which an untiled
    layer uses them. Queries and keys are normed head by head where there are norms for that."""

    norm: Norm
    q: Projection
    q_norm: Norm | None
    k: Projection
    k_norm: Norm | None
    v: Projection
    o: Projection

    def dequantized(self, *names: str) -> "AttentionParams":
        """Returns them with the weights of these projections as numbers, see `Projection.dequantized`: once for all
        groups."""
        return self._replace(**{name: getattr(self, name).dequantized() for name in names})


class MLPParams(NamedTuple):
    """The parameters of h + scale down(act(gate(n)) * up(n)) with n = norm(h), in the order in which an untiled layer
    uses them."""

    norm: Norm
    gate: Projection
    up: Projection
    down: Projection


class LayerParams(NamedTuple):
    """The parameters of a whole layer."""

    attention: AttentionParams
    mlp: MLPParams


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one call, and how its work is cut."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    groups: int
    """Groups of kv heads with their queries, whose attentions run one after the other."""
    chunk_tokens: int
    activation: str
    scale: float
    """The factor of what attention and MLP add to the residual stream."""
    dtype: torch.dtype
    """The dtype of the products."""
    trial: bool
    """See `to_be_filled`."""

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def group_heads(self) -> tuple[int, int]:
        """Query heads and kv heads of a group."""
        return self.heads // self.groups, self.kv_heads // self.groups

    def group_columns(self, group: int) -> list[tuple[slice, slice]]:
        """Returns the slices of a group's queries, keys and values: in the outputs of q, k and v, and side by side."""
        heads, kv_heads = self.group_heads
        starts = (0, heads, heads + kv_heads, heads + 2 * kv_heads)
        side_by_side = [slice(start * self.head_dim, stop * self.head_dim) for start, stop in pairwise(starts)]
        widths = [columns.stop - columns.start for columns in side_by_side]
        return [(slice(group * w, (group + 1) * w), to) for w, to in zip(widths, side_by_side, strict=True)]

    def branch_gradient(self, d: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of a branch, in the dtype of the products, from that of the residual stream."""
        d = d.to(self.dtype)
        return d if self.scale == 1 else d * self.scale

    def concat_groups(self, attn_output: Sequence[torch.Tensor], chunk: slice) -> torch.Tensor:
        """Returns a chunk [C, H K] of the groups' outputs of attention, [T, h K] each."""
        pieces = [out[chunk] for out in attn_output]
        return (pieces[0] if self.groups == 1 else torch.cat(pieces, 1)).to(self.dtype)
