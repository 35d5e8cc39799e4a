"""What docs/benchmarks.md shows of a GPU: checks first, then times and memory of each benchmark beside the others'."""

from collections.abc import Callable
from math import inf
from pathlib import Path

from benchmark import readme, report
from benchmark.gpu_day import CHECKS
from benchmark.markdown import table
from benchmark.pictures import TITLES, has_picture, name_of
from benchmark.report import GIB, figure
from benchmark.results import Results, Row, load, newest

UNMEASURED = "Not yet measured on a GPU."
SHAPE = "llama3_8b"
MODELS = {SHAPE: "Llama-3.1-8B", "smollm2_135m": "SmolLM2-135M"}
PEERS = {
    "liger-kernel": "liger",
    "deepspeed": "deepspeed",
    "cut-cross-entropy": "cce",
    "quack-kernels": "quack",
    "trl": "trl",
}
"""The contestants of packages that are named only where they were compared."""
OTHERS = ("cuDNN by itself",)
"""Checks of what seqtile works around, which do not count as its own."""
KERNELS = {"CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "FlashAttention", "EFFICIENT_ATTENTION": "efficient"}
LONGEST = {
    "tokens": "measured",
    "predicted tokens": "predicted",
    "peak, GiB": "its peak, GiB",
    "predicted peak": "planned",
    "layers run": "layers run",
    "tokens/s": "tokens/s",
    "of matmul rate": "utilisation",
}
"""Columns, by the names of `report.longest_cells`."""


def block(directory: Path) -> str:
    files: dict[Path, list[str]] = {}
    for subject in (*TITLES, "model_step"):
        if (file := newest(directory, subject=subject, gpu=True)) is not None:
            files.setdefault(file, []).append(subject)
    parts = checks(directory)
    for file, subjects in files.items():
        results = load(file)
        results.subjects = {name: results.subjects[name] for name in subjects}
        parts += comparisons(results, file)
    return "\n\n".join(parts) or UNMEASURED


def checks(directory: Path) -> list[str]:
    """Paragraphs: how many are right, which are not, and the figures of attention and of few steps."""
    found = readme.checks_of(directory, (*CHECKS, *OTHERS))
    if not found:
        return []
    counts, wrong = [], []
    for results, part, rows in found:
        number = sum("skipped" in row for row in rows)
        skipped = f", {number} skipped" if number else ""
        about = [results.device, results.date, str(results.subjects[part].commit)]
        counts.append(
            [part + ", without seqtile" * (part in OTHERS), report.right_of_all(rows) + skipped, ", ".join(about)]
        )
        in_table = tuple(f"{row['what']}, " for row in rows if is_attention(row))
        wrong += [[part, *report.wrong_cells(row)] for row in rows if is_wrong(row, except_of=in_table)]
    parts = [table([["checks", "right", "on, date, commit"], *counts], words=3)]
    parts += [table([["checks", "wrong", "error", "allowed"], *wrong], words=3)] if wrong else []
    parts += attention(found)
    return parts + [text for _, part, rows in found if part == "few steps" for text in few_steps(rows)]


def is_wrong(row: Row, except_of: tuple[str, ...]) -> bool:
    return row.get("right") is False and not row["what"].startswith(except_of)


def is_attention(row: Row) -> bool:
    return row["what"].startswith("attention, ") and "seconds" in row


def attention(found: list[tuple[Results, str, list[Row]]]) -> list[str]:
    """Long rows, by sdpa's kernel."""
    lines = []
    for _, part, rows in found:
        for row in filter(is_attention, rows):
            _, *case = row["what"].split(", ")
            kernel = KERNELS.get(row["sdpa"], row["sdpa"]) + (", without seqtile" if part in OTHERS else "")
            about = [
                kernel,
                verdict(f"{row['what']}, {row['sdpa']}: ", rows),
                f"{row['seconds']:.1f}",
                f"{row['peak_gb'] * 1e9 / GIB:.1f}",
            ]
            lines.append([each.partition(" ")[0] for each in case] + about)
    if not lines:
        return []
    about = "**Attention** of one long row, forward and backward, one call, with the kernel that sdpa chose:"
    return [about, table([["tokens", "heads", "kernel", "right", "s", "peak, GiB"], *lines], words=4)]


def verdict(case: str, rows: list[Row]) -> str:
    """Whether all checks that begin so are right; else the worst one and its error."""
    judged = [row for row in rows if row["what"].startswith(case) and "right" in row]
    errors = {row["what"].removeprefix(case): float(row["error"]) for row in judged if not row["right"]}
    if not errors:
        return "yes" if judged else "not checked"
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else inf)
    return f"no: {worst}, error {errors[worst]:.2g}"


