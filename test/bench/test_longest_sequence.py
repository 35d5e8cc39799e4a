"""The search finds the longest length that fits, and reports where it could not."""

from types import SimpleNamespace

import pytest
import torch
from benchmark import length_search as module
from benchmark.bench_model_step import STARTING, methods, seconds_of
from benchmark.device import DTYPE
from benchmark.length_search import CLOSE, SIZES, Step, expected_seconds, find_longest, model_flops, parts_of_flops
from benchmark.longest_sequence import Runner, host_bytes, predicted
from benchmark.methods import METHODS, WrongStep, check_step, error
from benchmark.run import MINUTES, SUBJECTS
from benchmark.run import STARTING as STARTING_A_SUBJECT
from benchmark.shapes import SHAPES, K, small
from hypothesis import given
from hypothesis import strategies as st

from seqtile import memory

LIMIT = 139 * 2**30
SHAPE = SHAPES["llama3_8b"]


CLOCK = SimpleNamespace(now=0.0, time=lambda: CLOCK.now)  # replaces the module `time`


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", CLOCK)


class Simulated(Runner):
    """Simulates memory that grows by a number of bytes per token, and a speed a third above that of the model."""

    def __init__(self, states: int, a_token: float, deadline: float = 1e18, rate: float = 4e14, limit: int = LIMIT):
        self.states, self.a_token, self.limit, self.shape, self.rate = states, a_token, limit, SHAPE, rate
        self.deadline, self.matmul, self.method = deadline, 8e14, METHODS["huggingface"]
        self.ran: list[tuple[int, int]] = []

    def __call__(self, tokens: int, layers: int) -> Step:
        self.ran.append((tokens, layers))
        seconds = model_flops(SHAPE, layers, tokens) * 4 / 3 / self.rate
        if (used := int(self.states + self.a_token * tokens)) > self.limit:
            CLOCK.now += seconds / 2
            raise torch.OutOfMemoryError
        CLOCK.now += seconds * (4 if tokens <= 32 * K else 1)
        return self.figures(tokens, layers, used, seconds)


@given(st.integers(0, 60 * 2**30), st.integers(20_000, 40_000_000))
def test_the_longest_is_found(states: int, a_token: int) -> None:
    runner = Simulated(states, a_token)
    said: list[Step | int] = []
    steps, end = find_longest(runner, SIZES["full"], said.append)
    fits = (LIMIT - states) // a_token
    assert end["ended_by"] == "memory" and [step for step in said if isinstance(step, Step)] == steps
    assert len(runner.ran) == len(set(runner.ran)) == len(said) and all(tokens % K == 0 for tokens, _ in runner.ran)
    if fits >= 8 * K:
        assert steps[-1].tokens <= fits < end["failed_at"]
        assert end["failed_at"] <= max(CLOSE * steps[-1].tokens, steps[-1].tokens + K)
        assert {layers for tokens, layers in runner.ran if tokens != 8 * K} <= {2} and runner.ran[0] == (8 * K, 32)


def test_time_that_is_up() -> None:
    """If time runs out, the search does as much as time allows, and nothing shorter than before."""
    steps, end = find_longest(Simulated(0, 20_000, CLOCK.now + 100), SIZES["full"], lambda step: None)
    assert 32 * K < steps[-1].tokens < 2**20 and end == {"ended_by": "time", "failed_at": None}
    steps, end = find_longest(Simulated(0, 20_000, CLOCK.now), SIZES["full"], lambda step: None)
    assert [step.tokens for step in steps] == [8 * K, 32 * K] and end["ended_by"] == "time"


ENDS = ("seqtile_layer_offload", "seqtile_head_groups_offload")
ENDS += tuple(f"{name}_weights" for name in ENDS)


def planned(name: str, gibibytes: float) -> int:
    """Returns the longest planned length. Liger has none, so a plan with the same tiled parts replaces it."""
    left = {"liger": {"tiles": ("loss",), "liger": True}}
    left["liger_deepspeed_mlp"] = {"tiles": ("loss", "mlp"), "liger": True}
    setup = {"zero_stage": 0, "optimizer": "sgd", **(METHODS[name].setup or left[name])}
    return memory.longest(SHAPE, gpu_memory_gib=1 + gibibytes, host_memory_gib=2**20, **setup).tokens


HAVE_TIME = {
    "in a full run": ("full", 139, MINUTES["full"], list(SUBJECTS), False),
    "alone": ("full", 139, 60, ["model_step"], True),
    "alone, on 80 GB": ("full", 74.5, 29, ["model_step"], True),
    "quick, on 80 GB": ("quick", 74.5, 8.5, ["model_step"], False),
}


@pytest.mark.parametrize("run", HAVE_TIME)
def test_methods_have_time_for_their_longest_length(run: str) -> None:
    """At 400 TFLOP/s, with 15 s of setup per process, every method reaches the length that is planned to fit."""
    size, gibibytes, minutes, subjects, all_methods = HAVE_TIME[run]
    seconds = 60 * minutes - STARTING_A_SUBJECT * len(subjects)
    end = CLOCK.now + seconds * SUBJECTS["model_step"] / sum(SUBJECTS[name] for name in subjects)
    for name in methods(size):
        method, longest = METHODS[name], planned(name, gibibytes)
        deadline = CLOCK.now + seconds_of(name, end - CLOCK.now, size)
        CLOCK.now += STARTING
        states = (4 if "weights" in method.offload else 17) * 2**30
        limit = int(gibibytes * 2**30)
        runner = Simulated(states, (limit - states) / longest, deadline, limit=limit)
        steps, ended = find_longest(runner, SIZES[size].of(method), lambda step: None)
        assert (name in ENDS and not all_methods) or steps[-1].tokens > 0.9 * longest, (name, steps[-1].tokens, ended)
        assert CLOCK.now <= deadline + STARTING


