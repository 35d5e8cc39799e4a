"""make table: benchmark results as a table, each contestant beside Hugging Face and the bare products, in one run."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def rows(path: Path) -> list[dict]:
    """One dict a measurement, with its ratios to Hugging Face and to the bare products of the same case."""
    entries = json.loads(path.read_text())["benchmarks"]
    measured = [
        {"subject": entry["name"].split("[")[0].removeprefix("test_"), "seconds": entry["stats"]["median"]}
        | entry["extra_info"]
        for entry in entries
    ]
    for row in measured:
        for name, contestant in (("hf", "huggingface"), ("floor", "products")):
            base = _same_case(measured, row, contestant)
            usable = "peak_mib" in row and base is not None and "peak_mib" in base
            row[f"time_x_{name}"] = row["seconds"] / base["seconds"] if usable else None
            row[f"memory_x_{name}"] = row["peak_mib"] / base["peak_mib"] if usable else None
    return measured


def _same_case(measured: list[dict], row: dict, contestant: str) -> dict | None:
    same = ("subject", "shape", "tokens")
    found = (r for r in measured if r["contestant"] == contestant and all(r[k] == row[k] for k in same))
    return next(found, None)


def print_table(path: Path) -> None:
    found = rows(path)
    spread = [row for row in found if row["subject"] == "sequence_parallel"]
    if others := [row for row in found if row not in spread]:
        print_losses_and_mlps(path.stem, others)
    if spread:
        print_sequence_parallel(path.stem, spread)


def print_losses_and_mlps(title: str, found: list[dict]) -> None:
    table = Table(title=title)
    for column in ("subject", "shape", "tokens", "contestant", "time, ms", "x HF", "x products", "peak, MiB", "x HF "):
        table.add_column(column, justify="left" if column in ("subject", "shape", "contestant") else "right")
    table.add_column("error", justify="right")
    for row in found:
        cells = [row["subject"], row["shape"], f"{row['tokens']:,}", row["contestant"]]
        if row.get("out_of_memory"):
            cells += ["out of memory", "", "", "", ""]
        else:
            time_x_hf, time_x_floor, memory_x_hf = (
                f"{row[key]:.2f}" if row[key] else "" for key in ("time_x_hf", "time_x_floor", "memory_x_hf")
            )
            cells += [f"{row['seconds'] * 1000:,.1f}", time_x_hf, time_x_floor, f"{row['peak_mib']:,.0f}", memory_x_hf]
        table.add_row(*cells, f"{row['error']:.1e}")
    Console(width=150).print(table)


def print_sequence_parallel(title: str, found: list[dict]) -> None:
    """The slowest rank's time, the largest peak, and how often the rank that sends most sends how many MiB."""
    ranks = max(row.get("group_size", 1) for row in found)
    table = Table(title=f"{title}: one sequence over {ranks} ranks, forward and backward")
    for column in ("case", "tokens", "contestant"):
        table.add_column(column, justify="right" if column == "tokens" else "left")
    for column in ("time, ms", "x HF", "peak, MiB", "x HF "):
        table.add_column(column, justify="right")
    table.add_column("sent by a rank, a layer: times, MiB")
    table.add_column("besides, a step")
    table.add_column("gradients", justify="right")
    table.add_column("error", justify="right")
    for row in found:
        cells = [row["shape"], f"{row['tokens']:,}", row["contestant"]]
        if "peak_mib" not in row:
            table.add_row(*cells, "", "", "", "", "out of memory" if row.get("out_of_memory") else row["refused"])
            continue
        times = [f"{row[key]:.2f}" if row[key] else "" for key in ("time_x_hf", "memory_x_hf")]
        cells += [f"{row['seconds'] * 1000:,.1f}", times[0], f"{row['peak_mib']:,.1f}", times[1]]
        cells += [_sent(row.get("wire", {}).get(part, {})) for part in ("layer", "step")]
        cells += [
            f"x {row['scale']:.2f}" if "scale" in row else "",
            f"{row['error']:.1e}{' wrong' * row.get('wrong', 0)}",
        ]
        table.add_row(*cells)
    Console(width=190).print(table)


def _sent(collectives: dict[str, list[int]]) -> str:
    return "\n".join(f"{calls} {name} {sent / 2**20:.3f}" for name, (calls, sent) in sorted(collectives.items()))


if __name__ == "__main__":
    results = sorted(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not results:
        sys.exit(f"no results in {RESULTS}: run make bench first (BENCH=smoke keeps none)")
    print_table(results[-1])