def few_steps(rows: list[Row]) -> list[str]:
    """Losses, time and peak of a model of few layers, tiled and untiled."""
    by_name = {row["what"]: row for row in rows}
    columns = [name for name in ("untiled", "seqtile") if name in by_name]
    if len(columns) < 2 or "first step" not in by_name:
        return []
    runs, about = [by_name[name] for name in columns], by_name["first step"]
    steps = range(len(runs[0]["losses"]))
    losses = [[float(loss) for loss in run["losses"]] for run in runs]  # of which JSON may have words, such as nan
    lines = [[f"loss, step {i + 1}", *(f"{each[i]:.4g}" for each in losses)] for i in steps]
    if "truth" in by_name:
        truth = [float(loss) for loss in by_name["truth"].get("losses", [])]
        lines += [distances_of(i + 1, [abs(each[i] / truth[i] - 1) for each in losses]) for i in range(len(truth))]
    for i in steps:  # as older results have it
        if (row := by_name.get(f"loss of step {i + 1}, from the truth")) and columns[0] in row:
            lines.append(distances_of(i + 1, [float(row[name]) for name in columns]))
    lines += [*worst_gradient(rows), ["s, last step", *(f"{run['seconds']:.3f}" for run in runs)]]
    lines += [["peak, GiB", *(f"{run['peak_bytes'] / GIB:.2f}" for run in runs)]]
    if "plan" in by_name:
        lines += [["planned, GiB", "", f"{by_name['plan']['planned_bytes'] / GIB:.2f}"]]
    title = (
        f"**{len(steps)} steps** of a Llama of {about['layers']} layers, {about['width']:,} wide, on "
        f"{about['tokens']:,} tokens in {about['dtype']}; seqtile with all options. A step changes each weight by 2 %, "
        "so differences grow:"
    )
    return [title, table([["", *columns], *lines])]


def distances_of(step: int, distances: list[float]) -> list[str]:
    """A row of the table: how far each run's loss is from the float32 run's, relative."""
    return [f"loss of step {step}, distance from float32's", *(f"{distance:.1%}" for distance in distances)]


def worst_gradient(rows: list[Row]) -> list[list[str]]:
    """The gradient of the first step that is nearest to what is allowed: twice the untiled model's distance from
    float32's."""
    found = [row for row in rows if row["what"].startswith("gradients of ") and "error" in row]
    title = "gradient of step 1 nearest to its limit, distance from float32's"
    return [[title, *(f"{error:.1%}" for error in (row["allowed"] / 2, float(row["error"])))] for row in found]


def comparisons(results: Results, file: Path) -> list[str]:
    """Paragraphs on the subjects that were measured."""
    parts = [machine(results)]
    for subject, title in TITLES.items():
        rows = [row for row in results.rows(subject) if row.get("shape") == SHAPE]
        late = sorted({row["tokens"] for row in rows if row["status"] == "no time left"})
        if rows := list(filter(is_shown, rows)):
            parts += [by_length(title, rows, time_and_peak), *ratios(rows, to_matmuls=subject != "shared_tokens")]
            parts += [f"No time was left for {', '.join(f'{n // 1024}K' for n in late)} tokens."] if late else []
            parts += [f"![{title}]({_picture(file, subject)})"] if has_picture(rows) else []
    if rows := results.rows("model_step"):
        parts += [longest_sequences(rows), f"![The longest sequences]({_picture(file, 'longest')})"]
    return parts


def is_shown(row: Row) -> bool:
    return row["status"] not in ("no time left", "absent")


