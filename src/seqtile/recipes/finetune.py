"""`seqtile finetune`: TRL's SFTTrainer with seqtile in it, from the options to the report."""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from filelock import FileLock, Timeout
from peft import PeftModel
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar
from trl import get_peft_config, get_quantization_config

from seqtile import sp
from seqtile.evaluation import positions_of
from seqtile.fitting import choose, formula_of, gpu_memory_at_hand, host_memory_at_hand, on_any_rank
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl
from seqtile.memory.room import room
from seqtile.memory.setup import GIB
from seqtile.models.apply import attention_refusal
from seqtile.recipes import check_output
from seqtile.recipes.dataset import counted, dataset_of
from seqtile.recipes.memory import MIB, memory_errors, peak_mib, planned_setup, return_freed_memory, rows_of
from seqtile.recipes.monitor import SIGNALS, Monitor, handling_signals
from seqtile.recipes.options import FinetuneOptions, Parser, parsed
from seqtile.recipes.output import picture, print_table, remove, report_of, write_figures, written_beside
from seqtile.recipes.pretrained import load_model, load_tokenizer
from seqtile.recipes.tuner import OPTIONS_FILE, SequenceParallelTuner, Tuner, check_finite, write_error
from seqtile.unwrapped import unwrapped


def finetune(arguments: list[str], console: Console) -> int | None:
    """Trains as the command line says, and leaves model/, report.json and report.png in the output; returns the signal
    that ended it early, None if none did.

    Raises ValueError for bad input, before anything is trained, and for a loss or weight that is not finite;
    MemoryError if memory is too small; OSError, last, if the model had to be saved elsewhere.
    """
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated")  # TRL's own use of the older name
    disable_progress_bar()
    disable_progress_bars()
    if "--help-all" in arguments:
        Parser().print_help()
        return None
    asked = parsed(arguments)
    own, training, output = asked.own, asked.training, Path(asked.training.output_dir)
    if own.untiled:  # a process that ends when the one that started it does
        Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    check_output(output)
    monitor = Monitor("untiled" if own.untiled else "seqtile", console, own.sequence_parallel)
    remedy = "--layer, --fit or a shorter --seq-len needs less"
    with (
        locked(output, training.process_index == 0),
        handling_signals(monitor.on_signal),
        memory_errors("the run needs", remedy),
    ):
        try:
            untiled = untiled_run(arguments, monitor) if own.compare else None
            trainer = train(asked, monitor)
            place = output if own.untiled else save(trainer)
        except KeyboardInterrupt:
            if monitor.received is None:
                raise
            return monitor.received
        write_results(asked, trainer, untiled, place)
        if place == output and training.push_to_hub:
            training.output_dir = str(output / "model")
            trainer.push_to_hub()
    if place != output:
        raise OSError(f"the model could not be saved in {output}; it is in {place}")
    return monitor.received


def write_results(asked: FinetuneOptions, trainer: Tuner, untiled: dict[str, Any] | None, place: Path) -> None:
    """Merges, prints the table, and writes report.json and report.png; of the untiled run report.json alone."""
    report = report_of(asked, trainer, untiled)
    if asked.own.untiled:
        (place / "report.json").write_text(json.dumps(report))
    elif trainer.is_world_process_zero():
        if asked.own.merge:
            merge(asked, trainer, place)
        else:
            remove(place / "merged")  # of an earlier run
        print_table(report, trainer.monitor.console)
        try:
            drawn = write_figures(place / "report", report, partial(picture, report))
            left = ["model", *["merged"] * asked.own.merge, "report.json", *["report.png"] * drawn]
            trainer.monitor.say(f"{', '.join(left[:-1])} and {left[-1]} are in {place}")
        except OSError as error:
            why = write_error(error, place)
            trainer.monitor.say(f"note: the model is in {place}, but no report could be written there ({why})")
    trainer.accelerator.wait_for_everyone()  # until the first rank has written


@contextmanager
def locked(output: Path, main: bool) -> Iterator[None]:
    """Holds the output for this run, and raises ValueError if another has it. The lock is the kernel's: a run that was
    killed leaves none."""
    try:
        lock = FileLock(output / ".lock").acquire(timeout=0) if main else nullcontext()
    except Timeout as error:
        raise ValueError(f"--output: another run writes to {output}; choose another directory") from error
    with lock:
        for left in output.glob(".incomplete-*") if main else ():  # by a run that was killed
            remove(left)
        yield


