"""Results as pictures: memory and time against length, and longest sequences; told apart without colours."""

import re
from itertools import cycle
from pathlib import Path

import matplotlib
from benchmark.results import Results, Row

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

STYLES = list(zip("osD^vX*Ph", cycle(["-", "--", ":", "-."]), strict=False))
HATCHES = ["", "//", "\\\\", "xx", "..", "--", "++"]
TITLES = {
    "linear_cross_entropy": "The loss",
    "masked_prompt": "The loss, three of four tokens a prompt",
    "linear_divergence": "A student's divergence from a frozen teacher",
    "gated_mlp": "The MLP, checkpointed",
    "decoder_layer": "A decoder layer, checkpointed",
    "shared_tokens": "Two layers and their head, a prompt and eight completions",
    "offload": "Six layers, MLPs tiled, checkpoints on the GPU or in host memory",
}
"""Of subjects that are compared, as pages name them."""
WORDS = {
    "huggingface": "Hugging Face",
    "on_liger": "with Liger",
    "liger": "Liger",
    "deepspeed_mlp": "DeepSpeed's tiled MLP",
    "deepspeed": "DeepSpeed",
    "trl": "TRL",
    "cce": "CCE",
    "quack": "QuACK",
    "save_on_cpu": "torch's save_on_cpu",
    "mlp": "MLP",
    "head_groups": "whole layer, head chunks",
    "layer": "whole layer",
    "sharing_alone": "untiled, prompt computed once",
    "sharing": "prompt computed once",
    "lora": "LoRA",
}
"""Parts of the names of contestants and methods, as pages name them."""


def name_of(contestant: str) -> str:
    """Returns a contestant's or method's name as pages show it."""
    return ", ".join(WORDS.get(part, part) for part in re.findall("|".join([*WORDS, "[^_]+"]), contestant))


def timed(rows: list[Row]) -> list[Row]:
    """Returns what was timed, of the shape with most lengths."""
    rows = [row for row in rows if "both_ms" in row]
    shapes = [row["shape"] for row in rows]
    return [row for row in rows if row["shape"] == max(shapes, key=shapes.count)]


def has_picture(rows: list[Row]) -> bool:
    """Returns whether a subject was timed at more than one length."""
    return len({row["tokens"] for row in timed(rows)}) > 1


def draw(results: Results, file: Path) -> list[Path]:
    """PNG files beside the result file, of what it has; their paths."""
    drawn = []
    for subject in TITLES:
        if has_picture(rows := results.rows(subject)):
            drawn.append(_against_length(results, subject, timed(rows), file))
    if rows := [row for row in results.rows("model_step") if row.get("steps")]:
        drawn.append(_longest(results, rows, file))
    return drawn


def _against_length(results: Results, subject: str, rows: list[Row], file: Path) -> Path:
    shape = rows[0]["shape"]
    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    contestants = dict.fromkeys(row["contestant"] for row in rows)
    for contestant, (marker, line) in zip(contestants, cycle(STYLES), strict=False):
        of_one = [row for row in rows if row["contestant"] == contestant]
        lengths = [row["tokens"] for row in of_one]
        style = {"marker": marker, "linestyle": line, "label": name_of(contestant), "markersize": 5}
        style |= {"color": "black", "linewidth": 2.2} if contestant.startswith("seqtile") else {"color": "0.45"}
        memory.plot(lengths, [row["peak_bytes"] / 2**30 for row in of_one], **style)
        time.plot(lengths, [row["both_ms"] / 1000 for row in of_one], **style)
    _length_axis(memory, "peak above the inputs, GiB")
    _length_axis(time, "forward and backward, s")
    memory.legend(fontsize=8)
    measured = f"peak memory (GiB) and time (s) measured on {results.device}, {results.date}"
    figure.suptitle(f"{TITLES[subject]}, {shape}: {measured}", fontsize=11)
    return _saved(figure, file, subject)


def _length_axis(axes: Axes, label: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:g}K"))
    axes.grid(which="both", color="0.9")


def _longest(results: Results, rows: list[Row], file: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.5 * len(rows)), layout="constrained")
    label: str | None = "predicted"
    for number, (row, hatch) in enumerate(zip(rows, cycle(HATCHES), strict=False)):
        tokens = row["steps"][-1]["tokens"]
        axes.barh(number, tokens, color="0.85", edgecolor="black", hatch=hatch)
        axes.text(max(tokens, row.get("predicted", 0)), number, f"  {tokens:,}", va="center")
        if "predicted" in row:
            axes.plot(row["predicted"], number, "k|", markersize=18, label=label)
            label = None
    axes.set_yticks(range(len(rows)), [name_of(row["contestant"]) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="longest sequence, tokens")
    if label is None:
        axes.legend()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1000:g}K"))
    limit, found = rows[0]["limit_bytes"] / 1e9, "measured" if label else "measured (bars) and predicted (lines)"
    about = f"longest sequence (tokens) {found}; {results.device}, {results.date}"
    figure.suptitle(f"{rows[0]['shape']}, {limit:,.3g} GB: {about}", fontsize=10)
    return _saved(figure, file, "longest")


def _saved(figure: pyplot.Figure, file: Path, name: str) -> Path:
    path = file.with_name(f"{file.stem}-{name}.png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
