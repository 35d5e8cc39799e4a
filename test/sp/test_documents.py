"""Blocks of queries with slices of keys and small masks, against one dense mask; no tensor of length x length."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measure import LiveBytes
from seqtile.sp import blocks as room
from seqtile.sp.blocks import How, attend, blocks
from seqtile.sp.documents import Layout, _documents
from seqtile.sp.heads import share_of

Documents = tuple[tuple[int, int], ...]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, Documents]:
    """A length and documents in it, with padding before, between and behind them."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=5))
    found, at = [], 0
    for gap, length in lengths:
        found.append((at + gap, at + gap + length))
        at = found[-1][1]
    return at + draw(st.integers(0, 5)), tuple(found)


def dense(length: int, documents: Documents, window: int | None) -> torch.Tensor:
    """[length, length]: True where a query sees a key."""
    row = torch.full((length,), -1)
    for i, (start, stop) in enumerate(documents):
        row[start:stop] = i
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (row[:, None] == row) & (row >= 0)
    return seen if window is None else seen & (distance < window)


@given(sequences(), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 3), st.sampled_from([4, 60, 2**24]))
@settings(deadline=None)
def test_blocks_are_the_dense_mask(
    sequence: tuple[int, Documents], window: int | None, size: int, mask_elements: int
) -> None:
    length, found = sequence
    expected, seen = dense(length, found, window), torch.zeros(length, length, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "MASK_ELEMENTS", mask_elements)
        for rank in range(size):
            for block in blocks(share_of(rank, size, 1, 1, length).rows, found, window):
                here = torch.ones(block.q1 - block.q0, block.k1 - block.k0, dtype=torch.bool).tril()
                if not block.is_square(window):
                    here = block.mask(window, torch.device("cpu"))
                    assert here.numel() <= max(mask_elements, length) or window is not None
                assert not seen[block.q0 : block.q1].any(), "a query stands in two blocks"
                seen[block.q0 : block.q1, block.k0 : block.k1] = here
    assert seen.equal(expected)


@given(sequences(), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 3), st.sampled_from(["sdpa", "eager"]))
@settings(deadline=None, max_examples=60)
def test_attention(sequence: tuple[int, Documents], window: int | None, size: int, implementation: str) -> None:
    """Outputs and gradients, of every rank's rows, of two sequences in a batch with other documents each."""
    length, found = sequence
    rows_of_batch = (found, ((0, length),))
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.stack([dense(length, row, window) for row in rows_of_batch])[:, None]
    truth = torch.where(
        mask.any(-1, keepdim=True), torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), 0.0
    )
    layout = Layout(SimpleNamespace(size=1), length, rows_of_batch, implementation)
    out = torch.full_like(truth, torch.nan)
    for rank in range(size):
        rows = share_of(rank, size, 1, 1, length).rows
        index = torch.cat([torch.arange(first, last) for first, last in rows] or [torch.arange(0)])
        out = out.index_copy(2, index, attend(q[:, :, index], k, v, rows, layout, How(window)))
    upstream = torch.randn_like(truth)
    ours, theirs = (torch.autograd.grad(y, (q, k, v), upstream, retain_graph=True) for y in (out, truth))
    for a, b in zip((out, *ours), (truth, *theirs), strict=True):
        tolerance = 1e-12 if implementation == "sdpa" else 1e-6  # eager's softmax is in float32
        expected = b.nan_to_num().detach()
        assert (a.detach() - expected).norm() <= tolerance * max(1, expected.norm())  # one token's scores: no gradient


def test_documents_of_positions() -> None:
    positions = torch.tensor([7, 8, 0, 1, 2, 0, 0, 1, 1, 2])
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
    assert _documents(positions, valid) == ((0, 2), (2, 5), (5, 6), (6, 7), (8, 9))
    assert _documents(positions, torch.zeros(10, dtype=torch.bool)) == ()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("found", [((0, 8192),), ((0, 3000), (3000, 8192)), ((700, 8000),)], ids=str)
def test_nothing_has_the_square_of_the_length(found: Documents, window: int | None, implementation: str) -> None:
    length = 8192
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    layout = Layout(SimpleNamespace(size=1), length, (found,), implementation)
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as memory:
        patch.setattr(room, "MASK_ELEMENTS", 2**20)
        attend(q, k, v, ((0, length),), layout, How(window)).sum().backward()
    assert 0 < memory.largest <= 2**23 < length**2
