"""Results as tables in a terminal."""

from typing import Any

from benchmark.results import Results, Row
from rich.console import Console
from rich.table import Table

GIB = 2**30


def print_tables(results: Results) -> None:
    console = Console(width=200)
    for name, subject in results.subjects.items():
        rows = results.rows(name)
        table = {"model_step": _ladder, "ulysses": _spread}.get(name, _contest)(rows)
        table.title = f"{name}: {results.device}, commit {subject.commit}, {subject.seconds:.0f} s"
        rates = figure(subject.matmul_tflops, ",.1f"), figure(subject.copy_gbs, ",.0f")
        ceilings = f"ceilings: {rates[0]} TFLOP/s in products, {rates[1]} GB/s in copies"
        table.caption = "\n".join([ceilings, *reasons(rows)])
        console.print(table)
    if limit := results.memory_limit_gb:
        console.print(f"memory was limited to {limit:g} GB")


def reasons(rows: list[Row]) -> list[str]:
    """Why there is no figure, once for each contestant and reason."""
    found = {(row["contestant"], row["status"]): row["why"].partition("\n")[0] for row in rows if row.get("why")}
    return [f"{contestant}: {status}, {why[:150]}" for (contestant, status), why in found.items()]


def _table(words: str, figures: str) -> Table:
    table = Table()
    for header in words.split("|"):
        table.add_column(header, no_wrap=True)
    for header in figures.split("|"):
        table.add_column(header, justify="right", no_wrap=True)
    return table


def figure(value: Any, form: str = ".2f") -> str:
    return "" if value is None else f"{value:{form}}"


def _contest(rows: list[Row]) -> Table:
    """Times in milliseconds: forward, backward, both, and the distance of both's quartiles."""
    figures = "forward|backward|both, ms|spread|rounds|x floor|x HF|x Liger|x peer"
    figures += "|peak, GiB|x HF |x Liger |x peer |error"
    table = _table("shape|tokens|contestant", figures)
    before = None
    for row in rows:
        case = (row.get("shape", ""), row.get("tokens", 0))
        if case != before:
            table.add_section()
        before = case
        cells = [case[0], f"{case[1]:,}", row["contestant"]]
        if "both_ms" not in row:
            table.add_row(*cells, *[""] * 13, row["status"])
            continue
        cells += [figure(row.get(key), ",.1f") for key in ("forward_ms", "backward_ms", "both_ms", "both_iqr_ms")]
        cells += [str(row["rounds"]), *(figure(row.get(f"time_x_{name}")) for name in ("floor", "hf", "liger", "peer"))]
        cells.append(figure(row["peak_bytes"] / GIB, ",.3f"))
        cells += [figure(row.get(f"memory_x_{name}")) for name in ("hf", "liger", "peer")]
        table.add_row(*cells, figure(row.get("error"), ".1e"))
    return table


def _ladder(rows: list[Row]) -> Table:
    figures = "peak, GiB|s a step|tokens/s|utilisation|longest|does not fit|predicted|host, GiB|error"
    table = _table("method|in host memory|tokens, layers run", figures)
    for row in rows:
        table.add_section()
        if not row.get("steps"):
            table.add_row(row["contestant"], "", row["status"])
        for step in row.get("steps", []):
            cells = [
                row["contestant"],
                in_host_memory(row),
                f"{step['tokens']:,}, {step['layers']}",
                figure(step["bytes"] / GIB, ",.3f"),
            ]
            cells += [figure(step["seconds"], ",.2f"), figure(step["tokens_per_second"], ",.0f")]
            cells.append(figure(step["utilisation"], ".0%"))
            if step is row["steps"][-1]:
                cells += [longest(row), figure(row.get("failed_at"), ","), figure(row.get("predicted"), ",")]
                cells.append(figure(row["host_bytes"] / GIB, ",.1f") if "host_bytes" in row else "")
                cells.append(figure(row["error"], ".1e"))
            table.add_row(*cells)
    return table


def in_host_memory(row: Row) -> str:
    return ", ".join(row.get("in_host_memory", []))


def longest(row: Row) -> str:
    """`>` where time was up, tries were, or the process died, before memory was full."""
    known = row["ended_by"] == "memory" and row.get("failed_at") is not None
    return f"{'' if known else '> '}{row['steps'][-1]['tokens']:,}"


def _spread(rows: list[Row]) -> Table:
    """The slowest rank's time, the largest peak, and what the rank that sends most sends."""
    words = "case|tokens|contestant|sent by a rank, a layer|besides, a step"
    table = _table(words, "ms|x HF|peak, GiB|x HF |gradients|error")
    for row in rows:
        cells = [row.get("shape", ""), f"{row.get('tokens', 0):,}", row["contestant"]]
        if row["status"] not in ("measured", "wrong"):
            table.add_row(*cells, row["status"])
            continue
        cells += [sent(row, part) for part in ("layer", "step")]
        cells += [figure(row.get("both_ms"), ",.1f"), figure(row.get("time_x_hf"))]
        cells.append(figure(row["peak_bytes"] / GIB, ",.3f") if "peak_bytes" in row else "")
        cells.append(figure(row.get("memory_x_hf")))
        cells += [f"x {row['scale']:.2f}" if "scale" in row else "", f"{row['error']:.1e}"]
        table.add_row(*cells[:-1], cells[-1] + " wrong" * (row["status"] == "wrong"))
    return table


def sent(row: Row, part: str) -> str:
    """How often which collective, and its MiB."""
    found = row.get("wire", {}).get(part, {})
    return "\n".join(f"{calls} {name} {size / 2**20:.3f} MiB" for name, (calls, size) in sorted(found.items()))
