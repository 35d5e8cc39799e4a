"""What the pages show of `seqtile.memory`'s predictions, beside what others have published."""

import json
import re
from pathlib import Path
from typing import Any

from benchmark import published_peaks, readme
from benchmark.markdown import fill, table
from benchmark.results import RESULTS
from typer.testing import CliRunner

from seqtile import memory
from seqtile.cli import app
from seqtile.fitting import choose, formula_of
from seqtile.memory.setup import GIB

PLANNING, BACKGROUND = "docs/planning.md", "docs/predictions.md"
QUANTISED, CASES = "docs/adapters.md", "docs/your-case.md"
PAGES = {  # the block of each page
    "longest of each line": "README.md",
    "output of the command": PLANNING,
    "what fit prints": PLANNING,
    "shared tokens": PLANNING,
    "measured peaks": BACKGROUND,
    "published lengths": BACKGROUND,
    "whole layers": BACKGROUND,
    "4-bit bases": QUANTISED,
    "predicted for QLoRA": CASES,
    "predicted for full fine-tuning": CASES,
}
CASE = re.compile(r"```bash\nseqtile (plan (?:[^\n]*\\\n)*[^\n]*)\n```\n\n<!-- predicted for ")
COMMAND = re.compile(r"```bash\nseqtile (plan [^\n]*)\n```")
LLAMA, LLAMA_70B, QWEN, QWEN_32B = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
)
EVERYTHING = ("activations", "optimizer", "weights")
PUBLISHED = {  # the longest of ALST, by GPUs
    LLAMA: {1: "500K", 8: "3.7M", 32: "15M"},
    LLAMA_70B: {16: "1.2M", 32: "4M", 64: "10M"},
    QWEN_32B: {1: "230K", 8: "1.55M", 32: "7M", 64: "15M"},
}
ABLATION = {  # of ALST: what it published, the GPUs that share a sequence, features of `seqtile.memory`
    "checkpointing, ZeRO-3, optimizer on the host": ("32K", 1, "nothing"),
    "+ tiled loss": ("160K", 1, "loss"),
    "+ 8 GPUs share the sequence": ("1.1M", 8, "loss"),
    "+ tiled MLP": ("1.2M", 8, "loss, MLP"),
    "(without it) + inputs on the host": ("2.4M", 8, "loss", "host"),
    "all of these": ("3.7M", 8, "loss, MLP", "host"),
}
GROUPS = {"tiles": memory.TILES, "head_groups": "auto"}


def blocks(root: Path, results: Path = RESULTS) -> dict[str, str]:
    """Returns what stands in the pages below `root` between `<!-- name -->` and `<!-- end of name -->`."""
    made = (readme.caption(results), command((root / PLANNING).read_text()), fit(), shared_tokens())
    made += (published_peaks.peaks(), lengths(), whole_layers(), quantised())
    made += tuple(case(found) for found in CASE.findall((root / CASES).read_text()))
    return dict(zip(PAGES, made, strict=True))


def command(page: str) -> str:
    """What the page's first command prints on 100 columns."""
    found = CliRunner().invoke(app, COMMAND.search(page)[1].split(), env={"COLUMNS": "100"})
    return f"```text\n{found.output.rstrip()}\n```"


def case(options: str) -> str:
    """What a plan's step needs, of the command that stands above it."""
    step = json.loads(CliRunner().invoke(app, [*options.replace("\\\n", "").split(), "--json"]).output)["plan"]
    setup, gpu, host = step["setup"], sum(step["gpu_gib"].values()), sum(step["host_gib"].values())
    where = "on each GPU" if setup["gpus"] > 1 else "on the GPU"
    parts = [f"Predicted, not measured: **{gpu:.1f} GiB** at the peak {where}, of {setup['gpu_memory_gib']:g} GiB"]
    parts += [f"{host:.1f} GiB in host memory"] if host else []
    return fill(f"{'; '.join(parts)}.")


def fit() -> str:
    room = memory.Setup(**with_room(180), host_memory_gib=1900)
    return f"```text\n{choose(formula_of(LLAMA), room, 262_144)}\n```"


