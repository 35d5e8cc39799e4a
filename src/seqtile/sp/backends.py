"""The attentions that Hugging Face registers, each asked in its own form for some queries of a sequence.

An attention's form is that of the masks Hugging Face makes for it: booleans or addends (sdpa, eager), cumulative
lengths of documents (flash attention), a BlockMask (flex attention). One that is registered without masks is asked for
causal squares only. In every form a query sees its own document, up to itself, no further back than the window, and no
padding.

All forms are made from segments: the queries of one document with the keys that they may see. Of two documents and
padding, and a rank that has the queries marked on the left:

            keys   0 ---------- 9 ---- 14   padding
    queries 0 .    |
              q      segment 1: a mask, since some queries of the square are another rank's
              q    |
            9 q           segment 2: a causal square, no mask
              q                   segment 3: no keys, zeros

No mask of length x length is ever made.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

from seqtile.sp.all_to_all import RankHeads, Rows, count
from seqtile.sp.layout import Layout

MASK_ELEMENTS = 2**24  # of the largest mask: 16 MiB of bools
SINKS = "s_aux"  # as Hugging Face passes an attention's sinks [H], logits that take a part of every softmax
SIDE = 128  # tokens a side of a BlockMask's blocks, torch's default


class LocalAttention(NamedTuple):
    """The attention that a model had, asked for this rank's heads and queries."""

    module: nn.Module
    layout: Layout
    heads: RankHeads
    window: int | None
    options: dict[str, Any]
    """scaling, dropout and, if there are, softcap and sinks, as Hugging Face passes them."""

    @property
    def reach(self) -> int:
        """How many keys a query sees at most, its own and those before it."""
        return self.layout.length if self.window is None else self.window

    @property
    def spans(self) -> tuple[Rows, ...]:
        """The spans whose tokens see each other both ways in this layer, see `Layout`."""
        return self.layout.spans[self.window is not None]

    def of_heads(self, heads: slice) -> "LocalAttention":
        """Returns the same with the sinks of some heads."""
        if SINKS not in self.options:
            return self
        return self._replace(options=self.options | {SINKS: self.options[SINKS][heads]})

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **others: Any) -> Tensor:
        """Calls it as Hugging Face does. q [B, h, n, K], k and v [B, kv, m, K] to [B, n, h, K]."""
        name = self.layout.implementation
        function = self.eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        config = Overridden(self.module.config, _attn_implementation=name)
        groups = q.shape[1] // k.shape[1]
        own = {"sinks": self.options[SINKS]} if SINKS in self.options else {}
        module = Overridden(self.module, config=config, num_key_value_groups=groups, head_dim=q.shape[3], **own)
        return function(module, q, k, v, mask, sliding_window=self.window, is_causal=True, **self.options, **others)[0]

    @property
    def eager(self) -> Callable[..., Any]:
        """The eager attention, which is in no registry: Gemma 2's has all options but sinks; with sinks the model's."""
        modeling = sys.modules[type(self.module).__module__] if SINKS in self.options else modeling_gemma2
        return modeling.eager_attention_forward


class Overridden:
    """An object with some of its attributes replaced."""

    def __init__(self, original: object, **attributes: object):
        vars(self).update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Block(NamedTuple):
    """Queries [q0, q1) and the keys [k0, k1) that one of them may see; no keys for queries of padding."""

    q0: int
    q1: int
    k0: int
    k1: int
    two_ways: bool = False
    """Each query sees all keys up to k1, of a span whose tokens see each other both ways; else none behind itself."""

    def is_square(self, reach: int) -> bool:
        """Returns whether it is a causal square, for which no mask is needed."""
        return not self.two_ways and self.q0 == self.k0 and self.q1 == self.k1 and self.k1 - self.k0 <= reach

    def mask(self, reach: int, device: torch.device) -> Tensor:
        """Returns [q1 - q0, k1 - k0], True where a query sees a key."""
        queries, keys = (torch.arange(*ends, device=device) for ends in (self[:2], self[2:4]))
        distance = queries[:, None] - keys
        return (distance < reach) if self.two_ways else (distance >= 0) & (distance < reach)


def segments(layout: Layout, rows: Rows, reach: int, spans: tuple[Rows, ...] = ()) -> list[list[Block]]:
    """Returns for each entry of the layout's documents all queries in `rows`, document by document, with the keys that
    they see."""
    key = ("segments", rows, reach, bool(spans))
    of_rows = zip(layout.documents, spans or ((),) * len(layout.documents), strict=True)
    return layout.once(key, lambda: [list(segments_of(rows, row, reach, spanned)) for row, spanned in of_rows])


