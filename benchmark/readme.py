"""make table: README's tables, from the results that are committed; and these in full, in the terminal."""

import sys
from pathlib import Path

from benchmark.results import RESULTS, Results, Row, load, newest
from benchmark.terminal import longest, print_tables, sent

README = Path(__file__).parent.parent / "README.md"
UNMEASURED = "Not yet measured on a GPU."
TITLES = {
    "linear_cross_entropy": "The loss",
    "masked_prompt": "The loss, three of four tokens a prompt",
    "gated_mlp": "The MLP, checkpointed",
    "decoder_layer": "A decoder layer, checkpointed",
    "offload": "Six layers, MLPs tiled, checkpoints on the GPU or in host memory",
}
SHAPE = "llama3_8b"


def blocks(directory: Path = RESULTS) -> dict[str, str]:
    """What stands in README between `<!-- name -->` and `<!-- end of name -->`."""
    on_gpu, spread = newest(directory, gpu=True), newest(directory, subject="ulysses")
    found = {"gpu": UNMEASURED if on_gpu is None else "\n\n".join(measured_on_gpu(load(on_gpu), on_gpu))}
    return found | ({} if spread is None else {"ulysses": ulysses(load(spread))})


def rewritten(text: str, found: dict[str, str]) -> str:
    for name, block in found.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{block}\n\n{end}{after}"
    return text


def table(rows: list[list[str]], words: int = 1) -> str:
    """Markdown; the first row is the header, the first columns are words and the others figures."""
    rows = [rows[0], ["---"] * words + ["---:"] * (len(rows[0]) - words), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measured_on_gpu(results: Results, file: Path) -> list[str]:
    """Paragraphs."""
    machine, first = results.machine, next(iter(results.subjects.values()))
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version != "absent")
    limit = f", memory limited to {results.memory_limit_gb:g} GB" if results.memory_limit_gb else ""
    few = "; beyond 128K tokens one repeat, and of the model two layers" if results.size == "quick" else ""
    about = (
        f"{results.device}{limit}, driver {machine.get('driver_version', '?')}, {versions}, {results.date}, commit "
        f"{first.commit}; {first.matmul_tflops:,.0f} TFLOP/s and {first.copy_gbs:,.0f} GB/s at most{few}. Of {SHAPE}, "
        "forward and backward: time over what the matrix products alone take at that rate; peak GiB above the inputs."
    )
    parts = [about]
    for subject, title in TITLES.items():
        if rows := [row for row in results.rows(subject) if row.get("shape") == SHAPE]:
            parts += [by_length(title, rows)]
            parts += [f"![{title}]({_picture(file, subject)})"] if any("both_ms" in row for row in rows) else []
    if rows := results.rows("model_step"):
        parts += [ladder(rows), f"![The ladder]({_picture(file, 'ladder')})"]
    return parts


def _picture(file: Path, name: str) -> str:
    return f"benchmark/results/{file.stem}-{name}.png"


def by_length(title: str, rows: list[Row]) -> str:
    lengths = sorted({row["tokens"] for row in rows})
    cells = {(row["contestant"], row["tokens"]): cell(row) for row in rows}
    contestants = dict.fromkeys(row["contestant"] for row in rows)
    header = [title, *(f"{tokens // 1024}K" for tokens in lengths)]
    return table([header, *([name, *(cells.get((name, tokens), "") for tokens in lengths)] for name in contestants)])


def cell(row: Row) -> str:
    if "both_ms" not in row:
        return row["status"]
    return f"x {row['time_x_floor']:.2f}, {row['peak_bytes'] / 2**30:.2f}"


def ladder(rows: list[Row]) -> str:
    header = [f"Longest sequence, {rows[0].get('shape', SHAPE)}, {rows[0].get('limit_bytes', 0) / 1e9:,.3g} GB"]
    lines = [[*header, "measured", "predicted", "tokens/s", "utilisation", "layers run"]]
    for row in rows:
        if not row.get("steps"):
            lines.append([row["contestant"], row["status"], *[""] * 4])
            continue
        last = row["steps"][-1]
        predicted = f"{row['predicted']:,}" if "predicted" in row else ""
        figures = [f"{last['tokens_per_second']:,.0f}", f"{last['utilisation']:.0%}", str(last["layers"])]
        lines.append([row["contestant"], longest(row), predicted, *figures])
    return table(lines)


def ulysses(results: Results) -> str:
    """What is sent and what is wrong; not times, which on one machine's cores say little."""
    header = ["", "sent by a rank, a layer", "peak of a rank, MiB", "gradients", "relative error"]
    lines = [header]
    for row in results.rows("ulysses"):
        if row["contestant"] == "huggingface":
            continue
        name = f"{row['contestant']}, {row['shape'].partition(' ')[2]}"
        if row["status"] not in ("measured", "wrong"):
            lines.append([name, f"{row['status']}: {row.get('why', '')}".removesuffix(": "), "", "", ""])
            continue
        peak = f"{row['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in row else ""
        wrong = " **wrong**" * (row["status"] == "wrong")
        lines.append([name, sent(row, "layer").replace("\n", ", "), peak, f"x {row['scale']:.2f}"])
        lines[-1].append(f"{row['error']:.0e}{wrong}")
    first = results.rows("ulysses")[0]
    about = f"{first['shape'].partition(' ')[0]}, {first['tokens']:,} tokens, {first['group_size']} ranks"
    commit = results.subjects["ulysses"].commit
    return f"{table(lines, words=2)}\n\nOf {about}: {results.device}, {results.date}, commit {commit}."


def main() -> None:
    README.write_text(rewritten(README.read_text(), blocks()))
    file = newest(gpu=True) or newest()
    if file is None:
        sys.exit(f"README is up to date; no results in {RESULTS} yet: run make bench")
    print_tables(load(file))


if __name__ == "__main__":
    main()
