"""The job of `seqtile evaluate`: a model and text files, evaluated on this process or on ranks that share documents."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

import seqtile
from seqtile import sp
from seqtile.evaluation import Evaluation
from seqtile.evaluation import evaluate as evaluate_model
from seqtile.recipes import EvaluateOptions, check_output, read_text
from seqtile.recipes.memory import memory_errors
from seqtile.recipes.output import write_figures
from seqtile.recipes.pretrained import device_of, load_model, load_tokenizer, read_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def evaluate(asked: EvaluateOptions) -> Evaluation:
    """Evaluates a model on text files, and writes the result to `asked.output`, if that is given.

    Raises ValueError for bad input, and where the output cannot be written; MemoryError if memory is short.
    """
    if asked.output is not None:
        check_output(asked.output)
    device = device_of(asked.device)
    remedy = "--context N gives the model at most N tokens at once, --layer and --dtype bfloat16 need less"
    ranks = nullcontext() if asked.local_rank is None else shared_by_ranks(device, asked.local_rank, asked.per_node)
    with memory_errors(f"MODEL {asked.model} and its documents need", remedy), ranks as ctx:
        documents, text_bytes = _documents(asked)
        model = load_model(asked.model, "MODEL")
        if asked.adapter is not None:
            with read_of(f"--adapter: {asked.adapter}"):
                model.load_adapter(str(asked.adapter))  # which needs peft
        model.to(device, getattr(torch, asked.dtype))
        seqtile.apply_seqtile(model, layer=asked.layer)
        if ctx is not None:
            sp.apply_ulysses(model, ctx, batches="whole")
        is_main = ctx is None or dist.get_rank() == 0
        quiet = not is_main or asked.as_json or not sys.stdout.isatty()
        columns = ("evaluating", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, transient=True, disable=quiet) as progress:
            bar = progress.add_task("", total=None)
            options = {"context": asked.context, "stride": asked.stride, "text_bytes": text_bytes}
            options["each"] = lambda done, total: progress.update(bar, completed=done, total=total)
            result = evaluate_model(model, documents, **options)
        if asked.output is not None and is_main:
            title = f"{asked.model}: {', '.join(file.name for file in asked.text)}"
            write_figures(asked.output / "evaluation", result.figures(), partial(picture, result, title))
    return result


@contextmanager
def shared_by_ranks(device: str, local_rank: int, per_node: int | None) -> Iterator[sp.SequenceParallel]:
    """Yields the ranks that torchrun started, which share each document."""
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    yield sp.initialize(dist.get_world_size(), per_node=per_node)
    dist.barrier()
    dist.destroy_process_group()


def _documents(asked: EvaluateOptions) -> tuple[list[torch.Tensor], int]:
    """Returns what the model's tokenizer makes of each file, with the special tokens that it adds and no others, and
    the bytes of all of that text: a byte order mark is none of it, ends of lines are as they are."""
    tokenizer, documents, text_bytes = load_tokenizer(asked.model, "MODEL"), [], 0
    for file in asked.text:
        try:
            text = read_text(file, newline="")
        except (UnicodeError, OSError) as error:
            raise ValueError(f"{file} cannot be read as UTF-8 text ({error}); pass text files") from error
        ids = tokenizer(text, verbose=False).input_ids
        if len(ids) < 2:
            raise ValueError(f"{file} has {len(ids)} tokens, expected 2 at least; leave it out")
        documents.append(torch.tensor(ids))
        text_bytes += len(text.encode())
    return documents, text_bytes


def picture(result: Evaluation, title: str) -> "Figure":
    """Returns the mean loss of a token by how many tokens came before it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    spans = result.by_position
    axes.stairs([span.loss for span in spans], [0, *(span.stop for span in spans)], baseline=None)
    axes.axhline(result.loss, linestyle="--", color="tab:gray", label=f"all: {result.loss:.4f}")
    axes.set(title=title.replace("$", r"\$"), xlabel="tokens before", ylabel="mean loss of a token")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
