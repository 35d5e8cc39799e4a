"""What README shows of results, as `make table` writes it: the paragraph of what was measured on a GPU; the picture of
predicted peak memory against length, with what a GPU measured of it; and its caption."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from benchmark.gpu_day import CHECKS, newest_of
from benchmark.markdown import fill
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
PEERS, OURS = ("#b5b5b5", "#7d7d7d", "#404040"), ("#79b0ff", "#1f6feb")
LINES: dict[str, tuple[tuple[str, ...], str]] = {  # label -> features of seqtile.memory, colour; solid with offload
    "Hugging Face": (("nothing",), PEERS[0]),
    "Liger": (("loss", "Liger"), PEERS[1]),
    "Liger, offload": (("loss", "Liger", "host"), PEERS[1]),
    "Liger, DeepSpeed's tiled MLP, offload": (("loss, MLP", "Liger", "host"), PEERS[2]),
    "seqtile": (("loss, MLP",), OURS[0]),
    "seqtile, whole layers, head chunks": (("groups",), OURS[1]),
    "seqtile, whole layers, head chunks, offload": (("groups", "host"), OURS[1]),
}
"""Peers have what they offer; offload is of the layers' inputs."""

MEASURED_BY = {  # label -> method of `benchmark.methods`
    "Hugging Face": "huggingface_lora",
    "Liger": "liger_lora",
    "seqtile": "seqtile_lora",
    "seqtile, whole layers, head chunks": "seqtile_head_groups_lora",
    "seqtile, whole layers, head chunks, offload": "seqtile_head_groups_offload_lora",
}
DEFAULT, BEST = "seqtile", "seqtile, whole layers, head chunks, offload"
BEST_OF_PEERS = "Liger, DeepSpeed's tiled MLP, offload"
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
    return {label: vars(with_features(memory.Setup(**COMMON), *names)) for label, (names, _) in LINES.items()}


def longest() -> dict[str, int]:
    """Returns the longest sequence predicted for each line."""
    return {label: memory.longest(MODEL, **setup).tokens for label, setup in setups().items()}


def caption(directory: Path = RESULTS) -> str:
    """Returns what README says below the picture; the numbers are in the picture."""
    ran, where = measured(directory)
    measurement = f"stars: measured on an {where}" if ran else "not measured"
    return fill(
        "*One training step of Llama-3.1-8B with LoRA of rank 16 in bfloat16, layers checkpointed, predicted for a GPU "
        f"of {GPU_GIB} GiB, of which a fifth stays free; {measurement}. Grey: other packages, alone and together. "
        "Solid lines: with offload, which keeps the layers' inputs in host memory; dashed: without.*"
    )


def draw(file: Path, directory: Path = RESULTS) -> None:
    """Writes the picture, the same bytes every time; its words stay text."""
    ran, where = measured(directory)
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "seqtile", "font.size": 10.5})
    figure, axes = pyplot.subplots(figsize=(8, 5.4), layout="constrained")
    lengths = [4096 * 2 ** (step / 4) for step in range(36)]
    found = longest()
    for label, setup in setups().items():
        end, (_, color) = found[label], LINES[label]
        line = "-" if "activations" in setup["offload"] else "--"
        tokens = sorted([*(int(length) for length in lengths if length < end), end])
        peaks = [memory.plan(MODEL, seq_len=length, **setup).gpu_bytes / GIB for length in tokens]
        axes.plot(tokens, peaks, color=color, linestyle=line, linewidth=2.2, label=f"{label}: {end:,}")
        axes.plot(end, ROOM, "o", color=color)
        row = ran.get(label, {"steps": [], "why": "not measured"})
        for step in [] if "why" in row else row["steps"][-1:]:  # of a method that died no peak is known
            axes.plot(step["tokens"], step["bytes"] / GIB + OF_CUDA, "*", color=color, markersize=13)
    axes.axhline(GPU_GIB, color="black", linewidth=1)
    axes.axhline(ROOM, color="black", linewidth=1, linestyle=":")
    stars = f", stars: measured ({where})" if ran else ""
    axes.text(4096, GPU_GIB - 4, f"dots: predicted{stars}", fontsize=9)
    axes.text(4096, ROOM + 1, f"four fifths of {GPU_GIB} GiB", fontsize=9)
    axes.set(xscale="log", xlabel="tokens of one sequence", ylabel="peak GPU memory, GiB", ylim=(0, GPU_GIB * 1.06))
    title = f"Predicted peak GPU memory (GiB) by length. In the legend: the longest sequence in {ROOM:g} GiB (tokens)"
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
    found, (ran, where) = checks_of(directory), measured(directory)
    named = where.partition(",")[0] if BEST in ran else ""  # the GPU in the first sentence
    speed = sentence_on_time(directory, named)
    said = [sentence_on_length(directory), speed, sentence_on_checks(found, named) if found else ""]
    if not (found or speed or ran):
        said.append(NOTHING)
    return fill(" ".join(filter(None, said)))


