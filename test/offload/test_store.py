"""A store without a device: tensors that are put can be taken, blocks are reused, and nothing is copied twice or
lost."""

import ctypes
import gc
import mmap
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Barrier, RLock, Thread, get_ident
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqtile.offload.host_memory import KEPT_FREE, available, host_memory_lock
from seqtile.offload.store import Copies, HostMemoryFull, Pool, Store

CPU = torch.device("cpu")


class Copy(int):
    """The number of elements that were copied, in place of an event."""

    def synchronize(self) -> None: ...


class Counted(Copies):
    """Records the copies in order."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.done: list[tuple[str, int]] = []

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> Copy:
        self.done.append(("out", tensor.numel()))
        super().out(tensor, block)
        return Copy(tensor.numel())

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        self.done.append(("back", block.numel()))
        return super().back(block)[0], Copy(block.numel())

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
    """A driver pins for the context of this thread's current device, which may be another one; here, for all GPUs. It
    does not wait for all that the GPU does."""
    current, calls = ["cuda:0"], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("pin", address, size, flags, current[-1]))
        return 0

    def unregister(address: int) -> int:
        calls.append(("unpin", address, current[-1]))
        return 0

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    driver.cudaError = SimpleNamespace(success=0)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "_cudart", driver, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("wait",)))
    pool = Pool(device=torch.device("cuda:1"))
    block = pool.take(5000)
    pool.give(block)
    pool.close()
    address = block.data_ptr()
    portable = 1
    assert calls == [("pin", address, 5000, portable, "cuda:1"), ("unpin", address, "cuda:1")]
    assert current == ["cuda:0"]


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
    rooms = iter([5000, 5000, 5000, 0, 0])
    for module in ("store", "host_memory"):
        monkeypatch.setattr(f"seqtile.offload.{module}.available", lambda: next(rooms))
    pool = Pool()
    pool.reserve(2, 3000)
    assert pool.total == 3000


def resident(address: int) -> int:
    """Bytes of the mapping at an address that are in memory; -1 if nothing is mapped there."""
    mapping = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
    return int(mapping.partition("Rss:")[2].split()[0]) * 1024 if mapping else -1


def anonymous() -> int:
    """Bytes of memory that this process has written to, those of files aside."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


LINUX = pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="a property of Linux")


