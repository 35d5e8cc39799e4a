"""All-to-alls between ranks of one process: every rank receives the right data, with a limited number of copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqtile.attention.nodes import Nodes
from seqtile.sp.all_to_all import AllToAll
from seqtile.sp.groups import SequenceParallel
from sp.test_heads import shapes
from support.choice import every_pair


class Wire:
    """Replaces the collective: stores what each rank sends until all have sent, then delivers it."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple] = {}

    def __enter__(self) -> "Wire":
        self.function, dist.all_to_all_single = dist.all_to_all_single, self.call
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self.function

    def call(self, *arguments: Any, group: int, async_op: bool) -> SimpleNamespace:
        assert async_op and group not in self.calls
        self.calls[group] = arguments
        return SimpleNamespace(wait=lambda: None)

    def deliver(self) -> None:
        for rank, (received, _, counts, _) in self.calls.items():
            parts = [sent.split(sent_counts)[rank] for _, (_, sent, _, sent_counts) in sorted(self.calls.items())]
            assert [part.numel() for part in parts] == counts
            received.copy_(torch.cat(parts))
        self.calls = {}


def exchanged(plans: list[AllToAll], tensors: list[list[Tensor]], to_heads: bool) -> list[list[Tensor]]:
    """Returns what each rank receives, from what each sends."""
    with Wire() as wire:
        waiting = [plan.start(own, to_heads=to_heads) for plan, own in zip(plans, tensors, strict=True)]
        wire.deliver()
        return [wait() for wait in waiting]


def plans_of(nodes: Nodes, q_heads: int, kv_heads: int, *arguments: Any) -> list[AllToAll]:
    groups = [SequenceParallel(rank, rank, nodes.size, 0, 1, per_node=nodes.per_node) for rank in range(nodes.size)]
    return [AllToAll(group, q_heads, kv_heads, *arguments) for group in groups]


def of_rank(x: Tensor, nodes: Nodes, rank: int) -> Tensor:
    """Returns a rank's tokens of [B, heads, tokens, K]."""
    return torch.cat([x[:, :, slice(*run)] for run in nodes.tokens_of(rank, x.shape[2])], 2)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Integers that every dtype can represent. bfloat16 rounds their sums, float32 does not."""
    return torch.randint(-255, 256, shape).to(dtype)


def strided(x: Tensor, kind: int) -> Tensor:
    """The same numbers [B, heads, tokens, K], laid out in this order, as [B, tokens, heads, K], or with gaps."""
    if kind == 0:
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2) if kind == 1 else x.repeat_interleave(2, -1)[..., ::2]


ALL = (False, True, True)


@example((8, 8, 1, 90), 1, True, ALL, 1, (None, torch.bfloat16), 1)  # eight ranks read one kv head
@example((4, 8, 2, 61), 1, True, ALL, 2, (None, torch.float32), 0)
@example((5, 7, 1, 61), 1, True, ALL, 1, (None, torch.bfloat16), 0)  # by unequally many
@example((9, 2, 1, 90), 1, True, ALL, 2, (None, torch.bfloat16), 2)  # ranks share the queries of a head
@example((2, 8, 2, 96), 2, True, ALL, 2, (None, torch.bfloat16), 0)  # two nodes of two, each with one copy of a half
@example((4, 8, 2, 96), 4, True, ALL, 1, (None, torch.bfloat16), 1)  # ranks of a node share kv heads
@example((4, 8, 2, 96), 2, False, ALL, 1, (None, torch.float32), 0)
@example((3, 6, 3, 90), 3, True, ALL, 1, (None, torch.bfloat16), 2)  # a rank has tokens of both parts of its node
@given(
    shapes(),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([ALL, (False,), (True, False, False), (False, False, True)]),
    st.integers(1, 2),
    st.sampled_from([(None, torch.float32), (None, torch.bfloat16), (torch.float32, torch.bfloat16)]),
    st.integers(0, 2),
)
def test_what_arrives(
    shape: tuple[int, int, int, int],
    number: int,
    in_nodes: bool,
    by_kv: tuple[bool, ...],
    batch: int,
    dtypes: tuple,
    kind: int,
) -> None:
    """Each rank gets its heads of all tokens, and of its queries; on the way back each rank's tokens get the sum of
    what ranks send. `number`: of nodes, each with shape[0] ranks."""
    per_node, q_heads, kv_heads, length = shape
    nodes, size = Nodes(number * per_node, per_node), number * per_node
    local, (wide, narrow) = -(-length // size), dtypes
    dtypes = [narrow if wide is None or is_kv else wide for is_kv in by_kv]
    counts = [kv_heads if is_kv else q_heads for is_kv in by_kv]
    widths = [3 + i for i in range(len(by_kv))]
    parts = zip(counts, widths, dtypes, strict=True)
    whole = [numbers(batch, n, local * size, k, dtype=dtype) for n, k, dtype in parts]
    plans = plans_of(nodes, q_heads, kv_heads, by_kv, local, in_nodes)
    shards = [[strided(of_rank(x, nodes, rank), kind) for x in whole] for rank in range(size)]
    expected = [[part_of(x, plan, is_kv) for x, is_kv in zip(whole, by_kv, strict=True)] for plan in plans]
    for found, wanted in zip(exchanged(plans, shards, True), expected, strict=True):
        for x, y in zip(found, wanted, strict=True):
            assert x.equal(y) and x.dtype == y.dtype and x.transpose(1, 2).is_contiguous()

    gradients = [[strided(numbers(*x.shape, dtype=x.dtype), kind) for x in own] for own in expected]
    total = [torch.zeros(x.shape) for x in whole]
    for plan, own in zip(plans, gradients, strict=True):
        for i, (x, is_kv) in enumerate(zip(own, by_kv, strict=True)):
            part_of(total[i], plan, is_kv, add=x)
    for rank, found in enumerate(exchanged(plans, gradients, False)):
        for x, y, dtype in zip(found, total, dtypes, strict=True):
            wanted = of_rank(y, nodes, rank).to(dtype)
            assert x.equal(wanted) and x.dtype == dtype and x.transpose(1, 2).is_contiguous()


def part_of(x: Tensor, plan: AllToAll, is_kv: bool, add: Tensor | None = None) -> Tensor:
    """Returns the part of a whole tensor that a rank computes with; it can add to that part."""
    rows = [slice(None)] if is_kv else [slice(*row) for row in plan.heads.rows]
    places = [x[:, plan.heads.kv if is_kv else plan.heads.q, row] for row in rows]
    if add is not None:
        for place, part in zip(places, add.split([place.shape[2] for place in places], 2), strict=True):
            place += part
    return torch.cat(places, 2) if places else x[:, plan.heads.q, :0]


class Written(TorchDispatchMode):
    """Counts the operations that write, and the bytes that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = function(*args, **kwargs or {})
        returned = function._schema.returns[0].alias_info
        allocates = function in (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format)
        if isinstance(found, Tensor) and not allocates and (returned is None or returned.is_write):
            self.calls += 1
            self.bytes += found.nbytes
        return found


