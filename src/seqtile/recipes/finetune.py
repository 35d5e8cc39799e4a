"""The main job: full-parameter fine-tuning of a causal LM on long documents, and how it compares with not tiling."""

import io
from contextlib import redirect_stderr
from typing import Any

from rich.console import Console

import seqtile
from seqtile.recipes.documents import sequences
from seqtile.recipes.job import Job, check_writable
from seqtile.recipes.pretrained import load_config, load_tokenizer, skeleton
from seqtile.recipes.report import figures, print_table, write_report
from seqtile.recipes.train import RunOutOfMemory, run_alone


def finetune(job: Job, console: Console) -> dict[str, Any]:
    """Runs `job` and returns what it wrote to report.json.

    With `compare`, the untiled model runs first, on the same sequences from the same seed. Leaves in `job.output`:
    report.json, report.png, and model/, the tiled run's model and its tokenizer as `save_pretrained` writes them.

    Raises ValueError for bad input, before anything is trained; RunOutOfMemory if the tiled run does not fit.
    """
    job.check()
    with redirect_stderr(io.StringIO()), console.status("reading documents"):  # Hugging Face has bars of its own
        config = load_config(job.model)
        seqtile.apply_seqtile(skeleton(config))  # what it cannot tile it refuses here, before anything is trained
        tokenizer = load_tokenizer(job.model)
        data = sequences(job.data, tokenizer, job.seq_len, job.steps)
    batches = data.rows
    if batches.max() >= config.vocab_size:
        raise ValueError(
            f"--model: the tokenizer gave token {batches.max()}, but config.vocab_size is {config.vocab_size}; "
            "pass a model with its own tokenizer"
        )
    check_writable(job.output)
    console.print(str(data), soft_wrap=True, highlight=False)
    if job.seq_len > config.max_position_embeddings:
        console.print(f"note: {job.model} is configured for {config.max_position_embeddings:,} positions at most")
    baseline = None
    if job.compare:
        try:
            baseline = run_alone(job, batches, tiled=False, save_to=None)
        except RunOutOfMemory as error:  # that the untiled model does not fit is a result
            console.print(f"note: {error}")
    tiled = run_alone(job, batches, tiled=True, save_to=job.output / "model")
    tokenizer.save_pretrained(job.output / "model")
    report = figures(job, baseline, tiled)
    write_report(report, job.output)
    print_table(report, console)
    console.print(f"model, report.json and report.png are in {job.output}")
    return report
