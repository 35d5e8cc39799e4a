"""The files that a fine-tuning job leaves behind: the model, and report.json and a picture of what was measured, which
is printed as a table too. Nothing half-written stays, what was there is kept until it is replaced, and nothing trained
is lost."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

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


def remove_incomplete(path: Path) -> None:
    """Removes what a process left that was killed in `written_beside`."""
    path, new, old = places(path)
    if path.exists() or not old.exists():  # else it was killed between two renames, and `new` is complete
        remove(new)


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


@dataclass
class RunResult:
    """The measurements of a training run, of the steps done so far; lists have one entry a step."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    peak_mib: float = 0.0
    status: str = ""
    saved: str | None = None
    """The directory of the saved model."""
    note: str | None = None
    """A remark, None if there is none."""


RECENT = 10  # steps, by which the time that is left is told


def step_figures(done: RunResult, tokens: int, steps: int) -> str:
    """Returns the loss of the last step of `tokens`, and how long the others will take."""
    seconds, left = done.step_seconds, steps - len(done.losses)
    said = f"loss {done.losses[-1]:.4f}  {tokens / seconds[-1]:,.0f} tokens/s  peak {done.peak_mib:,.0f} MiB"
    return f"{said}  {in_words(left * median(seconds[-RECENT:]))} left" if left else said


def in_words(seconds: float) -> str:
    """Returns a length of time in its two largest units at most."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def report_of(asked: "Asked", baseline: RunResult | None, tiled: RunResult, ranks: int = 1) -> dict[str, Any]:
    """Returns the contents of report.json, of the steps that were done. `baseline` and `max_loss_difference` are None
    without a comparison."""
    done = len(tiled.losses)
    if baseline is not None:
        few = {"losses": baseline.losses[:done], "step_seconds": baseline.step_seconds[:done]}
        baseline = replace(baseline, **few)
    pairs = [] if baseline is None else zip(baseline.losses, tiled.losses, strict=True)
    training = asked.training
    return {
        "model": asked.model.model_name_or_path,
        "seq_len": training.max_length,
        "device": "cpu" if training.use_cpu else "cuda",
        "sequence_parallel": asked.own.sequence_parallel,
        "dtype": "bfloat16" if training.bf16 else asked.model.dtype,
        "learning_rate": training.learning_rate,
        "seed": training.seed,
        "steps": done,
        "ranks": ranks,
        "baseline": None if baseline is None else asdict(baseline),
        "seqtile": asdict(tiled),
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
    """Returns the runs of a report by the name that they are shown under."""
    runs = {"untiled": report["baseline"], "seqtile": report["seqtile"]}
    return {name: run for name, run in runs.items() if run is not None}


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
    for step in sorted({round(row * (report["steps"] - 1) / (SHOWN - 1)) for row in range(SHOWN)}):
        table.add_row(f"loss, step {step + 1}", *(f"{run['losses'][step]:.6f}" for run in runs.values()))
    table.add_section()
    table.add_row("peak memory, MiB", *(f"{run['peak_mib']:,.0f}" for run in runs.values()))
    table.add_row("time, s", *(f"{sum(run['step_seconds']):.1f}" for run in runs.values()))
    table.add_row("tokens/s", *(f"{run['tokens_per_second']:,.0f}" for run in runs.values()))
    console.print(table, soft_wrap=False)
    if "untiled" in runs:
        console.print(
            f"largest loss difference {report['max_loss_difference']:.1e}; "
            f"peak memory {runs['seqtile']['peak_mib'] / runs['untiled']['peak_mib']:.0%} of the untiled model's"
        )


def picture(report: dict[str, Any]) -> "Figure":
    """Returns two panels: the losses by step, and the peak memory as bars. Of many steps the losses are drawn thin, and
    over them their means over the steps before."""
    from matplotlib.figure import Figure  # not in the process that trains, whose memory is measured
    from matplotlib.ticker import MaxNLocator

    runs, steps = runs_of(report), report["steps"]
    styles = {"untiled": {"marker": "o", "color": "tab:gray", "linewidth": 3}}
    styles["seqtile"] = {"marker": "x", "color": "tab:blue", "linestyle": "--" if len(runs) > 1 else "-"}
    window = steps // 40 if steps >= SMOOTHED else 1
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, run in runs.items():
        style = styles[name] | ({} if steps <= SHOWN else {"marker": None})
        if window > 1:
            losses.plot(range(1, steps + 1), run["losses"], color=style["color"], linewidth=0.5, alpha=0.4)
            name = f"{name}, mean of {window} steps"
        losses.plot(range(1, steps + 1), running_means(run["losses"], window), label=name, markersize=7, **style)
    losses.set(title="loss", xlabel="step", ylabel="mean loss of a token")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    losses.grid(alpha=0.3)
    losses.legend()
    peaks, colors = [run["peak_mib"] for run in runs.values()], [styles[name]["color"] for name in runs]
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
