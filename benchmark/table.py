"""make table: benchmark results as a table, each contestant beside Hugging Face in the same run."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def rows(path: Path) -> list[dict]:
    """One dict a measurement, with its ratios to Hugging Face of the same subject, shape and tokens."""
    entries = json.loads(path.read_text())["benchmarks"]
    measured = [
        {"subject": entry["name"].split("[")[0].removeprefix("test_"), "seconds": entry["stats"]["median"]}
        | entry["extra_info"]
        for entry in entries
    ]
    for row in measured:
        same = ("subject", "shape", "tokens")
        base = next(r for r in measured if r["contestant"] == "huggingface" and all(r[k] == row[k] for k in same))
        usable = "peak_mib" in row and "peak_mib" in base
        row["time_ratio"] = row["seconds"] / base["seconds"] if usable else None
        row["memory_ratio"] = row["peak_mib"] / base["peak_mib"] if usable else None
    return measured


def print_table(path: Path) -> None:
    table = Table(title=path.stem)
    for column in ("subject", "shape", "tokens", "contestant", "time, ms", "x HF", "peak, MiB", "x HF ", "error"):
        table.add_column(column, justify="left" if column in ("subject", "shape", "contestant") else "right")
    for row in rows(path):
        cells = [row["subject"], row["shape"], f"{row['tokens']:,}", row["contestant"]]
        if row.get("out_of_memory"):
            cells += ["out of memory", "", "", ""]
        else:
            ratios = [f"{row[k]:.2f}" if row[k] else "" for k in ("time_ratio", "memory_ratio")]
            cells += [f"{row['seconds'] * 1000:,.1f}", ratios[0], f"{row['peak_mib']:,.0f}", ratios[1]]
        table.add_row(*cells, f"{row['error']:.1e}")
    Console(width=130).print(table)


if __name__ == "__main__":
    results = sorted(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not results:
        sys.exit(f"no results in {RESULTS}: run make bench first")
    print_table(results[-1])
