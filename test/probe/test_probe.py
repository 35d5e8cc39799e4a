"""seqtile probe: seqtile is right, a planted defect is found, and a package that cannot run is shown as such."""

import json
import os
import re
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from seqtile import cli, probe
from seqtile.limits import installed
from seqtile.probe import PEERS, PROBES, Row, alone, cases, ranks
from seqtile.probe.cases import Case, Finding, batch_of, leak, scale, small_model, truth, window
from seqtile.probe.tree import cases_of

PAGE = Path(__file__).parents[2] / "docs" / "probe.md"
OURS = [case for case in alone.cases() if case.package == "seqtile"]
EXACT = {"leak": "0 of 40", "window": "0 of 55", "scale": "x 1.00", "label": "x 1.00"}


def figure_is_right(row: Row) -> bool:
    if row.probe in EXACT:
        return row.figure == EXACT[row.probe]
    return float(row.figure.replace(",", "")) < {"accumulation": 1e-6, "head": 3e-3, "memory": 50}[row.probe]


@pytest.mark.parametrize("case", OURS, ids=lambda case: f"{case.probe}-{case.system}")
def test_seqtile_is_right(case: Case) -> None:
    row = case.run()
    assert row.verdict == "right" and figure_is_right(row), row


@pytest.mark.dist
@pytest.mark.full("20 s: its processes import everything, and sp's own tests hold it")
def test_seqtile_is_right_over_two_ranks() -> None:
    rows = [row for row in probe.rows_of("seqtile", tuple(PROBES), 600) if row.package == "seqtile"]
    assert [row.probe for row in rows] == ["leak", "window", "window", "scale", "label"]
    assert all(row.verdict == "right" and figure_is_right(row) for row in rows), rows