def segments_of(rows: Rows, documents: Rows, reach: int, spans: Rows = ()) -> Iterator[Block]:
    for first, last in rows:
        for start, stop in documents:
            q0, q1 = max(first, start), min(last, stop)
            if q0 < q1:
                if first < q0:
                    yield Block(first, q0, q0, q0)
                for begin, end in spans:
                    begin, end = max(begin, start), min(end, stop)
                    if q0 < end and begin < q1:
                        if q0 < begin:
                            yield Block(q0, begin, max(start, q0 - reach + 1), begin)
                        q0, last_of_span = max(q0, begin), min(q1, end)
                        yield Block(q0, last_of_span, max(start, q0 - reach + 1), end, two_ways=True)
                        q0 = last_of_span
                if q0 < q1:
                    yield Block(q0, q1, max(start, q0 - reach + 1), q1)
                first = q1
        if first < last:
            yield Block(first, last, last, last)


def blocks(found: Iterable[Block], reach: int, squares: bool = True) -> Iterator[Block]:
    """Yields segments cut so that a mask is small: of as many queries at most as a query sees keys.
    `squares`: a causal square needs no mask, however large it is."""
    for segment in found:
        q0, q1, start, stop, two_ways = segment
        if start == stop or (squares and segment.is_square(reach)):
            yield segment
            continue
        size = min(reach, max(1, MASK_ELEMENTS // min(stop - start, 2 * reach)))
        while q0 < q1:
            end = min(q1, q0 + size)
            yield Block(q0, end, max(start, q0 - reach + 1), stop if two_ways else end, two_ways)
            q0 = end


def attend(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes this rank's queries q [B, h, rows, K] against k and v [B, kv, length, K], to [B, rows, h, K].

    Queries of padding get zeros.
    """
    compute = _form_of(attention.layout.implementation) or by_masks
    groups = attention.heads.groups
    out = joined([compute(attention.of_heads(heads), q[:, heads], k[:, kv], v[:, kv]) for heads, kv in groups], 2)
    if q.requires_grad and not out.requires_grad:  # nothing but padding here; the backward's collectives must still run
        out = torch.cat([out, q.transpose(1, 2)[:, :0].expand(-1, -1, -1, v.shape[3])], 1)
    return out


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Returns the parts as one; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_parts(tensors: Sequence[Tensor], sizes: list[int], dim: int) -> list[Sequence[Tensor]]:
    """Returns the parts of all tensors; one alone is not split, whose gradient would be copied."""
    return [tensors] if len(sizes) == 1 else list(zip(*(x.split(sizes, dim) for x in tensors), strict=True))


def _zeros(q: Tensor, v: Tensor) -> Tensor:
    """Returns the outputs [B, n, h, K] of queries of padding q [B, h, n, K]."""
    return q.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[3])


def by_masks(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor, additive: bool = False) -> Tensor:
    """Asks for block after block, with booleans or addends; rows of the batch together if they have the same
    documents."""
    found, rows, reach = [], attention.heads.rows, attention.reach
    parted = segments(attention.layout, rows, reach, attention.spans)
    key = ("blocks", rows, reach, additive, bool(attention.spans))
    cut = attention.layout.once(key, lambda: [list(blocks(row, reach, squares=not additive)) for row in parted])

    def of_block(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if block.k0 == block.k1:
            return _zeros(q, v)
        operands = (q, k[:, :, block.k0 : block.k1], v[:, :, block.k0 : block.k1])
        if not additive and block.is_square(reach):
            return attention.compute(*operands)
        # A mask kept for the backward, block after block, would grow with the square of the length.
        return checkpoint(with_mask, block, *operands, use_reentrant=False)

    def with_mask(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = block.mask(reach, q.device)
        if additive:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        return attention.compute(q, k, v, mask[None, None])

    for of_row, (q_row, k_row, v_row) in zip(cut, in_parts((q, k, v), [len(q) // len(cut)] * len(cut), 0), strict=True):
        queries = in_parts((q_row,), [block.q1 - block.q0 for block in of_row], 2)
        parts = [of_block(block, part, k_row, v_row) for block, (part,) in zip(of_row, queries, strict=True)]
        found.append(joined(parts or [_zeros(q_row, v_row)], 1))
    return joined(found, 0)


def _visible(attention: LocalAttention, batch: int) -> Iterator[tuple[int, int, Block]]:
    """Yields every segment of every row of the batch but padding's: the row, the place of its first query among this
    rank's, and the segment."""
    found = segments(attention.layout, attention.heads.rows, attention.reach, attention.spans)
    for row in range(batch):
        at = 0
        for segment in found[row if len(found) > 1 else 0]:
            if segment.k0 < segment.k1:
                yield row, at, segment
            at += segment.q1 - segment.q0


def by_lengths(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Asks flash attention for all segments of all rows in one call, as sequences of their own, causal from their ends:
    documents one behind the other, told apart by their cumulative lengths."""
    batch, heads, rows, _ = q.shape
    key = ("lengths", attention.reach, attention.heads.rows)
    queries, keys, lengths = attention.layout.once(key, lambda: _lengths(attention, batch, q.device))
    if lengths["max_length_q"] == 0:
        return _zeros(q, v)
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    chosen = (x if index is None else x[index] for x, index in zip(flat, (queries, keys, keys), strict=True))
    out = attention.compute(*(x.transpose(0, 1)[None] for x in chosen), **lengths)[0]
    if queries is not None:
        out = out.new_zeros(batch * rows, heads, out.shape[2]).index_copy(0, queries, out)
    return out.view(batch, rows, heads, -1)


def _lengths(attention: LocalAttention, batch: int, device: torch.device) -> tuple[Any, Any, dict[str, Any]]:
    """Returns which of the flattened queries, and which keys, to take one behind the other, None for all in order; and
    how Hugging Face's flash attention is told where documents begin."""
    rows, length = count(attention.heads.rows), attention.layout.length
    queries, keys = [torch.arange(0)], [torch.arange(0)]
    for row, at, segment in _visible(attention, batch):
        queries.append(torch.arange(segment.q1 - segment.q0) + row * rows + at)
        keys.append(torch.arange(row * length + segment.k0, row * length + segment.k1))
    found, lengths = [], {}
    for name, parts, whole in (("q", queries, batch * rows), ("k", keys, batch * length)):
        sizes, index = torch.tensor([len(part) for part in parts]), torch.cat(parts)
        lengths[f"cu_seq_lens_{name}"] = sizes.cumsum(0, dtype=torch.int32).to(device)
        lengths[f"max_length_{name}"] = int(sizes.max())
        found.append(None if index.equal(torch.arange(whole)) else index.to(device))
    return *found, lengths


def by_block_mask(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Asks flex attention, with an interval of keys for each query."""
    key = ("block mask", attention.reach, attention.heads.rows, bool(attention.spans))
    return attention.compute(q, k, v, attention.layout.once(key, lambda: block_mask(attention, len(q), q.device)))


def block_mask(attention: LocalAttention, batch: int, device: torch.device) -> BlockMask:
    """Returns the BlockMask of this rank's queries, from no tensor larger than queries x keys / 128^2."""
    queries, length = count(attention.heads.rows), attention.layout.length
    shape = (batch, -(-queries // SIDE) * SIDE)
    first, last = torch.full(shape, length), torch.full(shape, -1)  # keys [first, last]; as of one that sees nothing
    for row, at, (q0, q1, k0, k1, two_ways) in _visible(attention, batch):
        tokens, here = torch.arange(q0, q1), slice(at, at + q1 - q0)
        first[row, here] = (tokens - attention.reach + 1).clamp(k0)
        last[row, here] = k1 - 1 if two_ways else tokens
    first, last = first.to(device), last.to(device)
    begin, end = (x.view(batch, -1, 1, SIDE) for x in (first, last))
    keys = torch.arange(0, length, SIDE, device=device)
    some = (begin.amin(3) < keys + SIDE) & (end.amax(3) >= keys)
    full = (begin.amax(3) <= keys) & (end.amin(3) >= keys + SIDE - 1)

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[b, query] <= key) & (key <= last[b, query])

    listed = (*_listed(some & ~full), *_listed(full))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=SIDE, mask_mod=sees, seq_lengths=(queries, length))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each row of [B, queries / 128, keys / 128] how many are chosen, and which, those first."""
    order = chosen.to(torch.int32).argsort(dim=2, descending=True, stable=True)
    return chosen.sum(2, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


FORMS = {
    masking_utils.sdpa_mask: by_masks,
    masking_utils.eager_mask: partial(by_masks, additive=True),
    masking_utils.flash_attention_mask: by_lengths,
    masking_utils.flex_attention_mask: by_block_mask,
}


def _form_of(implementation: str) -> Callable[..., Tensor] | None:
    return FORMS.get(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation))


def check(attention: LocalAttention, ranks: int, q_heads: int) -> None:
    """Raises ValueError, alike on every rank, for what the wrapped attention cannot express."""
    name, window = attention.layout.implementation, attention.window
    longest = max((stop - start for row in attention.layout.documents for start, stop in row), default=0)
    for option, what in (("softcap", "soft cap of scores"), (SINKS, "sinks")):
        if option in attention.options and name == "sdpa":
            raise ValueError(f'sdpa has no {what}, which this model has; model.set_attn_implementation("eager")')
    if SINKS in attention.options and name == "eager" and "sinks" not in attention.eager.__code__.co_names:
        raise ValueError(
            f"the eager attention of {type(attention.module).__name__} has no sinks; leave this model whole"
        )
    if attention.spans and _form_of(name) in (None, by_lengths):
        raise ValueError(
            f"{name!r} cannot be asked for spans whose tokens see each other both ways, as of images; "
            'model.set_attn_implementation("sdpa")'
        )
    if _form_of(name) is None and (ranks > q_heads or (window is not None and window < longest)):
        what = "a sliding window" if ranks <= q_heads else f"{q_heads} heads over {ranks} ranks"
        raise ValueError(
            f"{name!r} has no mask function and can be asked for whole causal documents only, not for {what}; register "
            'one in AttentionMaskInterface, or model.set_attn_implementation("sdpa")'
        )
