"""Shapes, named by model, and what the benchmarks measure alike: time by pytest-benchmark, peak memory, error."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from measure import LiveBytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@dataclass(frozen=True)
class Shape:
    hidden: int
    mlp: int
    vocab: int
    tokens: tuple[int, ...]


SIZES = {
    "smoke": {"tiny": Shape(64, 128, 1000, (300, 5000))},
    "cpu": {"smollm2_135m": Shape(576, 1536, 49152, (4096, 8192))},
    "cuda": {
        "llama3_8b": Shape(4096, 14336, 128256, (4096, 8192, 32768, 131072)),
        "qwen3_32b": Shape(5120, 25600, 151936, (4096, 8192, 32768, 131072)),
    },
}


def shape_of(name: str) -> Shape:
    return next(shapes[name] for shapes in SIZES.values() if name in shapes)


def cases(size: str, lengths: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """(shape name, tokens) of a size: smoke, cpu or cuda. `lengths`: what a benchmark has for a size in their place."""
    return [(name, tokens) for name, shape in SIZES[size].items() for tokens in lengths.get(size, shape.tokens)]


PACKAGES = {"liger": "liger_kernel", "liger_tiled": "liger_kernel", "cce": "cut_cross_entropy", "quack": "quack"}
PACKAGES |= {"deepspeed": "deepspeed", "deepspeed_tiled": "deepspeed"}


def available(contestant: str) -> str | None:
    """Why a contestant cannot run here; None if it can."""
    if package := PACKAGES.get(contestant):
        if find_spec(package) is None:
            return f"{package} is not installed"
        if DEVICE == "cpu" and package != "deepspeed":
            return f"{package} needs a GPU"
    if contestant == "torch" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return "this torch has no tiled F.linear_cross_entropy"
    return None


def peak_mib(step: Callable[[], object]) -> float:
    """Peak memory of `step` above what is alive before it: allocated on a GPU, live tensors on a CPU."""
    gc.collect()
    if DEVICE == "cpu":
        with LiveBytes() as memory:
            step()
        return memory.peak / 2**20
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def run(benchmark, contestant: str, shape: str, tokens: int, step: Callable[[], list[torch.Tensor]], check) -> None:
    """Correctness first, then peak memory, then time: forward and backward together.

    `check(results)` gives the largest error relative to float64 on a small input of the same contestant, and raises
    if it is wrong. Running out of memory is a result, not an error.
    """
    benchmark.group = f"{shape}, {tokens:,} tokens"
    info = benchmark.extra_info
    info |= {"contestant": contestant, "shape": shape, "tokens": tokens, "device": DEVICE, "dtype": str(DTYPE)}
    info["error"] = check()
    try:
        info["peak_mib"] = peak_mib(step)
    except torch.OutOfMemoryError:
        info["out_of_memory"] = True
        benchmark.pedantic(lambda: None, rounds=1)
        return

    def timed() -> None:
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    rounds = 10 if DEVICE == "cuda" else 2
    benchmark.pedantic(timed, rounds=rounds, warmup_rounds=2 if DEVICE == "cuda" else 0)
