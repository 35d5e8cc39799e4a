"""make table: what the pages show of plans and of the results that are committed; these in full in the terminal."""

import sys
from pathlib import Path

from benchmark import gpu_page, loss_curves, plan_pages, predicted_times, readme, report
from benchmark.markdown import rewritten
from benchmark.results import RESULTS, Results, load, newest

ROOT = Path(__file__).parent.parent
PAGES = {  # the page of each block
    "so far": "README.md",
    "gpu": "docs/benchmarks.md",
    "loss curves": "docs/benchmarks.md",
    "ulysses": "docs/several-gpus.md",
}
ULYSSES = ("", "sent by a rank, a layer", "peak of a rank, MiB", "gradients", "relative error")


def blocks(directory: Path = RESULTS) -> dict[str, str]:
    """Returns what the pages show of results."""
    spread = newest(directory, subject="ulysses")
    found = {"so far": readme.paragraph(directory), "gpu": gpu_page.block(directory)}
    found["loss curves"] = loss_curves.block()
    return found | ({} if spread is None else {"ulysses": ulysses(load(spread))})


def write(root: Path = ROOT, directory: Path = RESULTS) -> None:
    """Writes the pages' blocks and README's picture below `root`."""
    places = PAGES | plan_pages.PAGES
    for name, block in (blocks(directory) | plan_pages.blocks(root, directory)).items():
        page = root / places[name]
        page.write_text(rewritten(page.read_text(), name, block))
    readme.draw(root / readme.PICTURE, directory)


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
