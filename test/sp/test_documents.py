"""Blocks of queries with slices of keys and small masks, against one dense mask; no tensor of length x length."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqtile.sp import segments
from seqtile.sp.all_to_all import RankHeads, Rows, rank_heads
from seqtile.sp.backends import attend, block_mask, check
from seqtile.sp.layout import documents_of, layout_of
from seqtile.sp.segments import Block, blocks, segments_of
from sp.attentions import INSTALLED, asked, install
from support.choice import every_pair
from support.measure import LiveBytes


@pytest.fixture(autouse=True)
def attentions() -> Iterator[None]:
    install()
    yield
    torch.compiler.set_stance("default")


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, Rows]:
    """A length and documents in it, with padding before, between and after them."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=5))
    found, at = [], 0
    for gap, length in lengths:
        found.append((at + gap, at + gap + length))
        at = found[-1][1]
    return at + draw(st.integers(0, 5)), tuple(found)


def dense(length: int, documents: Rows, window: int | None) -> Tensor:
    """[length, length]: True where a query sees a key."""
    row = torch.full((length,), -1)
    for i, (start, stop) in enumerate(documents):
        row[start:stop] = i
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (row[:, None] == row) & (row >= 0)
    return seen if window is None else seen & (distance < window)


@given(sequences(), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 3), st.sampled_from([4, 60, 2**24]))
def test_blocks_are_the_dense_mask(sequence: tuple, window: int | None, size: int, mask_elements: int) -> None:
    length, found = sequence
    reach = length if window is None else window
    expected, seen = dense(length, found, window), torch.zeros(length, length, dtype=torch.bool)

    def is_uncut(block: Block) -> bool:
        return block.is_square(reach)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MASK_ELEMENTS", mask_elements)
        for rank in range(size):
            for block in blocks(segments_of(rank_heads(rank, size, 1, 1, length).rows, found, reach), reach, is_uncut):
                keys = [key for start, stop in block.keys for key in range(start, stop)]
                here = torch.ones(block.q1 - block.q0, len(keys), dtype=torch.bool).tril()
                if not block.is_square(reach):
                    here = block.mask(reach, torch.device("cpu"))
                    assert here.numel() <= max(mask_elements, length) or window is not None
                assert not seen[block.q0 : block.q1].any(), "a query stands in two blocks"
                seen[block.q0 : block.q1, keys] = here
    assert seen.equal(expected)


@given(
    sequences(),
    st.one_of(st.none(), st.integers(1, 50)),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (3, 3), (4, 2), (3, 2)]),
    st.sampled_from([*INSTALLED, "of booleans", "of addends"]),
    st.sampled_from([60, 2**24]),
)
def test_attention(
    sequence: tuple, window: int | None, size: int, heads: tuple[int, int], implementation: str, mask_elements: int
) -> None:
    """Outputs and gradients of every rank's rows, for two sequences in a batch with different documents."""
    length, found = sequence
    rows_of_batch = (found, ((0, length),))
    q_heads, kv_heads = heads
    kv_of_q = tuple(i * kv_heads // q_heads for i in range(q_heads))
    q = torch.randn(2, q_heads, length, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.stack([dense(length, row, window) for row in rows_of_batch])[:, None]
    each = (x[:, list(kv_of_q)] for x in (k, v))
    truth = torch.nn.functional.scaled_dot_product_attention(q, *each, attn_mask=mask, scale=0.3)
    truth = torch.where(mask.any(-1, keepdim=True), truth, 0.0).transpose(1, 2)
    out = torch.full_like(truth, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MASK_ELEMENTS", mask_elements)
        for rank in range(size):
            rows = rank_heads(rank, size, 1, 1, length).rows
            share = RankHeads(slice(0, q_heads), slice(0, kv_heads), kv_of_q, rows)
            index = torch.cat([torch.arange(first, last) for first, last in rows] or [torch.arange(0)])
            asking = asked(implementation, rows_of_batch, length, share, window, scaling=0.3, dropout=0.0)
            if len(index):
                out = out.index_copy(1, index, attend(asking, q[:, :, index], k, v))
    upstream = torch.randn_like(truth)
    ours, theirs = (torch.autograd.grad(y, (q, k, v), upstream, retain_graph=True) for y in (out, truth))
    for a, b in zip((out, *ours), (truth, *theirs), strict=True):
        tolerance = 1e-6 if implementation in ("eager", "flex_attention") else 1e-12  # their softmax is in float32
        expected = b.nan_to_num().detach()
        assert (a.detach() - expected).norm() <= tolerance * max(1, expected.norm())  # one token's scores: no gradient


def test_an_attention_without_masks_is_asked_for_squares_only() -> None:
    documents, length = ((0, 30), (30, 70)), 80
    q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
    share = rank_heads(0, 1, 2, 2, length)
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
    assert documents_of(positions.expand(2, -1), rows) == (((0, 2), (2, 5), (5, 6), (6, 7), (8, 9)), ())
    assert documents_of(torch.tensor([[0, 1, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.bool)) == (((0, 2), (2, 5)),)


def one_rank(values: Tensor, ctx: object) -> list[Tensor]:
    return [values]


def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are determined by positions without a mask (with several axes, the text's); a mask applies to whole
    rows."""
    monkeypatch.setattr("seqtile.sp.layout.gather", one_rank)
    ctx = SimpleNamespace(rank=0, size=1)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    axes = torch.tensor([[0, 1, 1, 1, 2, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 9]])[:, None]
    left, right = torch.tensor([0, 0, 1, 1, 1, 1, 1]), torch.tensor([1, 1, 1, 1, 1, 0, 0])
    assert layout_of(7, packed, None, ctx, "sdpa").documents == (((0, 3), (3, 7)),)
    layout = layout_of(7, axes, None, ctx, "sdpa")
    assert layout.documents == (((0, 7),),)
    assert layout_of(7, torch.cat([packed[None], axes]), None, ctx, "sdpa").documents == (((0, 3), (3, 7)),)
    rows = layout_of(7, torch.arange(7)[None], torch.stack([left, right]), ctx, "sdpa").documents
    assert rows == (((2, 7),), ((0, 5),))
    for positions, mask in ((torch.arange(7)[None], torch.tensor([[1, 1, 0, 1, 1, 1, 1]])), (packed, right[None])):
        with pytest.raises(ValueError, match="has a hole, or position_ids restart under it"):
            layout_of(7, positions, mask, ctx, "sdpa")


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
    share = rank_heads(0, size, 1, 1, length)
    q, k, v = (torch.randn(1, 1, tokens, 4, requires_grad=True) for tokens in (length // size, length, length))
    asking = asked(implementation, (found,), length, share, window)
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as memory:
        patch.setattr(segments, "MASK_ELEMENTS", 2**20)
        attend(asking, q, k, v).sum().backward()
    assert 0 < memory.peak <= 2**25 < length**2


@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_mask(rank: int, window: int | None) -> None:
    """Its blocks cover the dense mask, its full blocks are full, and no tensor is as large as that mask."""
    length, side = 4096 + 50, 128
    documents = ((0, 1000), (1000, length - 9))
    share = rank_heads(rank, 2, 1, 1, length)
    with LiveBytes() as memory:
        made = block_mask(asked("flex_attention", (documents,), length, share, window), 1, torch.device("cpu"))
    assert memory.largest <= 8 * (length + side)
    rows = torch.cat([torch.arange(first, last) for first, last in share.rows])
    seen = dense(length, documents, window)[rows]
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