def without_positions(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    """A model function that leaks: all documents of a row form one."""
    return lambda batch: model(input_ids=batch["input_ids"]).logits[0]


def mean_of_means(model: nn.Module, batch: dict[str, Tensor], items: int) -> None:
    (model(**batch).loss / 2).backward()


def times_two() -> Finding:
    return scale(2 * truth(batch_of())[1], truth(batch_of())[1])


def shifted_after_the_cut(batch: dict[str, Tensor]) -> Tensor:
    """Both shards in one process; each loses the label at its end."""
    logits, labels = small_model()(input_ids=batch["input_ids"]).logits[0], batch["labels"][0]
    halves = zip(logits.split(32), labels.split(32), strict=True)
    return sum(F.cross_entropy(x[:-1], y[1:], reduction="sum") for x, y in halves).detach()


def in_another_direction() -> Finding:
    """A gradient with the right length along the true one, but another direction."""
    true = truth(batch_of())[1]
    across = true.flip(0) - true * (true.flip(0) @ true) / (true @ true)
    return scale(true + across, true)


PLANTED = {
    "leak": (lambda: leak(without_positions(small_model())), "wrong", "40 of 40"),
    "window": (lambda: window(without_positions(small_model())), "wrong", "55 of 55"),
    "scale": (times_two, "wrong", "x 2.00"),
    "another direction": (in_another_direction, "wrong", r"x 1.00, error \de[+-]\d\d"),
    "label": (lambda: ranks.label_factor(shifted_after_the_cut), "wrong", "x 0.00"),
    "accumulation": (lambda: alone.accumulation(small_model(), mean_of_means), "wrong", r"2\.\de\+00"),
    "head": (lambda: alone.head(alone.checkpointed), "imprecise", r"1\.\de-02"),
    "memory": (lambda: alone.memory(alone.untiled), "grows", r"\d,\d+"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str) -> None:
    find, verdict, figure = PLANTED[name]
    row = Case(name, "planted", "torch", find).run()
    assert row.verdict == verdict and re.fullmatch(figure, row.figure), row


def test_half_of_it_is_counted() -> None:
    """Counts the outputs that change, not whether any does: a leak only into the last ten tokens."""
    model = small_model()

    def logits(batch: dict[str, Tensor]) -> Tensor:
        whole, apart = (model(input_ids=batch["input_ids"], **given).logits[0] for given in ({}, positions))
        return torch.cat([apart[:-10], whole[-10:]])

    positions = {"position_ids": batch_of(packed=True)["position_ids"]}
    assert leak(logits) == Finding(False, "10 of 40")


def test_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        return "" if package in ("trl", "deepspeed") else "1.0"

    monkeypatch.setattr(cases, "installed", absent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {(case.package, case.gpu): case.absent() for tree in probe.TREES for case in cases_of(tree)}
    verdicts = {key: row and row.verdict for key, row in found.items()}
    assert verdicts.pop(("liger-kernel", True)) == verdicts.pop(("accelerate", True)) == "needs a GPU"
    assert verdicts.pop(("trl", False)) == verdicts.pop(("deepspeed", False)) == "not installed"
    assert set(verdicts.values()) == {None}
    monkeypatch.setattr(probe, "ended", lambda *_: pytest.fail("nothing of this tree is installed"))
    assert {row.verdict for row in probe.rows_of("deepspeed", tuple(PROBES), 1)} == {"not installed"}


def test_errors_are_rows() -> None:
    def fail(error: Exception) -> Finding:
        raise error

    for error, verdict in ((ValueError("no\nmore"), "refused"), (RuntimeError("no\nmore"), "failed")):
        row = Case("leak", "it", "torch", partial(fail, error)).run()
        assert (row.verdict, row.note) == (verdict, f"{type(error).__name__}: no")


def test_a_tree_that_hangs_is_ended() -> None:
    rows = probe.rows_of("alone", ["leak"], time_limit=0.01)
    assert {row.verdict for row in rows if row.package == "seqtile"} == {"not finished"}
    assert all(row.note == "in 0.01 s" for row in rows if row.verdict == "not finished")
    assert "failed" not in {row.verdict for row in rows}


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = Row("leak", "it", "seqtile", "right", "0 of 40"), Row("leak", "it", "torch", "wrong", "40 of 40")
    for ours, code in ((right, 0), (Row("leak", "it", "seqtile", "wrong", "1 of 40"), 1)):
        monkeypatch.setattr(cli, "rows_of_probes", lambda names, ours=ours, **_: [ours, wrong])
        result = CliRunner().invoke(cli.app, ["probe", "--json"])
        assert result.exit_code == code
        assert [row["verdict"] for row in json.loads(result.output)] == [ours.verdict, "wrong"]
    absent = Row("leak", "it", "trl", "not installed")

    def one_by_one(names: object, progress: object, each: Callable[[Row], None]) -> list[Row]:
        rows = [wrong, absent, right, Row("leak", "it", "deepspeed", "not finished", note="in 300 s")]
        return [each(row) or row for row in rows]

    monkeypatch.setattr(cli, "rows_of_probes", one_by_one)
    printed = CliRunner().invoke(cli.app, ["probe"]).output
    assert "  leak        wrong        torch, it: 40 of 40\n" in printed
    assert "not finished deepspeed, it (in 300 s)\nNot installed, and so not tried: trl.\n" in printed
    assert printed.endswith("\n3 results: 1 right, 1 wrong, 1 not finished.\n")
    monkeypatch.undo()
    monkeypatch.setattr(probe, "TREES", {})
    said: list[str] = []
    assert probe.probe(["window", "leak"], progress=said.append) == []
    assert said == [f"{name}: {PROBES[name]}" for name in ("leak", "window")]
    result = CliRunner().invoke(cli.app, ["probe", "--only", "leak", "--only", "leaks"])
    assert result.exit_code == 1 and "expected probes of leak, window" in result.output and "got leaks" in result.output
    assert PROBES["leak"] not in result.output


@pytest.mark.full("8 s, of a process that imports everything")
def test_what_was_found_stays_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is printed as soon as a process has written it, also into a pipe."""

    def interrupted(names: object, progress: object, each: Callable[[Row], None]) -> None:
        def first(row: Row) -> None:
            each(row)
            if row.verdict == "right":
                raise KeyboardInterrupt

        probe.rows_of("alone", ["leak"], 600, first)

    monkeypatch.setattr(cli, "rows_of_probes", interrupted)
    monkeypatch.setattr(probe, "LOOK", 0.01)
    result = CliRunner().invoke(cli.app, ["probe"])
    assert result.exit_code == 130
    assert "leak        right        seqtile, layer=True: 0 of 40\n" in result.output and "interrupted" in result.output


def test_sigterm_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the processes of the probes are ended, too."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "rows_of_probes", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    try:
        result = CliRunner().invoke(cli.app, ["probe"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 130 and "interrupted" in result.output


def test_by_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that a guide announces is no defect; any other wrong result still is."""
    monkeypatch.setattr(ranks, "cut_by_hand", shifted_after_the_cut)
    assert Case("label", "it", "torch", ranks.cut_before_the_shift).run().verdict == "by contract"
    monkeypatch.setattr(ranks, "cut_by_hand", lambda batch: truth(batch, "eager")[0])
    assert Case("label", "it", "torch", ranks.cut_before_the_shift).run().verdict == "right"
    monkeypatch.setattr(ranks, "cut_by_hand", lambda batch: truth(batch, "eager")[0] / 2)
    assert Case("label", "it", "torch", ranks.cut_before_the_shift).run().verdict == "wrong"
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test's, in this process
    assert Case("accumulation", "it", "accelerate", alone.accelerate_accumulates).run().verdict == "by contract"
    backward = accelerate.Accelerator.backward
    monkeypatch.setattr(accelerate.Accelerator, "backward", lambda self, loss: backward(self, 2 * loss))
    assert Case("accumulation", "it", "accelerate", alone.accelerate_accumulates).run().verdict == "wrong"


def rows_of_page() -> dict[tuple[str, str], tuple[str, str]]:
    """Verdict and remark by probe and system."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [[*row, "", ""] for row in rows if row[0] in PROBES and ": " in row[1]]
    return {(row[0], row[1]): (row[2].strip("*"), row[4]) for row in rows}


def test_the_page_has_every_row() -> None:
    every, page = [case for tree in probe.TREES for case in cases_of(tree)], rows_of_page()
    notes = {key: note for key, (verdict, note) in page.items() if verdict not in ("refused", "failed")}
    expected = {(case.probe, f"{case.package}: {case.system}"): case.note for case in every}
    assert page.keys() == expected.keys() and notes.items() <= expected.items()
    assert all(verdict == "right" for (_, system), (verdict, _) in page.items() if system.startswith("seqtile:"))
    assert len({(case.probe, case.package, case.system) for case in every}) == len(every)


@cache
def produced() -> list[Row]:
    return probe.probe(time_limit=900)


@pytest.mark.dist
@pytest.mark.full("a minute of every installed peer")
def test_the_page_has_what_the_command_says() -> None:
    if probe.versions() not in PAGE.read_text():
        pytest.skip(f"the page is of other versions than {probe.versions()}")
    found = {(row.probe, f"{row.package}: {row.system}"): (row.verdict, row.note) for row in produced()}
    assert found == rows_of_page()


@pytest.mark.dist
@pytest.mark.full("a minute of every installed peer")
@pytest.mark.parametrize("package", PEERS)
def test_a_peer_runs_where_it_is_installed(package: str) -> None:
    rows = [row for row in produced() if row.package == package]
    assert rows and all(row.verdict != "failed" for row in rows), rows
    assert installed(package) or {row.verdict for row in rows} == {"not installed"}
