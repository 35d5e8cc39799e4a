"""The files that a fine-tuning job leaves behind: the model, and report.json and a picture of what was measured, which
is printed as a table too. Nothing half-written stays, what was there is kept until it is replaced, and nothing trained
is lost."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from transformers.utils import logging
from trl import SFTTrainer

import seqtile
from seqtile.recipes import places

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from seqtile.recipes.options import Asked

logger = logging.get_logger(__name__)
SHOWN = 10  # steps: of more, the table shows this many, evenly spaced, and the picture no markers
SMOOTHED = 200  # steps: of so many and more, the picture shows means of a fortieth of them


@contextmanager
def written_beside(path: Path, keep: bool = True) -> Iterator[Path]:
    """Yields where to write a file or a directory, which then takes the place of `path`, unless an exception is raised.

    With `keep`, files of a directory that is replaced stay, where the new one lacks them, but for weights.
    """
    path, new, old = places(path)
    remove(new)
    try:
        yield new
        if path.is_dir():  # it is not replaced in one step
            remove(old)
            path.rename(old)
        new.replace(path)
        for entry in list(old.iterdir()) if keep and old.is_dir() else ():
            if ".safetensors" not in entry.name and not (path / entry.name).exists():
                entry.rename(path / entry.name)
        remove(old)
    finally:
        remove(new)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def report_of(asked: "Asked", trainer: SFTTrainer, name: str, baseline: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the contents of report.json: the run, under `name`, and the untiled run, if there was one, by the losses
    that were logged. `max_loss_difference` is None without a comparison."""
    training, logged = asked.training, [entry for entry in trainer.state.log_history if "loss" in entry]
    run: dict[str, Any] = {}
    for key in ("step", "loss", "step_seconds", "tokens_per_second", "peak_mib"):
        run[key] = [entry[key] for entry in logged]
    model = trainer.accelerator.unwrap_model(trainer.model)
    run["status"] = name if asked.own.untiled else str(seqtile.status(model))
    pairs = [] if baseline is None else zip(baseline["loss"], run["loss"], strict=False)
    return {
        "model": asked.model.model_name_or_path,
        "seq_len": training.max_length,
        "device": "cpu" if training.use_cpu else "cuda",
        "sequence_parallel": asked.own.sequence_parallel,
        "dtype": "bfloat16" if training.bf16 else asked.model.dtype,
        "learning_rate": training.learning_rate,
        "seed": training.seed,
        "ranks": training.world_size,
        **({} if baseline is None else {"untiled": baseline}),
        name: run,
        "max_loss_difference": max((abs(before - after) for before, after in pairs), default=None),
    }


def write_figures(path: Path, figures: dict[str, Any], draw: Callable[[], "Figure"]) -> None:
    """Writes `path`.json, and the figure that `draw` returns as `path`.png; warns instead if matplotlib is not
    installed."""
    with written_beside(path.with_suffix(".json")) as new:
        new.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib") is None:
        logger.warning(f"{path.name}.png is left out: it needs matplotlib (pip install matplotlib)")
        return
    from matplotlib import rc_context  # not in the process that trains, whose memory is measured

    with written_beside(path.with_suffix(".png")) as new, rc_context({"text.parse_math": False}):  # $ may be in a name
        draw().savefig(new, dpi=150, format="png")


def write_report(report: dict[str, Any], directory: Path) -> None:
    """Writes report.json to `directory`, and report.png if matplotlib is installed. Raises OSError, which says that the
    model is there."""
    try:
        write_figures(directory / "report", report, partial(picture, report))
    except OSError as error:
        raise OSError(f"the model is in {directory}, but its report could not be written there ({error})") from error


def runs_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the runs of a report by their names."""
    return {name: report[name] for name in ("untiled", "seqtile") if name in report}


def title_of(report: dict[str, Any]) -> str:
    title = f"{report['model']}, {report['seq_len']:,} tokens, {report['dtype']} on {report['device']}"
    if report.get("ranks", 1) > 1:
        title += f", {report['ranks']} ranks, {report['sequence_parallel']} to a sequence, the largest peak of a rank"
    return title


def print_table(report: dict[str, Any], console: Console) -> None:
    """Prints the figures of report.json as a table; of many losses some, the first and the last among them."""
    runs = runs_of(report)
    console.print(title_of(report))
    table = Table("")
    for name in runs:
        table.add_column(name, justify="right")
    steps = runs["seqtile"]["step"]
    for i in sorted({round(row * (len(steps) - 1) / (SHOWN - 1)) for row in range(SHOWN)}):
        table.add_row(f"loss, step {steps[i]}", *(f"{run['loss'][i]:.6f}" for run in runs.values()))
    table.add_section()
    table.add_row("peak memory, MiB", *(f"{max(run['peak_mib']):,.0f}" for run in runs.values()))
    table.add_row("a step, s", *(f"{median(run['step_seconds']):.2f}" for run in runs.values()))
    table.add_row("tokens/s", *(f"{median(run['tokens_per_second']):,.0f}" for run in runs.values()))
    console.print(table, soft_wrap=False)
    if "untiled" in runs:
        ours, untiled = (max(run["peak_mib"]) for run in (runs["seqtile"], runs["untiled"]))
        difference = f"largest loss difference {report['max_loss_difference']:.1e}"
        console.print(f"{difference}; peak memory {ours / untiled:.0%} of the untiled model's")


def picture(report: dict[str, Any]) -> "Figure":
    """Returns two panels: the losses by step, and the peak memory as bars. Of many steps the losses are drawn thin, and
    over them their means over the steps before."""
    from matplotlib.figure import Figure  # not in the process that trains, whose memory is measured
    from matplotlib.ticker import MaxNLocator

    runs = runs_of(report)
    steps = len(runs["seqtile"]["step"])
    styles = {"untiled": {"marker": "o", "color": "tab:gray", "linewidth": 3}}
    styles["seqtile"] = {"marker": "x", "color": "tab:blue", "linestyle": "--" if len(runs) > 1 else "-"}
    window = steps // 40 if steps >= SMOOTHED else 1
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, run in runs.items():
        style = styles[name] | ({} if steps <= SHOWN else {"marker": None})
        if window > 1:
            losses.plot(run["step"], run["loss"], color=style["color"], linewidth=0.5, alpha=0.4)
            name = f"{name}, mean of {window} steps"
        losses.plot(run["step"], running_means(run["loss"], window), label=name, markersize=7, **style)
    losses.set(title="loss", xlabel="step", ylabel="mean loss of a token")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    losses.grid(alpha=0.3)
    losses.legend()
    peaks, colors = [max(run["peak_mib"]) for run in runs.values()], [styles[name]["color"] for name in runs]
    bars = memory.bar(list(runs), peaks, width=0.5, color=colors)
    memory.bar_label(bars, fmt="{:,.0f}")
    memory.margins(y=0.12)
    memory.set(title="peak memory", ylabel="MiB", xlim=(-1, len(runs)))
    memory.yaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(title_of(report), fontsize="medium", wrap=True)
    return figure


def running_means(values: list[float], window: int) -> list[float]:
    """Returns the mean of each value and those before it, `window` in all; of fewer at the beginning."""
    sums = list(accumulate(values, initial=0.0))
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]
