"""What README shows of results, as `make table` writes it: the paragraph of what was measured on a GPU; the picture of
predicted peak memory against length, with what a GPU measured of it; and its caption."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from benchmark.gpu_day import CHECKS, newest_of
from benchmark.results import RESULTS, Results, Row, load
from benchmark.shapes import SHAPES

from seqtile import memory
from seqtile.memory import with_features
from seqtile.memory.setup import GIB

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, NullFormatter

PICTURE = "docs/images/peak.svg"
MODEL, GPU_GIB = "meta-llama/Llama-3.1-8B", 80
FREE = 1 / 5  # the margin that docs/planning.md asks for: the worst of benchmark/published_peaks.py
ROOM = GPU_GIB - GPU_GIB * FREE
COMMON = {"lora_rank": 16, "gpu_memory_gib": ROOM}
PEERS, OURS = "#8c8c8c", "#1f6feb"
LINES: dict[str, tuple[tuple[str, ...], str, str]] = {  # label -> features of seqtile.memory, colour, style of the line
    "Hugging Face": (("nothing",), PEERS, ":"),
    "Liger": (("loss", "Liger"), PEERS, "--"),
    "Liger, offload": (("loss", "Liger", "host"), PEERS, "-."),
    "Liger, offload, DeepSpeed's tiled MLP": (("loss, MLP", "Liger", "host"), PEERS, "-"),
    "seqtile": (("loss, MLP",), OURS, "--"),
    "seqtile, whole layers, head chunks": (("groups",), OURS, "-."),
    "seqtile, whole layers, head chunks, offload": (("groups", "host"), OURS, "-"),
}
"""Every peer has what it, or another package beside it, offers: offload is of the layers' inputs."""

MEASURED_BY = {  # label -> method of `benchmark.methods`
    "Hugging Face": "huggingface_lora",
    "Liger": "liger_lora",
    "seqtile": "seqtile_lora",
    "seqtile, whole layers, head chunks": "seqtile_head_groups_lora",
    "seqtile, whole layers, head chunks, offload": "seqtile_head_groups_offload_lora",
}
BEST, BEST_OF_PEERS = "seqtile, whole layers, head chunks, offload", "Liger, offload, DeepSpeed's tiled MLP"
OF_CUDA = 1  # GiB that a plan reserves
NOTHING = (
    "**Nothing has run on a GPU yet**: kernels are compiled for GPUs and run in Triton's interpreter; CPU tests check "
    "the numbers."
)


def measured(directory: Path = RESULTS) -> tuple[dict[str, Row], str]:
    """Returns each line's newest row of `model_step` that a GPU measured in the picture's memory; and on what."""
    found, about = {}, ""
    of_gpus = [results for results in map(load, directory.glob("*.json")) if results.on_gpu]
    for results in sorted(of_gpus, key=lambda results: results.date):
        for row in results.rows("model_step"):
            label = next((label for label, method in MEASURED_BY.items() if method == row["contestant"]), None)
            if label and row.get("steps") and abs(row["limit_bytes"] / GIB + OF_CUDA - ROOM) < 0.5:
                found[label] = row
                about = f"{results.device}, {results.date}"
    return found, about


def setups() -> dict[str, dict[str, Any]]:
    """Returns the fields of memory.Setup of each line."""
    return {label: vars(with_features(memory.Setup(**COMMON), *names)) for label, (names, *_) in LINES.items()}


def longest() -> dict[str, int]:
    """Returns the longest sequence predicted for each line."""
    return {label: memory.longest(MODEL, **setup).tokens for label, setup in setups().items()}


def caption(directory: Path = RESULTS) -> str:
    """Returns what README says below the picture; the numbers are in the picture."""
    ran, where = measured(directory)
    return fill(
        f"*Predicted{f'; the stars are measured ({where})' if ran else ', not measured'}: one training step of "
        f"Llama-3.1-8B with LoRA of rank 16 in bfloat16, layers checkpointed, on one GPU of {GPU_GIB} GiB. Grey: other "
        "packages, with all that they offer; offload keeps the layers' inputs in host memory. "
        "[How it was measured](docs/benchmarks.md#the-longest-sequences).*",
        130,
    )


