"""The longest sequence of one method, in a process of its own: steps at growing length until memory is full.

python -m benchmark.longest_sequence METHOD FILE --size SIZE --limit BYTES --deadline TIME --matmul-tflops RATE

A model is trained with few of its layers, and with bytes in the place of the others, see `LeftOutLayers`: bfloat16
weights, or LoRA's adapters of frozen ones; gradients that begin at None, SGD (an AdamW's states would be in host
memory, as in ALST's recipes), every layer checkpointed. A step counts if its loss and every gradient are finite. Writes
what was found into FILE as JSON. The idea is from Arctic Long Sequence Training, table 1.
"""

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from benchmark.comparison import allowed
from benchmark.device import DEVICE, DTYPE, Watch, free_memory, peak_bytes
from benchmark.left_out_layers import LeftOutLayers
from benchmark.length_search import SIZES, Step, find_longest, model_flops
from benchmark.methods import METHODS, Method, WrongStep, check_step, error, prepared
from benchmark.shapes import SHAPES, K, Shape, small
from transformers import PreTrainedModel

from seqtile import memory

SMALL_GPU = 48 * 10**9  # bytes: below them llama3_8b's weights and gradients leave no room; smollm2_135m is trained
LIMITS = {"smoke": 24 * 2**20, "small": 24 * 2**20, "cpu": 4 * 2**30}  # bytes, where no GPU sets one
WARM = 32 * K  # tokens: up to here the median of three steps after a first one; beyond, one step alone


class Runner:
    """Steps of one method."""

    def __init__(self, method: Method, shape: Shape, limit: int, deadline: float, matmul: float):
        self.method, self.shape, self.limit, self.deadline = method, shape, limit, deadline
        self.matmul = matmul  # FLOP/s
        self.model: PreTrainedModel | None = None

    def ready(self, layers: int) -> PreTrainedModel:
        if self.model is None or len(self.model.model.layers) != layers:
            self.model = None
            free_memory()
            self.model = prepared(self.method, self.shape, layers)
        self.model.zero_grad(set_to_none=True)  # of a step that memory was too small for
        return self.model

    def __call__(self, tokens: int, layers: int) -> Step:
        """Raises torch.OutOfMemoryError; WrongStep."""
        free_memory()
        model = self.ready(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, foreach=False)
        ids = torch.randint(self.shape.vocab, (1, tokens), device=DEVICE)
        watches: list[Watch] = []
        with LeftOutLayers(model, self.shape, tokens, offload=self.method.offload) as left_out:

            def step() -> None:
                watches.append(Watch())
                watches[-1].mark()
                (loss := model(input_ids=ids, labels=ids).loss).backward()
                watches[-1].mark()
                check_step(model, loss)
                watches[-1].mark()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                watches[-1].mark()
                left_out.end()

            weights = sum(parameter.nbytes for parameter in model.parameters()) + left_out.weights.nbytes
            used = weights + peak_bytes(step)
            if used > self.limit:
                raise torch.OutOfMemoryError(f"{used / 2**30:.2f} GiB, of {self.limit / 2**30:.2f}")
            for _ in range(3 if tokens <= WARM else 0):
                step()
        found = [watch.seconds() for watch in watches[1:] or watches]
        return self.figures(tokens, layers, used, statistics.median(before + after for before, _, after in found))

    def figures(self, tokens: int, layers: int, used: int, seconds: float) -> Step:
        frozen = self.method.frozen
        rate = model_flops(self.shape, layers, tokens, frozen) / seconds
        a_second = tokens * rate / model_flops(self.shape, self.shape.layers, tokens, frozen)
        return Step(tokens, layers, used, seconds, a_second, rate / self.matmul)


def predicted(method: Method, shape: Shape, limit: int) -> int | None:
    """The longest length by seqtile.memory, where it knows the method. A plan counts a GiB for CUDA, the limit none."""
    if method.setup is None:
        return None
    setup = {"zero_stage": 0, "optimizer": "sgd", "dtype": str(DTYPE).removeprefix("torch.")} | method.setup
    return memory.longest(shape, gpu_memory_gib=1 + limit / 2**30, host_memory_gib=2**20, **setup).tokens


def host_bytes(method: Method, shape: Shape, tokens: int) -> int:
    """What a whole model would have in host memory: the inputs of all layers but the last; weights and gradients of all
    layers. Nothing of an optimizer."""
    inputs = (shape.layers - 1) * tokens * shape.hidden if "activations" in method.offload else 0
    states = 2 * shape.layers * shape.layer_parameters if "weights" in method.offload else 0
    return (inputs + states) * DTYPE.itemsize


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=list(METHODS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--matmul-tflops", type=float, required=True)
    given = parser.parse_args()
    method, size = METHODS[given.method], SIZES[given.size]
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.limit / torch.cuda.mem_get_info()[1]))
        if given.limit < SMALL_GPU:
            size = replace(size, shape="smollm2_135m", layers=min(size.layers, SHAPES["smollm2_135m"].layers))
    shape = replace(SHAPES[size.shape], layers=max(8, SHAPES[size.shape].layers))
    found: dict[str, Any] = {"status": "measured", "shape": size.shape, "limit_bytes": given.limit, "steps": []}
    found |= {"layers": shape.layers, "predicted": predicted(method, shape, given.limit)}
    found |= {"in_host_memory": method.in_host_memory}
    found |= {"ended_by": "death", "failed_at": None}  # until it is known better

    def write(**more: Any) -> None:
        given.file.write_text(json.dumps(found | more))

    def say(step: Step | int) -> None:
        fits = isinstance(step, Step)
        found["steps"] += [asdict(step)] if fits else []
        write(**({} if fits else {"failed_at": step}))
        took = f", {step.bytes / 2**30:.2f} GiB, {step.seconds:.2f} s" if fits else " do not fit"
        print(f"{given.method}: {step.tokens if fits else step:,} tokens{took}", flush=True)

    ours, theirs = error(method, small(shape))
    found["error"] = ours
    if not ours <= allowed(theirs):
        return write(status="wrong", why=f"relative error {ours:.1e}")
    try:
        runner = Runner(method, shape, given.limit, given.deadline, 1e12 * given.matmul_tflops)
        steps, end = find_longest(runner, size.of(method), say)
    except WrongStep as error_at_length:
        return write(status="wrong", why=f"{error_at_length}, after {len(found['steps'])} steps", steps=[])
    if steps and method.offload:
        end["host_bytes"] = host_bytes(method, shape, steps[-1].tokens)
    write(**end)


if __name__ == "__main__":
    main()
