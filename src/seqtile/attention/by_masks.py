"""Computes attention block by block, with boolean or additive masks (sdpa, eager); a causal square needs no mask."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from seqtile.attention.heads import Rows
from seqtile.attention.layout import VARLEN
from seqtile.attention.local import LocalAttention, in_parts, joined, zeros
from seqtile.attention.recompute import Call, call_again_in_backward
from seqtile.attention.sdpa_lengths import causal_from_the_end, few_lengths, in_lengths, lengths_for_cudnn
from seqtile.attention.segments import Block, blocks, segments
from seqtile.sdpa import may_choose_cudnn, without_cudnn


def by_masks(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor, additive: bool = False) -> Tensor:
    """Computes attention block by block with boolean or additive masks. Computes rows with the same documents
    together."""
    found, rows, reach = [], attention.heads.rows, attention.reach
    parted = segments(attention.layout, rows, reach, attention.spans)
    by_cudnn = may_choose_cudnn(attention.kernel, q)
    whole = _whole_length(attention) if additive else 0

    def is_square(block: Block) -> bool:
        return not additive and block.is_square(reach)

    def is_uncut(block: Block) -> bool:
        needs_no_mask = attention.kernel == "sdpa" and is_causal_from_the_end(q, block, reach)
        return (needs_no_mask and not additive) or is_square(block)

    def with_mask(block: Block, documents: Rows, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        if is_uncut(block):  # one query, the last, sees every key
            mask = causal_from_the_end(q.shape[2], k.shape[2]) if q.shape[2] > 1 else None
        elif not block.keys:
            mask = torch.zeros(1, 1, block.q1 - block.q0, whole, dtype=torch.bool, device=q.device)
            for start, stop in documents:
                mask[..., start:stop] = block._replace(keys=((0, whole),)).mask(reach, q.device)[:, start:stop]
        else:
            mask = block.mask(reach, q.device)[None, None]
        if additive:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        with without_cudnn() if by_cudnn else nullcontext():
            return attention.with_sinks(sinks).compute(q, k, v, mask)

    def cut_into_blocks() -> tuple[list[list[Block]], dict[int, int], bool]:
        cut = [list(blocks(row, reach, is_uncut, whole)) for row in parted]
        squares = {block.q1 - block.q0 for row in cut for block in row if is_square(block)}
        lengths = lengths_for_cudnn(squares) if by_cudnn else None
        return cut, few_lengths(squares, attention.layout.length) if lengths is None else lengths, lengths is None

    key = ("blocks", rows, reach, additive, bool(attention.spans), q.dtype)
    cut, lengths, leaves_cudnn_out = attention.layout.once(key, cut_into_blocks)
    of_rows = in_parts((q, k, v), [len(q) // len(cut)] * len(cut), 0)
    for of_row, documents, (q_row, k_row, v_row) in zip(cut, attention.layout.documents, of_rows, strict=True):
        queries = [part for (part,) in in_parts((q_row,), [block.q1 - block.q0 for block in of_row], 2)]
        of_squares = keys_of_squares([block for block in of_row if is_square(block)], k_row, v_row)
        parts: list[Tensor | None] = [None] * len(of_row)
        with without_cudnn() if by_cudnn and leaves_cudnn_out else nullcontext():
            for i, (block, part) in enumerate(zip(of_row, queries, strict=True)):
                if not block.keys and not whole:
                    parts[i] = zeros(part, v)
                elif is_square(block):
                    parts[i] = in_lengths(lengths, attention.compute, part, *of_squares[block.q0])
        masked = [i for i, part in enumerate(parts) if part is None]
        calls = [Call(partial(with_mask, of_row[i], documents), of_row[i].keys or ((0, whole),)) for i in masked]
        asked = [queries[i] for i in masked]
        outs = call_again_in_backward(calls, asked, k_row, v_row, attention.sinks, attention.draws)
        for i, out in zip(masked, outs, strict=True):
            parts[i] = out
        found.append(joined(parts or [zeros(q_row, v_row)], 1))
    return joined(found, 0)


def _whole_length(attention: LocalAttention) -> int:
    """Returns how many tokens of a row padding may see, 0 for none. A softmax over an additive mask gives padding the
    values of others, which a shifted loss reads in front of a row's first token. Waits for the device if the length is
    there."""
    layout = attention.layout
    is_eager = layout.implementation in (VARLEN + "eager", attention.kernel)
    if not is_eager or not attention.has_padding_in_front or attention.sinks is not None:
        return 0
    return layout.length if layout.whole_length is None else int(layout.whole_length)


def keys_of_squares(squares: list[Block], k: Tensor, v: Tensor) -> dict[int, Sequence[Tensor]]:
    """Returns the keys and values of each causal square by its first token. They are split: the gradient of every slice
    would be a tensor of all tokens."""
    edges = sorted({0, k.shape[2], *(edge for block in squares for edge in (block.q0, block.q1))})
    sizes = [stop - start for start, stop in pairwise(edges)]
    return dict(zip(edges[:-1], in_parts((k, v), sizes, 2), strict=True))


def is_causal_from_the_end(q: Tensor, block: Block, reach: int) -> bool:
    """Returns whether sdpa has a kernel for this causal block without a mask: only on a GPU."""
    return q.is_cuda and block.is_causal(reach)
