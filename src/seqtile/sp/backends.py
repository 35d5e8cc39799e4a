"""Calls the attention functions that Hugging Face registers, each with its kind of mask, for some queries of a
sequence.

The kinds are boolean and additive masks (sdpa, eager), cumulative document lengths (flash attention), and a BlockMask
(flex attention). An attention without a mask function computes only causal squares. With every kind, a query sees its
own document up to itself, no further back than the window, and no padding.

All kinds are made from segments, see segments.py. No mask of length x length is ever made.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2

from seqtile.ops.state import Overridden
from seqtile.sdpa import may_choose_cudnn, without_cudnn
from seqtile.sp.heads import RankHeads, Rows, count
from seqtile.sp.layout import Layout
from seqtile.sp.recompute import Call, call_again_in_backward, gathered
from seqtile.sp.sdpa import causal_from_the_end, in_lengths, lengths_for_cudnn
from seqtile.sp.segments import Block, blocks, family, segments

SINKS = "s_aux"  # Hugging Face's argument for sinks [H], logits that take a share of every softmax
SIDE = 128  # tokens per side of a BlockMask's blocks, torch's default


class LocalAttention(NamedTuple):
    """The model's original attention, called for this rank's heads and queries."""

    module: nn.Module
    layout: Layout
    heads: RankHeads
    window: int | None
    options: dict[str, Any]
    """scaling, dropout and, if the model has them, softcap and sinks, as Hugging Face passes them."""

    @property
    def reach(self) -> int:
        """The maximum number of keys that a query sees, including its own."""
        return self.layout.length if self.window is None else self.window

    @property
    def spans(self) -> tuple[Rows, ...]:
        """The spans whose tokens see each other in both directions in this layer, see `Layout`."""
        return self.layout.spans[self.window is not None]

    def of_heads(self, heads: slice) -> "LocalAttention":
        """Returns this attention with only the sinks of these heads."""
        if SINKS not in self.options:
            return self
        return self._replace(options=self.options | {SINKS: self.options[SINKS][heads]})

    @property
    def sinks(self) -> Tensor | None:
        return self.options.get(SINKS)

    @property
    def draws(self) -> bool:
        """True if the attention draws random numbers."""
        return bool(self.options.get("dropout"))

    def with_sinks(self, sinks: Tensor | None) -> "LocalAttention":
        return self if sinks is None else self._replace(options=self.options | {SINKS: sinks})

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **others: Any) -> Tensor:
        """Calls the attention as Hugging Face does: from q [B, h, n, K], k and v [B, kv, m, K] to [B, n, h, K]."""
        name = self.layout.implementation
        function = self.eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        config = Overridden(self.module.config, _attn_implementation=name)
        groups = q.shape[1] // k.shape[1]
        own = {"sinks": self.options[SINKS]} if SINKS in self.options else {}
        module = Overridden(self.module, config=config, num_key_value_groups=groups, head_dim=q.shape[3], **own)
        return function(module, q, k, v, mask, sliding_window=self.window, is_causal=True, **self.options, **others)[0]

    @property
    def eager(self) -> Callable[..., Any]:
        """The eager attention, which is not registered: the model's own if it has sinks, else Gemma 2's."""
        modeling = sys.modules[type(self.module).__module__] if SINKS in self.options else modeling_gemma2
        return modeling.eager_attention_forward


def attend(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention from this rank's queries q [B, h, rows, K] to k and v [B, kv, length, K]: [B, rows, h, K].

    Outputs of padding are zeros.
    """
    compute = _form_of(attention.layout.implementation) or by_masks
    groups = attention.heads.groups
    out = joined([compute(attention.of_heads(heads), q[:, heads], k[:, kv], v[:, kv]) for heads, kv in groups], 2)
    return _kept_in_graph(out, q)


