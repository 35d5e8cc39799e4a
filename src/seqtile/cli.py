"""The command line: seqtile finetune | plan | env."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from seqtile import memory
from seqtile.recipes.forecast import figures, forecast, print_forecast
from seqtile.recipes.job import Job

PACKAGES = ("seqtile", "torch", "triton", "transformers", "accelerate", "peft", "trl", "deepspeed", "liger-kernel")
PACKAGES += ("flash-attn", "datasets", "safetensors")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def seqtile() -> None:
    """Fine-tune Hugging Face models on long documents, with a loss and MLPs whose memory does not grow with length."""


@app.command()
def finetune(
    model: Annotated[str, typer.Option(help="A local path, a hub name, or smollm2-135m.")] = "smollm2-135m",
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or directories (default: Python's standard library); repeat it for more."),
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a sequence.")] = 4096,
    steps: Annotated[int, typer.Option(help="Training steps, one sequence each, or one for each group.")] = 4,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the untiled model first, from the same seed.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16: computed under autocast, weights stay float32.")
    ] = "float32",
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Of torch's generators.")] = 0,
    output: Annotated[Path, typer.Option(help="Directory for the model and the report.")] = Path("runs/finetune"),
    sequence_parallel: Annotated[
        int,
        typer.Option(help="GPUs that share a sequence, under torchrun; the others train on sequences of their own."),
    ] = 1,
    shard: Annotated[
        str, typer.Option(help="Under torchrun, what spreads weights and optimizer: fsdp2, or zero3 (DeepSpeed).")
    ] = "fsdp2",
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep the inputs of checkpointed layers in host memory, not on the GPU.")
    ] = False,
    layer: Annotated[
        bool, typer.Option("--layer", help="Tile layers as a whole, everything but attention: longer sequences fit.")
    ] = False,
    head_groups: Annotated[
        str | None, typer.Option(help="With --layer: attention by so many groups of kv heads: a number, or auto.")
    ] = None,
    local_rank: Annotated[str | None, typer.Option(envvar="LOCAL_RANK", hidden=True, help="Set by torchrun.")] = None,
) -> None:
    """Full-parameter fine-tuning of a causal LM on long documents.

    On several GPUs: torchrun --nproc-per-node 4 -m seqtile.cli finetune --sequence-parallel 4 ...
    """
    job = Job(
        model=model,
        data=tuple(data or ()),
        seq_len=seq_len,
        steps=steps,
        compare=compare,
        device=device,
        dtype=dtype,
        learning_rate=learning_rate,
        seed=seed,
        output=output,
        sequence_parallel=sequence_parallel,
        shard=shard,
        offload=offload,
        layer=layer,
        head_groups=number_or_name(head_groups),
    )
    console = Console(soft_wrap=True)
    try:
        if local_rank is None:  # before anything slow is imported; ranks do it once they know which of them speaks
            job.check()
        run_and_leave(job, console)
    except (ModuleNotFoundError, ValueError, OSError, MemoryError) as error:
        console.print("[red]error:[/red]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        text = f"interrupted {error}".strip()
        console.print(f"\n{text}" if console.is_terminal else text)  # there a bar ends without a newline
        raise typer.Exit(130) from error


def run_and_leave(job: Job, console: Console) -> None:
    """Runs `job` and, as a rank, ends the process. `console` is to print its errors."""
    try:
        from seqtile.recipes.finetune import finetune as run
        from seqtile.recipes.ranks import leave, speaks
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: pip install 'seqtile[demo]'") from error
    console.quiet = not speaks()
    try:
        run(job, Console(quiet=console.quiet))
        leave()
    except (OSError, MemoryError):
        console.quiet = False  # not all ranks raise it alike
        raise


def number_or_name(option: str | None) -> int | str | None:
    return int(option) if option and option.isdigit() else option


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help=f"A config.json, its directory, or {', '.join(memory.KNOWN)}.")],
    seq_len: Annotated[int | None, typer.Option(help="Tokens a sequence (default: the longest that fits).")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs in all.")] = 1,
    sequence_parallel: Annotated[int | None, typer.Option(help="GPUs that share a sequence (default: all).")] = None,
    gpu_memory: Annotated[float, typer.Option(help="GiB of a GPU.")] = 80,
    host_memory: Annotated[float, typer.Option(help="GiB of a node.")] = 1900,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    zero_stage: Annotated[int, typer.Option(help="Spread over all GPUs: 1 optimizer, 2 gradients, 3 weights too.")] = 3,
    optimizer: Annotated[
        str, typer.Option(help="adamw (16 bytes a parameter, with a float32 copy of the weights), adamw_8bit, sgd.")
    ] = "adamw",
    dtype: Annotated[str, typer.Option(help="Of weights and activations: bfloat16, float16 or float32.")] = "bfloat16",
    lora_rank: Annotated[
        int | None, typer.Option(help="Of adapters over every projection; all else is frozen.")
    ] = None,
    offload: Annotated[
        list[str] | None, typer.Option(help="To host memory in any case: optimizer, weights; repeat it for more.")
    ] = None,
    layer: Annotated[
        bool, typer.Option("--layer", help="Plan with layers tiled as a whole, also where less is needed.")
    ] = False,
    head_groups: Annotated[
        str | None, typer.Option(help="Plan with so many groups of kv heads in such layers: a number, or auto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """What fits, before it runs: the longest sequence with each feature turned on, and what a step then holds.

    Exits with 1 if a sequence of --seq-len does not fit.
    """
    if "activations" in (offload or ()):
        raise typer.BadParameter(
            "layer inputs on the host are tried in any case; leave activations out", param_hint="--offload"
        )
    console = Console(soft_wrap=True)
    setup = {
        "gpus": gpus,
        "sequence_parallel": gpus if sequence_parallel is None else sequence_parallel,
        "gpu_memory_gib": gpu_memory,
        "host_memory_gib": host_memory,
        "gpus_per_node": gpus_per_node,
        "zero_stage": zero_stage,
        "optimizer": optimizer,
        "dtype": dtype,
        "lora_rank": lora_rank,
        "offload": tuple(offload or ()),
        "layer": layer,
        "head_groups": number_or_name(head_groups),
    }
    try:
        found = forecast(model, seq_len, batch_size, **setup)
    except ValueError as error:
        console.print("[red]error:[/red]", end=" ")
        console.print(in_options(str(error)), markup=False, highlight=False)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(figures(found), indent=2))
    else:
        print_forecast(found, console)
    if seq_len is not None and not found.plan.fits:
        raise typer.Exit(1)


def in_options(message: str) -> str:
    """With the names of `plan`'s options in the place of those of `seqtile.memory`."""
    name, found, rest = message.partition(": ")
    if not found or name not in {"seq_len", "batch_size", *memory.Setup.__dataclass_fields__}:
        return message
    return f"--{name.removesuffix('_gib').replace('_', '-')}: {rest}"


@app.command()
def env() -> None:
    """The versions of everything that seqtile meets, for a bug report."""
    import torch

    console = Console()
    console.print(f"{'python':<14}{platform.python_version()} on {platform.platform()}", highlight=False)
    for package in PACKAGES:
        try:
            console.print(f"{package:<14}{version(package)}", highlight=False)
        except PackageNotFoundError:
            console.print(f"{package:<14}not installed", highlight=False)
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        about = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}, CUDA {torch.version.cuda}"
        console.print(f"{f'gpu {i}':<14}{about}", highlight=False)
    if not torch.cuda.is_available():
        console.print(f"{'gpu':<14}none", highlight=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
