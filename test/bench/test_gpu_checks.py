"""The checks of kernels find one that computes a wrong row, omits a row, or raises. The few steps and the long
attention find a wrong gradient. Kernel times cover every part, next to predicted times."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark import attention, few_steps, kernel_checks, kernel_times, long_attention
from benchmark.checks import run_check, run_checks
from benchmark.one_tile import Tile, tile_at_hand
from benchmark.rates import Rates
from benchmark.shapes import SHAPES
from transformers import PreTrainedModel

from attention.cpu_kernel import kernel_on_cpu
from seqtile import status


@pytest.fixture(scope="module")
def tile() -> Tile:
    return replace(tile_at_hand(), longer=256)


@pytest.mark.parametrize("name", kernel_checks.CHECKS)
def test_all_is_right(name: str, tile: Tile) -> None:
    """Without a GPU, torch's kernel for documents is left out, unless it has a stand-in."""
    rows: list[dict[str, Any]] = []
    with kernel_on_cpu():
        assert run_check(name, partial(kernel_checks.CHECKS[name], tile), rows.append)
    assert rows and all(row["right"] for row in rows if "error" in row)
    assert sum(row["what"].startswith("documents") and "error" in row for row in rows) == 9 * (name == "documents")
    chosen = {row["case"]: row["chooses"] for row in rows if row["what"] == "sdpa"}
    assert len(chosen) == 4 * (name == "attention_chosen") and all(found.isupper() for found in chosen.values())


def left_out(x: torch.Tensor, *others: object) -> torch.Tensor:
    """Writes every row except one that the check does not look at."""
    y = kernel_checks.gated_activation_.unchanged(x, *others)
    y[1] = torch.nan
    return y


WRONG = [
    ("rotary", "rotary_", lambda x, cos, sin, backward=False: x.mul_(1.001), ["rotary", "rotary, there and back"]),
    ("gated_activation", "gated_activation_", left_out, ["gated activation: not finite"]),
    ("norm", "rms_norm", lambda *operands: 1 / 0, ["norm"]),
]


