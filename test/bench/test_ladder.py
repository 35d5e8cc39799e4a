"""The ladder finds the longest length that fits, and says so where it could not."""

import pytest
import torch
from benchmark import ladder
from benchmark.bench_model_step import STARTING, seconds_of
from benchmark.ladder import CLOSE, SIZES, Runner, Step, climb, model_flops, next_length
from benchmark.run import MINUTES, SUBJECTS
from benchmark.run import STARTING as STARTING_A_SUBJECT
from benchmark.rungs import RUNGS, error
from benchmark.shapes import SHAPES, K, small
from hypothesis import given
from hypothesis import strategies as st

from seqtile import memory

LIMIT = 139 * 2**30
SHAPE = SHAPES["llama3_8b"]


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "time", CLOCK)


class Simulated(Runner):
    """Memory that grows by so many bytes a token; so many FLOP/s, a third more of them than the model's."""

    def __init__(self, states: int, a_token: float, deadline: float = 1e18, rate: float = 4e14):
        self.states, self.a_token, self.limit, self.shape, self.rate = states, a_token, LIMIT, SHAPE, rate
        self.deadline, self.matmul = deadline, 8e14
        self.ran: list[tuple[int, int]] = []

    def __call__(self, tokens: int, layers: int) -> Step:
        self.ran.append((tokens, layers))
        seconds = model_flops(SHAPE, layers, tokens) * 4 / 3 / self.rate
        if (used := int(self.states + self.a_token * tokens)) > LIMIT:
            CLOCK.now += seconds / 2
            raise torch.OutOfMemoryError
        CLOCK.now += seconds * (4 if tokens <= 32 * K else 1)
        return self.figures(tokens, layers, used, seconds)


@given(st.integers(0, 60 * 2**30), st.integers(20_000, 40_000_000))
def test_the_longest_is_found(states: int, a_token: int) -> None:
    runner = Simulated(states, a_token)
    said: list[Step | int] = []
    steps, end = climb(runner, SIZES["full"], said.append)
    fits = (LIMIT - states) // a_token
    assert end["ended_by"] == "memory" and [step for step in said if isinstance(step, Step)] == steps
    assert len(runner.ran) == len(set(runner.ran)) == len(said) and all(tokens % K == 0 for tokens, _ in runner.ran)
    if fits >= 8 * K:
        assert steps[-1].tokens <= fits < end["failed_at"]
        assert end["failed_at"] <= max(CLOSE * steps[-1].tokens, steps[-1].tokens + K)
        assert {layers for tokens, layers in runner.ran if tokens != 8 * K} <= {2} and runner.ran[0] == (8 * K, 32)


def test_time_that_is_up() -> None:
    """Of what would take longer, as much is done as there is time for; nothing shorter than before."""
    steps, end = climb(Simulated(0, 20_000, CLOCK.now + 100), SIZES["full"], lambda step: None)
    assert 32 * K < steps[-1].tokens < 2**20 and end == {"ended_by": "time", "failed_at": None}
    steps, end = climb(Simulated(0, 20_000, CLOCK.now), SIZES["full"], lambda step: None)
    assert [step.tokens for step in steps] == [8 * K, 32 * K] and end["ended_by"] == "time"


def test_each_rung_has_time_for_its_longest_length() -> None:
    """In a full run on an H200, at 400 TFLOP/s, if 15 s go by in each process before a step: what is planned to fit is
    reached. Of Liger, which is not planned, what seqtile's loss or both its parts have stands there."""
    left = {"liger": {"tiles": ("loss",), "liger": True}}
    left["liger_deepspeed_mlp"] = {"tiles": ("loss", "mlp"), "liger": True}
    seconds = 60 * MINUTES["full"] - STARTING_A_SUBJECT * len(SUBJECTS)
    end = CLOCK.now + seconds * SUBJECTS["model_step"] / sum(SUBJECTS.values())
    for name, rung in RUNGS.items():
        setup = {"zero_stage": 0, "optimizer": "sgd", **(rung.setup or left[name])}
        longest = memory.longest(SHAPE, gpu_memory_gib=140, host_memory_gib=2**20, **setup).tokens
        deadline = CLOCK.now + seconds_of(name, end - CLOCK.now)
        CLOCK.now += STARTING
        states = 17 * 2**30
        steps, ended = climb(Simulated(states, (LIMIT - states) / longest, deadline), SIZES["full"], lambda step: None)
        assert steps[-1].tokens > 0.9 * longest, (name, steps[-1].tokens, longest, ended)


def test_the_next_length() -> None:
    steps = [Step(8 * K, 2, 10 * 2**30, 1, 1, 1), Step(16 * K, 2, 18 * 2**30, 1, 1, 1)]
    limit = 80 * 2**30
    assert next_length(steps, None, limit, K) == 75 * K  # 0.97 of 78
    assert next_length(steps, 20 * K, limit, K) == 18 * K  # what was expected did not fit
    assert next_length(steps, 17 * K, limit, K) is None
    assert next_length([], 8 * K, limit, K) == 4 * K


def test_flops_of_a_model() -> None:
    """Llama-3.1-8B: 7.5 billion weights in products, 6 FLOP for each and token; and attention's 3 passes of 2 products
    of 2 FLOP for 32 layers, 4,096 elements and half of the tokens. So many tokens a second has the whole model."""
    a_token = model_flops(SHAPE, 32, 32 * K) / (32 * K)
    assert abs(a_token - (6 * 7.504e9 + 12 * 32 * 4096 * 16 * K)) < 1e-3 * a_token
    step = Simulated(0, 1).figures(32 * K, 2, 0, model_flops(SHAPE, 2, 32 * K) / 4e14)
    assert step.utilisation == pytest.approx(0.5) and step.tokens_per_second == pytest.approx(4e14 / a_token)


@pytest.mark.parametrize("name", [name for name, rung in RUNGS.items() if not rung.needs])
def test_what_runs_is_right(name: str) -> None:
    ours, theirs = error(RUNGS[name], small(SHAPES["tiny"]))
    assert ours <= 3 * theirs + 1e-6
