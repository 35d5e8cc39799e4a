"""Contests under pytest-benchmark: a test is what one contestant did in one case.

The timer that pytest-benchmark reads stands still but for the time that a contest's rounds took on the device.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from benchmark.contest import Contest, Entry, Subject
from benchmark.device import DEVICE, DTYPE, ceilings, description, limit_memory
from benchmark.shapes import LENGTHS, SHAPES, Case, cases


class Clock:
    """A timer that moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


CLOCK = Clock()
CONTESTS = pytest.StashKey[dict[tuple[str, Case], dict[str, Entry]]]()
DEADLINE = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", default="smoke", choices=list(LENGTHS), help="which shapes and lengths")
    parser.addoption("--memory-limit", type=float, metavar="GB", help="emulate a GPU of so many 10**9 bytes")
    parser.addoption("--seconds", type=float, default=600, help="after them nothing more is begun, and that is said")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CONTESTS] = {}
    config.stash[DEADLINE] = time.time() + config.getoption("--seconds")
    limit_memory(config.getoption("--memory-limit"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"case", "contestant"} <= set(metafunc.fixturenames) and hasattr(metafunc.module, "SUBJECT"):
        subject: Subject = metafunc.module.SUBJECT
        metafunc.parametrize("case", cases(metafunc.config.getoption("--size"), subject.lengths), ids=str)
        metafunc.parametrize("contestant", subject.contestants)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.benchmark(timer=CLOCK.now))


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    output_json["machine"] = description() | ceilings()


def pytest_benchmark_group_stats() -> list[Any]:
    """No tables of pytest-benchmark's own: benchmark.table makes them, of all subjects."""
    return []


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, and the distance between the quartiles, in milliseconds."""
    found = [1000 * each for each in seconds]
    quartiles = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else [found[0]] * 3
    return {"ms": statistics.median(found), "iqr_ms": quartiles[2] - quartiles[0]}


@pytest.fixture
def record(benchmark: Any) -> Callable[..., None]:
    """Gives pytest-benchmark a row: its values, and seconds of each round (none where nothing was timed)."""

    def recorded(row: dict[str, Any], seconds: list[float]) -> None:
        remaining = iter(seconds or [0.0])
        setup = lambda: ((next(remaining),), {})  # noqa: E731
        known = {key: value for key, value in row.items() if value is not None and value == value}  # no NaN in JSON
        benchmark.extra_info |= {"device": DEVICE, "dtype": str(DTYPE).removeprefix("torch.")} | known
        benchmark.pedantic(CLOCK.advance, setup=setup, rounds=max(1, len(seconds)))

    return recorded


@pytest.fixture
def compete(request: pytest.FixtureRequest, record: Callable[..., None]) -> Callable[..., None]:
    """Holds the contest of a case when its first contestant asks for it; records what each did."""
    config = request.config

    def competed(subject: Subject, case: Case, contestant: str) -> None:
        held = config.stash[CONTESTS]
        if (subject.name, case) not in held:
            contest = Contest(subject, case, config.getoption("--size"), config.stash[DEADLINE])
            held[subject.name, case] = contest.run()
        entry = held[subject.name, case][contestant]
        both = [forward + backward for forward, backward in zip(entry.forward, entry.backward, strict=True)]
        row = {"subject": subject.name, "shape": case.shape, "tokens": case.tokens, "contestant": contestant}
        row |= {"status": entry.status, "why": entry.why, "error": entry.error}
        row["flops"] = subject.flops(SHAPES[case.shape], case.tokens)
        if both:
            row |= {"peak_bytes": entry.peak_bytes, "rounds": len(both)}
            times = {"forward": entry.forward, "backward": entry.backward, "both": both}
            row |= {f"{name}_{key}": value for name, found in times.items() for key, value in spread(found).items()}
        record(row, both)
        ours = contestant.startswith("seqtile")
        assert not ours or entry.status not in ("wrong", "failed"), f"{entry.status}: {entry.why}"

    return competed