@pytest.mark.parametrize(("name", "kernel", "change", "wrong"), WRONG, ids=[wrong[0] for wrong in WRONG])
def test_what_is_wrong(
    name: str, kernel: str, change: Callable, wrong: list[str], tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    change.unchanged = getattr(kernel_checks, kernel)
    monkeypatch.setattr(kernel_checks, kernel, change)
    rows: list[dict[str, Any]] = []
    assert not run_check(name, partial(kernel_checks.CHECKS[name], tile), rows.append)
    assert [row["what"] for row in rows if not row["right"]] == wrong


def long_rows(sequence: long_attention.Sequence) -> dict[str, bool]:
    """Returns what was compared, by the end of its name, and whether it is right."""
    rows: list[dict[str, Any]] = []
    run_check("long", partial(long_attention.attention, "long", sequence, False), rows.append)
    begins, figures, *compared = rows
    assert begins["sdpa"] == figures["sdpa"] and figures["seconds"] > 0
    return {row["what"].rpartition("_ATTENTION: ")[2] or row["what"]: row["right"] for row in compared}


def test_long_attention_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one head, one key of one kv head, a gradient where there is none upstream, an infinite value."""
    sequence = long_attention.Sequence(300, 4, 2, 8)
    right = long_rows(sequence)
    assert len(right) == 6 and all(right.values())
    computed = attention.forward_and_backward

    def spoilt(long: attention.Long) -> torch.Tensor:
        out = computed(long)
        out[0, -1, 3] *= 1.5
        long.q.grad[0, 7, 1, 2] = 0.01
        long.k.grad[0, 250, 1] += 1
        long.v.grad[0, 3, 0, 0] = torch.inf
        return out

    monkeypatch.setattr(long_attention, "forward_and_backward", spoilt)
    found = long_rows(sequence)
    names = ("not finite (of v)", "gradient of q where there is none upstream", "output")
    assert {name for name, good in found.items() if not good} == {*names, "gradient of k", "gradient of v"}


def test_long_attention_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_attention, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * 10**9, 80 * 10**9))
    row, *more = long_attention.attention("all-heads", long_attention.CASES["all-heads"], False)
    assert not more and row["skipped"] == "it needs about 55 GB, and 50 are free"


def test_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is right beside the untiled model; a gradient that is off by a hundredth is not."""
    shape, rows = replace(SHAPES["tiny"], layers=few_steps.LAYERS), []
    monkeypatch.setattr(few_steps, "CHUNK", 64)
    assert run_check("steps", partial(few_steps.steps, shape, 150), rows.append)
    found = {row["what"]: row for row in rows}
    assert "equal the untiled model's" in found["first step"]["found"] and found["plan"]["planned_bytes"] > 0
    assert len(found["seqtile"]["losses"]) == 3 and found["seqtile"]["losses"][2] < found["seqtile"]["losses"][0]
    assert any("attention in 2 head chunks" in line for line in found["status"]["says"])
    ours = few_steps.Trained([1.0], {"weight": torch.full([4], 1.01)}, 0, 0.0)
    others = [ours._replace(gradients={"weight": torch.full([4], value)}) for value in (1.0, 1.001)]
    worst = few_steps.worst_gradient(ours, *others)
    assert worst.error == pytest.approx(0.01) and worst.allowed == pytest.approx(0.002, rel=0.01)


def test_few_steps_say_which_part_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the untiled model did is noted before; then the model runs with all heads at once."""
    shape, rows, trained = replace(SHAPES["tiny"], layers=few_steps.LAYERS), [], few_steps.train

    def with_groups_failing(model: PreTrainedModel, *given: object) -> few_steps.Trained:
        if any("head chunks" in line for line in str(status(model)).splitlines()):
            raise RuntimeError("no groups here")
        return trained(model, *given)

    monkeypatch.setattr(few_steps, "CHUNK", 64)
    monkeypatch.setattr(few_steps, "train", with_groups_failing)
    assert not run_check("steps", partial(few_steps.steps, shape, 150), rows.append)
    assert [row["what"] for row in rows] == ["untiled", "seqtile", "seqtile, all heads at once", "steps"]
    assert rows[-1]["why"] == "RuntimeError: no groups here"


def test_findings_that_are_no_numbers(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_checks(
            "made up", {"one": lambda: iter([{"what": "x", "losses": [1.0, math.nan]}])}, tmp_path / "found.jsonl"
        )
    assert json.loads((tmp_path / "found.jsonl").read_text())["losses"] == [1.0, "nan"]


def test_times(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has a measured time, taken in turns, and a predicted time from its products and bytes."""
    turns: list[str] = []
    parts = {name: kernel_times.Part(lambda name=name: turns.append(name)) for name in "abc"}
    found = kernel_times.measure(parts)
    assert found.keys() == parts.keys() and turns[:9] == list("abcbcacab")
    assert len(turns) == 3 * (kernel_times.WARM + kernel_times.TURNS)
    monkeypatch.setattr(kernel_times, "WARM", 0)
    monkeypatch.setattr(kernel_times, "TURNS", 2)
    for make in (kernel_times.parts_of_loss, kernel_times.parts_of_mlp, kernel_times.parts_of_layer):
        for name, each in kernel_times.measure(parts := make(tile)).items():
            assert each["ms"] > 0 and each["iqr_ms"] >= 0 and (parts[name].flops > 0 or parts[name].bytes > 0)
    assert kernel_times.predicted(kernel_times.Part(None, flops=3e9, bytes=4e9), Rates(3e12, 4e12)) == pytest.approx(2)


def test_a_part_that_raises_is_left_out(capsys: pytest.CaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel")

    parts = {"good": kernel_times.Part(lambda: None), "bad": kernel_times.Part(fails)}
    assert list(kernel_times.runnable(parts)) == ["good"]
    assert "RuntimeError: no such kernel" in capsys.readouterr().out