def train(asked: FinetuneOptions, monitor: Monitor) -> Tuner:
    """Returns the trainer after training."""
    training, model_options = asked.training, asked.model
    if training.use_cpu:
        return_freed_memory()
    else:  # tensors of other sizes a layer, a chunk and a step do not leave the memory in pieces
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    libraries = peak_mib(training.device.type)
    last = last_checkpoint(asked)
    if last is None and (Path(training.output_dir) / "model").exists():
        monitor.say(f"note: the model of an earlier run in {training.output_dir} will be replaced")
    with monitor.console.status("loading"):
        hub = asked.hub_options()
        tokenizer = load_tokenizer(model_options.model_name_or_path, **hub)
        rows, others, said = dataset_of(asked, tokenizer)
        options = {"dtype": model_options.dtype, "attn_implementation": model_options.attn_implementation, **hub}
        if quantization := get_quantization_config(model_options):
            options |= {"quantization_config": quantization, "device_map": {"": training.device}}
        options |= training.model_init_kwargs or {}
        model = load_model(model_options.model_name_or_path, **options)
    monitor.say(said)
    fixed = asked.fixed_options(len(rows) if hasattr(rows, "__len__") else None)
    check_fixed_options(asked, fixed, last)
    training.model_init_kwargs, kind, extra = None, Tuner, {}
    if asked.own.sequence_parallel > 1:
        sp_group = sp.initialize(asked.own.sequence_parallel, per_node=asked.own.per_node)
        kind, extra = SequenceParallelTuner, {"sequence_parallel": sp_group}
    arguments = {"train_dataset": rows, "eval_dataset": others, "processing_class": tokenizer}
    arguments |= {"peft_config": get_peft_config(model_options), "fixed": fixed, "monitor": monitor}
    set_seed(training.seed)  # of adapters, which TRL draws before Trainer sees to it
    trainer = kind(model, training, **arguments, **extra)
    say_what_is_left_out(rows, trainer)
    prepare(asked, trainer, libraries)
    if last is not None:
        monitor.say(f"{monitor.name}: goes on after step {Path(last).name.rpartition('-')[2]}")
    trainer.train(resume_from_checkpoint=last)
    check_finite(trainer.model)
    return trainer


def say_what_is_left_out(rows: Dataset, trainer: Tuner) -> None:
    """Says how many rows TRL leaves out, since none of their trained tokens is within --seq-len. Raises ValueError if
    those are all."""
    kept = trainer.train_dataset
    if not hasattr(kept, "__len__") or trainer.args.packing:
        return
    if len(kept) == 0:
        raise ValueError("--data: no row has a token to train within --seq-len; pass a longer one, or other rows")
    if len(kept) < len(rows):
        left = counted(len(rows) - len(kept), "row")
        trainer.monitor.say(f"note: {left} left out, with no token to train within --seq-len")


def prepare(asked: FinetuneOptions, trainer: Tuner, libraries: float) -> None:
    """Chooses what --fit chooses, predicts the memory of a step, and adds callbacks: one tiles the model when training
    begins, `monitor` shows the run. `libraries`: the MiB that the process had before it loaded the model."""
    monitor, cpu, attention = trainer.monitor, asked.training.use_cpu, attention_of_rows(asked, trainer)
    length, rows = asked.training.max_length, asked.training.per_device_train_batch_size
    try:
        memory = {"host_memory_gib": host_memory_at_hand()}
        loaded = sum(weight.nbytes for weight in trainer.model.parameters()) / GIB  # which a plan counts, too
        at_hand = memory["host_memory_gib"] + loaded if cpu else gpu_memory_at_hand()
        memory["gpu_memory_gib"] = room(at_hand, asked.own.margin)
        setup, formula = planned_setup(asked, trainer, memory), formula_of(trainer.model.config)
        setup = replace(setup, attention=attention or setup.attention)
        shape = (length * rows, 1) if setup.rows == "packed" else (length, rows)  # TRL makes one row of a batch
        if asked.own.fit:
            fit = choose(formula, setup, *shape, host=not cpu, without=("attention",))
            monitor.say(str(fit))
            setup, groups = fit.setup, fit.options["head_groups"]
            chosen = {"layer": fit.options["layer"], "head_groups": groups and str(groups), "offload": fit.offload}
            asked.own = replace(asked.own, fit=False, **chosen)
        plan = formula.predict(setup, *shape)
        if not asked.own.untiled:  # whose loss is TRL's, not Hugging Face's
            monitor.predicted = libraries + (plan.gpu_bytes - plan.peak.parts.get("reserved", 0)) / MIB  # CUDA's own
    except ValueError:  # there is no formula for its memory
        if asked.own.fit:
            raise
    if length > (most := positions_of(trainer.model)):
        monitor.say(f"note: the model is configured for {most:,} positions at most, and --seq-len is {length:,}")
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    if not asked.own.untiled:
        try:
            apply_seqtile_to_trl()
        except ValueError:  # which names functions of TRL's
            monitor.say("note: the loss is TRL's own, in chunks; seqtile's needs TRL 1.16")
        own = asked.own
        options = {"layer": own.layer, "head_groups": own.groups, "attention": attention}
        trainer.add_callback(SeqtileCallback(offload=own.offload, **options))
    trainer.add_callback(monitor)


