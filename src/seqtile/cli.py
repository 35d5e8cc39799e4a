"""The command line: seqtile finetune | evaluate | plan | check | probe | env."""

import inspect
import json
import logging
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from seqtile import __version__
from seqtile.limits import installed
from seqtile.probe import NOT_INSTALLED, PROBES, Row, figures_of, markdown, versions
from seqtile.probe import probe as rows_of_probes
from seqtile.recipes import CheckOptions, EvaluateOptions, check_trl
from seqtile.recipes.plan import PlanOptions, forecast
from seqtile.recipes.plan_output import figures, print_forecast

NEEDED = ("torch", "triton", "transformers")
SDPA = ("flash", "mem_efficient", "math", "cudnn")  # torch's switches of what sdpa may use
OTHERS = (
    "accelerate",
    "peft",
    "trl",
    "deepspeed",
    "liger-kernel",
    "bitsandbytes",
    "flash-attn",
    "datasets",
    "safetensors",
    "typer",
)

FOREIGN = {  # loggers of packages that transformers imports -> how lines begin that they print whatever is asked for
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "DeepSpeed": "Setting accelerator to CPU",
    "torch.utils._pytree": "<enum '",
    "torchao": "Failed to load",
    "transformers.utils.generic": "`past_key_values`/`cache_params` are deprecated",  # by TRL 1.14
}
for _name, _start in FOREIGN.items():  # here, so that a process that a command starts prints none either
    logging.getLogger(_name).addFilter(lambda record, start=_start: not record.getMessage().startswith(start))

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


def print_version(asked: bool) -> None:
    if asked:
        print(f"seqtile {__version__}")
        raise typer.Exit()