def machine(results: Results) -> str:
    """On what was measured, and how to read the tables below."""
    found, versions = results.subjects.values(), results.machine.get("versions", {})
    compared = {
        each for subject in found for row in subject.rows if is_shown(row) for each in row["contestant"].split("_")
    }
    named = [
        f"{name} {version}"
        for name, version in versions.items()
        if version != "absent" and (name not in PEERS or PEERS[name] in compared)
    ]
    limit = f", memory limited to {results.memory_limit_gb:g} GB" if results.memory_limit_gb else ""
    commits = " and ".join(dict.fromkeys(str(subject.commit) for subject in found))
    matmuls, copies = ([getattr(subject, name) or 0 for subject in found] for name in ("matmul_tflops", "copy_gbs"))
    about = (
        f"**{results.device}{limit}**, {results.date}, commit {commits}; driver "
        f"{results.machine.get('driver_version', '?')}, {', '.join(named)}."
    )
    if max(matmuls) and max(copies):
        about += f" A large square matmul ran at {max(matmuls):,.0f} TFLOP/s, a copy at {max(copies):,.0f} GB/s."
    if not set(TITLES) & set(results.subjects):
        return about
    rows = [row for name in TITLES for row in results.rows(name) if row.get("shape") == SHAPE]
    once = [row["tokens"] for row in rows if row.get("rounds") == 1]
    repeat = f" (from {min(once) // 1024}K tokens on, of a single repeat)" if once else ""
    return (
        f"{about} Shapes of Llama-3.1-8B in bfloat16: ms of forward and backward{repeat}; peak GiB above the inputs. "
        '"Whole layer" is `layer=True`, "head chunks" also `head_groups="auto"`. '
        "Below each table is seqtile's time as a multiple of others: Liger's; that of its matmuls at the rate of "
        "that square matmul (others are faster, so below 1 is possible); and [predicted](#predicted-not-measured), "
        "here at the rates of this run and with the core of attention."
    )


def by_length(title: str, rows: list[Row], cell: Callable[[Row], str]) -> str:
    """A table with a row for each contestant and a column for each length."""
    lengths = sorted({row["tokens"] for row in rows})
    cells = {(row["contestant"], row["tokens"]): cell(row) for row in rows}
    header = [title, *(f"{tokens // 1024}K" for tokens in lengths)]
    contestants = dict.fromkeys(row["contestant"] for row in rows)
    return table([header, *([name_of(one), *(cells.get((one, n), "") for n in lengths)] for one in contestants)])


def time_and_peak(row: Row) -> str:
    if "both_ms" not in row:
        return row["status"] + (f", error {row['error']:.0e}" if "error" in row and row["status"] == "wrong" else "")
    return f"{row['both_ms']:,.1f} ms, {row['peak_bytes'] / GIB:.2f} GiB"


def over_prediction(row: Row) -> Row:
    return {"time_x_predicted": row["both_ms"] / row["predicted_ms"]} if "predicted_ms" in row else {}


def ratios(rows: list[Row], to_matmuls: bool) -> list[str]:
    """A table of seqtile's times over other times, if there are any. `to_matmuls`: also over that of the matmuls, if
    all contestants compute the same ones."""
    others = {"Liger's": "time_x_liger"} | ({"that of its matmuls": "time_x_floor"} if to_matmuls else {})
    others |= {"predicted": "time_x_predicted"}
    ours = [row for row in rows if row["contestant"].startswith("seqtile") and "both_ms" in row]
    ours = [row | over_prediction(row) for row in ours]
    shown = {name: key for name, key in others.items() if any(key in row for row in ours)}
    if not shown:
        return []
    title = f"seqtile's time as a multiple of: {', '.join(shown)}"
    return [by_length(title, ours, lambda row: ", ".join(figure(row.get(key)) or "-" for key in shown.values()))]


def longest_sequences(rows: list[Row]) -> str:
    """The longest sequence of each method, with its peak beside the plan's."""
    first = next((row for row in rows if "limit_bytes" in row), {"shape": SHAPE, "limit_bytes": 0})
    title = f"Longest sequence in {first['limit_bytes'] / GIB:,.3g} GiB"
    model = MODELS.get(first["shape"], first["shape"])
    lines = []
    for row in rows:
        cells = report.longest_cells(row)[-1]
        name = name_of(row["contestant"])
        if cells.get("GiB there"):
            name += f" ({cells['in host memory']} in host memory: {cells['GiB there']} GiB, calculated)"
        lines.append([name, *(cells.get(key, "") for key in LONGEST.values())])
    about = (
        f"Of {model}. `>`: the search ended before memory was full, by time unless another reason is given. Only the "
        "layers in *layers run* computed anything; of the others GPU memory was reserved, and nothing was copied. "
        "*Predicted* is by `seqtile.memory`: the longest sequence, and the peak at the measured length. *tokens/s*, at "
        "the measured length, are those of the whole model if each layer takes as long as those that ran; *of matmul "
        "rate* is the model's FLOPs a second, without recomputation, over those of a large square matmul."
    )
    reasons = [f"- {name_of(row['contestant'])}: {reason}." for row in rows if (reason := report.reason_of(row))]
    return "\n\n".join([table([[title, *LONGEST], *lines]), about, *(["\n".join(reasons)] if reasons else [])])


def _picture(file: Path, name: str) -> str:
    return f"../benchmark/results/{file.stem}-{name}.png"
