"""The chunks of small models, and what they should cost on a GPU: predicted without one, not measured.

    python -m benchmark.small_models   # the table in docs/how-it-works.md

A step of a checkpointed layer in bfloat16, as `benchmark.predicted_times` predicts it: an H200's rates, no core of
attention.
"""

from collections.abc import Iterator
from functools import partial

import torch
from benchmark import bench_decoder_layer
from benchmark.markdown import table
from benchmark.predicted_times import LAYERS, checkpointed_layer, predict
from benchmark.shapes import K

from seqtile.memory import KNOWN
from seqtile.memory.layer import chunk_tokens
from seqtile.memory.setup import Setup
from seqtile.memory.shape import Shape

MODELS = {
    "Qwen3-0.6B": KNOWN["Qwen/Qwen3-0.6B"],
    "Qwen3-1.7B": Shape(2048, 6144, 28, 16, 8, 128, 151936, "qwen3", tied=True),
    "Qwen3-4B": KNOWN["Qwen/Qwen3-4B"],
    "Qwen3-8B": KNOWN["Qwen/Qwen3-8B"],
    "Qwen3-14B": Shape(5120, 17408, 40, 40, 8, 128, 151936, "qwen3"),
    "Qwen3-32B": KNOWN["Qwen/Qwen3-32B"],
}
LENGTHS = tuple(n * K for n in (4, 16, 32, 64, 128))
PREDICTED = (4 * K, 128 * K)
WAYS = ("seqtile", "seqtile_layer")  # MLPs tiled, whole layers tiled


def row(model: str) -> list[str]:
    """Tokens of a chunk, chunks of each length, and for each of two lengths the time of either way over untiled."""
    shape = MODELS[model]
    tokens = chunk_tokens(shape, Setup(), mlp=True)
    of_chunks = [f"{tokens:,}", *(str(-(-length // tokens)) for length in LENGTHS)]
    return [model, *of_chunks, *ratios(shape)]


def ratios(shape: Shape) -> Iterator[str]:
    for length in PREDICTED:
        operands = partial(bench_decoder_layer.SUBJECT.operands, shape, length, torch.bfloat16)
        untiled, *ours = (
            predict(operands, partial(checkpointed_layer, LAYERS[way])).seconds() for way in ("huggingface", *WAYS)
        )
        yield " / ".join(f"{seconds / untiled:.2f}" for seconds in ours)


def header() -> list[str]:
    return [
        "",
        "tokens",
        *(f"{length // K}K" for length in LENGTHS),
        *(f"time, {length // K}K" for length in PREDICTED),
    ]


if __name__ == "__main__":
    print(table([header(), *map(row, MODELS)]))
