"""Blocks of queries with slices of keys and small masks, against one dense mask; no tensor of length x length.
Documents may continue others, as completions continue a prefix that rows share."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from seqtile.attention import by_lengths, segments
from seqtile.attention.backends import attend, check
from seqtile.attention.by_block_mask import block_mask
from seqtile.attention.heads import RankHeads, Rows, rank_heads
from seqtile.attention.layout import document_edges, documents_at, edges_of, rows_between
from seqtile.attention.segments import Block, blocks, segments_of
from seqtile.sp.groups import ALONE
from seqtile.sp.layout import gathered_positions
from sp.attentions import INSTALLED, asked, dense, install
from sp.prefixes import path_mask
from support.choice import every_pair, every_value
from support.measure import LiveBytes


@pytest.fixture(autouse=True)
def attentions() -> Iterator[None]:
    install()
    yield
    torch.compiler.set_stance("default")


@st.composite
def sequences(draw: st.DrawFn, continued: bool) -> tuple[int, Rows, tuple[int | None, ...]]:
    """A length, documents with padding after them, and for each document the one before it that it continues. If none
    does, (), and there is padding before and between documents too."""
    parents: list[int | None] = []

    def grow(parent: int | None, depth: int) -> None:
        parents.append(parent)
        own = len(parents) - 1
        for _ in range(draw(st.integers(0, 3 if continued and depth < 2 else 0))):
            grow(own, depth + 1)

    for _ in range(draw(st.integers(1, 2 if continued else 5))):
        grow(None, 0)
    found, at = [], 0
    for _ in parents:
        start = at + draw(st.integers(0, 0 if continued else 5))
        at = start + draw(st.integers(1, 25 if continued else 40))
        found.append((start, at))
    return at + draw(st.integers(0, 5)), tuple(found), tuple(parents) if continued else ()


APART = (70, ((2, 30), (33, 66)), ())
CONTINUED = (70, ((0, 20), (20, 40), (40, 50), (50, 66)), (None, 0, 1, 0))
EITHER = st.one_of(sequences(False), sequences(True))
WINDOWS = st.one_of(st.none(), st.integers(1, 50))
ATTENTIONS = (*INSTALLED, "of booleans", "of addends")


@example(APART, 20, 2, 60)
@example(CONTINUED, None, 2, 60)
@example(CONTINUED, 25, 1, 60)
@given(EITHER, WINDOWS, st.integers(1, 3), st.sampled_from([4, 60, 2**24]))
def test_blocks_are_the_dense_mask(sequence: tuple, window: int | None, size: int, mask_elements: int) -> None:
    length, found, parents = sequence
    reach = length if window is None else window
    seen = torch.zeros(length, length, dtype=torch.bool)

    def is_uncut(block: Block) -> bool:
        return block.is_square(reach)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MASK_ELEMENTS", mask_elements)
        for rank in range(size):
            rows = rank_heads(rank, size, 1, 1, ((0, length),)).rows
            for block in blocks(segments_of(rows, found, reach, (), parents), reach, is_uncut):
                keys = [key for start, stop in block.keys for key in range(start, stop)]
                here = block.mask(reach, torch.device("cpu"))
                if block.is_square(reach):
                    assert here.equal(torch.ones_like(here).tril())
                else:
                    assert here.numel() <= max(mask_elements, length) or window is not None
                assert not seen[block.q0 : block.q1].any(), "a query stands in two blocks"
                seen[block.q0 : block.q1, keys] = here
    assert seen.equal(path_mask(length, found, parents, window))


def with_each_attention(test: Callable) -> Callable:
    """Adds an example of each attention with either kind of sequence."""
    for i, (name, sequence) in enumerate(product(ATTENTIONS, (APART, CONTINUED))):
        test = example(sequence, (None, 25)[i % 3 // 2], 2, ((4, 2), (3, 2))[i // 2 % 2], name, True, 60)(test)
    return test


@with_each_attention
@given(
    EITHER,
    WINDOWS,
    st.integers(1, 3),
    st.sampled_from([(1, 1), (3, 3), (4, 2), (3, 2)]),
    st.sampled_from(ATTENTIONS),
    st.booleans(),
    st.sampled_from([60, 2**24]),
)
def test_attention(
    sequence: tuple,
    window: int | None,
    size: int,
    heads: tuple[int, int],
    implementation: str,
    sinks: bool,
    mask_elements: int,
) -> None:
    """Outputs and gradients of every rank's rows, for two sequences in a batch with different documents, or for one
    whose documents continue others; with sinks if the attention supports them."""
    length, found, parents = sequence
    rows_of_batch = (found,) if parents else (found, ((0, length),))
    q_heads, kv_heads = heads
    kv_of_q = tuple(i * kv_heads // q_heads for i in range(q_heads))
    batch, wide = len(rows_of_batch), {"dtype": torch.float64, "requires_grad": True}
    q = torch.randn(batch, q_heads, length, 8, **wide)
    k, v = (torch.randn(batch, kv_heads, length, 8, **wide) for _ in range(2))
    options = {"s_aux": torch.randn(q_heads, **wide)} if sinks and implementation == "flash_attention_3" else {}
    mask = torch.stack([path_mask(length, row, parents, window) for row in rows_of_batch])[:, None]
    padding = ~mask.any(-1, keepdim=True)
    each = (x[:, list(kv_of_q)] for x in (k, v))
    truth = dense(q, *each, mask | padding, 0.3, options.get("s_aux")).masked_fill(padding, 0).transpose(1, 2)
    out = torch.full_like(truth, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MASK_ELEMENTS", mask_elements)
        patch.setattr(by_lengths, "LONG", mask_elements)
        for rank in range(size):
            rows = rank_heads(rank, size, 1, 1, ((0, length),)).rows
            share = RankHeads(slice(0, q_heads), slice(0, kv_heads), kv_of_q, rows)
            index = torch.cat([torch.arange(first, last) for first, last in rows] or [torch.arange(0)])
            asking = asked(implementation, rows_of_batch, length, share, window, scaling=0.3, dropout=0.0, **options)
            asking.layout.parents = parents
            if len(index):
                out = out.index_copy(1, index, attend(asking, q[:, :, index], k, v))
    upstream, inputs = torch.randn_like(truth), (q, k, v, *options.values())
    ours, theirs = (torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (out, truth))
    for a, b in zip((out, *ours), (truth, *theirs), strict=True):
        tolerance = 1e-6 if implementation in ("eager", "flex_attention") else 1e-12  # their softmax is in float32
        assert (a - b).detach().norm() <= tolerance * max(1, b.detach().norm())  # one token's scores: no gradient


def test_an_attention_without_masks_is_asked_for_squares_only() -> None:
    documents, length = ((0, 30), (30, 70)), 80
    q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
    share = rank_heads(0, 1, 2, 2, ((0, length),))
    ours, theirs = (
        attend(asked(name, (documents,), length, share, None, scaling=None, dropout=0.0), q, k, v)
        for name in ("of squares", "sdpa")
    )
    torch.testing.assert_close(ours, theirs)
    asking = asked("of squares", (documents,), length, share, 39)
    with pytest.raises(ValueError, match=r"computes only whole causal documents, not a sliding window; register"):
        check(asking, 1, 2)
    with pytest.raises(ValueError, match=r"not 2 heads over 3 ranks; register"):
        check(asking._replace(window=None), 3, 2)
    check(asking._replace(window=40), 2, 2)


def test_documents_of_positions() -> None:
    positions = torch.tensor([7, 8, 0, 1, 2, 0, 0, 1, 1, 2])
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
    rows = torch.stack([valid, torch.zeros(10, dtype=torch.bool)])
    assert rows_between(edges_of(positions.expand(2, -1), rows)) == (((0, 2), (2, 5), (5, 6), (6, 7), (8, 9)), ())
    edges = edges_of(torch.tensor([[0, 1, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.bool))
    assert rows_between(edges) == (((0, 2), (2, 5)),)


def one_rank(values: Tensor, ctx: object) -> list[Tensor]:
    return [values]


def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are determined by positions without a mask (with several axes, the text's); a mask applies to whole
    rows."""
    monkeypatch.setattr("seqtile.sp.layout.gather", one_rank)

    def found(positions: Tensor, mask: Tensor | None = None) -> tuple[Rows, ...]:
        whole, of_shards = (positions, mask), gathered_positions(positions, mask, ALONE)
        found, gathered = (documents_at(document_edges(*each), mask is not None) for each in (whole, of_shards))
        assert found == gathered
        return found

    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    axes = torch.tensor([[0, 1, 1, 1, 2, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 9]])[:, None]
    left, right = torch.tensor([0, 0, 1, 1, 1, 1, 1]), torch.tensor([1, 1, 1, 1, 1, 0, 0])
    assert found(packed) == (((0, 3), (3, 7)),)
    assert found(axes) == (((0, 7),),)
    assert found(torch.cat([packed[None], axes])) == (((0, 3), (3, 7)),)
    assert found(torch.arange(7)[None], torch.stack([left, right])) == (((2, 7),), ((0, 5),))
    for positions, mask in ((torch.arange(7)[None], torch.tensor([[1, 1, 0, 1, 1, 1, 1]])), (packed, right[None])):
        with pytest.raises(ValueError, match="has a hole, or position_ids restart under it"):
            found(positions, mask)


