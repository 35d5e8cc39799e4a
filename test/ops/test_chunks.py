import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqtile.ops.chunks import chunks, resolve_chunk_tokens
from seqtile.rules import MIN_CHUNK_TOKENS


@given(tokens=st.integers(1, 10_000), chunk_tokens=st.integers(1, 12_000))
def test_chunks_cover_every_row_once_in_order(tokens: int, chunk_tokens: int) -> None:
    slices = list(chunks(tokens, chunk_tokens))
    assert [row for chunk in slices for row in range(chunk.start, chunk.stop)] == list(range(tokens))
    assert all(chunk.stop - chunk.start == chunk_tokens for chunk in slices[:-1])


def test_the_rule() -> None:
    assert resolve_chunk_tokens(None, 576) == MIN_CHUNK_TOKENS
    assert resolve_chunk_tokens(None, 4096) == 4096
    assert resolve_chunk_tokens(17, 4096) == 17


@pytest.mark.parametrize(("bad", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_chunk_tokens(bad: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="chunk_tokens: expected"):
        resolve_chunk_tokens(bad, 64)
