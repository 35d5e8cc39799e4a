"""Runs an example at tiny size: sequences of LENGTH tokens, chunks of CHUNK."""

import inspect
import re
import sys
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import seqtile
import seqtile.integrations.trl
import seqtile.rules
from seqtile.integrations.trainer import SeqtileCallback

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTH, SEQUENCES, CHUNK = 120, 6, 50
STEP = re.compile(r"step \d+: loss (\d+\.\d+), gradient norm (\d+\.\d+)")


def run(name: str, *arguments: str, tiled: bool = True, **numbers: float | str) -> dict[str, Any]:
    """Runs an example and returns its global names, with its output as `printed` and its model's status as `status`.
    `numbers` replace constants of the script and arguments in it; `tiled=False` leaves its model untiled."""
    source = (EXAMPLES / f"{name}.py").read_text().replace("inspect.getsource(", "document(")
    for number, value in numbers.items():
        source, count = re.subn(rf"^( *{number} ?= ?)[\w.-]+", rf"\g<1>{value}", source, flags=re.M)
        assert count == 1, f"{name} has no {number}"
    text = inspect.getsource(inspect)[: 2 * LENGTH] * (SEQUENCES // 2)  # two different sequences, again and again
    names, printed, status = {"__name__": "__main__", "document": lambda _: text}, StringIO(), None
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(printed))
        stack.enter_context(patch.object(sys, "argv", [f"{name}.py", *arguments]))
        stack.enter_context(patch.object(seqtile.rules, "MIN_CHUNK_TOKENS", CHUNK))
        stack.enter_context(patch.object(seqtile.rules, "MLP_CHUNK_BYTES", 0))
        if not tiled:
            stack.enter_context(patch.object(seqtile, "apply_seqtile", lambda *_, **__: None, create=True))
            stack.enter_context(patch.object(SeqtileCallback, "on_train_begin", lambda *_, **__: None))
            stack.enter_context(patch.object(seqtile.integrations.trl, "apply_seqtile_to_trl", lambda: None))
        exec(compile(source, EXAMPLES / f"{name}.py", "exec"), names)
        if "model" in names:
            status = seqtile.status(names["model"])
    return names | {"printed": printed.getvalue(), "status": status}


def figures(names: dict[str, Any]) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step."""
    if "trainer" in names:
        return [(float(e["loss"]), float(e["grad_norm"])) for e in names["trainer"].state.log_history if "loss" in e]
    return [(float(loss), float(norm)) for loss, norm in STEP.findall(names["printed"])]


def on_rank(name: str, directory: str, how: str, *data: str, **numbers: float) -> dict[str, Any]:
    """Runs an example on one rank; `how` is tiled or untiled. Returns its figures, its number of tiled MLPs, and the
    number of ranks that share a sequence."""
    names = run(name, directory, *data, tiled=how == "tiled", LENGTH=LENGTH, **numbers)
    return {"figures": figures(names), "mlps": names["status"].mlp.tiled, "ranks": names["ctx"].size}


def trained_by_grpo(directory: str) -> tuple[float, list[float]]:
    """Returns a number that depends on the weights, and the rewards of each step."""
    trainer = run("grpo_sp", directory, LENGTH=LENGTH)["trainer"]
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    history = trainer.state.log_history
    assert any(entry.get("reward_std", 0) > 0 for entry in history)
    return float(weights.double().square().sum()), [entry["reward"] for entry in history if "reward" in entry]
