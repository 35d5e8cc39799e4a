"""Comparisons under pytest-benchmark: a test is what one contestant did in one case.

The timer that pytest-benchmark reads stands still but for the time that a comparison's rounds took on the device. Rows
go into a file as they come, since a device that is lost, or a process that dies, takes with it what is only in memory.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.comparison import Comparison, expected_seconds
from benchmark.device import DEVICE, DTYPE, LOST, ceilings, description, limit_memory, name, spread
from benchmark.results import RESULTS
from benchmark.rows import append, read
from benchmark.shapes import FEWER, LENGTHS, SHAPES, Case, cases
from benchmark.subject import Outcome, Subject

Record = Callable[[dict[str, Any], list[float]], None]


class Clock:
    """A timer that moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


CLOCK = Clock()
COMPARISONS = pytest.StashKey[dict[tuple[str, Case], dict[str, Outcome]]]()
DEADLINE = pytest.StashKey[float]()
MACHINE = pytest.StashKey[dict[str, Any]]()
PACE = pytest.StashKey[dict[str, float]]()
WITHOUT = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", default="smoke", choices=["smoke", *LENGTHS], help="which shapes and lengths")
    parser.addoption("--memory-limit", type=float, metavar="GB", help="emulate a GPU of so many 10**9 bytes")
    parser.addoption("--seconds", type=float, default=600, help="after them nothing more is begun, and that is said")
    parser.addoption(
        "--rows", type=Path, metavar="FILE", help="lines of JSON: what is measured on, unless it is there; rows"
    )
    parser.addoption("--commit", help="that is measured, of which the rows are")
    parser.addoption("--without", action="append", default=[], metavar="CONTESTANT", help="one that kills the device")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPARISONS], config.stash[PACE] = {}, {}
    config.stash[DEADLINE] = time.time() + config.getoption("--seconds")
    config.stash[WITHOUT] = set(config.getoption("--without"))
    limit_memory(config.getoption("--memory-limit"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"case", "contestant"} <= set(metafunc.fixturenames) and hasattr(metafunc.module, "SUBJECT"):
        subject: Subject = metafunc.module.SUBJECT
        metafunc.parametrize("case", cases(metafunc.config.getoption("--size"), subject.lengths), ids=str)
        metafunc.parametrize("contestant", contestants_at_size(metafunc.config, subject.contestants))


def contestants_at_size(config: pytest.Config, contestants: Iterable[str]) -> list[str]:
    """Those that take part at this size, see `shapes.FEWER`."""
    fewer = FEWER.get(config.getoption("--size"))
    return [name for name in contestants if fewer is None or name in fewer]


def directory(config: pytest.Config) -> Path:
    """Where results go."""
    file = config.getoption("--rows")
    return file.parent if file else RESULTS


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.benchmark(timer=CLOCK.now))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before anything else is measured: later the device may be lost."""
    if session.items and not session.config.getoption("--collect-only"):
        file = session.config.getoption("--rows")
        known, _ = read(file) if file else ({}, {})
        session.config.stash[MACHINE] = known or ceilings() | description()  # the clocks are those under load
        if not known:
            write(session.config, session.config.stash[MACHINE] | {"commit": session.config.getoption("--commit")})


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else name()


def write(config: pytest.Config, line: dict[str, Any]) -> None:
    if file := config.getoption("--rows"):
        append(file, line)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Takes a row's values, and the seconds of each round: none where nothing was timed."""

    def recorded(row: dict[str, Any], seconds: list[float]) -> None:
        row = {"device": DEVICE, "dtype": str(DTYPE).removeprefix("torch.")} | row
        row |= {f"both_{key}": value for key, value in spread(seconds).items()} if seconds else {}
        row = {key: value for key, value in row.items() if value is not None and value == value}  # no NaN in JSON
        write(request.config, {"id": request.node.nodeid, "row": row})
        if seconds:
            benchmark, remaining = request.getfixturevalue("benchmark"), iter(seconds)
            benchmark.extra_info |= row
            benchmark.pedantic(CLOCK.advance, setup=lambda: ((next(remaining),), {}), rounds=len(seconds))

    return recorded


def row_of(subject: Subject, case: Case, contestant: str, outcome: Outcome) -> dict[str, Any]:
    row = {"subject": subject.name, "shape": case.shape, "tokens": case.tokens, "contestant": contestant}
    row |= {"status": outcome.status, "why": outcome.why, "error": outcome.error}
    row["flops"] = subject.flops(SHAPES[case.shape], case.tokens)
    if outcome.forward:
        row |= {"peak_bytes": outcome.peak_bytes, "rounds": len(outcome.forward)}
        times = {"forward": outcome.forward, "backward": outcome.backward}
        row |= {f"{name}_{key}": value for name, found in times.items() for key, value in spread(found).items()}
    return row


@pytest.fixture
def compare(request: pytest.FixtureRequest, record: Record) -> Callable[[Subject, Case, str], None]:
    """Runs the comparison of a case when its first contestant asks for it; records what each did."""
    config = request.config
    terminal, capture = (config.pluginmanager.getplugin(name) for name in ("terminalreporter", "capturemanager"))

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.write_line(line)

    def outcomes_of(subject: Subject, case: Case) -> dict[str, Outcome]:
        outcomes, pace = config.stash[COMPARISONS], config.stash[PACE]
        if (subject.name, case) not in outcomes:
            seconds = expected_seconds(subject, case, config.getoption("--size"), pace.get(subject.name, 0))
            if time.time() + seconds > config.stash[DEADLINE]:
                outcomes[subject.name, case] = {name: Outcome("no time left") for name in subject.contestants}
                return outcomes[subject.name, case]
            left_out = subject.contestants.keys() - contestants_at_size(config, subject.contestants)
            without = config.stash[WITHOUT] & subject.contestants.keys() | left_out
            comparison = Comparison(subject, case, config.getoption("--size"), without, show)
            outcomes[subject.name, case] = comparison.run()
            pace[subject.name] = comparison.pace
            if (killer := comparison.killer) is not None:
                test, outcome = request.node.nodeid.partition("[")[0], outcomes[subject.name, case][killer]
                write(config, {"id": f"{test}[{case}-{killer}]", "row": row_of(subject, case, killer, outcome)})
                show(f"{killer} took the device with it")
                os._exit(LOST)  # an orderly end would ask the device
        return outcomes[subject.name, case]

    def record_outcome(subject: Subject, case: Case, contestant: str) -> None:
        outcome = outcomes_of(subject, case)[contestant]
        both = [forward + backward for forward, backward in zip(outcome.forward, outcome.backward, strict=True)]
        record(row_of(subject, case, contestant, outcome), both)
        ours = contestant.startswith("seqtile")
        assert not ours or outcome.status not in ("wrong", "failed"), f"{outcome.status}: {outcome.why}"

    return record_outcome
