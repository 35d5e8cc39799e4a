"""The canary finds a kernel that computes a wrong row, omits a row, or raises. Its kernel times cover every part, next
to predicted times."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark import canary, kernel_times
from benchmark.one_tile import Tile, tile_at_hand
from benchmark.rates import Rates


@pytest.fixture(scope="module")
def tile() -> Tile:
    return replace(tile_at_hand(), longer=256)


@pytest.mark.parametrize("name", canary.CHECKS)
def test_all_is_right(name: str, tile: Tile) -> None:
    rows: list[dict[str, Any]] = []
    assert canary.checked(name, tile, rows.append)
    assert rows and all(row["right"] for row in rows)


def left_out(x: torch.Tensor, *others: object) -> torch.Tensor:
    """Writes every row except one that the canary does not inspect."""
    y = canary.gated_activation_.unchanged(x, *others)
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
    change.unchanged = getattr(canary, kernel)
    monkeypatch.setattr(canary, kernel, change)
    rows: list[dict[str, Any]] = []
    assert not canary.checked(name, tile, rows.append)
    assert [row["what"] for row in rows if not row["right"]] == wrong


def test_times(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has a measured time, taken in turns, and a predicted time from its products and bytes."""
    turns: list[str] = []
    parts = {name: kernel_times.Part(lambda name=name: turns.append(name)) for name in "abc"}
    found = kernel_times.measured(parts)
    assert found.keys() == parts.keys() and turns[:9] == list("abcbcacab")
    assert len(turns) == 3 * (kernel_times.WARM + kernel_times.TURNS)
    monkeypatch.setattr(kernel_times, "WARM", 0)
    monkeypatch.setattr(kernel_times, "TURNS", 2)
    for make in (kernel_times.parts_of_loss, kernel_times.parts_of_mlp, kernel_times.parts_of_layer):
        for name, each in kernel_times.measured(parts := make(tile)).items():
            assert each["ms"] > 0 and each["iqr_ms"] >= 0 and (parts[name].flops > 0 or parts[name].bytes > 0)
    assert kernel_times.predicted(kernel_times.Part(None, flops=3e9, bytes=4e9), Rates(3e12, 4e12)) == pytest.approx(2)


def test_a_part_that_raises_is_left_out(capsys: pytest.CaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel")

    parts = {"good": kernel_times.Part(lambda: None), "bad": kernel_times.Part(fails)}
    assert list(kernel_times.runnable(parts)) == ["good"]
    assert "RuntimeError: no such kernel" in capsys.readouterr().out
