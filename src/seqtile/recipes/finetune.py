"""`seqtile finetune`: TRL's SFTTrainer with seqtile in it, from the options to the report."""

import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from rich.console import Console
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import get_peft_config
from trl import get_quantization_config as quantization_of

import seqtile
from seqtile import offload, sp
from seqtile.fitting import choose, formula_of, gpu_memory_at_hand, host_memory_at_hand
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl
from seqtile.memory import Setup
from seqtile.recipes import check_output, number_or_name, source
from seqtile.recipes.data import is_out_of_memory, load_config, load_tokenizer, read_of, unpacked
from seqtile.recipes.memory import return_freed_memory
from seqtile.recipes.options import Asked
from seqtile.recipes.output import RunResult, print_table, report_of, write_report, written_beside
from seqtile.recipes.rows import dataset_of
from seqtile.recipes.tuner import RESULT, OverRanks, Tuner, Watch, check_finite

UNTILED = "untiled.json"


def finetune(asked: Asked, arguments: list[str], console: Console) -> int | None:
    """Trains as `asked`, and leaves model/, report.json and report.png in the output; returns the signal that ended it
    early, None if none did. `arguments` are those that `asked` was parsed from.

    Raises ValueError for bad input, before anything is trained, and for a loss or weight that is not finite;
    MemoryError if memory is too small; OSError, last, if the model had to be saved elsewhere.
    """
    own, training = asked.own, asked.training
    output = Path(training.output_dir)
    check_output(output, {})
    with held(output, training.process_index == 0):
        baseline = untiled_run(arguments, console) if own.compare else None
        with memory_errors("the run"):
            watch, trainer, place = trained(asked, console)
        if not trainer.is_world_process_zero():
            return watch.got
        report = report_of(asked, baseline, watch.result, training.world_size)
        write_report(report, place)
        if own.untiled:
            return watch.got
        print_table(report, console)
        if watch.result.note is not None:
            console.print(f"note: {watch.result.note}")
        console.print(f"model, report.json and report.png are in {place}", markup=False)
    if place != output:
        raise OSError(f"the model could not be saved in {output}; it is in {place}")
    return watch.got


@contextmanager
def held(output: Path, main: bool) -> Iterator[None]:
    """Holds the output for this run, and raises ValueError if another has it. The lock is the kernel's: a run that was
    killed leaves none."""
    lock = FileLock(output / ".lock") if main else None
    try:
        if lock is not None:
            lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"--output: another run writes to {output}; choose another directory") from error
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def trained(asked: Asked, console: Console) -> tuple[Watch, Tuner, Path]:
    """Returns what was measured, the trainer, and where the model is."""
    own, training = asked.own, asked.training
    if training.use_cpu:
        return_freed_memory()
    last = checkpoint_to_go_on_from(asked)
    with redirect_stderr(io.StringIO()), console.status("loading"):  # Hugging Face has bars of its own
        tokenizer = load_tokenizer(asked.model.model_name_or_path)
        data, others, said = dataset_of(asked, tokenizer)
        model = load(asked)
    console.print(said, markup=False)
    watch = Watch("untiled" if own.untiled else "seqtile", console, training.max_length)
    trainer = trainer_of(asked, model, tokenizer, (data, others), watch)
    if last is not None:
        watch.result = RunResult(**json.loads((Path(last) / RESULT).read_text())["result"])
        watch.say(f"{watch.name}: goes on after step {len(watch.result.losses)} of {training.max_steps}")
    with watch.signals_noted(), watch.bar(training.max_steps):
        trainer.train(resume_from_checkpoint=last)
        check_finite(trainer.model)
        model, result = trainer.accelerator.unwrap_model(trainer.model), watch.result
        result.status = "untiled" if own.untiled else str(seqtile.status(model))
        result.note = None if own.untiled else no_layer_tiled(model, asked)
        result.tokens_per_second = len(result.losses) * watch.tokens / sum(result.step_seconds)
        place = saved(trainer, Path(training.output_dir), own.merge, watch)
        result.saved = str(place / "model")
    return watch, trainer, place


