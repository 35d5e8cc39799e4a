"""The machine before anything is measured on it: versions, memory, how fast host memory can be registered and copied.

    python3 -m benchmark.describe_machine [FILE]

Appends what it found to FILE, as lines of JSON.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmark.device import CLOCKS, DEVICE, IMPORTING, Watch, description, output, synchronize
from benchmark.rows import append

from seqtile.offload.host_memory import available
from seqtile.offload.store import Pool

GIB = 2**30


def copy_speed(target: torch.Tensor, source: torch.Tensor) -> float:
    """GB/s of the better of two copies."""
    seconds = []
    for _ in range(2):
        watch = Watch()
        watch.mark()
        target.copy_(source, non_blocking=True)
        watch.mark()
        seconds += watch.seconds()
    return source.nbytes / min(seconds) / 1e9


def host_memory_speed(size: int = GIB) -> dict[str, float]:
    """Seconds to register a block as `seqtile.offload` does, and how fast it is copied out to and back."""
    device = torch.device("cuda", torch.cuda.current_device())
    pool = Pool(device=device)
    on_gpu = torch.ones(size, dtype=torch.uint8, device=device)
    synchronize()
    started = time.perf_counter()
    block = pool.take(size)
    found = {"register_1gib_s": time.perf_counter() - started}
    found |= {"out_gbs": copy_speed(block, on_gpu), "back_gbs": copy_speed(on_gpu, block)}
    assert on_gpu.sum().item() == size, "what came back is not what went out"
    found["copied_by_a_fork_gib"] = bytes_of_a_fork() / GIB
    pool.give(block)
    found["unregister_1gib_s"] = seconds_to_close(pool)
    busy = Pool(device=device)
    busy.reserve(1, size)
    torch.cuda._sleep(10**9)  # cycles of the GPU, about half a second: does the driver wait for it?
    return found | {"unregister_1gib_while_computing_s": seconds_to_close(busy)}


def seconds_to_close(pool: Pool) -> float:
    started = time.perf_counter()
    pool.close()
    return time.perf_counter() - started


def bytes_of_a_fork() -> int:
    """Returns the bytes of host memory that a forked process takes, which does nothing."""
    before = available()
    process = os.fork()
    if process == 0:
        time.sleep(2)
        os._exit(0)
    time.sleep(1)
    taken = before - available()
    os.waitpid(process, 0)
    return taken


def expandable_segments() -> str:
    """Whether a process can allocate memory in segments that grow, as `benchmark.run` asks for it."""
    code = "import torch; torch.ones(2**30, dtype=torch.uint8, device='cuda'); print('yes')"
    command = ("env", "PYTORCH_ALLOC_CONF=expandable_segments:True", sys.executable, "-c", code)
    return output(*command, seconds=IMPORTING) or "no"


def note(part: str, found: dict[str, Any]) -> None:
    for name, value in found.items():
        print(f"{name}: {f'{value:.3g}' if isinstance(value, float) else value}", flush=True)
    for file in sys.argv[1:2]:
        append(Path(file), {"part": part} | found)


def main() -> None:
    found: dict[str, Any] = description() | {"cpus": len(os.sched_getaffinity(0))}
    found |= {"host_available_gib": round(available() / GIB, 1)}
    found["modules"] = {name: str(getattr(sys.modules.get(name), "__file__", "")) for name in ("torch", "seqtile")}
    if DEVICE == "cuda":
        print(output("nvidia-smi", f"--query-gpu=name,memory.total,memory.used,{','.join(CLOCKS)}", "--format=csv"))
    note("machine", found)
    if DEVICE == "cuda":
        note("segments", {"expandable_segments": expandable_segments()})
        note("host memory", host_memory_speed())


if __name__ == "__main__":
    main()
