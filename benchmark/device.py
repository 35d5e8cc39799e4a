"""The machine that is measured: its clock, its memory, its two ceilings, what it is."""

import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from seqtile.memory.measure import LiveBytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LOST = 86  # the exit status of a process whose device was lost: another one can go on
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "deepspeed",
    "trl",
    "cut-cross-entropy",
    "quack-kernels",
)
CHOOSING = ("CUBLAS", "CUDA_", "CUDNN_", "NVIDIA_TF32", "PYTORCH_", "TORCH", "TRITON_")
"""How the environment variables begin that choose a kernel, an allocator or a device."""
IMPORTING = 120.0  # seconds that `import torch` may take from a cold disk
CLOCKS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


class Watch:
    """Takes the times between marks on the device's own clock (CUDA events); on a CPU, on the host's."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        if DEVICE == "cpu":
            self.marks.append(time.perf_counter())
        else:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def seconds(self) -> list[float]:
        """From each mark to the next; waits for the last."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if DEVICE == "cpu":
            return [end - start for start, end in pairs]
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, and the distance between the quartiles, in milliseconds."""
    found = [1000 * each for each in seconds]
    quartiles = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else [found[0]] * 3
    return {"ms": statistics.median(found), "iqr_ms": quartiles[2] - quartiles[0]}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def is_lost() -> bool:
    """Whether the device answers no more, as after an illegal access: then this process cannot use it again."""
    try:
        synchronize()
    except RuntimeError:
        return True
    return False


def free_memory() -> None:
    """Gives what nobody holds back to the device."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes that `step` holds above what is alive before it: allocated on a GPU, live tensors on a CPU."""
    gc.collect()
    if DEVICE == "cpu":
        with LiveBytes() as memory:
            step()
        return memory.peak
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def limit_memory(gigabytes: float | None) -> None:
    """Emulates a smaller GPU, of so many 10**9 bytes."""
    if gigabytes and DEVICE == "cuda":
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total))


def _median_seconds(function: Callable[[], object], at_least: float = 1.0) -> float:
    """Of the second half of what is done in so many seconds: by then the clocks are what they are under load."""
    found: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < at_least or len(found) < 4:
        watch = Watch()
        watch.mark()
        function()
        watch.mark()
        found += watch.seconds()
    return statistics.median(found[len(found) // 2 :])


def ceilings() -> dict[str, float]:
    """What the device can do at most: TFLOP/s of a large product of random matrices, and GB/s of a large copy, bytes
    read and bytes written both counted."""
    free_memory()
    size, elements = (8192, 2**29) if DEVICE == "cuda" else (1024, 2**24)
    left, right, out = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(3))
    products = _median_seconds(lambda: torch.mm(left, right, out=out))
    source = torch.randn(elements, device=DEVICE, dtype=DTYPE)
    target = torch.empty_like(source)
    copies = _median_seconds(lambda: target.copy_(source))
    return {"matmul_tflops": 2 * size**3 / products / 1e12, "copy_gbs": 2 * source.nbytes / copies / 1e9}


def output(*command: str, seconds: float = 30.0) -> str | None:
    """What a command prints; None if it fails, is not there, or takes longer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def name() -> str:
    """Asked by another process: one that measures nothing shall hold nothing on a GPU."""
    if DEVICE == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    code = "import torch; print(torch.cuda.get_device_name())"
    return output(sys.executable, "-c", code, seconds=IMPORTING) or "unknown GPU"


def unusable_gpu() -> str | None:
    """Says which GPU of this machine torch cannot use, why, and what to do; None if there is none."""
    listed = "" if torch.cuda.is_available() else output("nvidia-smi", "-L") or ""
    gpus = [line.partition(" (UUID")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    if not gpus:
        return None
    try:
        torch.cuda.init()
        why = "torch.cuda.is_available() is False"
    except (RuntimeError, AssertionError) as error:  # AssertionError: of a build without CUDA
        why = str(error).rstrip(".")
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return (
        f"nvidia-smi lists {', '.join(gpus)}, which torch {torch.__version__} cannot use: {why}. It was built for "
        f"{f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}; the driver is "
        f"{driver.split()[0] if driver else 'unknown'}, and CUDA 13 needs 580 or newer, CUDA 12 needs 525. Install a "
        "newer driver, or a torch for this one, such as "
        "`pip install torch --index-url https://download.pytorch.org/whl/cu126`"
    )


def commit() -> str | None:
    """Of the working tree, `+` behind it if that was changed; None outside of git."""
    head = output("git", "rev-parse", "--short", "HEAD")
    return head and head + "+" * bool(output("git", "status", "--porcelain", "--untracked-files=no"))


def sdpa_choice() -> str:
    """What torch's attention computes with, in training, for a causal bfloat16 call of Llama-8B's heads."""
    q, k, v = (torch.zeros(1, 32, 1024, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name.lower()


def choosing() -> dict[str, str]:
    """The environment variables that choose; none that holds a path."""
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(CHOOSING) and "/" not in value}


def description() -> dict[str, Any]:
    """What this process measures on: device, memory in GiB, driver, clocks in MHz, watts, versions; what torch's
    attention computes with, and the environment variables that choose."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else name()
    about: dict[str, Any] = {"device": device, "python": platform.python_version(), "versions": versions()}
    about |= {"sdpa": sdpa_choice(), "cudnn": torch.backends.cudnn.version() or "none", "environment": choosing()}
    about |= {"cuda": torch.version.cuda or "none", "driver_version": "none"}
    if DEVICE == "cuda":
        about["memory_gib"] = round(torch.cuda.mem_get_info()[1] / 2**30, 1)
        identity = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
        found = output("nvidia-smi", identity, f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits")
        about |= dict(zip(CLOCKS, found.split(", "), strict=True)) if found else {}
    return about