def no_layer_tiled(model: Any, asked: Asked) -> str | None:
    """Returns that no layer was tiled, and why, where the sequence, or a rank's part of it, is no longer than a
    chunk."""
    status = seqtile.status(model)
    sizes = [tokens for part in (status.mlp, status.layer) if part is not None for tokens in part.untiled_tokens]
    tokens = math.ceil(asked.training.max_length / asked.own.sequence_parallel)
    if not sizes or tokens > min(sizes):
        return None
    tokens_are = f"{tokens:,} tokens are no more than a chunk of {min(sizes):,}"
    return f"no layer was tiled, since {tokens_are}; pass a longer --seq-len"


def checkpoint_to_go_on_from(asked: Asked) -> str | None:
    """Returns the directory of the last checkpoint, None for a new run. Raises ValueError if there is none to go on
    from, or if it is another run's."""
    output = asked.training.output_dir
    last = get_last_checkpoint(output)
    if not asked.own.resume:
        if last is not None:
            raise ValueError(
                f"--output: {output} holds {Path(last).name} of an earlier run; pass --resume, or another --output"
            )
        return None
    if last is None:
        raise ValueError(
            f"--resume: expected a checkpoint in {output}, got none; pass the --output of the run that was ended "
            "early, or leave out --resume to start a new run"
        )
    found = json.loads((Path(last) / RESULT).read_text())
    now = asked.figures()
    changed = [name for name, before in found["options"].items() if name in now and now[name] != before]
    if changed:
        name = changed[0]
        raise ValueError(f"--resume: {name} was {found['options'][name]} and is {now[name]} now; pass the same options")
    state = json.loads((Path(last) / "trainer_state.json").read_text())
    schedule = str(asked.training.lr_scheduler_type).lower()
    if asked.training.max_steps not in (-1, state["max_steps"]) and "constant" not in schedule:
        raise ValueError(
            f"--resume: the run has {state['max_steps']} steps, and --steps is {asked.training.max_steps} now; another "
            "number is possible only with --lr-scheduler-type constant"
        )
    return last


def load(asked: Asked) -> Any:
    """Returns the model, all of whose weights its files hold. Raises ValueError otherwise."""
    name, extra = source(asked.model.model_name_or_path)
    quantized = unpacked() if extra else quantization_of(asked.model)
    extra |= {"dtype": asked.model.dtype, "attn_implementation": asked.model.attn_implementation}
    extra |= {"quantization_config": quantized, "trust_remote_code": asked.training.trust_remote_code}
    extra |= {"device_map": {"": asked.training.device}} if asked.model.load_in_4bit or asked.model.load_in_8bit else {}
    extra |= dict(asked.training.model_init_kwargs or {}) | {"output_loading_info": True}
    load_config(asked.model.model_name_or_path)
    with read_of(f"--model: the weights of {asked.model.model_name_or_path}"):
        model, found = AutoModelForCausalLM.from_pretrained(name, **extra)
    for kind in ("missing_keys", "mismatched_keys"):
        if wrong := sorted(map(str, found[kind])):
            raise ValueError(
                f"--model: {kind.replace('_', ' ')} in the weights, {wrong[0]} first; pass a model whose weights and "
                "config.json belong together"
            )
    asked.training.model_init_kwargs = None
    return model


