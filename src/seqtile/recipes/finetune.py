"""The main job: full-parameter fine-tuning of a causal LM on long documents, and how it compares with not tiling."""

import io
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import seqtile
from seqtile import sp
from seqtile.recipes.alone import run_alone
from seqtile.recipes.documents import sequences, standard_library
from seqtile.recipes.job import Job, check_space, check_writable
from seqtile.recipes.out_of_memory import RunOutOfMemory
from seqtile.recipes.pretrained import load_config, load_tokenizer, skeleton
from seqtile.recipes.ranks import groups_of, on_this_machine
from seqtile.recipes.report import figures, print_table, write_report
from seqtile.recipes.train import RunResult, train


def finetune(job: Job, console: Console) -> dict[str, Any]:
    """Runs `job` and returns what it wrote to report.json.

    With `compare`, the untiled model runs first, on the same sequences from the same seed. On ranks that torchrun
    started, all of them call this. Leaves in `job.output`: report.json, report.png, and model/, the tiled run's model
    and its tokenizer as `save_pretrained` writes them.

    Raises ValueError for bad input, before anything is trained, and for a loss that is not finite; RunOutOfMemory if
    the tiled run does not fit; OSError, last, if the model had to be saved elsewhere; and KeyboardInterrupt, last, if
    Ctrl-C ended it early.
    """
    job = on_this_machine(job)
    with groups_of(job) as ctx, TemporaryDirectory() as files:
        tokenizer = Path(files)
        batches = prepared(job, console, 1 if ctx is None else ctx.data_parallel_size, tokenizer)
        if ctx is None:
            baseline, tiled = runs_alone(job, batches, tokenizer, console)
        else:
            baseline, tiled = None, run_on_ranks(job, batches, tokenizer, ctx)
        report = figures(job, baseline, tiled, ranks=1 if ctx is None else dist.get_world_size())
        if tiled.saved is not None:  # on the first rank
            place = Path(tiled.saved).parent
            print_table(report, console)
            if tiled.note is not None:
                console.print(f"note: {tiled.note}", soft_wrap=True)
            write(report, place)
            console.print(f"model, report.json and report.png are in {place}", soft_wrap=True)
    if tiled.saved is not None and place != job.output:
        raise OSError(f"the model could not be saved in {job.output}; it is in {place}")
    if (done := len(tiled.losses)) < job.steps:
        raise KeyboardInterrupt(f"after step {done} of {job.steps}; what was trained until then is saved")
    return report


def write(report: dict[str, Any], place: Path) -> None:
    try:
        write_report(report, place)
    except OSError as error:
        raise OSError(f"the model is in {place}, but its report could not be written there ({error})") from error


def prepared(job: Job, console: Console, groups: int, tokenizer_files: Path) -> torch.Tensor:
    """What to train on, [steps, groups, seq_len], once all is known to work that can be known before training.

    The tokenizer is written to `tokenizer_files`, to be saved with the model: by then its own may be gone.
    """
    with redirect_stderr(io.StringIO()), console.status("reading documents"):  # Hugging Face has bars of its own
        config = load_config(job.model)
        model = skeleton(config)
        # What it cannot tile it refuses here, before anything is trained.
        seqtile.apply_seqtile(model, layer=job.layer, head_groups=job.head_groups)
        tokenizer = load_tokenizer(job.model)
        tokenizer.save_pretrained(tokenizer_files)
        data = sequences(job.data or standard_library(), tokenizer, job.seq_len, job.steps * groups)
    if data.rows.max() >= config.vocab_size:
        raise ValueError(
            f"--model: the tokenizer gave token {data.rows.max()}, but config.vocab_size is {config.vocab_size}; "
            "pass a model with its own tokenizer"
        )
    in_float32 = 4 * sum(parameter.numel() for parameter in model.parameters())
    check_space(job.output / "model", in_float32)
    check_writable(job.output)
    console.print(str(data), soft_wrap=True, highlight=False)
    if job.seq_len > config.max_position_embeddings:
        text = f"note: {job.model} is configured for {config.max_position_embeddings:,} positions at most"
        console.print(text, soft_wrap=True)
    return data.rows.view(job.steps, groups, job.seq_len)


def runs_alone(
    job: Job, batches: torch.Tensor, tokenizer: Path, console: Console
) -> tuple[RunResult | None, RunResult]:
    """The untiled run, if asked for and if it fits, with as many steps as the tiled one, and the tiled one."""
    baseline = None
    if job.compare:
        try:
            baseline = run_alone(job, batches, tiled=False, save_to=None)
        except RunOutOfMemory as error:  # that the untiled model does not fit is a result
            console.print(f"note: {error}")
    tiled = run_alone(job, batches, tiled=True, save_to=job.output / "model", tokenizer=tokenizer)
    if baseline is not None:
        done = len(tiled.losses)
        baseline = replace(baseline, losses=baseline.losses[:done], step_seconds=baseline.step_seconds[:done])
    return baseline, tiled


def run_on_ranks(job: Job, batches: torch.Tensor, tokenizer: Path, ctx: sp.SequenceParallel) -> RunResult:
    """The tiled run, of which this process is one rank."""
    try:
        return train(job, batches, tiled=True, save_to=job.output / "model", tokenizer=tokenizer, ctx=ctx)
    except torch.OutOfMemoryError as error:
        raise RunOutOfMemory(f"rank {dist.get_rank()} had too little memory; a shorter --seq-len needs less") from error