def _kept_in_graph(out: Tensor, q: Tensor) -> Tensor:
    """Returns `out`, which depends on q also if it is padding only: the collectives of q's backward must run on every
    rank."""
    if out.requires_grad or not q.requires_grad:
        return out
    return torch.cat([out, q.transpose(1, 2)[:, :0, :, :1].expand(-1, -1, -1, out.shape[3])], 1)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Returns the concatenated parts; does not copy a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def in_parts(tensors: Sequence[Tensor], sizes: list[int], dim: int) -> list[Sequence[Tensor]]:
    """Splits each tensor into parts. Does not split a single part, because that would copy its gradient."""
    return [tensors] if len(sizes) == 1 else list(zip(*(x.split(sizes, dim) for x in tensors), strict=True))


def _zeros(q: Tensor, v: Tensor) -> Tensor:
    """Returns zeros [B, n, h, K], the outputs for queries q [B, h, n, K] of padding."""
    return q.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[3])


def averages_padding(model: nn.Module, implementation: str) -> bool:
    """Returns whether a model's attention gives queries that see no key the mean of all values, as a softmax over an
    additive mask does, rather than zeros."""
    is_additive = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) == masking_utils.eager_mask
    return is_additive and not any(hasattr(module, "sinks") for module in model.modules())


def by_masks(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor, additive: bool = False) -> Tensor:
    """Computes attention block by block with boolean or additive masks. Computes rows with the same documents
    together."""
    found, rows, reach = [], attention.heads.rows, attention.reach
    parted = segments(attention.layout, rows, reach, attention.spans)
    by_cudnn = may_choose_cudnn(attention.layout.implementation, q)
    whole = _whole_length(attention) if additive else 0

    def is_square(block: Block) -> bool:
        return not additive and block.is_square(reach)

    def is_uncut(block: Block) -> bool:
        needs_no_mask = attention.layout.implementation == "sdpa" and is_causal_from_the_end(q, block, reach)
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

    def cut_into_blocks() -> tuple[list[list[Block]], dict[int, int] | None]:
        cut = [list(blocks(row, reach, is_uncut, whole)) for row in parted]
        squares = {block.q1 - block.q0 for row in cut for block in row if is_square(block)}
        return cut, lengths_for_cudnn(squares) if by_cudnn else {}

    key = ("blocks", rows, reach, additive, bool(attention.spans), q.dtype)
    cut, lengths = attention.layout.once(key, cut_into_blocks)
    of_rows = in_parts((q, k, v), [len(q) // len(cut)] * len(cut), 0)
    for of_row, documents, (q_row, k_row, v_row) in zip(cut, attention.layout.documents, of_rows, strict=True):
        queries = [part for (part,) in in_parts((q_row,), [block.q1 - block.q0 for block in of_row], 2)]
        of_squares = keys_of_squares([block for block in of_row if is_square(block)], k_row, v_row)
        parts: list[Tensor | None] = [None] * len(of_row)
        with without_cudnn() if lengths is None else nullcontext():
            for i, (block, part) in enumerate(zip(of_row, queries, strict=True)):
                if not block.keys and not whole:
                    parts[i] = _zeros(part, v)
                elif is_square(block):
                    parts[i] = in_lengths(lengths or {}, attention.compute, part, *of_squares[block.q0])
        masked = [i for i, part in enumerate(parts) if part is None]
        calls = [Call(partial(with_mask, of_row[i], documents), of_row[i].keys or ((0, whole),)) for i in masked]
        asked = [queries[i] for i in masked]
        outs = call_again_in_backward(calls, asked, k_row, v_row, attention.sinks, attention.draws)
        for i, out in zip(masked, outs, strict=True):
            parts[i] = out
        found.append(joined(parts or [_zeros(q_row, v_row)], 1))
    return joined(found, 0)


def _whole_length(attention: LocalAttention) -> int:
    """Returns how many tokens of a row padding may see, 0 for none. A softmax over an additive mask gives padding the
    values of others, which a shifted loss reads in front of a row's first token. Waits for the device if the length is
    there."""
    layout = attention.layout
    if not layout.has_mask or attention.sinks is not None or not any(row and row[0][0] for row in layout.documents):
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


def _visible(attention: LocalAttention, batch: int) -> Iterator[tuple[int, int, Block]]:
    """Yields each segment of each row of the batch, except padding: the row, the index of the segment's first query
    among this rank's queries, and the segment."""
    found = segments(attention.layout, attention.heads.rows, attention.reach, attention.spans)
    for row in range(batch):
        at = 0
        for segment in found[row if len(found) > 1 else 0]:
            if segment.keys:
                yield row, at, segment
            at += segment.q1 - segment.q0


class PackedCall(NamedTuple):
    """A call of flash attention for several segments. The rows of the batch follow one another."""

    queries: Rows
    keys: Rows
    lengths: dict[str, Any]
    """The arguments that tell Hugging Face's flash attention where segments start."""


def by_lengths(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Calls flash attention for the segments of all rows, as packed sequences with cumulative lengths: once or, where
    documents share keys, in as many calls as needed so that no call gets more keys than a row has. Each segment is
    causal, aligned at its end."""
    (batch, heads, rows, _), layout = q.shape, attention.layout
    tokens, key = batch * rows, ("lengths", attention.reach, attention.heads.rows)
    calls = layout.once(key, lambda: list(_packed_calls(attention, batch, q.device)))
    if not calls:
        return _zeros(q, v)
    asked, k, v = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
    queries = layout.once((*key, "q"), lambda: _index([call.queries for call in calls], tokens, q.device))
    asked = gathered(asked, queries)

    def computed(lengths: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return attention.with_sinks(sinks).compute(q, k, v, **lengths)

    if layout.parents:
        again = [Call(partial(computed, call.lengths), call.keys) for call in calls]
        parts = [part for (part,) in in_parts((asked,), [count(call.queries) for call in calls], 2)]
        out = joined(list(call_again_in_backward(again, parts, k, v, attention.sinks, attention.draws)), 1)
    else:
        keys = layout.once((*key, "k"), lambda: _index([calls[0].keys], batch * layout.length, q.device))
        out = computed(calls[0].lengths, asked, gathered(k, keys), gathered(v, keys), attention.sinks)
    if queries is not None:
        out = out.new_zeros(1, tokens, heads, out.shape[3]).index_copy(1, queries, out)
    return out.view(batch, rows, heads, -1)


def _packed_calls(attention: LocalAttention, batch: int, device: torch.device) -> Iterator[PackedCall]:
    rows, length = count(attention.heads.rows), attention.layout.length
    calls: list[list[tuple[Rows, Rows]]] = []  # for each call, the queries and the keys of its segments
    for row, at, (q0, q1, seen, _) in _visible(attention, batch):
        queries = ((row * rows + at, row * rows + at + q1 - q0),)
        keys = tuple((row * length + start, row * length + stop) for start, stop in seen)
        if not calls or (attention.layout.parents and sum(count(sent) for _, sent in calls[-1]) + count(keys) > length):
            calls.append([])
        calls[-1].append((queries, keys))
    for call in calls:
        lengths: dict[str, Any] = {}
        of_segments = list(zip(*call, strict=True))
        for name, parts in zip("qk", of_segments, strict=True):
            sizes = [0, *map(count, parts)]
            lengths[f"cu_seq_lens_{name}"] = torch.tensor(sizes).cumsum(0, dtype=torch.int32).to(device)
            lengths[f"max_length_{name}"] = max(sizes)
        yield PackedCall(*(tuple(chain(*parts)) for parts in of_segments), lengths)


def _index(parts: Iterable[Rows], tokens: int, device: torch.device) -> Tensor | None:
    """Returns the indices of these parts of flattened tokens; None if they are all tokens, in order."""
    found = torch.cat([torch.arange(*part) for part in chain(*parts)])
    return None if found.equal(torch.arange(tokens)) else found.to(device)


def by_block_mask(attention: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Calls flex attention with a BlockMask."""
    key = ("block mask", attention.reach, attention.heads.rows, bool(attention.spans))
    return attention.compute(q, k, v, attention.layout.once(key, lambda: block_mask(attention, len(q), q.device)))


def block_mask(attention: LocalAttention, batch: int, device: torch.device) -> BlockMask:
    """Returns the BlockMask of this rank's queries. No tensor is larger than queries x keys / 128^2.

    A query sees a key at or before its position and within the window if the key's document is the query's own or an
    ancestor of it. The documents that may see a key are consecutive, so each key is visible up to one end.
    """
    queries, layout, reach = count(attention.heads.rows), attention.layout, attention.reach
    keys = -(-layout.length // SIDE) * SIDE
    last = torch.full((batch, -(-queries // SIDE) * SIDE), -1)  # the last key that a query sees; -1 for none
    for row, at, (q0, q1, seen, two_ways) in _visible(attention, batch):
        last[row, at : at + q1 - q0] = seen[-1][1] - 1 if two_ways else torch.arange(q0, q1)
    place = F.pad(torch.cat([torch.arange(*piece) for piece in attention.heads.rows]), (0, last.shape[1] - queries))
    ends, depth = torch.zeros(batch, keys, dtype=torch.long), torch.zeros(batch, keys, dtype=torch.long)
    for row in range(batch):
        documents = layout.documents[row if len(layout.documents) > 1 else 0]
        for (start, stop), path, end in zip(documents, *family(documents, layout.parents), strict=True):
            ends[row, start:stop] = end
            depth[row, start:stop] = torch.arange(stop - start) + count(path)
    of_query = depth[:, place]
    last, place, ends, depth, of_query = (x.to(device) for x in (last, place, ends, depth, of_query))

    def side(x: Tensor, of_keys: bool) -> Tensor:
        return x.view(len(x) if x.dim() > 1 else 1, *((1, -1) if of_keys else (-1, 1)), SIDE)

    begins = torch.arange(0, keys, SIDE, device=device)
    seen_by, own, away = side(last, False), side(place, False), side(of_query, False)
    end, at = side(ends, True), side(depth, True)
    some = (seen_by.amax(3) >= begins) & (own.amin(3) < end.amax(3)) & (away.amin(3) - at.amax(3) < reach)
    full = (seen_by.amin(3) >= begins + SIDE - 1) & (own.amax(3) < end.amin(3)) & (away.amax(3) - at.amin(3) < reach)

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_near = of_query[b, query] - depth[b, key] < reach
        return (key <= last[b, query]) & (place[query] < ends[b, key]) & is_near

    listed = (*_listed(some & ~full), *_listed(full))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=SIDE, mask_mod=sees, seq_lengths=(queries, layout.length))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of [B, queries / 128, keys / 128], returns how many are chosen, and all indices, the chosen
    first."""
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


def check_has_masks(implementation: str) -> None:
    """Raises ValueError if an attention takes no masks, and so computes only causal squares."""
    if _form_of(implementation) is None:
        raise ValueError(
            f"{implementation!r} has no mask function, which queries after a shared prefix need; "
            'register one in AttentionMaskInterface, or model.set_attn_implementation("sdpa")'
        )


def check(attention: LocalAttention, ranks: int, q_heads: int) -> None:
    """Raises ValueError, the same on every rank, if the wrapped attention cannot compute this layout."""
    name, window = attention.layout.implementation, attention.window
    longest = max((stop - start for row in attention.layout.documents for start, stop in row), default=0)
    for option, what in (("softcap", "soft cap of scores"), (SINKS, "sinks")):
        if option in attention.options and name == "sdpa":
            raise ValueError(f'sdpa has no {what}, which this model needs; model.set_attn_implementation("eager")')
    if SINKS in attention.options and name == "eager" and "sinks" not in attention.eager.__code__.co_names:
        raise ValueError(
            f"the eager attention of {type(attention.module).__name__} has no sinks; leave this model whole"
        )
    if attention.spans and _form_of(name) in (None, by_lengths):
        raise ValueError(
            f"{name!r} does not support spans of tokens that see each other both ways, such as images; "
            'model.set_attn_implementation("sdpa")'
        )
    if _form_of(name) is None and (ranks > q_heads or (window is not None and window < longest)):
        what = "a sliding window" if ranks <= q_heads else f"{q_heads} heads over {ranks} ranks"
        raise ValueError(
            f"{name!r} has no mask function, so it computes only whole causal documents, not {what}; register "
            'one in AttentionMaskInterface, or model.set_attn_implementation("sdpa")'
        )
