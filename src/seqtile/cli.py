"""The command line: seqtile finetune | plan | env."""

import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer
from rich.console import Console

from seqtile.recipes import Job
from seqtile.recipes.plan import Question, figures, forecast, print_forecast

PACKAGES = ("seqtile", "torch", "triton", "transformers", "accelerate", "peft", "trl", "deepspeed", "liger-kernel")
PACKAGES += ("flash-attn", "datasets", "safetensors")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def seqtile() -> None:
    """Fine-tune Hugging Face models on long documents, with a loss and MLPs whose memory does not grow with length."""


def command(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Makes a command of a function of one dataclass: each field is an option, as its annotation says."""
    [parameter] = inspect.signature(function).parameters.values()
    options = parameter.annotation

    def with_options(**values: Any) -> None:
        function(options(**values))

    with_options.__signature__ = inspect.signature(options)
    app.command(function.__name__, help=inspect.getdoc(function))(with_options)
    return function


@contextmanager
def errors_printed(console: Console) -> Iterator[None]:
    """Ends the command with 1 for an error that has a sentence for the user, with 130 for Ctrl-C."""
    try:
        yield
    except (ModuleNotFoundError, ValueError, OSError, MemoryError) as error:
        console.quiet &= not isinstance(error, OSError | MemoryError)  # which not all ranks raise alike
        console.print("[red]error:[/red]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        text = f"interrupted {error}".strip()
        console.print(f"\n{text}" if console.is_terminal else text)  # there a bar ends without a newline
        raise typer.Exit(130) from error


@command
def finetune(job: Job) -> None:
    """Full-parameter fine-tuning of a causal LM on long documents.

    On several GPUs: torchrun --nproc-per-node 4 -m seqtile.cli finetune --sequence-parallel 4 ...
    """
    quiet = job.local_rank not in (None, 0)
    with errors_printed(Console(soft_wrap=True, quiet=quiet)):
        job.check()
        try:
            from seqtile.recipes.finetune import finetune as run  # slow to import
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: pip install 'seqtile[demo]'") from error
        run(job, Console(quiet=quiet))
    if job.local_rank is not None:  # threads of gloo abort the interpreter's own exit now and then
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@command
def plan(asked: Question) -> None:
    """Tells what fits, before it runs: the longest sequence with each feature turned on, and what a step then holds.

    Exits with 1 if a sequence of --seq-len does not fit.
    """
    if "activations" in (asked.offload or ()):
        raise typer.BadParameter(
            "layer inputs on the host are tried in any case; leave activations out", param_hint="--offload"
        )
    console = Console(soft_wrap=True)
    with errors_printed(console):
        found = forecast(asked)
    if asked.as_json:
        print(json.dumps(figures(found), indent=2))
    else:
        print_forecast(found, console)
    if asked.seq_len is not None and not found.plan.fits:
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """The versions of everything that seqtile meets, for a bug report."""
    import torch

    found = {"python": f"{platform.python_version()} on {platform.platform()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        found[f"gpu {i}"] = f"{gpu.name}, {memory}, sm_{gpu.major}{gpu.minor}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        found["gpu"] = "none"
    for name, about in found.items():
        Console().print(f"{name:<14}{about}", highlight=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
