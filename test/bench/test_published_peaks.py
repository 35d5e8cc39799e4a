"""Plans against peaks that others have published: each is within a fifth, or the cause is given; the worst is the
margin."""

import inspect
import math
import re

import pytest
from benchmark.pages import ROOT
from benchmark.published_peaks import RUNS, Run, worst_misses
from benchmark.readme import FREE, GPU_GIB, ROOM
from typer.testing import CliRunner

from seqtile.cli import app
from seqtile.fitting import fit
from seqtile.recipes.plan import PlanOptions


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.options)
def test_a_plan_is_within_a_fifth_or_has_its_cause(run: Run) -> None:
    if run.fitted:
        assert run.cause and run.plan["fits"] and run.planned <= run.measured
        return
    assert bool(run.cause) == (abs(run.ratio - 1) > FREE), run.ratio
    assert abs(run.explained / run.measured - 1) <= FREE, "the cause does not explain it"


def test_the_margin_is_the_worst_miss() -> None:
    low, _ = worst_misses()
    assert low == math.ceil(100 * FREE) and ROOM == GPU_GIB * (1 - FREE) == 64
    for page in ("predictions", "planning", "your-case"):
        words = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
        assert f"up to {low} % too low" in words, page
    assert PlanOptions.margin == FREE == inspect.signature(fit).parameters["margin"].default
    assert PlanOptions.gpu_memory_gib == GPU_GIB and PlanOptions("").setup()["gpu_memory_gib"] == ROOM


@pytest.mark.full("5 s; test_pages compares the whole block with what make table writes")
def test_the_commands_give_the_tables_figures() -> None:
    """The page's commands, in the order of its rows, give the table's figures."""
    page = (ROOT / "docs" / "predictions.md").read_text()
    block = page.split("<!-- measured peaks -->")[1].split("<!-- end of measured peaks -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")][2:]
    commands = re.findall(r"^seqtile (plan .*)$", block, re.M)
    assert len(rows) == len(commands) == len(RUNS)
    for (name, gpus, tokens, _, planned, *_), command in zip(rows, commands, strict=True):
        told = " ".join(CliRunner().invoke(app, command.split(), env={"COLUMNS": "120"}).output.split())
        assert f"1 x {tokens} tokens" in told and f"{name}:" in told and (gpus == "1" or f"{gpus} GPUs" in told)
        assert float(re.search(r"│ all │ ([\d.]+)", told)[1]) == pytest.approx(float(planned), abs=0.06)
