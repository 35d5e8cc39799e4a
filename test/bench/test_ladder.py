"""The ladder finds the longest length that fits, and says so where it could not."""

import time

import torch
from benchmark.ladder import CLOSE, Runner, Size, Step, climb, model_flops, next_length
from benchmark.rungs import RUNGS, error
from benchmark.shapes import SHAPES, K, small
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 80 * 2**30
SIZE = Size("llama3_8b", ((8 * K, 8), (32 * K, 2)), 6)


class Simulated(Runner):
    """Memory that grows by so many bytes a token; 400 TFLOP/s. Nothing waits: the deadline is what a step may take."""

    def __init__(self, states: int, a_token: int, seconds: float = 1e9):
        self.states, self.a_token, self.limit, self.shape = states, a_token, LIMIT, SHAPES["llama3_8b"]
        self.deadline = time.time() + seconds
        self.ran: list[tuple[int, int, int]] = []

    def __call__(self, tokens: int, layers: int, rounds: int) -> Step:
        self.ran.append((tokens, layers, rounds))
        if (used := self.states + self.a_token * tokens) > LIMIT:
            raise torch.OutOfMemoryError
        return Step(tokens, layers, used, model_flops(self.shape, layers, tokens) / 4e14, 1.0, 0.5)


@given(st.integers(0, 30 * 2**30), st.integers(20_000, 40_000_000))
def test_the_longest_is_found(states: int, a_token: int) -> None:
    runner = Simulated(states, a_token)
    steps, end = climb(runner, SIZE)
    fits = (LIMIT - states) // a_token
    if fits < K:
        assert not steps
        return
    assert end["ended_by"] == "memory" and steps[-1].tokens <= fits < end["failed_at"]
    assert end["failed_at"] <= max(CLOSE * steps[-1].tokens, steps[-1].tokens + K)
    assert len(runner.ran) == len(set(runner.ran))
    assert all(tokens % K == 0 and rounds == (4 if tokens <= 128 * K else 1) for tokens, _, rounds in runner.ran)


def test_time_that_is_up() -> None:
    """Of what would take longer, as much is done as there is time for; nothing shorter than before."""
    steps, end = climb(Simulated(0, 20_000, seconds=60), SIZE)
    assert 50 < steps[-1].seconds < 60 and end == {"ended_by": "time", "failed_at": None}
    steps, end = climb(Simulated(0, 20_000, seconds=0.1), SIZE)
    assert [step.tokens for step in steps] == [8 * K] and end["ended_by"] == "time"


def test_the_next_length() -> None:
    steps = [Step(8 * K, 2, 10 * 2**30, 1, 1, 1), Step(16 * K, 2, 18 * 2**30, 1, 1, 1)]
    assert next_length(steps, None, LIMIT, K) == 75 * K  # 0.97 of 78
    assert next_length(steps, 20 * K, LIMIT, K) == 18 * K  # what was expected did not fit
    assert next_length(steps, 17 * K, LIMIT, K) is None
    assert next_length([], 8 * K, LIMIT, K) == 4 * K


def test_flops_of_a_model() -> None:
    """Llama-3.1-8B: 7.5 billion weights in products, 6 FLOP for each and token, and 12.9 GFLOP a token of attention at
    32K, 3 passes x 2 products x 2 FLOP x 32 layers x 4,096 x half of 32K."""
    shape = SHAPES["llama3_8b"]
    a_token = model_flops(shape, 32, 32 * K) / (32 * K)
    assert abs(a_token - (6 * 7.504e9 + 12 * 32 * 4096 * 16 * K)) < 1e-3 * a_token


def test_what_runs_is_right() -> None:
    """Each rung that can run here, on a model of two layers."""
    for name, rung in RUNGS.items():
        if not rung.needs:
            ours, theirs = error(rung, small(SHAPES["tiny"]))
            assert ours <= 3 * theirs + 1e-6, name
