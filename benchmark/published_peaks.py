"""Peaks that others measured on GPUs, each with the `seqtile plan` command of the same step and its prediction.

A row is here only if its source says, or shows, the model, the GPUs, the tokens and what was turned on; what is
inferred from the figures a note says. All in GiB: a source that writes GB is read as its own arithmetic has it, see
`UNITS`.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property

from benchmark.markdown import fill, table
from benchmark.readme import FREE
from typer.testing import CliRunner

from seqtile.cli import app

GB = 1e9 / 2**30  # GiB
ARCTIC = "https://github.com/snowflakedb/ArcticTraining/blob/2771b4b/projects/sequence-parallelism/run-"
ALST = "https://arxiv.org/abs/2506.13996"
TRL = "https://github.com/huggingface/trl/blob/main/examples/sft_qwen3_8b_1m_context/sft_qwen3_8b_1m_context.py"
ACCELERATE = "https://github.com/huggingface/accelerate/pull/4175"
ULYSSES = "https://huggingface.co/blog/ulysses-sp"
AXOLOTL = "https://github.com/axolotl-ai-cloud/axolotl/pull/3733"
NAMES = {ARCTIC: "ArcticTraining", ALST: "ALST", TRL: "TRL", ACCELERATE: "Accelerate", ULYSSES: "Hugging Face"}
NAMES |= {AXOLOTL: "Axolotl"}
UNITS = (
    "ArcticTraining's figures are what the driver reports, with what torch's allocator holds in reserve. TRL and "
    "Accelerate count 10^9 bytes as a GB; the others' GB are GiB."
)
KEYS = 2 * 2**20 * 8 * 128 * 2 / 2**30  # of a million tokens, and their values: 8 heads of 128 in bfloat16
GATHERED = (
    "Accelerate's context parallelism gathers the keys and values of all tokens on every GPU: 4.0 GiB that the plan, "
    "of attention by heads, does not count. With these, attention peaks at {:.1f} GiB."
)
ACCUMULATED = (
    "The post says that the optimizer was on the host. Planned with it on the GPUs, as in the configuration that the "
    "post shows: its 16 bytes a parameter, with weights and gradients, are 60 of the 76 GiB on one GPU."
)
ASSUMED = (
    "The pull request names neither optimizer nor loss. Planned with 8-bit AdamW, a loss in chunks and accumulated "
    "gradients, which its figures suggest."
)


@dataclass(frozen=True)
class Run:
    """A run of others."""

    options: str
    """What `seqtile plan` is given."""
    measured: float
    """GiB at the peak of a GPU; of `fitted` the memory of the GPU."""
    source: str
    note: str = ""
    """What is to be known about the setup."""
    cause: str = ""
    """Why the plan is off by more than 20 %."""
    held: float = 0
    """GiB that the run held in attention and the plan does not."""
    fitted: bool = False
    """No peak is published, only that the run fitted."""

    @cached_property
    def plan(self) -> dict:
        """What the command answers to --json."""
        return json.loads(CliRunner().invoke(app, ["plan", *self.options.split(), "--json"]).output)["plan"]

    @property
    def planned(self) -> float:
        return sum(self.plan["gpu_gib"].values())

    @property
    def explained(self) -> float:
        """What is planned with what else the run held, in GiB."""
        moments = self.plan["moments_gib"]
        attention = max(size for moment, size in moments.items() if moment.startswith("attention"))
        return max(self.planned, attention + self.held)

    @property
    def ratio(self) -> float:
        return self.planned / self.measured

    @property
    def text(self) -> str:
        """Its note or cause."""
        return (self.note or self.cause).format(self.explained)


def alst(model: str, gpus: int, tokens: int) -> str:
    """The step of Arctic Long Sequence Training."""
    away = "--offload optimizer" + " --offload weights" * (gpus == 1)
    away += " --flat" * (gpus > 8)  # as DeepSpeed's Ulysses sends
    return f"{model} --margin 0 --gpus {gpus} --seq-len {tokens} {away} --only loss,MLP,host,Liger"


def h200(tokens: int, only: str) -> str:
    """Of Llama-8B on one GPU of 141 GB."""
    return f"{LLAMA} --gpu-memory 140 --margin 0 --seq-len {tokens} --offload optimizer --offload weights --only {only}"


def ulysses(gpus: int, tokens: int) -> str:
    return f"Qwen/Qwen3-4B --margin 0 --gpus {gpus} --seq-len {tokens} --accumulate --only nothing"


def axolotl(tokens: int, only: str) -> str:
    return f"Qwen/Qwen3-8B --margin 0 --seq-len {tokens} --optimizer adamw_8bit --accumulate --only {only}"


def trl(model: str, only: str) -> str:
    return f"{model} --margin 0 --gpus 8 --seq-len 1048576 --only {only}"


LLAMA, LLAMA_70B, QWEN_32B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B"
RUNS = [
    Run(h200(65_000, "nothing"), 137.36, f"{ARCTIC}h200-sp1-llama-8b-baseline.yml"),
    Run(h200(300_000, "loss,Liger"), 134.96, f"{ARCTIC}h200-sp1-llama-8b-liger.yml"),
    Run(h200(650_000, "loss,host,Liger"), 126.81, f"{ARCTIC}h200-sp1-llama-8b-liger-offload.yml"),
    Run(h200(1_200_000, "loss,MLP,host,Liger"), 136.15, f"{ARCTIC}h200-sp1-llama-8b-liger-offload-tiled-mlp.yml"),
    Run(alst(LLAMA_70B, 32, 4_000_000), 47.70, f"{ARCTIC}h100-sp32-llama-70b.yml"),
    Run(alst(LLAMA_70B, 64, 10_000_000), 53.83, f"{ARCTIC}h100-sp64-llama-70b.yml"),
    Run(
        alst(QWEN_32B, 32, 7_000_000),
        71.55,
        f"{ARCTIC}h100-sp32-qwen3-32b.yml",
        "Run with torch 2.4; the paper found torch before 2.7.1 to leak memory or to use more.",
    ),
    Run(alst(QWEN_32B, 64, 15_000_000), 71.00, f"{ARCTIC}h100-sp64-qwen3-32b.yml"),
    Run(
        alst(LLAMA, 1, 500_000),
        80,
        ALST,
        cause="No peak is published. The recipe says that 555,000 tokens failed in a Triton kernel, by an illegal "
        "memory access: memory was not the limit.",
        fitted=True,
    ),
    Run(
        alst(LLAMA, 8, 3_700_000),
        80,
        ALST,
        cause="No peak is published. 462,500 tokens a GPU are fewer than one GPU took, so it is likely not memory that "
        "was the limit here either.",
        fitted=True,
    ),
    Run(trl("Qwen/Qwen3-8B", "loss,host"), 56.2 * GB, TRL, held=KEYS),
    Run(trl("Qwen/Qwen3-0.6B", "loss"), 27.9 * GB, ACCELERATE, GATHERED, held=KEYS),
    Run(trl("Qwen/Qwen3-0.6B", "loss,host"), 20.8 * GB, ACCELERATE, cause=GATHERED, held=KEYS),
    Run(ulysses(1, 8192), 76.4, ULYSSES, ACCUMULATED),
    Run(ulysses(4, 8192), 23.4, ULYSSES, ACCUMULATED),
    Run(ulysses(4, 32_768), 35.0, ULYSSES, ACCUMULATED),
    Run(ulysses(4, 65_536), 50.5, ULYSSES, ACCUMULATED),
    Run(ulysses(4, 98_304), 66.0, ULYSSES, ACCUMULATED),
    Run(axolotl(16_384, "loss"), 63.3, AXOLOTL, ASSUMED),
    Run(axolotl(16_384, "loss,host"), 58.9, AXOLOTL, ASSUMED),
    Run(axolotl(32_768, "loss"), 73.1, AXOLOTL, ASSUMED),
    Run(axolotl(32_768, "loss,host"), 64.3, AXOLOTL, ASSUMED),
]


def unexplained() -> list[float]:
    """Returns what was planned over what was measured, of the runs for which no cause is named."""
    return [run.ratio for run in RUNS if not run.cause]


def worst_misses() -> tuple[int, int]:
    """Returns by how many per cent a plan without a named cause is too low at most, and too high."""
    ratios = unexplained()
    return math.ceil(100 * (1 - min(ratios))), math.ceil(100 * (max(ratios) - 1))


def peaks() -> str:
    """Returns the table, its notes, and the commands in the order of its rows."""
    rows = [["", "GPUs", "tokens", "measured, GiB", "planned, GiB", "planned / measured", "by", "note"]]
    texts = list(dict.fromkeys(run.text for run in RUNS if run.text))
    for run in RUNS:
        setup = run.plan["setup"]
        by = next(name for url, name in NAMES.items() if run.source.startswith(url))
        rows.append([run.options.split()[0].split("/")[1], str(setup["gpus"]), f"{run.plan['seq_len']:,}"])
        rows[-1] += [f"{'< ' * run.fitted}{run.measured:.1f}", f"{run.planned:.1f}"]
        rows[-1] += [f"{'> ' * run.fitted}{run.ratio:.2f}", f"[{by}]({run.source})"]
        rows[-1] += [str(texts.index(run.text) + 1) if run.text else ""]
    low, high = worst_misses()
    about = (
        f"{UNITS} Except where a note says what it leaves out, a plan is up to {low} % too low, and up to {high} % "
        "too high. **So leave "
        f"{'a fifth' if low == 100 * FREE else f'{low} %'} of the memory free.** Notes:"
    )
    notes = [fill(f"{number}. {text}", indent="   ") for number, text in enumerate(texts, 1)]
    commands = "\n".join(f"seqtile plan {run.options}" for run in RUNS)
    return "\n\n".join(
        (
            table(rows),
            fill(about),
            "\n".join(notes),
            "The commands, row by row; these runs kept no margin:",
            f"```bash\n{commands}\n```",
        )
    )
