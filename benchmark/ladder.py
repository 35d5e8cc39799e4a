"""One rung of the ladder, in a process of its own: steps at growing length until memory is full.

python -m benchmark.ladder RUNG FILE --size SIZE --limit BYTES --deadline TIME

A model of all its layers' size is trained with fewer of them, see `Missing`: bfloat16 weights, gradients that begin at
None, SGD (an AdamW's states would be in host memory, as in ALST's recipes), every layer checkpointed. Writes what was
found into FILE as JSON. Source of the ladder: Arctic Long Sequence Training, table 1.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmark.contest import allowed
from benchmark.device import DEVICE, DTYPE, Watch, ceilings, free_memory, peak_bytes
from benchmark.missing import Missing
from benchmark.rungs import RUNGS, Rung, error, prepared
from benchmark.shapes import SHAPES, K, Shape, small
from transformers import PreTrainedModel

from seqtile import memory


@dataclass(frozen=True)
class Size:
    shape: str
    layers: int
    """Of the first, short step; all others have two."""
    lengths: tuple[int, int]
    """Before the longest is looked for."""
    tries: int
    grain: int = K
    """Lengths are multiples of it."""


SIZES = {
    "smoke": Size("tiny", 4, (256, 512), 2, 64),
    "cpu": Size("smollm2_135m", 4, (1 * K, 2 * K), 4, 256),
    "quick": Size("llama3_8b", 8, (8 * K, 32 * K), 3),
    "full": Size("llama3_8b", 32, (8 * K, 32 * K), 7),
}
SMALL_GPU = 48 * 10**9  # bytes: below them llama3_8b's weights and gradients leave no room; smollm2_135m is trained
LIMITS = {"smoke": 24 * 2**20, "cpu": 4 * 2**30}  # bytes, where no GPU sets one
WARM = 32 * K  # tokens: up to here the median of three steps after a first one; beyond, one step alone
CLOSE = 1.08  # a length that did not fit, over one that did: near enough


@dataclass
class Step:
    tokens: int
    layers: int
    bytes: int
    """At the peak, weights and what stands for missing layers included."""
    seconds: float
    tokens_per_second: float
    """Of the whole model, at this utilisation."""
    utilisation: float
    """Model FLOPs (nothing computed again) a second, over the matmul rate measured in the same process."""


def model_flops(shape: Shape, layers: int, tokens: int) -> float:
    """Of forward and backward, three times a forward: 2 for each weight in a product and token, attention's core of
    two products of which causality leaves half."""
    weights = layers * (shape.attention_parameters + shape.mlp_parameters) + shape.head_parameters
    return 3 * (2.0 * weights * tokens + layers * 2.0 * tokens**2 * shape.q)


def next_length(steps: list[Step], failed: int | None, limit: int, grain: int) -> int | None:
    """The length to try next: a little below, then a little above what the last two say; None if it is near enough."""
    low, high = steps[-1].tokens if steps else 0, failed or 2**40
    if high <= max(CLOSE * low, low + grain):
        return None
    guesses = [(low + high) // 2 if failed else 2 * low]
    if len(steps) > 1:
        before, last = steps[-2:]
        a_token = (last.bytes - before.bytes) / (last.tokens - before.tokens)
        fits = last.tokens + (limit - last.bytes) / max(a_token, 1)
        guesses = [int(0.97 * fits), int(1.03 * fits), *guesses]
    rounded = (guess // grain * grain for guess in guesses)
    return next((guess for guess in rounded if low < guess < high), None)


class Runner:
    """Steps of one rung."""

    def __init__(self, rung: Rung, shape: Shape, limit: int, deadline: float):
        self.rung, self.shape, self.limit, self.deadline = rung, shape, limit, deadline
        self.matmul = ceilings()["matmul_tflops"] * 1e12
        self.model: PreTrainedModel | None = None

    def ready(self, layers: int) -> PreTrainedModel:
        if self.model is None or len(self.model.model.layers) != layers:
            self.model = None
            free_memory()
            self.model = prepared(self.rung, self.shape, layers)
        self.model.zero_grad(set_to_none=True)  # of a step that memory was too small for
        return self.model

    def __call__(self, tokens: int, layers: int) -> Step:
        """Raises torch.OutOfMemoryError."""
        free_memory()
        model = self.ready(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, foreach=False)
        ids = torch.randint(self.shape.vocab, (1, tokens), device=DEVICE)
        watches: list[Watch] = []
        with Missing(model, self.shape, tokens, inputs=not self.rung.offloads) as missing:

            def step() -> None:
                watches.append(Watch())
                watches[-1].mark()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                watches[-1].mark()
                missing.end()

            weights = sum(parameter.nbytes for parameter in model.parameters()) + missing.weights.nbytes
            used = weights + peak_bytes(step)
            if used > self.limit:
                raise torch.OutOfMemoryError(f"{used / 2**30:.2f} GiB, of {self.limit / 2**30:.2f}")
            for _ in range(3 if tokens <= WARM else 0):
                step()
        seconds = statistics.median(watch.seconds()[0] for watch in watches[1:] or watches)
        return self.figures(tokens, layers, used, seconds)

    def figures(self, tokens: int, layers: int, used: int, seconds: float) -> Step:
        rate = model_flops(self.shape, layers, tokens) / seconds
        a_second = tokens * rate / model_flops(self.shape, self.shape.layers, tokens)
        return Step(tokens, layers, used, seconds, a_second, rate / self.matmul)


def affordable(shape: Shape, last: Step, tokens: int, seconds: float, grain: int) -> int:
    """The longest length, up to `tokens`, whose step takes no more than this; 0 if it is no longer than the last."""
    a_flop = last.seconds / model_flops(shape, last.layers, last.tokens)
    while tokens > last.tokens and a_flop * model_flops(shape, 2, tokens) > seconds:
        tokens = int(0.9 * tokens) // grain * grain
    return tokens if tokens > last.tokens else 0


def climb(runner: Runner, size: Size, say: Callable[[Step | int], None]) -> tuple[list[Step], dict[str, Any]]:
    """All steps that ran, the last at the longest length; and what ended the climb. `say` gets each step, or the length
    that did not fit."""
    steps: list[Step] = []
    failed = None
    todo = list(size.lengths)
    for _ in range(len(todo) + size.tries):
        if todo and failed is None:
            tokens: int | None = todo.pop(0)
        elif (tokens := next_length(steps, failed, runner.limit, size.grain)) is None:
            break
        elif steps:
            seconds = runner.deadline - time.time()
            tokens = affordable(runner.shape, steps[-1], tokens, seconds, size.grain)
        if not tokens:
            return steps, {"ended_by": "time", "failed_at": failed}
        try:
            steps.append(runner(tokens, size.layers if tokens == size.lengths[0] else 2))
            say(steps[-1])
        except torch.OutOfMemoryError:
            failed = tokens
            say(failed)
    return steps, {"ended_by": "memory", "failed_at": failed}


def predicted(rung: Rung, shape: Shape, limit: int) -> int | None:
    """The longest length by seqtile.memory, where it knows the rung. A plan counts a GiB for CUDA, the limit none."""
    if rung.setup is None:
        return None
    setup = {"zero_stage": 0, "optimizer": "sgd", "dtype": str(DTYPE).removeprefix("torch.")} | rung.setup
    return memory.longest(shape, gpu_memory_gib=1 + limit / 2**30, host_memory_gib=2**20, **setup).tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rung", choices=list(RUNGS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    given = parser.parse_args()
    rung, size = RUNGS[given.rung], SIZES[given.size]
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.limit / torch.cuda.mem_get_info()[1]))
        if given.limit < SMALL_GPU:
            size = replace(size, shape="smollm2_135m", layers=min(size.layers, SHAPES["smollm2_135m"].layers))
    shape = replace(SHAPES[size.shape], layers=max(8, SHAPES[size.shape].layers))
    found: dict[str, Any] = {"status": "measured", "shape": size.shape, "limit_bytes": given.limit, "steps": []}
    found |= {"layers": shape.layers, "predicted": predicted(rung, shape, given.limit)}
    found |= {"ended_by": "death", "failed_at": None}  # until it is known better

    def write(**more: Any) -> None:
        given.file.write_text(json.dumps(found | more))

    def say(step: Step | int) -> None:
        fits = isinstance(step, Step)
        found["steps"] += [asdict(step)] if fits else []
        write(**({} if fits else {"failed_at": step}))
        took = f", {step.bytes / 2**30:.2f} GiB, {step.seconds:.2f} s" if fits else " do not fit"
        print(f"{given.rung}: {step.tokens if fits else step:,} tokens{took}", flush=True)

    ours, theirs = error(rung, small(shape))
    found["error"] = ours
    if not ours <= allowed(theirs):
        return write(status="wrong", why=f"relative error {ours:.1e}")
    steps, end = climb(Runner(rung, shape, given.limit, given.deadline), size, say)
    if steps and rung.offloads:
        end["host_bytes"] = (shape.layers - 1) * steps[-1].tokens * shape.hidden * DTYPE.itemsize
    write(**end)


if __name__ == "__main__":
    main()
