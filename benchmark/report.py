"""Results as tables: all figures for a terminal, of which the pages choose.

python3 -m benchmark.report DIRECTORY   # every result file there, and what a run that was killed has left
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark import rows as row_files
from benchmark.markdown import table
from benchmark.results import Results, Row, SubjectResults, load

GIB, MIB = 2**30, 2**20
Cells = dict[str, str]
"""Of a row of a table, by the headers of its columns."""
COMPARISON = {
    "forward, ms": ("forward_ms", ",.2f"),
    "backward": ("backward_ms", ",.2f"),
    "both": ("both_ms", ",.2f"),
    "spread": ("both_iqr_ms", ",.2f"),
    "rounds": ("rounds", "d"),
    "predicted": ("predicted_ms", ",.2f"),
    "x floor": ("time_x_floor", ".2f"),
    "x HF": ("time_x_hf", ".2f"),
    "x Liger": ("time_x_liger", ".2f"),
    "x peer": ("time_x_peer", ".2f"),
    "peak, GiB": ("peak_gib", ",.3f"),
    "peak x HF": ("memory_x_hf", ".2f"),
    "peak x Liger": ("memory_x_liger", ".2f"),
    "peak x peer": ("memory_x_peer", ".2f"),
    "error": ("error", ".1e"),
}
"""Of a comparison: each column's key in a row, see `Results.rows`, and format. The spread is between quartiles."""
LONGEST = ("method", "in host memory", "tokens", "s a step", "GiB there", "measured", "does not fit", "predicted")
LONGEST += ("its peak, GiB", "planned", "layers run", "tokens/s", "utilisation", "error")
ULYSSES = ("", "tokens", "sent by a rank, a layer", "besides, a step", "ms", "x HF", "peak of a rank, MiB", "peak x HF")
ULYSSES += ("gradients", "relative error")


def figure(value: Any, form: str = ".2f") -> str:
    return "" if value is None else f"{value:{form}}"


def table_of(rows: Iterable[Cells], columns: Sequence[str], words: int, aligned: bool = True) -> str:
    return table([list(columns), *([row.get(column, "") for column in columns] for row in rows)], words, aligned)


def comparison(rows: list[Row]) -> str:
    return table_of(map(comparison_cells, rows), ("shape", "tokens", "contestant", *COMPARISON), words=3)


def comparison_cells(row: Row) -> Cells:
    cells = {"shape": row.get("shape", ""), "tokens": f"{row.get('tokens', 0):,}", "contestant": row["contestant"]}
    if "both_ms" not in row:
        return cells | {"error": row["status"]}
    row = row | {"peak_gib": row["peak_bytes"] / GIB}
    return cells | {column: figure(row.get(key), form) for column, (key, form) in COMPARISON.items()}


def longest_sequences(rows: list[Row]) -> str:
    return table_of([cells for row in rows for cells in longest_cells(row)], LONGEST, words=2)


def longest_cells(row: Row) -> list[Cells]:
    """Of each step of a method; the last has what was found of the method."""
    if not row.get("steps"):
        return [{"method": row["contestant"], "measured": row["status"]}]
    died = "why" in row
    cells = [
        {
            "method": row["contestant"],
            "tokens": f"{step['tokens']:,}",
            "s a step": figure(step["seconds"], ",.2f"),
            "in host memory": ", ".join(row.get("in_host_memory", [])),
            "its peak, GiB": "" if died else f"{step['bytes'] / GIB:,.2f}",
            "planned": "" if died else planned_peak(row, step["tokens"]),
            "layers run": str(step["layers"]),
            "tokens/s": f"{step['tokens_per_second']:,.0f}",
            "utilisation": f"{step['utilisation']:.0%}",
        }
        for step in row["steps"]
    ]
    host = row.get("host_bytes")
    cells[-1] |= {
        "GiB there": "" if host is None else f"{host / GIB:,.0f}",
        "measured": longest(row),
        "does not fit": figure(row.get("failed_at"), ","),
        "predicted": figure(row.get("predicted"), ","),
        "error": figure(row.get("error"), ".1e"),
    }
    return cells


def longest(row: Row) -> str:
    """`>` where time was up, tries were, or the process died, before memory was full."""
    known = row["ended_by"] == "memory" and row.get("failed_at") is not None
    return f"{'' if known else '> '}{row['steps'][-1]['tokens']:,}"


def planned_peak(row: Row, tokens: int) -> str:
    """GiB of the step that was measured, without what a plan reserves for CUDA; nothing for methods without a plan."""
    from benchmark.methods import METHODS  # these imports take seconds, and most reports do not need them
    from benchmark.shapes import SHAPES

    from seqtile import memory

    setup = METHODS[row["contestant"]].setup if row["contestant"] in METHODS else None
    if setup is None or row.get("shape") not in SHAPES:
        return ""
    shape, dtype = SHAPES[row["shape"]], row.get("dtype", "bfloat16")
    shape = replace(shape, layers=row.get("layers", shape.layers))
    plan = memory.plan(shape, seq_len=tokens, zero_stage=0, optimizer="sgd", dtype=dtype, **setup)
    return f"{(plan.gpu_bytes - plan.peak.parts['reserved']) / GIB:.2f}"


def ulysses(rows: list[Row]) -> str:
    return table_of(map(ulysses_cells, rows), ULYSSES, words=1)


