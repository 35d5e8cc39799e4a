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
    table = Table(title=path.stem)
    for column in ("subject", "shape", "tokens", "contestant", "time, ms", "x HF", "x products", "peak, MiB", "x HF "):
        table.add_column(column, justify="left" if column in ("subject", "shape", "contestant") else "right")
    table.add_column("error", justify="right")
    for row in rows(path):
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


if __name__ == "__main__":
    results = sorted(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not results:
        sys.exit(f"no results in {RESULTS}: run make bench first")
    print_table(results[-1])