EVEN = ((2, 4, 4), (4, 8, 4), (8, 32, 8), (32, 64, 8), (8, 8, 1))  # ranks, query heads, kv heads
EXCHANGES = {  # for each tensor: whether its heads are kv heads, and whether its dtype is wider
    "queries, keys, values": ((False, False), (True, False), (True, False)),
    "attention's output": ((False, False),),
    "a recurrence's": ((False, False), (False, True), (False, True), (True, False), (True, False)),
}


@pytest.mark.full("of 60 cases", but=every_pair)
@pytest.mark.parametrize("to_heads", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize(("size", "q_heads", "kv_heads"), EVEN)
def test_one_copy_a_tensor_on_either_side(
    size: int, q_heads: int, kv_heads: int, kind: str, batch: int, to_heads: bool
) -> None:
    """If every rank has equally many heads, for any number of ranks."""
    by_kv, is_wide = zip(*EXCHANGES[kind], strict=True)
    dtypes = [torch.float32 if wide else torch.bfloat16 for wide in is_wide]
    counts = [kv_heads if is_kv else q_heads for is_kv in by_kv]
    here = [numbers(batch, n, 5, 7, dtype=dtype) for n, dtype in zip(counts, dtypes, strict=True)]
    last = SequenceParallel(size - 1, size - 1, size, 0, 1)
    plan = AllToAll(last, q_heads, kv_heads, by_kv, 5)
    repeated = zip([x.repeat(1, 1, size, 1) for x in here], by_kv, strict=True)
    tensors = here if to_heads else [part_of(x, plan, is_kv) for x, is_kv in repeated]
    with Wire() as wire, Written() as written:
        wait = plan.start(tensors, to_heads=to_heads)
        (received, sent, _, _), wire.calls = wire.calls[size - 1], {}
        assert written.calls == len(tensors) and written.bytes <= sent.nbytes
        received.fill_(1)
        written.calls = written.bytes = 0
        results = wait()
    assert written.calls == len(tensors) and written.bytes == sum(x.nbytes for x in results)