def ulysses_cells(row: Row) -> Cells:
    """The slowest rank's time, the largest peak, and what the rank that sends most sends."""
    cells = {
        "": f"{row['contestant']}, {row.get('shape', '').partition(' ')[2]}",
        "tokens": f"{row.get('tokens', 0):,}",
    }
    if row["status"] not in ("measured", "wrong"):
        return cells | {"sent by a rank, a layer": f"{row['status']}: {row.get('why', '')}".removesuffix(": ")}
    return cells | {
        "sent by a rank, a layer": sent(row, "layer"),
        "besides, a step": sent(row, "step"),
        "ms": figure(row.get("both_ms"), ",.1f"),
        "x HF": figure(row.get("time_x_hf")),
        "peak of a rank, MiB": f"{row['peak_bytes'] / MIB:,.0f}" if "peak_bytes" in row else "",
        "peak x HF": figure(row.get("memory_x_hf")),
        "gradients": f"x {row['scale']:.2f}" if "scale" in row else "",
        "relative error": f"{row['error']:.0e}{' **wrong**' * (row['status'] == 'wrong')}",
    }


def sent(row: Row, part: str) -> str:
    """How often which collective, and its MiB."""
    collectives = row.get("wire", {}).get(part, {})
    return ", ".join(f"{calls} {name} {size / MIB:.3f} MiB" for name, (calls, size) in sorted(collectives.items()))


def right_of_all(rows: list[Row]) -> str:
    """How many checks are right, of how many."""
    judged = [row["right"] for row in rows if "right" in row]
    return f"{sum(judged)} of {len(judged)}"


def findings(rows: list[Row]) -> list[str]:
    """Returns paragraphs on checks: every wrong one, and what nothing judges."""
    wrong = [row for row in rows if row.get("right") is False]
    found = [row for row in rows if "right" not in row and not row["what"].endswith(": begins")]
    said = [f"- {words_of(row)}" for row in found if not isinstance(row.get("says"), list)]
    parts = [table([["wrong", "error", "allowed"], *map(wrong_cells, wrong)], words=2)] if wrong else []
    return [*parts, "\n".join(said)] if said else parts


def reason_of(row: Row) -> str:
    """The first line of why something has no figure, as a table can hold it; nothing if it has one."""
    return row.get("why", "").partition("\n")[0].replace("|", "\\|")


def wrong_cells(row: Row) -> list[str]:
    """What is wrong, its error or why there is none, and the error that is allowed."""
    if "error" not in row:
        return [row["what"], reason_of(row), ""]
    return [row["what"], f"{float(row['error']):.1e}", f"{float(row['allowed']):.1e}"]


def words_of(row: Row) -> str:
    """A row that nothing judges."""
    if row["what"] == "plan":
        return f"peak {row['of'] / GIB:.2f} GiB, planned {row['planned_bytes'] / GIB:.2f}"
    shown = {key: rounded(value) for key, value in row.items() if key not in ("what", "peak_bytes")}
    shown |= {"peak": f"{row['peak_bytes'] / GIB:.2f} GiB"} if "peak_bytes" in row else {}
    return f"{row['what']}: {', '.join(f'{key} {value}' for key, value in shown.items())}"


def rounded(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(rounded, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reasons(rows: list[Row]) -> list[str]:
    """Why there is no figure, once for each contestant and reason."""
    found = {(row["contestant"], row["status"]): row["why"].partition("\n")[0] for row in rows if row.get("why")}
    return [f"{contestant}: {status}, {why[:150]}" for (contestant, status), why in found.items()]


def print_tables(results: Results) -> None:
    for name, subject in results.subjects.items():
        rows = results.rows(name)
        print(f"\n{name}: {results.device}, {results.date}, {results.size}, commit {subject.commit}")
        if any("what" in row for row in rows):
            print(
                "\n".join(
                    [f"{right_of_all(rows)} checks are right"] * any("right" in row for row in rows) + findings(rows)
                )
            )
            continue
        print({"model_step": longest_sequences, "ulysses": ulysses}.get(name, comparison)(rows))
        rates = figure(subject.matmul_tflops, ",.1f"), figure(subject.copy_gbs, ",.0f")
        print(f"{subject.seconds:.0f} s; at most {rates[0]} TFLOP/s in matmuls, {rates[1]} GB/s in copies")
        for reason in reasons(rows):
            print(reason)
    if limit := results.memory_limit_gb:
        print(f"memory was limited to {limit:g} GB")


def results_in(directory: Path) -> list[Results]:
    """Of each file; rows of a subject, or of a method, that has not ended stand by themselves."""
    found = [load(file) for file in sorted(directory.glob("*.json"))]
    for file in sorted(directory.glob("*.jsonl")):
        subject = row_files.subject_of(file)
        machine, _ = row_files.read(file)
        for name in {row["subject"] for row in subject.rows}:
            found.append(Results(machine.get("device", "?"), "not ended", file.stem, subjects={name: subject}))
    for file in sorted(directory.glob("*.unfinished")):
        row = json.loads(file.read_text()) | {"subject": "model_step", "contestant": file.stem.partition("-")[2]}
        subject = SubjectResults(None, 0, None, None, [row])
        found.append(Results("?", "not ended", file.stem, subjects={"model_step": subject}))
    return found


def main() -> None:
    for results in results_in(Path(sys.argv[1])):
        print_tables(results)


if __name__ == "__main__":
    main()
