"""What a fine-tuning job leaves behind: a table, report.json and a picture, all of the same figures."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from seqtile.recipes.job import Job
from seqtile.recipes.save import written_beside
from seqtile.recipes.train import RunResult

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

SHOWN = 10  # steps: of more, the table shows this many, evenly spaced, and the picture no markers


def figures(job: Job, baseline: RunResult | None, tiled: RunResult, ranks: int = 1) -> dict[str, Any]:
    """The contents of report.json, of the steps that were done. `baseline` and `max_loss_difference` are None without a
    comparison."""
    difference = None
    if baseline is not None:
        difference = max(abs(a - b) for a, b in zip(baseline.losses, tiled.losses, strict=True))
    return {
        "model": job.model,
        "seq_len": job.seq_len,
        "steps": len(tiled.losses),
        "device": job.device,
        "ranks": ranks,
        "sequence_parallel": job.sequence_parallel,
        "shard": job.shard if ranks > 1 else None,
        "dtype": job.dtype,
        "learning_rate": job.learning_rate,
        "seed": job.seed,
        "baseline": None if baseline is None else asdict(baseline),
        "seqtile": asdict(tiled),
        "max_loss_difference": difference,
    }


def print_table(report: dict[str, Any], console: Console) -> None:
    """The figures of report.json as a table; of many losses some, the first and the last among them."""
    tiled, baseline = report["seqtile"], report["baseline"]
    runs = [tiled] if baseline is None else [baseline, tiled]
    table = Table(title=title_of(report))
    table.add_column("")
    for name in ("seqtile",) if baseline is None else ("untiled", "seqtile"):
        table.add_column(name, justify="right")
    for step in sorted({round(row * (report["steps"] - 1) / (SHOWN - 1)) for row in range(SHOWN)}):
        table.add_row(f"loss, step {step + 1}", *(f"{run['losses'][step]:.6f}" for run in runs))
    if baseline is not None:
        table.add_row("step 1's document again", "", f"{tiled['again']:.6f}")
    table.add_section()
    table.add_row("peak memory, MiB", *(f"{run['peak_mib']:,.0f}" for run in runs))
    table.add_row("time, s", *(f"{sum(run['step_seconds']):.1f}" for run in runs))
    table.add_row("tokens/s", *(f"{run['tokens_per_second']:,.0f}" for run in runs))
    console.print(table)
    if baseline is not None:
        console.print(
            f"largest loss difference {report['max_loss_difference']:.1e}; "
            f"peak memory {tiled['peak_mib'] / baseline['peak_mib']:.0%} of the untiled model's"
        )


def title_of(report: dict[str, Any]) -> str:
    title = f"{report['model']}, {report['seq_len']:,} tokens, {report['dtype']} on {report['device']}"
    if report.get("ranks", 1) > 1:
        title += f", {report['ranks']} ranks, {report['sequence_parallel']} to a sequence, the largest peak of a rank"
    return title


def write_report(report: dict[str, Any], directory: Path) -> None:
    """report.json and report.png in `directory`."""
    with written_beside(directory / "report.json") as new:
        new.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    figure = picture(report)
    with written_beside(directory / "report.png") as new:
        figure.savefig(new, dpi=150, format="png")
    plt.close(figure)


def picture(report: dict[str, Any]) -> Figure:
    """Two panels: the losses by step, and the peak memory as bars."""
    runs = {"untiled": report["baseline"], "seqtile": report["seqtile"]}
    runs = {name: run for name, run in runs.items() if run is not None}
    figure, (losses, memory) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, run in runs.items():
        style = {"color": "black", "linestyle": "--"} if name == "seqtile" else {"color": "darkgrey", "linewidth": 3}
        marker = {"untiled": "o", "seqtile": "x"}[name] if report["steps"] <= SHOWN else None
        losses.plot(range(1, report["steps"] + 1), run["losses"], label=name, marker=marker, markersize=7, **style)
    losses.set(title="loss", xlabel="step")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    losses.legend()
    bars = memory.bar(list(runs), [run["peak_mib"] for run in runs.values()], color="lightgrey", edgecolor="black")
    for bar, hatch in zip(bars, ("", "//") if len(runs) == 2 else ("//",), strict=True):
        bar.set_hatch(hatch)
    memory.bar_label(bars, fmt="{:,.0f}")
    memory.margins(y=0.12)
    memory.set(title="peak memory, MiB")
    figure.suptitle(title_of(report))
    return figure
