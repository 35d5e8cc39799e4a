"""Exactly one rank computes each query of each head, with its kv head, and all ranks have equal work."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqtile.attention.heads import count, rank_heads, within
from seqtile.sp.compressed import CompressedKeys
from sp.recurrences import build


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    kv_heads = draw(st.integers(1, 12))
    return draw(st.integers(1, 9)), kv_heads * draw(st.integers(1, 8)), kv_heads, draw(st.integers(1, 90))


@given(shapes())
def test_each_query_once(shape: tuple[int, int, int, int]) -> None:
    size, q_heads, kv_heads, length = shape
    done: list[tuple[int, int]] = []
    for rank in range(size):
        share = rank_heads(rank, size, q_heads, kv_heads, ((0, length),))
        heads = range(*share.q.indices(q_heads))
        for head, kv in zip(heads, share.kv_of_q, strict=True):
            assert share.kv.start + kv == head * kv_heads // q_heads
            done += [(head, row) for first, last in share.rows for row in range(first, last)]
        assert {*share.kv_of_q} == {*range(share.kv.stop - share.kv.start)}, "a kv head was sent that no query reads"
        assert list(share.rows) == sorted(share.rows)
        for queries, kv_group in share.groups:
            together, kvs = share.kv_of_q[queries], range(share.kv.stop - share.kv.start)[kv_group]
            each = len(together) // len(kvs)
            assert together == tuple(kv for kv in kvs for _ in range(each)), "kernels read it otherwise"
        assert [kv for queries, _ in share.groups for kv in share.kv_of_q[queries]] == list(share.kv_of_q)
    assert sorted(done) == [(head, row) for head in range(q_heads) for row in range(length)]


@given(shapes())
def test_balanced(shape: tuple[int, int, int, int]) -> None:
    """Heads to within one; for ranks that share a head, causal work (a query's keys) up to rounding."""
    size, q_heads, kv_heads, length = shape
    shares = [rank_heads(rank, size, q_heads, kv_heads, ((0, length),)) for rank in range(size)]
    counts = [share.q.stop - share.q.start for share in shares]
    assert max(counts) - min(counts) <= 1
    for head in range(q_heads if q_heads < size else 0):
        work = [sum(sum(range(a, b)) for a, b in share.rows) for share in shares if share.q.start == head]
        assert max(work) - min(work) <= 4 * length


@given(shapes(), st.integers(0, 300), st.integers(0, 300))
def test_within(shape: tuple[int, int, int, int], start: int, stop: int) -> None:
    rows = rank_heads(shape[0] - 1, *shape[:3], ((0, shape[3]),)).rows
    kept = [row for first, last in rows for row in range(first, last) if start <= row < stop]
    assert [row for first, last in within(rows, start, stop) for row in range(first, last)] == kept
    assert count(within(rows, start, stop)) == len(kept)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("latent", [8, 61, 62, 200])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_latents_travel_compressed_where_that_is_less(size: int, latent: int, adapted: bool) -> None:
    """Six heads of 22 elements per token, or the latent and 4 elements for every rank. Never with an adapter on the
    projection that expands them."""
    attention = build("deepseek_v3", kv_lora_rank=latent).model.layers[0].self_attn
    if adapted:
        attention.kv_b_proj.register_forward_hook(lambda module, args, output: output)
    keys = CompressedKeys(attention, SimpleNamespace(size=size))
    assert keys.elements == (size * (latent + 4), 22 * max(6, size))
    assert keys.is_chosen == (not adapted and (size, latent) in ((2, 8), (2, 61), (8, 8)))
    k, v = keys(torch.randn(1, 1, 5, latent), torch.randn(1, 1, 5, 4))
    assert k.shape[1] == v.shape[1] == (1 if keys.is_chosen else 6)
