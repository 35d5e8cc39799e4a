"""Every query of every head is computed by exactly one rank, with the kv head it belongs to, and all work alike."""

from hypothesis import given, settings
from hypothesis import strategies as st

from seqtile.sp.all_to_all import count, head_share, within


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    kv_heads = draw(st.integers(1, 12))
    return draw(st.integers(1, 9)), kv_heads * draw(st.integers(1, 8)), kv_heads, draw(st.integers(1, 90))


@settings(deadline=None)
@given(shapes())
def test_each_query_once(shape: tuple[int, int, int, int]) -> None:
    size, q_heads, kv_heads, length = shape
    done: list[tuple[int, int]] = []
    for rank in range(size):
        share = head_share(rank, size, q_heads, kv_heads, length)
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


@settings(deadline=None)
@given(shapes())
def test_balanced(shape: tuple[int, int, int, int]) -> None:
    """Heads to within one; where ranks share a head, causal work (a query's keys) to within what rounding leaves."""
    size, q_heads, kv_heads, length = shape
    shares = [head_share(rank, size, q_heads, kv_heads, length) for rank in range(size)]
    counts = [share.q.stop - share.q.start for share in shares]
    assert max(counts) - min(counts) <= 1
    for head in range(q_heads if q_heads < size else 0):
        work = [sum(sum(range(a, b)) for a, b in share.rows) for share in shares if share.q.start == head]
        assert max(work) - min(work) <= 4 * length


@settings(deadline=None)
@given(shapes(), st.integers(0, 300), st.integers(0, 300))
def test_within(shape: tuple[int, int, int, int], start: int, stop: int) -> None:
    rows = head_share(shape[0] - 1, *shape).rows
    kept = [row for first, last in rows for row in range(first, last) if start <= row < stop]
    assert [row for first, last in within(rows, start, stop) for row in range(first, last)] == kept
    assert count(within(rows, start, stop)) == len(kept)
