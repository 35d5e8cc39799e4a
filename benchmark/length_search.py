"""How the longest length is looked for, in the time that there is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from benchmark.methods import Method
from benchmark.shapes import K, Shape


@dataclass(frozen=True)
class Size:
    shape: str
    layers: int
    """Of the first, short step; others have two, see `affordable`."""
    lengths: tuple[int, ...]
    """Before the longest is looked for."""
    tries: int
    grain: int = K
    """Lengths are multiples of it."""
    fewest: int = 2
    """Layers of a step that takes much of the time."""

    def of(self, method: Method) -> "Size":
        """Where inputs are offloaded, the loss is what needs most for longer (of Llama-8B beyond 64K tokens, by head
        groups beyond 128K), and only then is it seen how memory grows; and a layer by itself shows what a whole model
        needs."""
        size = replace(self, layers=2) if "weights" in method.offload else self
        if "activations" in method.offload:
            first, last = size.lengths
            last *= 4 if "head_groups" in method.setup else 2
            size = replace(size, lengths=(first, last, 2 * last), fewest=1)
        return size


SIZES = {
    "smoke": Size("tiny", 4, (256, 512), 1, 64),
    "small": Size("tiny", 4, (256, 512), 2, 64),
    "cpu": Size("smollm2_135m", 4, (1 * K, 2 * K), 4, 256),
    "quick": Size("llama3_8b", 8, (8 * K, 32 * K), 3),
    "full": Size("llama3_8b", 32, (8 * K, 32 * K), 7),
}
CLOSE = 1.08  # a length that did not fit, over one that did: near enough
MARGIN = 1.05  # of a step's time over what is expected


@dataclass
class Step:
    tokens: int
    layers: int
    bytes: int
    """At the peak, weights and what stands for the layers left out included."""
    seconds: float
    tokens_per_second: float
    """Of the whole model, at this utilisation."""
    utilisation: float
    """Model FLOPs (nothing computed again) a second, over the matmul rate measured in the same run."""


def parts_of_flops(shape: Shape, layers: int, tokens: int) -> tuple[float, float]:
    """The model's FLOPs of forward and backward, three times a forward: 2 for each weight in a product and token;
    and attention's core of two products of which causality leaves half."""
    weights = layers * (shape.attention_parameters + shape.mlp_parameters) + shape.head_parameters
    return 6.0 * weights * tokens, 6.0 * layers * tokens**2 * shape.q


def model_flops(shape: Shape, layers: int, tokens: int, frozen: bool = False) -> float:
    """Of a frozen model no gradient of a weight is computed: a third less in products with weights."""
    weights, attention = parts_of_flops(shape, layers, tokens)
    return weights * (2 / 3 if frozen else 1) + attention


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


class Steps(Protocol):
    """Runs steps of so many tokens and layers. Raises torch.OutOfMemoryError."""

    shape: Shape
    limit: int
    deadline: float

    def __call__(self, tokens: int, layers: int) -> Step: ...


def expected_seconds(shape: Shape, steps: list[Step], tokens: int, layers: int) -> float:
    """Of a step, from the last two: they tell how long products with weights take, and attention, whose share grows.
    From the last alone where there is no other, or where that gives no times."""
    weights, attention = parts_of_flops(shape, layers, tokens)
    flops = [parts_of_flops(shape, step.layers, step.tokens) for step in steps[-2:]]
    seconds = [step.seconds for step in steps[-2:]]
    if len(steps) > 1 and (determinant := flops[0][0] * flops[1][1] - flops[0][1] * flops[1][0]):
        a_weight = (seconds[0] * flops[1][1] - seconds[1] * flops[0][1]) / determinant
        an_attention = (seconds[1] * flops[0][0] - seconds[0] * flops[1][0]) / determinant
        if min(a_weight, an_attention) > 0:
            return a_weight * weights + an_attention * attention
    return seconds[-1] / sum(flops[-1]) * (weights + attention)


def affordable(
    shape: Shape, steps: list[Step], tokens: int, seconds: float, grain: int, fewest: int
) -> tuple[int, int]:
    """The longest length, up to `tokens`, whose step takes no more than this, 0 if it is no longer than the last; and
    its layers: two where that leaves time for two more of them."""
    expected = partial(expected_seconds, shape, steps)
    layers = 2 if 3 * expected(tokens, 2) <= seconds else fewest
    while tokens > steps[-1].tokens and MARGIN * expected(tokens, layers) > seconds:
        tokens = int(0.98 * tokens) // grain * grain
    return (tokens if tokens > steps[-1].tokens else 0), layers


def find_longest(runner: Steps, size: Size, say: Callable[[Step | int], None]) -> tuple[list[Step], dict[str, Any]]:
    """Returns all steps that ran, the last at the longest length; and what ended the search. `say` gets each step, or
    the length that did not fit."""
    steps: list[Step] = []
    failed = None
    todo = list(size.lengths)
    for _ in range(len(todo) + size.tries):
        layers = 2
        if todo and failed is None:
            tokens: int | None = todo.pop(0)
            layers = size.layers if tokens == size.lengths[0] else 2
        elif (tokens := next_length(steps, failed, runner.limit, size.grain)) is None:
            break
        elif steps:
            seconds = runner.deadline - time.time()
            tokens, layers = affordable(runner.shape, steps, tokens, seconds, size.grain, size.fewest)
        if not tokens:
            return steps, {"ended_by": "time", "failed_at": failed}
        try:
            steps.append(runner(tokens, layers))
            say(steps[-1])
        except torch.OutOfMemoryError:
            failed = tokens
            say(failed)
    return steps, {"ended_by": "memory", "failed_at": failed}
