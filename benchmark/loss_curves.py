"""Loss curves of a small model: untiled, tiled whole, and untiled with another order of summation.

    python -m benchmark.loss_curves

A Llama of two layers predicts the bytes of Python's standard library: 300 steps of 3,584 tokens, 1.08 million in all,
each step in 8 chunks where tiled. Four more runs permute the channels of hidden states and MLPs, which changes nothing
but the order in which products are summed: how far two curves of the same training are apart without seqtile. In
float32, and in bfloat16 under autocast; with checkpointing. Half an hour on one core. Writes loss_curves.json
beside this file, and the picture of docs/benchmarks.md.
"""

import argparse
import json
import platform
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
from benchmark.markdown import table
from benchmark.pictures import pyplot
from transformers import LlamaConfig, LlamaForCausalLM

import seqtile

STEPS, TOKENS, CHUNKS = 300, 3584, 8
SPIKE = 128
"""The highest loss after the first seven steps: the bytes are of `_sysconfigdata`, a table of build settings."""
PERMUTED = tuple(f"permuted {number}" for number in range(1, 5))
RUNS = ("untiled", "tiled", *PERMUTED)
DTYPES = ("float32", "bfloat16")
FILE = Path(__file__).with_suffix(".json")
PICTURE = FILE.parents[1] / "docs" / "images" / "loss-curves.png"
CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": TOKENS,
    "use_cache": False,
}


def text(tokens: int) -> torch.Tensor:
    """Returns the first bytes of the standard library's modules by name, int64 [tokens]."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:tokens]), dtype=torch.uint8).long()


def model_of(run: str) -> LlamaForCausalLM:
    """Returns the model of a run, float32, with activation checkpointing; every run begins at the same weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if run in PERMUTED:
        torch.manual_seed(int(run.split()[1]))
        permute_channels(model)
    if run == "tiled":
        seqtile.apply_seqtile(model, layer=True, chunk_tokens=TOKENS // CHUNKS)
    return model.train()


@torch.no_grad()
def permute_channels(model: LlamaForCausalLM) -> None:
    """Puts the channels of the hidden states and of every MLP into another order: the same function and updates."""
    hidden = torch.randperm(CONFIG["hidden_size"])
    for name, weight in model.named_parameters():
        writes = weight.dim() == 1 or name.split(".")[-2] in ("o_proj", "down_proj")  # hidden states, others read them
        weight.copy_(weight[hidden] if writes else weight[:, hidden])
    for layer in model.model.layers:
        inner = torch.randperm(CONFIG["intermediate_size"])
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight.copy_(projection.weight[inner])
        layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, inner])


def curve(run: str, dtype: str, steps: int = STEPS, tokens: int = TOKENS) -> list[float]:
    """Trains with AdamW, one sequence a step; returns the loss of each step before its update."""
    model, data = model_of(run), text(steps * tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in data.view(steps, 1, tokens):
        with torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def measured(dtype: str) -> dict[str, list[float]]:
    """Returns the curve of each run."""
    curves = {}
    for run in RUNS:
        curves[run] = curve(run, dtype)
        print(f"{dtype}, {run}: {curves[run][0]:.4f} to {curves[run][-1]:.4f}", flush=True)
    return curves


def differences(curves: dict[str, list[float]], run: str) -> list[float]:
    """Returns a run's loss minus the untiled one's, step by step."""
    return [a - b for a, b in zip(curves[run], curves["untiled"], strict=True)]


def apart(curves: dict[str, list[float]], run: str) -> tuple[float, float, float]:
    """Returns the mean and the largest distance of a run's loss from the untiled one's, and the mean difference."""
    found = differences(curves, run)
    distances = [abs(each) for each in found]
    return sum(distances) / len(found), max(distances), sum(found) / len(found)


def block() -> str:
    """What docs/benchmarks.md shows."""
    found = json.loads(FILE.read_text())
    rows = [["dtype", "run", "loss, step 1", f"step {STEPS}", "mean distance", "largest", "mean difference"]]
    for dtype, curves in found["curves"].items():
        for run, losses in curves.items():
            distances = [""] * 3 if run == "untiled" else [f"{distance:.1e}" for distance in apart(curves, run)]
            rows.append([dtype, run, f"{losses[0]:.5f}", f"{losses[-1]:.5f}", *distances])
    return f"torch {found['torch']}, Python {found['python']}, on a CPU:\n\n{table(rows, 2)}"


def draw(results: dict[str, dict[str, list[float]]], file: Path) -> None:
    """Above the untiled loss, below the differences from it: with seqtile, and by rounding alone."""
    layout = {"layout": "constrained", "squeeze": False, "height_ratios": (1, 2), "sharex": True}
    figure, axes = pyplot.subplots(2, len(results), figsize=(11, 5.6), **layout)
    for (dtype, curves), (above, below) in zip(results.items(), axes.T, strict=True):
        steps = range(1, len(curves["untiled"]) + 1)
        above.plot(steps, curves["untiled"], color="black", linewidth=1)
        above.set(title=dtype, ylabel="untiled loss,\nnats per token")
        if SPIKE in steps:
            about = {"xytext": (20, -4), "textcoords": "offset points", "fontsize": 8}
            above.annotate(f"step {SPIKE}: a file of numbers", (SPIKE, curves["untiled"][SPIKE - 1]), **about)
        orders = [differences(curves, run) for run in PERMUTED]
        bounds = [[bound(found) for found in zip(*orders, strict=True)] for bound in (min, max)]
        label = f"untiled, summed in {len(orders)} other orders: from the least to the most"
        below.fill_between(steps, *bounds, color="0.7", label=label)
        below.plot(steps, differences(curves, "tiled"), color="#1f6feb", linewidth=1, label="seqtile")
        below.set(xlabel="step", ylabel="difference from the untiled loss,\nnats per token")
        below.legend(fontsize=8, loc="upper left")
    figure.suptitle(
        "Training loss of a small model, and its difference with seqtile (nats per token); measured on a CPU"
    )
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES, help="none: only draw")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {"curves": {}}
    for dtype in options.dtypes:
        found["torch"], found["python"] = torch.__version__, platform.python_version()
        found["curves"][dtype] = measured(dtype)
        options.out.write_text(json.dumps(found) + "\n")
    draw(found["curves"], options.picture)


if __name__ == "__main__":
    main()