def shared_tokens() -> str:
    """Of a prompt and its completions. A sequence that has to be longer than its prompt may not fit at all."""
    prompt, rows = 30_000, [["", "each alone, GiB", "prompt once, GiB", "longest, each alone", "longest, prompt once"]]
    room = with_room(80)
    given = {"batch_size": 8, "gpus": 8, "batches": "whole", "offload": ("optimizer",)}
    over = {"sequence_parallel": 8}
    setups = {
        "loss and MLPs in chunks": {},
        "layers in chunks": {"tiles": memory.TILES},
        "layers in chunks, their inputs on the host": {"tiles": memory.TILES, "offload": EVERYTHING[:2]},
        "loss and MLPs in chunks, over 8 GPUs": over,
        "layers in chunks, over 8 GPUs": over | {"tiles": memory.TILES},
    }
    for name, setup in setups.items():
        found = [given | setup | {"shared_tokens": tokens} for tokens in (0, prompt)]
        planned = [f"{memory.plan(LLAMA, seq_len=32_000, **each).gpu_bytes / GIB:.1f}" for each in found]
        lengths = [memory.longest(LLAMA, **each, **room).tokens for each in found]
        rows.append([name, *planned, *(f"{length:,}" if length > prompt else "none" for length in lengths)])
    return table(rows)


def longest(model: str, **setup: Any) -> str:
    tokens = memory.longest(model, **setup).tokens
    return f"{tokens:,}" if tokens else "none"


def with_room(gib: float) -> dict[str, float]:
    """A GPU of so much memory, a fifth of it left free, as the pages ask for."""
    return {"gpu_memory_gib": gib - gib * readme.FREE}


def alst(gpus: int) -> dict[str, Any]:
    """The step of Arctic Long Sequence Training, without Liger's norms."""
    return {"gpus": gpus, "sequence_parallel": gpus, "flat": True, "offload": EVERYTHING[: 3 if gpus == 1 else 2]}


def short(model: str) -> str:
    return model.split("/")[1]


def lengths() -> str:
    rows = [["", "GPUs", "published", "predicted", "with Liger", "bound by"]]
    for model, lengths in PUBLISHED.items():
        for gpus, length in lengths.items():
            plain, light = (memory.longest(model, **alst(gpus), liger=liger) for liger in (False, True))
            figures = [f"{plain.tokens:,}", f"{light.tokens:,}", plain.bound.partition(":")[0]]
            rows.append([short(model), str(gpus), length, *figures])
    steps = []
    for step, (length, shared_by, *names) in ABLATION.items():
        setup = memory.Setup(gpus=8, sequence_parallel=shared_by, offload=("optimizer",))
        steps.append([step, length, longest(LLAMA, **vars(memory.with_features(setup, *names)))])
    step = memory.plan(LLAMA_70B, seq_len=1_200_000, tiles=memory.TILES[:2], **alst(16))
    peaks = " and ".join(f"{run.measured:.1f}" for run in published_peaks.RUNS if LLAMA_70B in run.options)
    bound = (
        "`bound by` refers to the column `predicted`. For the published 1.2 million tokens of Llama-3.1-70B on 16 GPUs "
        f"the plan counts {step.gpu_bytes / GIB:.1f} of 80 GiB on each GPU and {step.host_bytes / GIB:,.0f} of 1,900 "
        "GiB in each node's host memory. No peak of this run is listed above, so what limited it is unknown. The runs "
        f"on 32 and 64 GPUs peaked at {peaks} GiB: GPU memory did not limit these."
    )
    about = (
        "The paper's ablation (its table 1: Llama-8B, 8 GPUs), and the predictions for the same steps, without Liger's "
        "norms:"
    )
    blocks = (table(rows), fill(bound), fill(about), table([["", "published", "predicted"], *steps]))
    return "\n\n".join(blocks)


def whole_layers() -> str:
    rows = [["", "GPU", "predicted", "with Liger", "layer tiled", "head chunks"]]
    setups = ({}, {"liger": True}, {"tiles": memory.TILES}, GROUPS)
    for model in (LLAMA, QWEN, QWEN_32B):
        for gib in (80, 141):
            found = [longest(model, **with_room(gib), offload=EVERYTHING, **setup) for setup in setups]
            rows.append([short(model), f"{gib} GiB", *found])
    shared = longest(LLAMA, **alst(8), **with_room(80), tiles=memory.TILES, batches="whole")
    about = (
        "On 8 GPUs of 80 GiB that share the sequence, a fifth of each left free, with layers tiled as a whole, "
        f"optimizer and layer inputs on the host, the prediction for Llama-3.1-8B is {shared} tokens. Each GPU then "
        "has one kv head, too few for head chunks."
    )
    return f"{table(rows)}\n\n{fill(about)}"


def quantised() -> str:
    header = ["checkpointed", "loss and MLP in chunks", "whole layers, head chunks", "and their inputs on the host"]
    rows = [["", "GPU", *header]]
    setups = ({"tiles": ()}, {}, GROUPS, GROUPS | {"offload": ("activations",)})
    for model in (LLAMA, QWEN, QWEN_32B):
        for gib in (24, 48, 80):
            common = {**with_room(gib), "lora_rank": 16, "load_in_4bit": True}
            rows.append([short(model), f"{gib} GiB", *(longest(model, **common | setup) for setup in setups)])
    return table(rows)
