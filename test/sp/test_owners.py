"""Which rank has the values of which token, from the definition; of contiguous parts no index is made."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqtile.sp import owners
from seqtile.sp.groups import SequenceParallel
from seqtile.sp.owners import Owners

CPU = torch.device("cpu")


def group(rank: int, size: int) -> SequenceParallel:
    return SequenceParallel(None, rank, size, 0, 1)


@given(st.data(), st.integers(1, 4))
def test_owners_of_ranks(data: st.DataObject, size: int) -> None:
    """Each token's values are on its rank, one row each, in order; a view of the tokens shows the same values."""
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 9)))
    drawn = st.lists(st.integers(0, size - 1), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    ranks = torch.tensor(data.draw(drawn)).view(shape)
    values, chosen = torch.randn(*shape, 2), torch.rand(shape) < 0.6
    rows = [Owners.of_ranks(ranks, group(rank, size)).own(values) for rank in range(size)]
    for rank, own in enumerate(rows):
        assert own.equal(values[ranks == rank])
    gathered = torch.stack([torch.cat([own, own.new_zeros(max(map(len, rows)) - len(own), 2)]) for own in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "gather", lambda own, of_group: gathered)
        for rank, own in enumerate(rows):
            held = Owners.of_ranks(ranks, group(rank, size))
            whole = held.whole(own)
            assert whole.equal(values) and whole._base is None, "a view of what was gathered"
            seen, taken = held.viewed(lambda tokens: tokens[chosen])
            assert seen.own(values[chosen]).equal(own if taken is None else own[taken])


@pytest.mark.parametrize("length", [32, 37])
def test_contiguous_parts_need_no_index(length: int) -> None:
    """A rank's part of one row is a view, also of a part or a flattened view of the tokens."""
    values = torch.randn(1, length, 3)
    for rank in range(4):
        held = Owners.of_parts(1, length, group(rank, 4))
        part = values[0, -(-length // 4) * rank :][: -(-length // 4)]
        flat, _ = held.viewed(lambda tokens: tokens.flatten(0, 1))
        shifted, taken = held.viewed(lambda tokens: tokens[:, 1:])
        for each, whole in ((held, values), (flat, values[0]), (shifted, values[:, 1:])):
            own = each.own(whole)
            assert isinstance(each.on(CPU)[1], slice) and own.untyped_storage().data_ptr() == whole.data_ptr() - (
                whole.storage_offset() * whole.itemsize
            )
        assert held.own(values).equal(part) and shifted.own(values[:, 1:]).equal(part[1:] if rank == 0 else part)
        assert isinstance(held.on(CPU)[0], slice) and (taken is None) == (rank > 0)


def test_several_rows() -> None:
    """Each rank has an equal part of each row, the last ones fewer tokens or none."""
    values = torch.randn(3, 5, 2)
    expected: list[Tensor] = [values[:, :2], values[:, 2:4], values[:, 4:], values[:, 5:]]
    for rank, part in enumerate(expected):
        assert Owners.of_parts(3, 5, group(rank, 4)).own(values).equal(part.flatten(0, 1))
