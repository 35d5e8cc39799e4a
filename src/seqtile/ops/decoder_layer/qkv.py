"""Queries, keys and values of a head chunk, chunk by chunk: norm, projections, norms of heads, rotary embedding.

A group's lie side by side in one buffer [T, h + 2 kv, K]. The gradients of their weights are summed by attention.py.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from seqtile.kernels.dispatch import rms_norm, rms_norm_backward, rotary_
from seqtile.ops.chunks import chunks, to_be_filled
from seqtile.ops.decoder_layer.params import AttentionParams, LayerSizes, Norm
from seqtile.ops.linear import Projection
from seqtile.protocols import SequenceParallelAttention


class Inputs(NamedTuple):
    """The tensors that queries, keys and values are computed from."""

    x: torch.Tensor
    """[T, D]"""
    cos: torch.Tensor | None
    """[T, K], or [S, K] if the sequences of a batch share them; None for a layer without positions."""
    sin: torch.Tensor | None
    params: AttentionParams
    sizes: LayerSizes

    def projections(self, group: int) -> list[tuple[Projection, slice]]:
        """Returns the projections to queries, keys and values of a group, each with its columns of the buffer."""
        columns, (_, q, _, k, _, v, _) = self.sizes.group_columns(group), self.params
        wholes = zip((q, k, v), columns, strict=True)
        return [(whole.slice_out(rows).to(self.sizes.dtype), to) for whole, (rows, to) in wholes]

    def angles(self, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin of a chunk's tokens, [C, K]."""
        length, count = self.cos.shape[0], chunk.stop - chunk.start
        start = chunk.start % length
        tokens: slice | torch.Tensor = slice(start, start + count)
        if start + count > length:  # over the end of a sequence
            tokens = torch.arange(start, start + count, device=self.cos.device) % length
        return self.cos[tokens], self.sin[tokens]

    @property
    def head_norms(self) -> list[tuple[Norm, slice]]:
        """The norms of queries and keys, each with its heads in a group; empty without norms."""
        heads, kv_heads = self.sizes.group_heads
        if self.params.q_norm is None:
            return []
        return [(self.params.q_norm, slice(heads)), (self.params.k_norm, slice(heads, heads + kv_heads))]


class QKV(NamedTuple):
    """Queries, keys and values of a group."""

    views: Sequence[torch.Tensor]
    """[B, h, S, K], twice [B, kv, S, K], as attention takes them."""
    bases: Sequence[torch.Tensor]
    """The tensors that they are views of."""
    pre_norm_qk: torch.Tensor | None
    """Queries and keys before their norms, of this rank's tokens [T, h + kv, K], where these are kept."""


