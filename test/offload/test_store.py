"""A store without a device: tensors that are put can be taken, blocks are reused, and nothing is copied twice or
lost."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqtile.offload.store import KEPT_FREE, Copies, HostMemoryFull, Pool, Store, available

CPU = torch.device("cpu")


class Counted(Copies):
    """Records the copies in order."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.done: list[tuple[str, int]] = []

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> int:
        self.done.append(("out", tensor.numel()))
        super().out(tensor, block)
        return tensor.numel()

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.done.append(("back", block.numel()))
        return super().back(block)[0], block.numel()

    def wait(self, copied: int) -> None:
        self.done.append(("wait", copied))


class Driven(Pool):
    """A pool that records the calls of its driver."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self.registered: list[int] = []
        self.returned: list[int] = []

    def register(self, address: int, size: int) -> None:
        self.registered.append(address)

    def unregister(self, address: int) -> None:
        self.returned.append(address)


def made(limit: int | None = None) -> tuple[Store, Counted]:
    copies = Counted()
    return Store(Pool(limit), copies), copies


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.randoms())
def test_what_is_put_is_taken(sizes: list[int], order) -> None:
    """In any order, twice, including views and half precision; the sources are overwritten in the meantime."""
    store, _ = made()
    tensors = [torch.randn(size, 3).to(torch.bfloat16 if size % 2 else torch.float32) for size in sizes]
    tensors = [tensor.t() if len(tensor) % 3 else tensor[::2] for tensor in tensors]
    expected = [tensor.clone() for tensor in tensors]
    held = [store.put(tensor) for tensor in tensors]
    store.settle()
    for tensor in tensors:
        tensor.fill_(torch.nan)
    for i in [*range(len(held)), *order.sample(range(len(held)), len(held))][::-1]:
        taken = store.take(held[i])
        assert taken.equal(expected[i]) and taken.dtype == expected[i].dtype


def test_one_is_on_its_way_while_the_next_is_computed() -> None:
    """The next `put` waits for a copy out. Copies back start one region before they are needed: of all tensors of the
    region, each once."""
    store, copies = made()
    held = []
    for sizes in ((1, 2), (3,), (4, 5)):
        store.begin_region()
        held.append([store.put(torch.randn(size)) for size in sizes])
    store.settle()
    assert copies.done == [(kind, size) for size in (1, 2, 3, 4, 5) for kind in ("out", "wait")]
    copies.done.clear()
    for region in held[::-1]:
        for one in region:
            copies.done.append(("take", len(store.take(one))))
    at = {event: i for i, event in enumerate(copies.done)}
    assert at.keys() == set(product(("back", "wait", "take"), range(1, 6))) and len(at) == len(copies.done)
    for size in range(1, 6):
        assert at["back", size] < at["wait", size] < at["take", size]
    for earlier, later in (((3,), 4), ((1, 2), 3)):  # the region before, and the first tensor of the one after it
        assert all(at["back", size] < at["take", later] for size in earlier)


def test_what_is_here_is_not_fetched() -> None:
    """Neither tensors that are back nor tensors that have not left yet."""
    store, copies = made()
    tensor = torch.randn(5)
    held = store.put(tensor)
    assert store.take(held).data_ptr() == tensor.data_ptr() and copies.done[0] == ("out", 5)
    assert ("back", 5) not in copies.done
    other = store.put(torch.randn(6))
    store.settle()
    assert store.take(other) is store.take(other) and copies.done.count(("back", 6)) == 1


def test_what_was_changed_on_its_way_out_is_an_error() -> None:
    """As in autograd. Later changes are allowed: the block holds the earlier values."""
    store, _ = made()
    early, late = torch.randn(5), torch.randn(6)
    held = store.put(early)
    early.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        store.take(held)
    expected, other = late.clone(), store.put(late)
    store.settle()
    late.add_(1)
    assert store.take(other).equal(expected)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        store.take(held)


def test_the_same_tensor_is_copied_once() -> None:
    store, copies = made()
    tensor, other = torch.randn(4, 5), torch.randn(4, 5)
    first, between = store.put(tensor), store.put(other)
    assert store.put(tensor) is first and store.put(other) is between
    part = store.put(tensor[1:])
    assert part is not first and store.take(part).equal(tensor[1:])
    tensor.add_(1)
    changed = store.put(tensor)
    assert changed is not first and store.take(changed).equal(tensor)
    assert sum(kind == "out" for kind, _ in copies.done) == 4
    del tensor, part, changed, first
    kept = []
    for _ in range(50):  # some in the memory of a freed tensor whose copy is still held
        again = torch.randn(4, 5)
        kept.append(store.put(again))
        store.settle()
        assert store.take(kept[-1]).equal(again)
        del again


def test_blocks_are_of_the_exact_size_and_reused() -> None:
    pool = Driven()
    store = Store(pool, Copies(CPU))
    for size in (1000, 1000, 900, 1000):
        held = [store.put(torch.randn(size)) for _ in range(3)]
        assert all(len(one.memory) == 4000 for one in held)
        del held
    assert pool.total == 3 * 4000 and len(pool.registered) == 3 and not pool.returned
    held = [store.put(torch.randn(2000))]
    assert pool.total == 2 * 4000 + 8000, "in the place of one that is too small"
    pool.close()
    assert len(pool.returned) == 3
    del held
    gc.collect()
    assert pool.total == 0 and sorted(pool.returned) == sorted(pool.registered)


def test_a_limit() -> None:
    """At the limit, free blocks that are too small are released for new ones. If that is not enough, an error is
    raised, and nothing that is held is lost."""
    pool = Driven(10_000)
    store = Store(pool, Copies(CPU))
    tensors = [torch.randn(1000), torch.randn(1000)]
    first, second = (store.put(tensor) for tensor in tensors)
    with pytest.raises(HostMemoryFull, match="would exceed the limit of"):
        store.put(torch.randn(1000))
    assert store.take(first).equal(tensors[0]) and store.take(second).equal(tensors[1])
    del first
    with pytest.raises(HostMemoryFull, match="would exceed the limit of"):
        pool.take(20_000)
    assert pool.total == 8000 and not pool.returned
    larger = torch.randn(1250)
    assert store.take(store.put(larger)).equal(larger)
    assert pool.total <= 10_000


def test_lengths_that_grow_leave_no_trail() -> None:
    pool = Pool()
    store = Store(pool, Copies(CPU))
    for size in (1000, 1100, 1200, 500, 1300):
        held = [store.put(torch.randn(size)) for _ in range(3)]
        del held
        assert pool.total <= 3 * 4 * 1300
    assert pool.total == 3 * 4 * 1300


def test_a_driver_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be registered is not available; memory that cannot be returned stops nothing."""

    def refuse(pool: Pool, *args: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Pool, "register", refuse)
    pool = Pool()
    with pytest.raises(HostMemoryFull, match="cannot be had: out of memory"):
        pool.take(1000)
    assert pool.total == 0
    monkeypatch.undo()
    monkeypatch.setattr(Pool, "unregister", refuse)
    pool = Pool()
    pool.reserve(3, 1000)
    with pytest.raises(RuntimeError, match="out of memory"):
        pool.close()
    assert pool.total == 0