def attention_of_rows(asked: FinetuneOptions, trainer: Tuner) -> str | None:
    """Returns the attention without masks for rows that are packed or padded, where the model can have it."""
    if asked.own.untiled or rows_of(asked.training, trainer) == "plain":
        return None
    if (refusal := attention_refusal(unwrapped(trainer.model))) is not None:
        trainer.monitor.say(f"note: {refusal.partition(';')[0]}")
        return None
    return "varlen"


def last_checkpoint(asked: FinetuneOptions) -> str | None:
    """Returns the directory of the last checkpoint, None for a new run. Raises ValueError if there is none to go on
    from, or one though it is a new run."""
    output = asked.training.output_dir
    last = get_last_checkpoint(output)
    if last is None and asked.own.resume:
        raise ValueError(
            f"--resume: expected a checkpoint in {output}, got none; pass the --output of the run that was ended "
            "early, or leave out --resume to start a new run"
        )
    if last is not None and not asked.own.resume:
        raise ValueError(
            f"--output: {output} holds {Path(last).name} of an earlier run; pass --resume, or another --output"
        )
    return last


def check_fixed_options(asked: FinetuneOptions, fixed: dict[str, Any], last: str | None) -> None:
    """Raises ValueError if the last checkpoint is of a run with other options."""
    if last is None:
        return
    if not (Path(last) / OPTIONS_FILE).exists():
        raise ValueError(f"--resume: {last} was not written by seqtile finetune; pass another --output")
    before, now = json.loads((Path(last) / OPTIONS_FILE).read_text()), json.loads(json.dumps(fixed))
    for name in before:
        if name in now and now[name] != before[name]:
            raise ValueError(f"--resume: {name} was {before[name]} and is {now[name]} now; pass the same options")
    steps, wanted = json.loads((Path(last) / "trainer_state.json").read_text())["max_steps"], asked.training.max_steps
    if wanted not in (-1, steps) and "constant" not in asked.training.lr_scheduler_type:
        raise ValueError(
            f"--resume: the run has {steps} steps, and --steps is {wanted} now; another number is possible only with "
            "--lr-scheduler-type constant"
        )


def save(trainer: Tuner) -> Path:
    """Saves the model and its tokenizer, and returns in which directory: the output, or a temporary one if that cannot
    be. Raises OSError if neither can be."""
    main, failed = trainer.is_world_process_zero(), []
    if trainer.is_fsdp_enabled:  # of shards, which Accelerate asks for by default, no model is saved
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    for attempt in (1, 2):
        place, error = Path(trainer.args.output_dir), None
        try:
            if attempt == 2 and main:
                place = Path(tempfile.mkdtemp(prefix="seqtile-"))
            with written_beside(place / "model") if main else nullcontext(place / "model") as new:
                trainer.save_model(str(new), _internal_call=True)
        except Exception as raised:  # safetensors has its own; whatever it is, the weights are not to be lost
            error = raised
            failed.append(f"in {place} ({error})")
            trainer.monitor.say(f"note: the model cannot be saved {failed[-1]}")
        if not on_any_rank(error is not None):
            return place
    raise OSError(f"the trained model is lost: it could be saved neither {' nor '.join(failed)}; make room first")


def merge(asked: FinetuneOptions, trainer: Tuner, place: Path) -> None:
    """Writes the adapter merged into the base, in the base's own dtype, not in 4 bits; says so if that cannot be."""
    try:
        base = load_model(asked.model.model_name_or_path, dtype=asked.model.dtype, **asked.hub_options())
        merged = PeftModel.from_pretrained(base, place / "model").merge_and_unload()
        with written_beside(place / "merged") as new:
            merged.save_pretrained(new)
            trainer.processing_class.save_pretrained(new)
    except Exception as error:  # of memory, a disk or a file; the adapter is saved
        trainer.monitor.say(f"note: not merged ({write_error(error, place)}); the adapter is in {place / 'model'}")


def untiled_run(arguments: list[str], monitor: Monitor) -> dict[str, Any] | None:
    """Returns what the untiled run measures, in a process of its own, so that its peak memory is its own; None, and
    says so, if it does not fit. The process ends when this one does. Raises KeyboardInterrupt if a signal ended it."""
    with tempfile.TemporaryDirectory() as aside:
        command = [sys.executable, "-m", "seqtile.cli", "finetune", *arguments, "--untiled", "--output", aside]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        with handling_signals(lambda number, frame: process.send_signal(number)):
            code = process.wait()
        file = Path(aside) / "report.json"
        if code == 0 and file.exists():
            return json.loads(file.read_text())["runs"]["seqtile"]
    if -code in SIGNALS:
        monitor.received = -code
        raise KeyboardInterrupt
    monitor.say("note: the untiled run did not come to its end, so there is nothing to compare with")
    return None