class QKVByGroup:
    """Queries, keys and values of one group after the other, in the order of `groups`.

    Over ranks, those of the next group are sent before attention computes with this one's; on one rank nothing is
    computed before it is asked for. With `keep_normed` the groups share norm(x) [T, D].
    """

    def __init__(
        self,
        inputs: Inputs,
        groups: Sequence[int],
        sp_attention: SequenceParallelAttention | None,
        *,
        keep_normed: bool = False,
        keep_pre_norm_qk: bool = False,
    ):
        self._inputs, self._left, self._sp_attention = inputs, list(groups), sp_attention
        self._normed = NormedInput(inputs, whole=keep_normed and len(self._left) > 1)
        self._keep_pre_norm_qk = keep_pre_norm_qk and inputs.params.q_norm is not None
        self._sent: Callable[[], QKV] | None = None

    def next_group(self) -> QKV:
        qkv = (self._sent or self._next())()
        self._sent = self._next() if self._sp_attention is not None and self._left else None
        return qkv

    def _next(self) -> Callable[[], QKV]:
        """Computes those of the next group and sends them; returns a function that waits for what arrives."""
        sizes = self._inputs.sizes
        buffer, pre_norm_qk = project(self._inputs, self._left.pop(0), self._normed, self._keep_pre_norm_qk)
        heads, kv_heads = sizes.group_heads
        views = buffer.unflatten(0, (sizes.batch, sizes.length)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
        if self._sp_attention is None:
            return lambda: QKV(views, (buffer,), pre_norm_qk)
        arriving = self._sp_attention.start_to_heads(*views)

        def arrived() -> QKV:
            found = arriving()
            return QKV(found, found, pre_norm_qk)

        return arrived


class NormedInput:
    """norm(x) of x [T, D], computed chunk by chunk; with `whole` once, and kept for the groups that follow.

    If it is kept, chunks are longer: a group's matmul is then as large as that of all heads without groups.
    """

    def __init__(self, inputs: Inputs, whole: bool = False):
        self._x, self._norm, self._whole, self._known = inputs.x, inputs.params.norm, whole, 0
        self.chunk_tokens = inputs.sizes.chunk_tokens * (inputs.sizes.groups if whole else 1)
        tokens, width = inputs.x.shape
        rows = tokens if whole else min(tokens, self.chunk_tokens)
        self._rows = inputs.x.new_empty(rows, width, dtype=inputs.sizes.dtype)

    def chunk(self, chunk: slice) -> torch.Tensor:
        """Returns norm(x) of these tokens; the next call overwrites it, unless all are kept."""
        rows = self._rows[chunk if self._whole else slice(chunk.stop - chunk.start)]
        if chunk.stop > self._known:
            rms_norm(self._x[chunk], *self._norm, out=rows)
            self._known = chunk.stop if self._whole else 0
        return rows


def project(
    inputs: Inputs, group: int, normed: NormedInput, keep_pre_norm_qk: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the buffer of a group, and with `keep_pre_norm_qk` its queries and keys before their norms."""
    projections, head_norms, sizes = inputs.projections(group), inputs.head_norms, inputs.sizes
    tokens, (heads, kv_heads), width = len(inputs.x), sizes.group_heads, sizes.head_dim
    buffer = to_be_filled(inputs.x, (tokens, heads + 2 * kv_heads, width), sizes.dtype, trial=sizes.trial)
    pre_norm_qk = buffer.new_empty(tokens, heads + kv_heads, width) if keep_pre_norm_qk else None
    flat = buffer.view(tokens, -1)
    for chunk in chunks(tokens, normed.chunk_tokens):
        normed_chunk, rows = normed.chunk(chunk), flat[chunk]
        for projection, columns in projections:
            projection.forward(normed_chunk, out=rows[:, columns])
        qk = buffer[chunk, : heads + kv_heads]
        if pre_norm_qk is not None:
            pre_norm_qk[chunk] = qk
        for norm, of_norm in head_norms:
            rms_norm(qk[:, of_norm], *norm, out=qk[:, of_norm])
        if inputs.cos is not None:
            rotary_(qk, *inputs.angles(chunk))
    return buffer, pre_norm_qk


class QKVGradients:
    """The gradients of x, and of the parameters before attention, added up over groups.

    `sums` are those of the parameters, see `NodeParams`. Allocates `d_normed` [T, D], the gradient of what the
    norm returned, with the first group.
    """

    def __init__(self, inputs: Inputs, sums: AttentionParams, needs_x: bool):
        self._inputs, self._sums = inputs, sums
        self._through_norm = needs_x or sums.norm.weight is not None
        self._d_normed: torch.Tensor | None = None

    def add(self, group: int, d_qkv: Sequence[torch.Tensor], pre_norm_qk: torch.Tensor | None) -> None:
        """Adds what a group contributes: the gradients of its queries [B, h, S, K], keys and values."""
        inputs, x, sizes = self._inputs, self._inputs.x, self._inputs.sizes
        projections, head_norms, (heads, kv_heads) = inputs.projections(group), inputs.head_norms, sizes.group_heads
        wholes = zip((self._sums.q, self._sums.k, self._sums.v), sizes.group_columns(group), strict=True)
        sums, add = [whole.slice_out(rows) for whole, (rows, _) in wholes], self._d_normed is not None
        if self._through_norm and not add:
            self._d_normed = to_be_filled(x, dtype=sizes.dtype, trial=sizes.trial)
        d_qkv = [d.transpose(1, 2).flatten(0, 1) for d in d_qkv]  # [T, h, K]; copies only of other layouts
        normed, rows = NormedInput(inputs), min(len(x), sizes.chunk_tokens)
        d_rows = x.new_empty(rows, heads + 2 * kv_heads, sizes.head_dim, dtype=sizes.dtype)
        recomputed = torch.empty_like(d_rows[:, : heads + kv_heads]) if pre_norm_qk is None and head_norms else None
        for chunk in chunks(len(x), sizes.chunk_tokens):
            count, normed_chunk = chunk.stop - chunk.start, normed.chunk(chunk)
            d_heads = d_rows[:count]
            torch.cat([d[chunk] for d in d_qkv], 1, out=d_heads)
            d_qk, d_chunk = d_heads[:, : heads + kv_heads], d_heads.flatten(1)
            if inputs.cos is not None:
                rotary_(d_qk, *inputs.angles(chunk), backward=True)
            if head_norms:
                before = pre_norm_qk[chunk] if recomputed is None else recomputed[:count]
                for projection, columns in projections[:2] if recomputed is not None else ():
                    projection.forward(normed_chunk, out=before.flatten(1)[:, columns])
                self._through_head_norms(before, d_qk)
            for i, (projection, columns) in enumerate(projections):
                projection.add_gradients(sums[i], d_chunk[:, columns], normed_chunk)
                if self._through_norm:
                    projection.backward(d_chunk[:, columns], out=self._d_normed[chunk], add=add or i > 0)

    def _through_head_norms(self, before: torch.Tensor, d_heads: torch.Tensor) -> None:
        """Makes the gradients of normed queries and keys [C, h, K] those of `before`, in place."""
        sums = (self._sums.q_norm, self._sums.k_norm)
        for (norm, heads), total in zip(self._inputs.head_norms, sums, strict=True):
            d_weight = None if total.weight is None else total.weight.total()
            rms_norm_backward(before[:, heads], *norm, d_heads[:, heads], d_heads[:, heads], d_weight=d_weight)

    def add_to_x(self, d_x: torch.Tensor) -> None:
        """Adds the gradient through the norm to `d_x` [T, D], and that of the norm's weight to its sum."""
        x, norm, sizes = self._inputs.x, self._inputs.params.norm, self._inputs.sizes
        d_normed, self._d_normed = self._d_normed, None
        if d_normed is None:
            return
        d_weight = None if self._sums.norm.weight is None else self._sums.norm.weight.total()
        for chunk in chunks(len(x), sizes.chunk_tokens):
            rows = d_x[chunk]
            rms_norm_backward(x[chunk], *norm, d_normed[chunk], rows, add=rows, d_weight=d_weight)