def test_blocks_are_pinned_with_their_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver pins for the context of this thread's current device, which may be another one."""
    current, calls = ["cuda:0"], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("pin", address, size, current[-1]))
        return 0

    def unregister(address: int) -> int:
        calls.append(("unpin", address, current[-1]))
        return 0

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    driver.cudaError = SimpleNamespace(success=0)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "_cudart", driver, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = Pool(device=torch.device("cuda:1"))
    block = pool.take(5000)
    pool.give(block)
    pool.close()
    address = block.data_ptr()
    assert calls == [("pin", address, 5000, "cuda:1"), ("unpin", address, "cuda:1")] and current == ["cuda:0"]


def test_threads() -> None:
    """No block is lent twice at the same time."""
    pool, out, twice = Pool(), set(), []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work() -> None:
        for _ in range(500):
            block = pool.take(100)
            twice.extend([block] if block.data_ptr() in out else [])
            out.add(block.data_ptr())
            out.discard(block.data_ptr())
            pool.give(block)

    threads = [Thread(target=work) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not twice and pool.total <= 4 * 100


def test_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the limit allows; memory that another process takes in the meantime is no error."""
    pool = Pool(10_000)
    pool.reserve(4, 3000)
    assert pool.total == 9000
    assert len(pool.take(2500)) == 3000 and pool.total == 9000
    rooms = iter([5000, 0, 0])
    monkeypatch.setattr("seqtile.offload.store.available", lambda: next(rooms))
    pool = Pool()
    pool.reserve(2, 3000)
    assert pool.total == 3000


GIB = 2**30


def written(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_available(tmp_path: Path) -> None:
    """The minimum of the machine's memory and the control group's (v2 or v1); reclaimable cache counts as free."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert available(proc, groups) == 2**62, "nothing is known"
    written(proc, meminfo=f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    assert available(proc, groups) == 8 * GIB - KEPT_FREE
    written(groups, memory__max="max\n")
    assert available(proc, groups) == 8 * GIB - KEPT_FREE
    stat = f"anon {2 * GIB}\ninactive_file {GIB}\n"
    written(groups, memory__max=f"{5 * GIB}\n", memory__current=f"{3 * GIB}\n", memory__stat=stat)
    assert available(proc, groups) == 3 * GIB - KEPT_FREE
    limits = {"memory__limit_in_bytes": str(4 * GIB), "memory__usage_in_bytes": str(3 * GIB)}
    written(groups / "memory", **limits, memory__stat="total_inactive_file 0\n")
    assert available(proc, groups) == 0


V2, V1 = ("memory__max", "memory__current"), ("memory__limit_in_bytes", "memory__usage_in_bytes")


@pytest.mark.parametrize(
    ("line", "group", "names"),
    [
        ("0::/job/step", "job", V2),
        ("0::/job/step", "job/step", V2),
        ("4:cpu,memory:/job/step", "memory/job", V1),
        ("4:memory:/job/step", "memory/job/step", V1),
    ],
)
def test_available_in_nested_groups(tmp_path: Path, line: str, group: str, names: tuple[str, str]) -> None:
    """As schedulers create them: a limit also applies to the groups inside, and files may be missing."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    written(proc / "self", cgroup=f"1:name=systemd:/other\n{line}\n")
    written(groups / group, **{names[0]: f"{6 * GIB}\n", names[1]: f"{2 * GIB}\n"})
    assert available(proc, groups) == 4 * GIB - KEPT_FREE
    assert available() < 2**62
