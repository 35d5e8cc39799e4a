"""The job of `seqtile finetune`, from its options to its report: full-parameter fine-tuning of a causal LM on long
documents, and how it compares with not tiling."""

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import seqtile
from seqtile.fitting import choose, formula_of, gpu_memory_at_hand, host_memory_at_hand
from seqtile.memory import Setup
from seqtile.recipes import Job, check_output, checkpoint_in, number_or_name
from seqtile.recipes.data import device_of, is_out_of_memory, load_config, load_tokenizer, sequences, standard_library
from seqtile.recipes.output import RunResult, print_table, remove_incomplete, report_of, write_report
from seqtile.recipes.state import Run, check_same, rank, ranks
from seqtile.recipes.train import sequence_group, train


def finetune(job: Job, console: Console) -> dict[str, Any]:
    """Runs a job that was checked and returns what it wrote to report.json.

    With `compare`, the untiled model runs first, on the same sequences from the same seed. On ranks that torchrun
    started, all of them call this. Leaves in `job.output`: report.json, report.png, and model/, the tiled run's model
    and its tokenizer as `save_pretrained` writes them.

    Raises ValueError for bad input, before anything is trained, and for a loss that is not finite; RunOutOfMemory if
    the tiled run does not fit; OSError, last, if the model had to be saved elsewhere; and KeyboardInterrupt, last, if
    Ctrl-C ended it early; then, or with `save_every`, a checkpoint is there too, from which `resume` goes on.
    """
    job = replace(job, device=device_of(job.device))
    if job.offload and job.device == "cpu":
        raise ValueError("--offload moves what checkpointing keeps off a GPU, but --device is cpu; leave it out")
    alone = job.local_rank is None
    with nullcontext() if alone else sequence_group(job) as ctx, TemporaryDirectory() as files:
        job = fitted(job, console) if job.fit else job
        run = prepared(job, console, Path(files) / "tokenizer")
        baseline = untiled_run(run, console) if job.compare else None
        with memory_errors("the tiled run" if alone else f"rank {rank()}"):
            tiled = train(run, ctx)
        if baseline is not None:
            done = len(tiled.losses)
            baseline = replace(baseline, losses=baseline.losses[:done], step_seconds=baseline.step_seconds[:done])
        report = report_of(job, baseline, tiled, ranks())
        if tiled.saved is not None:  # in the main process
            place = Path(tiled.saved).parent
            print_table(report, console)
            if tiled.note is not None:
                console.print(f"note: {tiled.note}")
            write_report(report, place)
            console.print(f"model, report.json and report.png are in {place}")
    if tiled.saved is not None and place != job.output:
        raise OSError(f"the model could not be saved in {job.output}; it is in {place}")
    if (done := len(tiled.losses)) < job.steps:
        on = "" if checkpoint_in(job.output) is None else "; --resume goes on from its checkpoint"
        raise KeyboardInterrupt(f"after step {done} of {job.steps}; what was trained until then is saved{on}")
    return report


def fitted(job: Job, console: Console) -> Job:
    """Returns the job with the cheapest features that fit, see `seqtile.fit`. Raises ValueError if none do."""
    on_gpu, memory, spread = job.device == "cuda", host_memory_at_hand(), job.sequence_parallel
    sizes = {"gpu_memory_gib": gpu_memory_at_hand() if on_gpu else memory, "host_memory_gib": memory}
    autocast = job.dtype == "bfloat16"
    setup = Setup(dtype=job.dtype, autocast=autocast, gpus=ranks(), sequence_parallel=spread, **sizes)
    found = choose(formula_of(load_config(job.model)), setup, job.seq_len, host=on_gpu)
    console.print(str(found))
    groups = found.setup.head_groups
    chosen = {"layer": found.options["layer"], "head_groups": groups and str(groups), "offload": found.offload}
    return replace(job, fit=False, **chosen)


def prepared(job: Job, console: Console, tokenizer_files: Path) -> Run:
    """Returns the tiled run, once all is known to work that can be known before training.

    The tokenizer is written to `tokenizer_files`, to be saved with the model: by then its own may be gone.
    """
    groups = ranks() // job.sequence_parallel
    with redirect_stderr(io.StringIO()), console.status("reading documents"):  # Hugging Face has bars of its own
        config = load_config(job.model)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # What it cannot tile it refuses here, before anything is trained.
        seqtile.apply_seqtile(model, layer=job.layer, head_groups=number_or_name(job.head_groups))
        tokenizer = load_tokenizer(job.model)
        tokenizer.save_pretrained(tokenizer_files)
        data = sequences(job.data or standard_library(), tokenizer, job.seq_len, job.steps * groups)
    if data.rows.max() >= config.vocab_size:
        raise ValueError(
            f"--model: the tokenizer gave token {data.rows.max()}, but config.vocab_size is {config.vocab_size}; "
            "pass a model with its own tokenizer"
        )
    in_float32 = 4 * sum(parameter.numel() for parameter in model.parameters())
    checkpoints = 1 if checkpoint_in(job.output) else 2  # the new one beside the earlier, which may be there already
    with_model = in_float32 * (3 * checkpoints + 1)
    check_output(job.output, {"model": in_float32, "checkpoint": 0 if job.save_every is None else with_model})
    for name in ("model", "checkpoint") if rank() == 0 else ():  # what a process that was killed left there
        remove_incomplete(job.output / name)
    console.print(str(data))
    if job.seq_len > config.max_position_embeddings:
        console.print(f"note: {job.model} is configured for {config.max_position_embeddings:,} positions at most")
    rows = data.rows.view(job.steps, groups, job.seq_len)
    run = Run(job, config, rows, tiled=True, save_to=job.output / "model", tokenizer=tokenizer_files)
    if job.resume:
        check_same(run)
    return run


def untiled_run(run: Run, console: Console) -> RunResult | None:
    """Returns what the untiled run measures, in a process of its own, so that its peak memory is its own; None, and
    says so, if it does not fit. The process ends when this one is interrupted, or ends."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(replace(run, tiled=False, save_to=None), sender), daemon=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: a terminal's Ctrl-C reaches that process, too
    process.start()
    signal.signal(signal.SIGINT, before)
    sender.close()  # so that nothing is left to wait for if the process is killed
    try:
        with memory_errors("the untiled run"):
            found = receiver.recv()
            if isinstance(found, Exception):
                raise found
            return found
    except RunOutOfMemory as error:  # that the untiled model does not fit is a result
        console.print(f"note: {error}")
        return None
    finally:
        process.kill()
        process.join()


def _send_result(run: Run, sender: Connection) -> None:
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    try:
        sender.send(train(run))
    except Exception as error:
        sender.send(error)


class RunOutOfMemory(MemoryError):
    """A run had too little memory, or its process was killed, which is what too little host memory looks like."""


@contextmanager
def memory_errors(who: str) -> Iterator[None]:
    """Raises RunOutOfMemory, which names `who` needed it, where memory was short inside."""
    try:
        yield
    except (RuntimeError, MemoryError, EOFError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunOutOfMemory(f"{who} had too little memory; a shorter --seq-len needs less") from error