@pytest.mark.full("of 24 cases", but=every_pair)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("found", [((0, 8192),), ((0, 3000), (3000, 8192)), ((700, 8000),)], ids=str)
def test_memory_does_not_grow_with_the_square_of_the_length(
    found: Rows, window: int | None, size: int, implementation: str
) -> None:
    """All live bytes, forward and backward, of a rank that has a head or shares one."""
    length = 8192
    share = rank_heads(0, size, 1, 1, ((0, length),))
    q, k, v = (torch.randn(1, 1, tokens, 4, requires_grad=True) for tokens in (length // size, length, length))
    asking = asked(implementation, (found,), length, share, window)
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as memory:
        patch.setattr(segments, "MASK_ELEMENTS", 2**20)
        attend(asking, q, k, v).sum().backward()
    assert 0 < memory.peak <= 2**25 < length**2


@pytest.mark.full("of 6 cases", but=every_value)
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_mask(rank: int, window: int | None) -> None:
    """Its blocks cover the dense mask, its full blocks are full, and no tensor is as large as that mask."""
    length, side = 4096 + 50, 128
    documents = ((0, 1000), (1000, length - 9))
    share = rank_heads(rank, 2, 1, 1, ((0, length),))
    with LiveBytes() as memory:
        made = block_mask(asked("flex_attention", (documents,), length, share, window), 1, torch.device("cpu"))
    assert memory.largest <= 8 * (length + side)
    rows = torch.cat([torch.arange(first, last) for first, last in share.rows])
    seen = path_mask(length, documents, (), window)[rows]
    blocks_of = torch.nn.functional.pad(seen, (0, -length % side, 0, -len(rows) % side))
    blocks_of = blocks_of.view(-(-len(rows) // side), side, -(-length // side), side).transpose(1, 2)
    full, listed = (torch.zeros(blocks_of.shape[:2], dtype=torch.bool) for _ in range(2))
    for i in range(len(full)):
        full[i, made.full_kv_indices[0, 0, i, : made.full_kv_num_blocks[0, 0, i]].long()] = True
        listed[i, made.kv_indices[0, 0, i, : made.kv_num_blocks[0, 0, i]].long()] = True
    assert full.equal(blocks_of.all(-1).all(-1)) and full.any() == (window != 1)
    some = blocks_of.any(-1).any(-1)
    assert not (full & listed).any() and (full | listed | ~some).all()
    assert (listed & ~some).sum() <= 2 * len(full[0]), "of a block of queries from two pieces all between"
