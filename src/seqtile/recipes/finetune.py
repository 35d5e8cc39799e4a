"""The main job: full-parameter fine-tuning of a causal LM on long documents, and how it compares with not tiling."""

import io
from contextlib import redirect_stderr
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import PreTrainedTokenizerBase

import seqtile
from seqtile import sp
from seqtile.recipes.alone import RunOutOfMemory, run_alone
from seqtile.recipes.documents import sequences
from seqtile.recipes.job import Job, check_writable
from seqtile.recipes.pretrained import load_config, load_tokenizer, skeleton
from seqtile.recipes.ranks import groups_of
from seqtile.recipes.report import figures, print_table, write_report
from seqtile.recipes.train import RunResult, train


def finetune(job: Job, console: Console) -> dict[str, Any]:
    """Runs `job` and returns what it wrote to report.json.

    With `compare`, the untiled model runs first, on the same sequences from the same seed. On ranks that torchrun
    started, all of them call this. Leaves in `job.output`: report.json, report.png, and model/, the tiled run's model
    and its tokenizer as `save_pretrained` writes them.

    Raises ValueError for bad input, before anything is trained; RunOutOfMemory if the tiled run does not fit.
    """
    job.check()
    with groups_of(job) as ctx:
        batches, tokenizer = prepared(job, console, 1 if ctx is None else ctx.data_parallel_size)
        baseline, tiled = runs_alone(job, batches, console) if ctx is None else (None, run_on_ranks(job, batches, ctx))
        report = figures(job, baseline, tiled, ranks=1 if ctx is None else dist.get_world_size())
        if ctx is None or dist.get_rank() == 0:
            tokenizer.save_pretrained(job.output / "model")
            write_report(report, job.output)
            print_table(report, console)
            console.print(f"model, report.json and report.png are in {job.output}")
    return report


def prepared(job: Job, console: Console, groups: int) -> tuple[torch.Tensor, PreTrainedTokenizerBase]:
    """What to train on, [steps, groups, seq_len], and the tokenizer it is from, once all is known to work that can be
    known before training."""
    with redirect_stderr(io.StringIO()), console.status("reading documents"):  # Hugging Face has bars of its own
        config = load_config(job.model)
        # What it cannot tile it refuses here, before anything is trained.
        seqtile.apply_seqtile(skeleton(config), layer=job.layer, head_groups=job.head_groups)
        tokenizer = load_tokenizer(job.model)
        data = sequences(job.data, tokenizer, job.seq_len, job.steps * groups)
    if data.rows.max() >= config.vocab_size:
        raise ValueError(
            f"--model: the tokenizer gave token {data.rows.max()}, but config.vocab_size is {config.vocab_size}; "
            "pass a model with its own tokenizer"
        )
    check_writable(job.output)
    console.print(str(data), soft_wrap=True, highlight=False)
    if job.seq_len > config.max_position_embeddings:
        console.print(f"note: {job.model} is configured for {config.max_position_embeddings:,} positions at most")
    return data.rows.view(job.steps, groups, job.seq_len), tokenizer


def runs_alone(job: Job, batches: torch.Tensor, console: Console) -> tuple[RunResult | None, RunResult]:
    """The untiled run, if asked for and if it fits, and the tiled one."""
    baseline = None
    if job.compare:
        try:
            baseline = run_alone(job, batches, tiled=False, save_to=None)
        except RunOutOfMemory as error:  # that the untiled model does not fit is a result
            console.print(f"note: {error}")
    return baseline, run_alone(job, batches, tiled=True, save_to=job.output / "model")


def run_on_ranks(job: Job, batches: torch.Tensor, ctx: sp.SequenceParallel) -> RunResult:
    """The tiled run, of which this process is one rank."""
    try:
        return train(job, batches, tiled=True, save_to=job.output / "model", ctx=ctx)
    except torch.OutOfMemoryError as error:
        raise RunOutOfMemory(f"rank {dist.get_rank()} had too little memory; a shorter --seq-len needs less") from error