def trainer_of(asked: Asked, model: Any, tokenizer: Any, data: tuple[Dataset, Any], watch: Watch) -> Tuner:
    """Returns the trainer, in which the model is tiled when training begins."""
    own, training = asked.own, asked.training
    if own.fit:
        own = fitted(asked, model, watch)
    callbacks = []
    if not own.untiled:
        try:
            apply_seqtile_to_trl()
        except ValueError:  # which names functions of TRL's
            watch.say("note: the loss is TRL's own, in chunks; seqtile's needs TRL 1.16")
        callbacks = [SeqtileCallback(layer=own.layer, head_groups=number_or_name(own.head_groups))]
    training.gradient_checkpointing &= not own.offload  # which checkpoints by itself
    kind, extra = Tuner, {}
    if own.sequence_parallel > 1:
        kind, extra = OverRanks, {"sequence_parallel": sp.initialize(own.sequence_parallel)}
    given = {"train_dataset": data[0], "eval_dataset": data[1], "processing_class": tokenizer}
    given |= {"peft_config": get_peft_config(asked.model), "callbacks": [*callbacks, watch]}
    set_seed(training.seed)  # of adapters, which TRL draws before Trainer sees to it
    trainer = kind(model, training, figures=asked.figures(), watch=watch, **given, **extra)
    if own.offload:
        offload.enable(trainer.model)
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    return trainer


def fitted(asked: Asked, model: Any, watch: Watch) -> Any:
    """Returns seqtile's options with the cheapest features that fit. Raises ValueError if none do."""
    training, memory = asked.training, host_memory_at_hand()
    sizes = {"gpu_memory_gib": memory if training.use_cpu else gpu_memory_at_hand(), "host_memory_gib": memory}
    lora = {"lora_rank": asked.model.lora_r, "load_in_4bit": asked.model.load_in_4bit} if asked.model.use_peft else {}
    setup = Setup(
        dtype=str(model.dtype).removeprefix("torch."),
        autocast=bool(training.bf16) and model.dtype == torch.float32,
        gpus=training.world_size,
        sequence_parallel=asked.own.sequence_parallel,
        **sizes,
        **lora,
    )
    found = choose(formula_of(model.config), setup, training.max_length, host=not training.use_cpu)
    watch.say(str(found))
    groups = found.setup.head_groups
    chosen = {"layer": found.options["layer"], "head_groups": groups and str(groups), "offload": found.offload}
    return replace(asked.own, fit=False, **chosen)


def saved(trainer: Tuner, output: Path, merge: bool, watch: Watch) -> Path:
    """Saves the model and its tokenizer, and returns in which directory: the output, or a temporary one if that cannot
    be. Raises OSError if neither can be."""
    main, failed = trainer.is_world_process_zero(), []
    for attempt in range(2):
        place = Path(tempfile.mkdtemp(prefix="seqtile-")) if attempt and main else output
        try:
            with written_beside(place / "model") if main else nullcontext(place / "model") as new:
                trainer.save_model(str(new), _internal_call=True)
            if merge and main:
                merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
                with written_beside(place / "merged") as new:
                    merged.save_pretrained(new)
                    trainer.processing_class.save_pretrained(new)
            return place
        except Exception as error:  # safetensors has its own; whatever it is, the weights are not to be lost
            failed.append(f"in {place} ({error})")
            watch.say(f"note: the model cannot be saved {failed[-1]}")
    raise OSError(f"the trained model is lost: it could be saved neither {' nor '.join(failed)}; make room first")


def untiled_run(arguments: list[str], console: Console) -> RunResult | None:
    """Returns what the untiled run measures, in a process of its own, so that its peak memory is its own; None, and
    says so, if it does not fit. The process ends when this one does."""
    rest = [argument for argument in arguments if argument != "--compare"]
    with tempfile.TemporaryDirectory() as aside:
        command = [sys.executable, "-m", "seqtile.cli", "finetune", *rest, "--untiled", "--output", aside]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)  # which closes with this process
        try:
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        file = Path(aside) / "report.json"
        if code == 0 and file.exists():
            return RunResult(**json.loads(file.read_text())["seqtile"])
    if code in (-9, 1):
        console.print("note: the untiled run did not come to its end, so there is nothing to compare with")
        return None
    raise KeyboardInterrupt("in the untiled run")


def end_with_parent() -> None:
    """Ends this process when its standard input closes."""
    Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()


@contextmanager
def memory_errors(who: str) -> Iterator[None]:
    """Raises MemoryError, which names `who` needed it, where memory was short inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"{who} had too little memory; a shorter --seq-len needs less") from error
