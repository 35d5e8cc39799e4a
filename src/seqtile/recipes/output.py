"""The files that a fine-tuning job leaves behind: the model, and report.json and a picture of what was measured, which
is printed as a table too. Nothing half-written stays, what was there is kept until it is replaced, and nothing trained
is lost."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from transformers.utils import logging

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqtile.recipes.options import FinetuneOptions
    from seqtile.recipes.tuner import Tuner

logger = logging.get_logger(__name__)
SHOWN = 10  # steps: of more, the table shows this many, evenly spaced, and the picture no markers


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yields where to write a file or a directory, which then takes the place of `path`, or of what it links to, unless
    an exception is raised. Other files than weights and JSON of a directory that is replaced stay, where the new one
    lacks them.
    """
    path = Path(os.path.realpath(path))  # which, unlike Path.resolve, takes links that lead in a circle
    new, old = (path.with_name(f"{path.name}.{what}") for what in ("incomplete", "replaced"))
    remove(new)
    try:
        yield new
        if path.is_dir():  # it is not replaced in one step
            remove(old)
            path.rename(old)
        new.replace(path)
        for entry in old.iterdir() if old.is_dir() else ():
            if not {".safetensors", ".json", ".bin"} & set(entry.suffixes) and not (path / entry.name).exists():
                shutil.move(entry, path)
        remove(old)
    finally:
        remove(new)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def report_of(asked: "FinetuneOptions", trainer: "Tuner", untiled: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the contents of report.json, with a value of each list for each loss that was logged."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    measured = ("step", "loss", "step_seconds", "tokens_per_second", "peak_mib")
    run: dict[str, Any] = {"status": trainer.monitor.status}
    run |= {name: [entry[name] for entry in logged] for name in measured}
    return {
        "options": trainer.fixed,
        "device": asked.training.device.type,
        "runs": {"seqtile": run} if untiled is None else {"untiled": untiled, "seqtile": run},
    }


def write_figures(path: Path, figures: dict[str, Any], draw: Callable[[], "Figure"]) -> bool:
    """Writes `path`.json, and the figure that `draw` returns as `path`.png. Without matplotlib it warns instead of
    drawing, and returns False."""
    with written_beside(path.with_suffix(".json")) as new:
        new.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib") is None:
        logger.warning(f"{path.name}.png is left out: it needs matplotlib (pip install matplotlib)")
        return False
    with written_beside(path.with_suffix(".png")) as new:
        draw().savefig(new, dpi=150, format="png")
    return True


def title_of(report: dict[str, Any]) -> str:
    options = report["options"]
    dtype = "bfloat16" if options["bf16"] else options["dtype"]
    title = f"{options['model_name_or_path']}, {options['max_length']:,} tokens, {dtype} on {report['device']}"
    if options["world_size"] > 1:
        title += f", {options['world_size']} ranks, {options['sequence_parallel']} to a sequence"
    return title


def speed(run: dict[str, Any]) -> float:
    """Returns the mean tokens of a step over the median of its seconds."""
    seconds, rates = run["step_seconds"], run["tokens_per_second"]
    return fmean(each * rate for each, rate in zip(seconds, rates, strict=True)) / median(seconds)


def print_table(report: dict[str, Any], console: Console) -> None:
    """Prints the figures of report.json as a table; of many losses some, the first and the last among them."""
    runs = report["runs"]
    steps = runs["seqtile"]["step"]
    table = Table("", *(Column(name, justify="right") for name in runs))
    rows = [(f"loss, step {step}", lambda run, i=i: f"{run['loss'][i]:.6f}") for i, step in enumerate(steps)]
    rows = [rows[i] for i in sorted({round(row * (len(rows) - 1) / (SHOWN - 1)) for row in range(SHOWN)})]
    rows.append(("peak memory, MiB", lambda run: f"{max(run['peak_mib']):,.0f}"))
    rows.append(("time of a step, s", lambda run: f"{median(run['step_seconds']):.2f}"))
    rows.append(("tokens/s", lambda run: f"{speed(run):,.0f}"))
    for title, shown in rows:
        table.add_row(title, *(shown(run) for run in runs.values()))
    console.print(title_of(report))
    console.print(table, soft_wrap=False)
    if "untiled" in runs:
        ours, untiled = runs["seqtile"], runs["untiled"]
        difference = max(abs(a - b) for a, b in zip(ours["loss"], untiled["loss"], strict=False))
        share = max(ours["peak_mib"]) / max(untiled["peak_mib"])
        console.print(f"largest loss difference {difference:.1e}; peak memory {share:.0%} of the untiled model's")


def picture(report: dict[str, Any]) -> "Figure":
    """Returns two panels: the losses by step, and the peak memory as bars. Many losses are drawn thin, and over them
    their means over the steps before."""
    from matplotlib.figure import Figure  # not in the process that trains, whose memory is measured

    runs, colors = report["runs"], {"untiled": "tab:gray", "seqtile": "tab:blue"}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, run in runs.items():
        style = {"color": colors[name], "linewidth": 3 if name == "untiled" else 1.5}
        style["marker"] = "o" if len(run["step"]) <= SHOWN else None
        if (window := len(run["step"]) // 40) > 4:
            losses.plot(run["step"], run["loss"], **style | {"linewidth": 0.5, "alpha": 0.4})
            name = f"{name}, mean of {window} steps"
        losses.plot(run["step"], running_means(run["loss"], max(window, 1)), label=name, **style)
    losses.set(title="loss", xlabel="step", ylabel="mean loss of a token")
    losses.locator_params(axis="x", integer=True)
    losses.grid(alpha=0.3)
    losses.legend()
    peaks = [max(run["peak_mib"]) for run in runs.values()]
    bars = memory.bar(list(runs), peaks, width=0.5, color=[colors[name] for name in runs])
    memory.bar_label(bars, fmt="{:,.0f}")
    memory.margins(y=0.12)
    memory.set(title="peak memory", ylabel="MiB", xlim=(-1, len(runs)))
    figure.suptitle(title_of(report).replace("$", r"\$"), fontsize="medium", wrap=True)
    return figure


def running_means(values: list[float], window: int) -> list[float]:
    """Returns the mean of each value and those before it, `window` in all; of fewer at the beginning."""
    return [fmean(values[max(0, i - window) : i]) for i in range(1, len(values) + 1)]
