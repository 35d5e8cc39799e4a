"""What README shows of results, as `make table` writes it: the paragraph of what was measured on a GPU; the picture of
predicted peak memory against length, with what a GPU measured of it; and its caption."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from benchmark.gpu_day import CHECKS, newest_of
from benchmark.report import longest as longest_of
from benchmark.results import RESULTS, Results, Row, load

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
LINES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # label -> features of seqtile.memory, style
    "Hugging Face": (("nothing",), {"color": "#8c8c8c", "linestyle": ":"}),
    "with Liger": (("loss", "Liger"), {"color": "#8c8c8c", "linestyle": "--"}),
    "seqtile": (("loss, MLP",), {"color": "#1f6feb", "linestyle": "--"}),
    "seqtile, layer=True, head_groups": (("groups",), {"color": "#1f6feb", "linestyle": "-."}),
    "and offload": (("groups", "host"), {"color": "#1f6feb", "linestyle": "-"}),
}


MEASURED_BY = {  # label -> method of `benchmark.methods`
    "Hugging Face": "huggingface_lora",
    "with Liger": "liger_lora",
    "seqtile": "seqtile_lora",
    "seqtile, layer=True, head_groups": "seqtile_head_groups_lora",
    "and offload": "seqtile_head_groups_offload_lora",
}
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
                about = f"{results.device}, {results.date}, commit {results.subjects['model_step'].commit}"
    return found, about


def setups() -> dict[str, dict[str, Any]]:
    """Returns the fields of memory.Setup of each line."""
    return {label: vars(with_features(memory.Setup(**COMMON), *names)) for label, (names, _) in LINES.items()}


def longest() -> dict[str, int]:
    """Returns the longest sequence predicted for each line."""
    return {label: memory.longest(MODEL, **setup).tokens for label, setup in setups().items()}


def caption(directory: Path = RESULTS) -> str:
    """Returns what README says below the picture."""
    lengths = longest()
    ran, where = measured(directory)
    said = [f"{tokens:,}{f' ({longest_of(ran[label])})' if label in ran else ''}" for label, tokens in lengths.items()]
    title = f"predicted (in brackets: measured, {where})" if ran else "predicted, not measured"
    support = (
        "[How it was measured](docs/benchmarks.md#the-longest-sequences)."
        if ran
        else "Only simulations support this: [no run measured by others has LoRA or whole layers](docs/predictions.md)."
    )
    both = memory.longest(MODEL, **vars(with_features(memory.Setup(**COMMON), "loss, MLP", "Liger"))).tokens
    host = memory.plan(MODEL, seq_len=[*lengths.values()][-1], **setups()["and offload"]).host_bytes / GIB
    text = (
        f"*Longest sequences in tokens, {title}: Llama-3.1-8B with LoRA of rank 16 in bfloat16 on one GPU of {GPU_GIB} "
        f"GiB, a fifth of it left free; layers checkpointed. Hugging Face: {said[0]}; "
        f"Liger (norms, RoPE, tiled loss): {said[1]}; seqtile: {said[2]}; with Liger's norms: {both:,}; with whole "
        f"layers and head chunks instead: {said[3]}; and with the layers' inputs in {host:.0f} GiB of "
        f"host memory: {said[4]}. {support}*"
    )
    return fill(text, 130)


def draw(file: Path, directory: Path = RESULTS) -> None:
    """Writes the picture, the same bytes every time; its words stay text."""
    ran, where = measured(directory)
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "seqtile", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    lengths = [4096 * 2 ** (step / 4) for step in range(36)]
    found = longest()
    for label, setup in setups().items():
        end, (_, style) = found[label], LINES[label]
        tokens = sorted([*(int(length) for length in lengths if length < end), end])
        peaks = [memory.plan(MODEL, seq_len=length, **setup).gpu_bytes / GIB for length in tokens]
        axes.plot(tokens, peaks, linewidth=2.2, label=f"{label}: {end:,} tokens", **style)
        axes.plot(end, ROOM, "o", color=style["color"])
        for step in ran[label]["steps"][-1:] if label in ran else []:
            axes.plot(step["tokens"], step["bytes"] / GIB + OF_CUDA, "*", color=style["color"], markersize=13)
    axes.axhline(GPU_GIB, color="black", linewidth=1)
    axes.axhline(ROOM, color="black", linewidth=1, linestyle=":")
    axes.text(4096, ROOM + 1, "a fifth is left free", fontsize=9)
    if ran:
        axes.text(4096, ROOM + 6, f"stars: measured, {where}", fontsize=9)
    axes.set(xscale="log", xlabel="tokens of one sequence", ylabel="peak memory, GiB", ylim=(0, GPU_GIB * 1.06))
    axes.set_xticks([2**power * 1024 for power in range(2, 12, 1)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 2**20:g}M" if n >= 2**20 else f"{n / 1024:g}K"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="0.9")
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def checks_of(directory: Path, parts: Sequence[str] = CHECKS) -> list[tuple[Results, str, list[Row]]]:
    """Of each of these parts that has been checked on a GPU: the newest results, its name and its rows."""
    found = [(newest_of(part, directory), part) for part in parts]
    return [(results, part, results.subjects[part].rows) for results, part in found if results]


def paragraph(directory: Path = RESULTS) -> str:
    """Returns what README says of all that was measured on a GPU."""
    found, speed, (lengths, _) = checks_of(directory), sentence_on_time(directory), measured(directory)
    where = {f" ({results.device}, {results.date})" for results, *_ in found}
    speed = speed.replace(*where, "") if len(where) == 1 else speed  # that is said already
    said = [sentence_on_checks(found)] if found else [] if speed or lengths else [NOTHING]
    said += [speed] if speed else []
    left = ["times"] * (not speed) + ["lengths and memory"] * (not lengths)
    said += [f"GPU {', '.join(left)} below are predicted."] if left else []
    return fill(" ".join(said), 130)


def sentence_on_checks(found: list[tuple[Results, str, list[Row]]]) -> str:
    """What came of all checks, and the peak of the few steps."""
    commits = dict.fromkeys(str(results.subjects[part].commit) for results, part, _ in found)
    results = found[0][0]
    rows = [row for _, _, rows in found for row in rows]
    judged = [row for row in rows if "right" in row]
    wrong = sum(not row["right"] for row in judged)
    where = f"**On an {results.device}** ({results.date}, commit {' and '.join(commits)})"
    link = "[checks](docs/benchmarks.md)"
    verdict = f"**{wrong} of {len(judged)} {link} are wrong**" if wrong else f"all {len(judged)} {link} are right"
    plan = next((row for row in rows if row["what"] == "plan"), None)
    peak = f"; a step peaked at {plan['of'] / GIB:.1f} GiB, planned {plan['planned_bytes'] / GIB:.1f}" if plan else ""
    return f"{where} {verdict}{peak}."


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
    where = f"{results.device}, {results.date}"
    return f"A tiled layer of {row['tokens'] // 1024}K tokens takes {ratios} time ({where})."