def sentence_on_length(directory: Path) -> str:
    """The longest sequence, measured if a GPU measured it; beside the default's, and the longest predicted with other
    packages."""
    lengths, (ran, where) = longest(), measured(directory)
    steps = {label: row["steps"][-1] for label, row in ran.items()}
    tokens = steps[BEST]["tokens"] if BEST in ran else lengths[BEST]
    host = memory.plan(MODEL, seq_len=tokens, **setups()[BEST]).host_bytes / GIB
    title, how = "Predicted, not measured", "."
    if BEST in ran:
        number, layers = steps[BEST]["layers"], SHAPES[ran[BEST]["shape"]].layers
        title = f"Measured on an {where}, with {number} of {layers} layers built and memory set aside for the others"
        minutes = tokens / steps[BEST]["tokens_per_second"] / 60
        how = (
            " ([how](docs/benchmarks.md#the-longest-sequences)). Extrapolated from what ran, a full step takes "
            f"{minutes:.0f} minutes, mostly for attention, not counting copies to host memory."
        )
    text = f"**{title}: {tokens:,} tokens of Llama-3.1-8B with LoRA fit in {ROOM:g} GiB** (four fifths of an {GPU_GIB} "
    text += f"GiB GPU) with all options on, plus a calculated {host:.0f} GiB of host memory"
    default = f"reached {steps[DEFAULT]['tokens']:,}" if DEFAULT in ran else f"should reach {lengths[DEFAULT]:,}"
    peers = f"Liger, offload and DeepSpeed's tiled MLP together are predicted to reach {lengths[BEST_OF_PEERS]:,}."
    return f"{text}{how} seqtile without options {default}. {peers}"


def ending(device: str, named: str) -> str:
    """Returns the end of a sentence on a GPU: its name, unless that is the one that was named before."""
    return "." if device == named else f" ({device})."


def sentence_on_checks(found: list[tuple[Results, str, list[Row]]], named: str) -> str:
    """What came of all checks."""
    judged = [row for _, _, rows in found for row in rows if "right" in row]
    wrong = sum(not row["right"] for row in judged)
    link = "[checks on the GPU](docs/benchmarks.md#measured-on-a-gpu)"
    verdict = f"**{wrong} of {len(judged)} {link} fail**" if wrong else f"All {len(judged)} {link} pass"
    devices = " and ".join(dict.fromkeys(results.device for results, _, _ in found))
    return verdict + ending(devices, named)


def sentence_on_time(directory: Path, named: str) -> str:
    """The time of a layer that is tiled as a whole, over each peer's, at the longest sequence that has one."""
    results = newest_of("decoder_layer", directory)
    rows = [row for row in results.rows("decoder_layer") if row["contestant"] == "seqtile_layer"] if results else []
    peers = {"time_x_hf": "", "time_x_liger": " with Liger's kernels"}
    timed = [row for row in rows if row["shape"] == "llama3_8b" and peers.keys() & row.keys()]
    if not timed:
        return ""
    row = max(timed, key=lambda row: row["tokens"])
    ratios = " and ".join(
        f"{row[key]:.2f} of the time that Hugging Face's takes{peer}" for key, peer in peers.items() if key in row
    )
    about = f"At {row['tokens'] // 1024}K tokens a layer in chunks takes"
    return f"{about} {ratios}{ending(results.device, named)}"
