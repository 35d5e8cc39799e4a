"""make table: what the pages show of plans and of the results that are committed; these in full in the terminal."""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmark import loss_curves, plan_pages, predicted_times, readme, report
from benchmark.gpu_day import CHECKS
from benchmark.markdown import rewritten, table
from benchmark.pictures import TITLES
from benchmark.results import RESULTS, Results, Row, load, newest

ROOT = Path(__file__).parent.parent
PAGES = {  # the page of each block
    "so far": "README.md",
    "gpu": "docs/benchmarks.md",
    "loss curves": "docs/benchmarks.md",
    "ulysses": "docs/several-gpus.md",
}
UNMEASURED = "Not yet measured on a GPU."
SHAPE = "llama3_8b"
OTHERS = ("cuDNN by itself",)
"""Checks of what seqtile works around, which do not count as its own."""
LONGEST = ("in host memory", "GiB there", "measured", "predicted", "its peak, GiB", "planned", "layers run", "tokens/s")
LONGEST += ("utilisation",)
ULYSSES = ("", "sent by a rank, a layer", "peak of a rank, MiB", "gradients", "relative error")


def blocks(directory: Path = RESULTS) -> dict[str, str]:
    """Returns what the pages show of results."""
    spread = newest(directory, subject="ulysses")
    found = {"so far": readme.paragraph(directory), "gpu": gpu(directory)}
    found["loss curves"] = loss_curves.block()
    return found | ({} if spread is None else {"ulysses": ulysses(load(spread))})


def gpu(directory: Path) -> str:
    """What was measured on a GPU: checks, and of each benchmark the results that count."""
    files: dict[Path, list[str]] = {}
    for subject in (*TITLES, "model_step"):
        if (file := newest(directory, subject=subject, gpu=True)) is not None:
            files.setdefault(file, []).append(subject)
    parts = checks(directory)
    for file, subjects in files.items():
        results = load(file)
        results.subjects = {name: results.subjects[name] for name in subjects}
        parts += measured_on_gpu(results, file)
    return "\n\n".join(parts) or UNMEASURED


def write(root: Path = ROOT, directory: Path = RESULTS) -> None:
    """Writes the pages' blocks and README's picture below `root`."""
    places = PAGES | plan_pages.PAGES
    for name, block in (blocks(directory) | plan_pages.blocks(root, directory)).items():
        page = root / places[name]
        page.write_text(rewritten(page.read_text(), name, block))
    readme.draw(root / readme.PICTURE, directory)


def checks(directory: Path) -> list[str]:
    """Returns paragraphs on each part that has been checked on a GPU."""
    parts = []
    for results, part, rows in readme.checks_of(directory, (*CHECKS, *OTHERS)):
        name, commit = part.capitalize() if part in CHECKS else part, results.subjects[part].commit
        parts.append(f"**{name}**: {report.count_of_right(rows)} ({results.device}, {results.date}, commit {commit}).")
        parts += report.findings(rows)
    return parts


def measured_on_gpu(results: Results, file: Path) -> list[str]:
    """Paragraphs."""
    machine, found = results.machine, results.subjects.values()
    versions = [f"{name} {version}" for name, version in machine.get("versions", {}).items() if version != "absent"]
    limit = f", memory limited to {results.memory_limit_gb:g} GB" if results.memory_limit_gb else ""
    commits = " and ".join(dict.fromkeys(str(subject.commit) for subject in found))
    products, copies = ([getattr(subject, name) or 0 for subject in found] for name in ("matmul_tflops", "copy_gbs"))
    once = [row["tokens"] for name in TITLES for row in results.rows(name) if row.get("rounds") == 1]
    about = (
        f"{results.device}{limit}, driver {machine.get('driver_version', '?')}, {', '.join(versions)}, {results.date}, "
        f"commit {commits}; {max(products):,.0f} TFLOP/s and {max(copies):,.0f} GB/s at most. Of {SHAPE}, forward and "
        "backward: time over what the matmuls alone take at the rate measured beside; peak GiB above the inputs"
        f"{f'; from {min(once) // 1024}K tokens on one repeat' if once else ''}."
    )
    parts = [about]
    for subject, title in TITLES.items():
        rows = [row for row in results.rows(subject) if row.get("shape") == SHAPE]
        if rows := [row for row in rows if row["status"] != "no time left"]:
            parts += [by_length(title, rows)]
            parts += [over_liger(rows)] if subject == "decoder_layer" else []
            parts += [over_prediction(title, rows)] if any("predicted_ms" in row for row in rows) else []
            parts += [f"![{title}]({_picture(file, subject)})"] if any("both_ms" in row for row in rows) else []
    if rows := results.rows("model_step"):
        parts += [longest_sequences(rows), f"![The longest sequences]({_picture(file, 'longest')})"]
    return parts