@LINUX
def test_blocks_are_registered_outside_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes take and register theirs at the same time, and see this memory as taken: it is resident."""
    seen = []

    def register(pool: Pool, address: int, size: int) -> None:
        with host_memory_lock().acquire(timeout=0):
            seen.append(resident(address))

    monkeypatch.setattr(Pool, "register", register)
    pool = Pool()
    pool.take(3 * 2**20)
    pool.reserve(1, 2**20)
    assert seen == [3 * 2**20, 2**20]


@LINUX
def test_two_do_not_take_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """When both begin, each finds enough. In the middle both find too little: one gives up, the other gets it all."""
    step, begun, in_step, calls = 2**22, anonymous(), Barrier(2), Counter()

    def available() -> int:
        """The two look at the same time until neither finds a step more: ten are there, five are taken by each."""
        calls[get_ident()] += 1
        together = calls[get_ident()] <= 7
        if together:
            in_step.wait()
        found = begun + 10 * step - anonymous()
        if together:
            in_step.wait()
        else:
            time.sleep(0.1)
        return found

    def take(i: int) -> None:
        try:
            pools[i].take(7 * step)
        except HostMemoryFull:
            full.append(i)

    for module in ("store", "host_memory"):
        monkeypatch.setattr(f"seqtile.offload.{module}.available", available)
    monkeypatch.setattr("seqtile.offload.host_memory._STEP", step)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE)  # which would take more than a step
    pools, full = [Pool(), Pool()], []
    threads = [Thread(target=take, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(full) == 1 and [pool.total for pool in pools] == [0 if i in full else 7 * step for i in range(2)]


def forked(work: Callable[[], bool]) -> bool:
    """Returns what `work` returns in a child process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while other threads run
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # ends it, in place of waiting for a lock forever
        right = False
        try:
            right = work()
        finally:
            os._exit(0 if right else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@LINUX
def test_a_forked_process_has_no_blocks() -> None:
    """It would have copies of all pages that are pinned. The parent keeps them."""
    pool = Pool()
    block = pool.take(2**20)
    assert forked(lambda: resident(block.data_ptr()) == -1) and resident(block.data_ptr()) == 2**20


@LINUX
def test_a_forked_process_leaves_its_parents_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may free a store and its pool, which another thread of the parent was using. It unregisters nothing, and what
    it has mapped at a block's address stays."""
    pool, abandoned = Driven(), []
    monkeypatch.setattr(Copies, "abandon", lambda copies, tensor: abandoned.append(tensor))
    store = Store(pool, Copies(CPU))
    first, second = store.put(torch.randn(1000)), store.put(torch.randn(1000))
    address, returned = first.memory.data_ptr(), pool.returned
    objects = {"pool": pool, "store": store, "lent": second}
    del first, second, store  # a block is free, and one is lent
    holder = Thread(target=pool._lock.acquire)
    holder.start()
    holder.join()

    def work() -> bool:
        nonlocal pool
        libc = ctypes.CDLL(None)
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mmap.restype = ctypes.c_void_p
        readable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        own = libc.mmap(address, mmap.PAGESIZE, readable, private, -1, 0)
        ctypes.memset(own, 7, 1)
        del pool
        objects.clear()
        gc.collect()
        return own == address and ctypes.string_at(own, 1) == b"\7" and not returned and not abandoned

    right = forked(work)
    pool._lock = RLock()  # nobody will release the other
    assert right


@dataclass
class Event:
    name: str
    done: list[tuple[str, str]]

    def synchronize(self) -> None:
        self.done.append(("the host waits for", self.name))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What streams of copies and the host do: events, and who waits for which."""
    done: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, device: torch.device):
            self.device = device

        def record_event(self) -> Event:
            done.append((f"{self.device} copies", name := f"copy {len(done)}"))
            return Event(name, done)

        def wait_stream(self, other: "Stream") -> None: ...

        def wait_event(self, event: Event) -> None:
            done.append((f"{self.device} waits for", event.name))

    computing = SimpleNamespace(wait_event=lambda event: None)
    module = SimpleNamespace(Stream=Stream, stream=nullcontext, current_stream=lambda device: computing)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return done


def test_a_block_is_unregistered_after_its_own_last_copy(
    done: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When lengths grow, in the middle of a forward: the host waits for nothing else."""
    monkeypatch.setattr(Pool, "unregister", lambda pool, address: done.append(("unregistered", "")))
    store = Store(Pool(), Copies(CPU))
    first, second = store.put(torch.randn(1000)), store.put(torch.randn(1000))
    store.settle()
    store.take(first)
    del first
    grown = store.put(torch.randn(2000))
    copies = [("cpu copies", "copy 0"), ("cpu copies", "copy 1"), ("cpu copies", "copy 2")]
    assert done == [*copies, ("the host waits for", "copy 2"), ("unregistered", ""), ("cpu copies", "copy 5")]
    del second, grown


def test_a_block_goes_to_another_device_after_its_last_copy(done: list[tuple[str, str]]) -> None:
    """Each device copies on a stream of its own."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cpu:1")

    pool = Pool()
    store = Store(pool, Copies(CPU))
    held = store.put(torch.randn(1000))
    del held
    tensor = torch.randn(1000)
    held = store.put(tensor.as_subclass(Elsewhere))
    store.settle()
    assert store.take(held).equal(tensor) and pool.total == 4000
    assert done == [
        ("cpu copies", "copy 0"),
        ("cpu:1 waits for", "copy 0"),
        ("cpu:1 copies", "copy 2"),
        ("cpu:1 copies", "copy 3"),
    ]


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


def test_a_forked_process_is_lent_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be memory that is not there."""
    pool = Pool()
    pool.give(pool.take(4096))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="make a Pool here"):
        pool.take(4096)