@app.callback()
def seqtile(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fine-tune Hugging Face models on long documents, with a loss and MLPs whose memory does not grow with length."""


def command(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Makes a command of a function of one dataclass, whose fields are its options."""
    [parameter] = inspect.signature(function).parameters.values()
    options = parameter.annotation

    def with_options(**values: Any) -> None:
        function(options(**values))

    with_options.__signature__ = signature_of(options)
    app.command(function.__name__, help=inspect.getdoc(function))(with_options)
    return function


def signature_of(options: type) -> inspect.Signature:
    """Returns the fields of a dataclass as typer takes them."""
    parameters = inspect.signature(options).parameters.values()
    kinds = (Annotated[field.type, field.metadata["typer"]] for field in fields(options))
    return inspect.Signature([one.replace(annotation=kind) for one, kind in zip(parameters, kinds, strict=True)])


def stdout_console(quiet: bool = False) -> Console:
    """Returns a console of stdout that prints names and paths as they are, though they may look like Rich's markup; in
    a file or a pipe, which have no width, so wide that it cuts nothing off."""
    width = None if sys.stdout.isatty() else 200
    return Console(quiet=quiet, soft_wrap=True, width=width, markup=False, emoji=False, highlight=False)


@contextmanager
def errors_printed(console: Console) -> Iterator[None]:
    """Ends the command with 1 for an error that has a sentence for the user, with 130 for Ctrl-C."""
    try:
        yield
    except (ImportError, ValueError, OSError, MemoryError) as error:
        if isinstance(error, OSError | MemoryError):  # it may be of one rank alone, whichever that is
            console.quiet = False
        console.print("error:", style="red", end=" ")
        console.print(str(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        text = f"interrupted {error}".strip()
        console.print(f"\n{text}" if console.is_terminal else text)  # there a bar ends without a newline
        raise typer.Exit(130) from error


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def finetune(
    context: typer.Context, local_rank: Annotated[int | None, typer.Option(envvar="LOCAL_RANK", hidden=True)] = None
) -> None:
    """Train a causal LM on long documents or chats: TRL's SFT, with seqtile in it.

    Usage: seqtile finetune [OPTIONS], or on several GPUs: torchrun --nproc-per-node 8 -m seqtile.cli finetune [OPTIONS]

    Model and data
      --model              a local path, a hub name, or smollm2-135m (default, from PyPI)
      --data               text files, directories of them; JSON, JSONL, CSV or Parquet with messages, prompt and
                           completion, or text; a data set of the hub (default: the source of Python's library)
      --seq-len            tokens of a sequence at most (4096); text files become sequences of exactly so many
      --config             a YAML file with any of these options
    Training
      --steps              steps in total (default: --num-train-epochs, one; 4 on the default data)
      --learning-rate      the largest rate (1e-5; 2e-4 for adapters); it rises, then falls by --lr-scheduler-type
      --gradient-accumulation-steps    batches of a step (1)
      --packing            put short rows into one sequence; attention computes them without a mask
      --assistant-only-loss            of chats train the assistant's tokens only
      --test-split-size    with --eval-strategy: the share of the rows to evaluate on
      --seed               of drawn weights, dropout and the order of the data (42)
      --compare            train the untiled model first, in a process of its own, and compare
    Adapters
      --use-peft           train LoRA's adapters (--lora-r 16, --lora-alpha 32) on all linear layers of a frozen base
      --load-in-4bit       with --use-peft: the base in 4 bits (QLoRA)
      --merge              also write the merged model, to OUTPUT/merged
    Memory
      --layer              tile whole layers, everything except attention: longer sequences fit
      --head-groups        with --layer: attention in chunks of kv heads: a number, or auto
      --offload            keep the inputs of checkpointed layers in host memory, not on the GPU
      --fit                choose the cheapest of these three with which a step fits
      --margin             the share of memory that --fit keeps free (0.2)
      --dtype              of the weights (float32, under bfloat16 autocast on a GPU; bfloat16 below adapters)
      --sequence-parallel  under torchrun: GPUs that share a sequence (1)
      --per-node           of these GPUs, how many are on each node (default: by host names)
    Output
      --output             directory of model, report and checkpoints (runs/finetune)
      --save-every         a checkpoint every so many steps and at the end (default: if the run is ended early)
      --resume             continue from the last checkpoint in --output, with the same options
      --device             cpu or cuda (default: cuda if there is one)

    All options of TRL's SFTConfig, ModelConfig and data sets are taken, as --use-peft or --use_peft: see --help-all
    """
    console, got = stdout_console(quiet=local_rank not in (None, 0)), None
    if {"--help", "-h"} & set(context.args):
        console.print(inspect.getdoc(finetune))
        return
    with errors_printed(console):
        got = recipe("finetune")(context.args, console)
    if got is not None:
        end_by(got)
    end_rank(local_rank)


@command
def evaluate(asked: EvaluateOptions) -> None:
    """Loss, perplexity and bits per byte of long documents, by the number of tokens before.

    With several GPUs sharing each document: torchrun --nproc-per-node 4 -m seqtile.cli evaluate MODEL TEXT ...
    """
    console = stdout_console(quiet=asked.local_rank not in (None, 0))
    with errors_printed(console):
        asked.check()
        result = recipe("evaluate")(asked)
    console.print(json.dumps(result.figures(), indent=2) if asked.as_json else str(result))
    end_rank(asked.local_rank)


def end_by(number: int) -> None:
    """Ends this process as the signal would have, so that whoever sent it sees that."""
    sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def recipe(name: str) -> Callable[..., Any]:
    """Returns the function of a module of recipes that has its name; it is slow to import."""
    try:
        if name == "finetune":
            check_trl(version("trl"))
        return getattr(import_module(f"seqtile.recipes.{name}"), name)
    except ModuleNotFoundError as error:
        absent = error.name and "." not in error.name and find_spec(error.name) is None
        raise ModuleNotFoundError(
            f"{f'{error.name} is not installed' if absent else error}: pip install 'seqtile[finetune]'"
        ) from error


def end_rank(local_rank: int | None) -> None:
    """Ends a process that torchrun started: threads of gloo abort the interpreter's own exit now and then."""
    if local_rank is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@command
def plan(asked: PlanOptions) -> None:
    """Predicts what fits before it runs: the longest sequence with more and more features, and a step's memory.

    Exits with 1 if a sequence of --seq-len does not fit.
    """
    console = stdout_console()
    with errors_printed(console), Console(stderr=True).status("") as status:  # of a simulation, where there is one
        result = forecast(asked, status.update)
    is_too_long = asked.seq_len is not None and not result.fits(asked.seq_len)
    finish(figures(result) if asked.as_json else partial(print_forecast, result, console), is_too_long)


def finish(result: Callable[[], None] | dict[str, Any] | list[Any], failed: bool) -> None:
    """Prints a result: figures as JSON, or what a function prints; ends the command with 1 if it `failed`."""
    if callable(result):
        result()
    else:
        print(json.dumps(result, indent=2))
    if failed:
        raise typer.Exit(1)


@command
def check(asked: CheckOptions) -> None:
    """Tries a small copy of a model: which parts can be tiled, and whether each computes the same.

    Takes half a minute to a few minutes, by the machine and its load; --no-variants takes less.

    Exits with 1 if a part computes something else when tiled.
    """
    from seqtile.recipes.check import check as run  # slow to import
    from seqtile.recipes.check import print_report

    console = stdout_console()
    with errors_printed(console):
        report = run(asked)
    finish(report.figures() if asked.as_json else partial(print_report, report, console), report.differs)


@app.command()
def probe(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PROBES)}; repeat it for more.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the rows as a table in Markdown.")] = False,
) -> None:
    """Looks for defects of long-sequence training in seqtile and in its installed peers, on CPUs.

    Takes a minute on two free cores, up to ten on busy ones; prints each result as soon as it is there.

    Exits with 1 unless seqtile itself is right.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises, so that the probe's processes are ended
    console, names = stdout_console(), only or tuple(PROBES)
    with errors_printed(console):
        if as_json or as_markdown:
            with Console(stderr=True).status("") as status:
                rows = rows_of_probes(names, progress=status.update)
        else:
            rows = rows_of_probes(names, progress=console.print, each=partial(print_row, console))
    printed = partial(print, markdown(rows)) if as_markdown else partial(print_summary, rows, console)
    is_wrong = any(row.package == "seqtile" and row.verdict != "right" for row in rows)
    finish(figures_of(rows) if as_json else printed, is_wrong)


def print_row(console: Console, row: Row) -> None:
    """Prints a result of a probe in a line, unless its package is not installed, which the summary says."""
    if row.verdict != NOT_INSTALLED:
        verdict = Text(f"{row.verdict:<12}", {"right": "green", "wrong": "red"}.get(row.verdict, "yellow"))
        said = f"{row.package}, {row.system}" + f": {row.figure}" * bool(row.figure) + f" ({row.note})" * bool(row.note)
        console.print(f"  {row.probe:<12}", verdict, f" {said}", sep="")


def print_summary(rows: list[Row], console: Console) -> None:
    absent = dict.fromkeys(row.package for row in rows if row.verdict == NOT_INSTALLED)
    if absent:
        console.print(f"Not installed, and so not tried: {', '.join(absent)}.")
    found = Counter(row.verdict for row in rows if row.verdict != NOT_INSTALLED)
    first = [verdict for verdict in ("right", "wrong") if verdict in found]
    counts = ", ".join(f"{found[verdict]} {verdict}" for verdict in dict.fromkeys((*first, *found)))
    console.print(f"With {versions()}.\n{found.total()} results: {counts}.")


@app.command()
def env() -> None:
    """Prints the machine and the versions of all relevant packages as a Markdown list, for a bug report."""
    lines = {"seqtile": __version__, "Python": platform.python_version(), "OS": platform.platform(), "CPU": cpu()}
    lines |= gpus() | {"C compiler": compiler()} | {name: installed(name) or "not installed" for name in NEEDED}
    lines["also installed"] = ", ".join(f"{name} {installed(name)}" for name in OTHERS if installed(name)) or "none"
    lines["not installed"] = ", ".join(name for name in OTHERS if not installed(name)) or "none"
    for name, about in lines.items():
        print(f"- {name}: {about}")


def cpu() -> str:
    file = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", file.read_text()) if file.exists() else None
    name = named[1] if named else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return f"{name}, {os.cpu_count()} cores" + (f", {memory / 2**30:.0f} GiB" if memory else "")


def compiler() -> str:
    """Returns what Triton builds its launcher with."""
    program = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "none"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return f"{program}, {'with' if header.exists() else 'without'} Python.h"


def gpus() -> dict[str, str]:
    """Returns the GPUs that torch sees, the CUDA and the driver behind them, and what its attention may use."""
    try:
        import torch
        from torch.utils import collect_env
    except Exception as error:  # which is what the report may be about
        return {"GPU": f"unknown: torch cannot be imported ({error})"}
    seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = Counter(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in seen)
    driver = collect_env.get_nvidia_driver_version(collect_env.run) or "none"
    cuda = f"{torch.version.cuda or 'none'} in torch, driver {driver}"
    lines = {"GPU": "; ".join(f"{count} x {name}" for name, count in names.items()) or "none", "CUDA": cuda}
    switches = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SDPA}
    lines["sdpa"] = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in switches.items())
    try:
        lines["cuDNN"] = str(torch.backends.cudnn.version() or "none")
    except RuntimeError as error:  # it is not the one that torch was built for
        lines["cuDNN"] = f"unknown: {error}"
    return lines


def main() -> None:
    app()


if __name__ == "__main__":
    main()