def _picture(file: Path, name: str) -> str:
    return f"../benchmark/results/{file.stem}-{name}.png"


def cell_of(row: Row) -> str:
    if "both_ms" not in row:
        return row["status"] + (f", error {row['error']:.0e}" if "error" in row and row["status"] == "wrong" else "")
    return f"x {row['time_x_floor']:.2f}, {row['peak_bytes'] / 2**30:.2f}"


def over_liger(rows: list[Row]) -> str:
    """The ratio by which a tiled layer is judged."""
    title = "Time of a layer over Hugging Face's with Liger's kernels"
    ours = [row for row in rows if row["contestant"].startswith("seqtile")]
    return by_length(title, ours, lambda row: report.figure(row.get("time_x_liger")))


def over_prediction(title: str, rows: list[Row]) -> str:
    """Measured times beside predicted ones."""

    def cell(row: Row) -> str:
        if "predicted_ms" not in row:
            return ""
        return f"{row['both_ms']:,.1f} / {row['predicted_ms']:,.1f} = {row['both_ms'] / row['predicted_ms']:.2f}"

    about = f"{title}: milliseconds measured / [predicted](#predicted-not-measured), attention at the rate of matmuls"
    return by_length(about, [row for row in rows if "predicted_ms" in row], cell)


def by_length(title: str, rows: list[Row], cell: Callable[[Row], str] = cell_of) -> str:
    lengths = sorted({row["tokens"] for row in rows})
    cells = {(row["contestant"], row["tokens"]): cell(row) for row in rows}
    contestants = dict.fromkeys(row["contestant"] for row in rows)
    header = [title, *(f"{tokens // 1024}K" for tokens in lengths)]
    return table([header, *([name, *(cells.get((name, tokens), "") for tokens in lengths)] for name in contestants)])


def longest_sequences(rows: list[Row]) -> str:
    first = next((row for row in rows if "limit_bytes" in row), {"shape": SHAPE, "limit_bytes": 0})
    title = f"Longest sequence, {first['shape']}, {first['limit_bytes'] / 1e9:,.3g} GB"
    last = [report.longest_cells(row)[-1] for row in rows]
    rows_of_page = [cells | {title: cells["method"]} for cells in last]
    about = (
        "Measured at that length on the layers that are named, with finite gradients of every parameter, and bytes for "
        "the others; `>`: time was up before memory was full. Predicted is the longest by `seqtile.memory`; planned is "
        "what it says of the peak at the measured length. What is in host "
        "memory is of the layers; of their weights and gradients the GPU then holds two layers', as if they were "
        "copied while others are computed, and these copies are not made. tokens/s are those of all layers at the "
        "utilisation (the model's FLOPs over the rate of matmuls); GiB there are what all layers would need."
    )
    return f"{report.table_of(rows_of_page, (title, *LONGEST), words=2, aligned=False)}\n\n{about}"


def ulysses(results: Results) -> str:
    """What is sent and what is wrong; not times, which on one machine's cores say little."""
    rows = [row for row in results.rows("ulysses") if "shape" in row]
    cells = [report.ulysses_cells(row) for row in rows if row["contestant"] != "huggingface"]
    first = rows[0]
    about = f"{first['shape'].partition(' ')[0]}, {first['tokens']:,} tokens, {first['group_size']} ranks"
    commit = results.subjects["ulysses"].commit
    shown = report.table_of(cells, ULYSSES, words=2, aligned=False)
    return f"{shown}\n\nOf {about}: {results.device}, {results.date}, commit {commit}."


def main() -> None:
    predicted_times.add_to_files(RESULTS)
    write()
    file = newest(gpu=True) or newest()
    if file is None:
        sys.exit(f"the pages are up to date; no results in {RESULTS} yet: run make bench")
    report.print_tables(load(file))


if __name__ == "__main__":
    main()