def draw(file: Path, directory: Path = RESULTS) -> None:
    """Writes the picture, the same bytes every time; its words stay text."""
    ran, where = measured(directory)
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "seqtile", "font.size": 10.5})
    figure, axes = pyplot.subplots(figsize=(8, 5.4), layout="constrained")
    lengths = [4096 * 2 ** (step / 4) for step in range(36)]
    found = longest()
    for label, setup in setups().items():
        end, (_, color, line) = found[label], LINES[label]
        tokens = sorted([*(int(length) for length in lengths if length < end), end])
        peaks = [memory.plan(MODEL, seq_len=length, **setup).gpu_bytes / GIB for length in tokens]
        axes.plot(tokens, peaks, color=color, linestyle=line, linewidth=2.2, label=f"{label}: {end:,}")
        axes.plot(end, ROOM, "o", color=color)
        for step in ran[label]["steps"][-1:] if label in ran else []:
            axes.plot(step["tokens"], step["bytes"] / GIB + OF_CUDA, "*", color=color, markersize=13)
    axes.axhline(GPU_GIB, color="black", linewidth=1)
    axes.axhline(ROOM, color="black", linewidth=1, linestyle=":")
    axes.text(4096, ROOM + 1, "a fifth is left free", fontsize=9)
    if ran:
        axes.text(4096, ROOM + 6, f"stars: measured, {where}", fontsize=9)
    axes.set(xscale="log", xlabel="tokens of one sequence", ylabel="peak GPU memory, GiB", ylim=(0, GPU_GIB * 1.06))
    title = "Predicted peak GPU memory (GiB) by length. In the legend: the longest sequence that fits (tokens)"
    axes.set_title(title, fontsize=10)
    axes.set_xticks([2**power * 1024 for power in range(2, 12, 1)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 2**20:g}M" if n >= 2**20 else f"{n / 1024:g}K"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="0.9")
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def checks_of(directory: Path, parts: Sequence[str] = CHECKS) -> list[tuple[Results, str, list[Row]]]:
    """Of each of these parts that has been checked on a GPU: the newest results, its name and its rows."""
    found = [(newest_of(part, directory), part) for part in parts]
    return [(results, part, results.subjects[part].rows) for results, part in found if results]


def paragraph(directory: Path = RESULTS) -> str:
    """Returns what README says first: the longest sequence, the time of a layer, and what the checks on a GPU found."""
    found, speed = checks_of(directory), sentence_on_time(directory)
    said = [sentence_on_length(directory), speed, sentence_on_checks(found) if found else ""]
    if not (found or speed or measured(directory)[0]):
        said.append(NOTHING)
    return fill(" ".join(filter(None, said)), 130)


def sentence_on_length(directory: Path) -> str:
    """The longest sequence, measured if a GPU measured it; beside the longest predicted with other packages."""
    predicted, (ran, where) = longest(), measured(directory)
    theirs = f"{predicted[BEST_OF_PEERS]:,}"
    step = f"a training step of Llama-3.1-8B with LoRA in {ROOM:g} GiB"
    peers = "Liger, DeepSpeed's tiled MLP and offload together"
    if BEST not in ran:
        return f"**Predicted, not measured: {step} fits {predicted[BEST]:,} tokens**; {peers} reach {theirs}."
    last = ran[BEST]["steps"][-1]
    layers = SHAPES[ran[BEST]["shape"]].layers
    how = f"{last['layers']} of {layers} layers ran, and the memory of the others was allocated"
    return (
        f"**Measured on an {where}: {step} ran on {last['tokens']:,} tokens** ({how}, "
        f"[how](docs/benchmarks.md#the-longest-sequences)). {peers} are predicted to reach {theirs}."
    )


def sentence_on_checks(found: list[tuple[Results, str, list[Row]]]) -> str:
    """What came of all checks."""
    judged = [row for _, _, rows in found for row in rows if "right" in row]
    wrong = sum(not row["right"] for row in judged)
    link = "[checks](docs/benchmarks.md#measured-on-a-gpu)"
    verdict = f"**{wrong} of {len(judged)} {link} are wrong**" if wrong else f"All {len(judged)} {link} are right"
    return f"{verdict} ({found[0][0].device})."


def sentence_on_time(directory: Path) -> str:
    """The time of a layer that is tiled as a whole, over each peer's, at the longest sequence that has one."""
    results = newest_of("decoder_layer", directory)
    rows = [row for row in results.rows("decoder_layer") if row["contestant"] == "seqtile_layer"] if results else []
    peers = {"time_x_hf": "Hugging Face's", "time_x_liger": "Liger's"}
    timed = [row for row in rows if row["shape"] == "llama3_8b" and peers.keys() & row.keys()]
    if not timed:
        return ""
    row = max(timed, key=lambda row: row["tokens"])
    ratios = " and ".join(f"{row[key]:.2f} of {peer}" for key, peer in peers.items() if key in row)
    return f"A tiled layer of {row['tokens'] // 1024}K tokens takes {ratios} time ({results.device})."