def test_layers_of_a_long_step() -> None:
    """With offloaded inputs two layers, if that leaves time for two more, else one. Without offloading two."""
    offloaded = SIZES["full"].of(METHODS["seqtile_head_groups_offload_weights"])
    runner = Simulated(2**32, 50_000, CLOCK.now + 10_000)
    steps, _ = find_longest(runner, offloaded, lambda step: None)
    assert runner.ran[:3] == [(8 * K, 2), (128 * K, 2), (256 * K, 2)]
    assert steps[-1].layers == 2 and steps[-1].tokens > 2_800_000
    steps, _ = find_longest(Simulated(2**32, 50_000, CLOCK.now + 2000), offloaded, lambda step: None)
    assert steps[-1].layers == 1 and steps[-1].tokens > 2_800_000
    steps, _ = find_longest(Simulated(2**32, 50_000, CLOCK.now + 2000), SIZES["full"], lambda step: None)
    assert steps[-1].layers == 2


def test_time_of_a_long_step() -> None:
    """Attention, whose share grows, may be slower than products with weights. Short steps determine both rates."""

    def took(tokens: int, layers: int) -> Step:
        weights, attention = parts_of_flops(SHAPE, layers, tokens)
        return Step(tokens, layers, 0, weights / 5e14 + attention / 2e14, 1, 1)

    steps = [took(32 * K, 2), took(128 * K, 2)]
    right = took(2048 * K, 1).seconds
    assert expected_seconds(SHAPE, steps, 2048 * K, 1) == pytest.approx(right)
    assert expected_seconds(SHAPE, steps[1:], 2048 * K, 1) < 0.8 * right  # from one step alone
    steps[1].seconds = steps[0].seconds  # the rate of weights would be negative
    assert expected_seconds(SHAPE, steps, 256 * K, 2) == pytest.approx(
        steps[0].seconds * model_flops(SHAPE, 2, 256 * K) / model_flops(SHAPE, 2, 128 * K)
    )


def test_flops_of_a_model() -> None:
    """Llama-3.1-8B: 7.5 billion weights in products, 6 FLOP per weight and token; and attention's 3 passes of 2
    products of 2 FLOP for 32 layers, 4,096 elements and half of the tokens. The whole model reaches this many tokens
    per second."""
    a_token = model_flops(SHAPE, 32, 32 * K) / (32 * K)
    assert abs(a_token - (6 * 7.504e9 + 12 * 32 * 4096 * 16 * K)) < 1e-3 * a_token
    step = Simulated(0, 1).figures(32 * K, 2, 0, model_flops(SHAPE, 2, 32 * K) / 4e14)
    assert step.utilisation == pytest.approx(0.5) and step.tokens_per_second == pytest.approx(4e14 / a_token)


@pytest.mark.full("each method asks it of itself, two of them in make bench-smoke")
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.needs])
def test_what_runs_is_right(name: str) -> None:
    ours, theirs = error(METHODS[name], small(SHAPES["tiny"]))
    assert ours <= 3 * theirs + 1e-6


def test_a_step_that_is_wrong() -> None:
    """A step is wrong if its loss or any gradient is missing, all zero or not finite."""
    loss = torch.tensor(2.0)

    def model(**changed: float | None) -> torch.nn.Module:
        found = torch.nn.Linear(4, 3)
        for name, parameter in found.named_parameters():
            if (value := changed.get(name, 1.0)) is not None:
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.view(-1)[-1] = value
        return found

    check_step(model(), loss)
    check_step(model(weight=-1.0), loss)
    for changed in ({"bias": None}, {"bias": 0.0}, {"weight": torch.nan}, {"weight": torch.inf}, {"bias": -torch.inf}):
        with pytest.raises(WrongStep, match=f"^{next(iter(changed))}.grad is "):
            check_step(model(**changed), loss)
    with pytest.raises(WrongStep, match=r"^the loss is from nan"):
        check_step(model(), loss * torch.nan)


def test_what_is_in_host_memory() -> None:
    """Llama-8B at a million tokens: 8 KB per token and layer; two bytes, twice, for each of 7 billion weights."""
    tokens, itemsize = 10**6, DTYPE.itemsize / 2
    inputs, states = (itemsize * size for size in (31 * 8192 * tokens, 4 * 32 * 218_112_000))
    found = [METHODS[name] for name in ("seqtile_loss_mlp", *ENDS[1::2])]
    assert [host_bytes(method, SHAPE, tokens) for method in found] == [0, inputs, inputs + states]
    assert [method.in_host_memory for method in found] == [[], ["inputs"], ["inputs", "weights", "gradients"]]


def test_what_is_predicted() -> None:
    """More time is predicted for head groups than for a tiled layer, and for weights in host memory than on the GPU."""
    layer, groups, layer_weights, groups_weights = (predicted(METHODS[name], SHAPE, 80 * 10**9) for name in ENDS)
    assert layer < groups < groups_weights and layer < layer_weights < groups_weights
