"""TRL's SFTTrainer as `seqtile finetune` runs it: a line a step; checkpoints that are complete or absent; nothing is
lost to a signal, a full disk or a loss that is not finite."""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer

import seqtile
from seqtile import sp
from seqtile.fitting import gather_numbers, on_any_rank
from seqtile.recipes import in_brief
from seqtile.recipes.memory import MIB, peak_mib
from seqtile.recipes.output import remove

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
OPTIONS = "seqtile.json"
"""The file of a checkpoint with the options that a run which goes on from it must share."""


class Tuner(SFTTrainer):
    """Measures steps, and writes a checkpoint beside its place and renames it once it is whole; if that cannot be, says
    so and trains on.

    `fixed` are the options that a run which goes on must share.
    """

    incomplete: str | None = None
    """The directory in which a checkpoint is being written."""
    failed: str | None = None
    """Why that could not be on this rank."""
    saved_at = 0
    """The step of the last checkpoint."""

    def __init__(self, *args: Any, fixed: dict[str, Any], monitor: "Monitor", **kwargs: Any):
        self.fixed, self.monitor = fixed, monitor
        super().__init__(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        self.monitor.tokens += inputs["input_ids"].numel() if mask is None else mask.sum()  # does not wait for a GPU
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what was measured since the last loss. Raises ValueError for a loss that is not finite."""
        if "loss" in logs:
            logs |= self.monitor.measured(self.args.device.type)
        super().log(logs, start_time)
        if not math.isfinite(logs.get("loss", 0)):
            raise ValueError(
                f"the loss of step {self.state.global_step} is {logs['loss']}; nothing was saved of it. Train with a "
                "smaller --learning-rate, or look at the data"
            )

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._prepare_dataset(*args, **kwargs)
        except (AttributeError, LookupError, TypeError) as error:
            expected = "expected text, messages, or a prompt and a completion in every row"
            raise ValueError(f"--data: TRL cannot take these rows ({in_brief(error)}); {expected}") from error

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Writes a model on this rank; in a checkpoint notes that it failed, since others wait for the rest of it."""
        try:
            super()._save(*args, **kwargs)
        except Exception as error:
            if self.incomplete is None:
                raise
            self.failed = cause(error, Path(self.args.output_dir))

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.incomplete or super()._get_output_dir(trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL would write one into --output for every checkpoint."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        check_finite(self.model)
        output, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        if self.saved_at == self.state.global_step:
            return
        aside, main = output / f".incomplete-{name}", self.is_world_process_zero()
        best, self.failed = self.state.best_model_checkpoint, None
        try:
            self.incomplete = str(aside)
            if main:
                remove(aside)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint:
                self.state.best_model_checkpoint = self.state.best_model_checkpoint.replace(str(aside), str(output))
            if main:
                self.state.save_to_json(str(aside / name / "trainer_state.json"))
                (aside / name / OPTIONS).write_text(json.dumps(self.fixed), encoding="utf-8")
        except Exception as error:  # safetensors, torch and the system have one each for a full disk
            self.failed = cause(error, output)  # a text, since the error's frames hold files open
        finally:
            self.incomplete = None
        if not on_any_rank(self.failed is not None) and main:
            try:
                (aside / name).replace(output / name)
            except OSError as error:
                self.failed = cause(error, output)
        if main:
            remove(aside)
        if on_any_rank(self.failed is not None):
            self.state.best_model_checkpoint = best
            step = f"step {self.state.global_step} of {self.state.max_steps}"
            self.monitor.say(f"note: no checkpoint after {step} ({self.failed or 'on another rank'})")
            return
        self.saved_at = self.state.global_step
        if main:
            kept = {"best_model_checkpoint": self.state.best_model_checkpoint}
            rotate_checkpoints(str(output), save_total_limit=self.args.save_total_limit, **kept)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Keeps the dtypes of weights: PEFT loads adapters in float32."""
        before = {name: weight.dtype for name, weight in self.model.named_parameters()}
        super()._load_from_checkpoint(*args, **kwargs)
        for name, weight in self.model.named_parameters():
            weight.data = weight.data.to(before[name])


def cause(error: Exception, directory: Path) -> str:
    """Returns in brief why nothing could be written."""
    with suppress(OSError):
        if shutil.disk_usage(directory).free < MIB:
            return "disk full"
    return in_brief(error)


class SequenceParallelTuner(sp.SequenceParallelTrainerMixin, Tuner):
    """The same on sequences that ranks share."""


def check_finite(model: nn.Module) -> None:
    """Raises ValueError, on all ranks alike, if a weight is NaN or infinite."""
    wrong = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if on_any_rank(bool(wrong)):
        name = wrong[0] if wrong else "a weight on another rank"
        raise ValueError(f"{name} holds nan or inf, so it was not saved; train with a smaller --learning-rate")


def _is_finite(weight: torch.Tensor) -> bool:
    """Returns whether what this rank has of a weight, all of it or a shard, is."""
    weight = getattr(weight, "ds_tensor", weight).detach()  # of ZeRO-3
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    return not weight.is_floating_point() or bool(weight.isfinite().all())


@contextmanager
def handling_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Calls `handler` for signals that would end the process."""
    taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup does
    before = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Monitor(TrainerCallback):
    """Shows a line for every loss that is logged, and saves and ends the run on a signal.

    `shared_by` is the number of ranks that share a sequence, `predicted` the memory of a step, in MiB.
    """

    received: int | None = None
    """The signal that ended the run."""
    bar: tqdm | None = None
    """Of the steps, once training has begun."""
    status = ""
    """What is tiled, as the first step shows."""

    def __init__(self, name: str, console: Console, shared_by: int = 1):
        self.name, self.console, self.shared_by, self.predicted = name, console, shared_by, None
        self.tokens = self.steps = 0  # since the last loss
        self.start = 0.0

    def say(self, text: str) -> None:
        with tqdm.external_write_mode():
            self.console.print(text)

    def on_signal(self, number: int, frame: Any) -> None:
        """Handles a signal: the step at hand ends before the run does. Before training, and at a second Ctrl-C, raises
        KeyboardInterrupt, but not on ranks, to which torchrun passes on what their terminal has told them already."""
        again, alone = self.received == number == signal.SIGINT, not dist.is_initialized()
        if self.received is None and alone and self.bar is not None:
            self.say("interrupted: after this step the model is saved; Ctrl-C again ends it at once")
        self.received = number
        if alone and (again or self.bar is None):
            raise KeyboardInterrupt

    def measured(self, device: str) -> dict[str, float]:
        """Returns the seconds of a step since the last loss, the tokens per second of all ranks, and the largest peak
        of one."""
        seconds = time.perf_counter() - self.start
        ranks = gather_numbers(float(self.tokens), peak_mib(device))
        tokens = ranks[:, 0].sum().item() / self.shared_by
        figures = {"step_seconds": seconds / self.steps, "tokens_per_second": tokens / seconds}
        self.tokens = self.steps = 0
        return figures | {"peak_mib": ranks[:, 1].max().item()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = {"initial": state.global_step, "total": state.max_steps}
        self.bar = tqdm(desc=self.name, disable=self.console.quiet or not self.console.is_terminal, **done)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps == 0:
            self.start = time.perf_counter()
        self.steps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.name == "seqtile" and not self.status:
            self.status = str(seqtile.status(model))
            self.say(self.status)
        self.bar.update()
        if on_any_rank(self.received is not None):
            control.should_save = control.should_training_stop = True
            self.received = self.received or signal.SIGTERM
        last = state.global_step == state.max_steps
        control.should_save |= last and args.save_strategy != "no"
        control.should_log |= last or control.should_save  # a checkpoint keeps no sum of losses

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "eval_loss" in logs:
            self.say(f"{self.name}: evaluated after step {state.global_step}  loss {logs['eval_loss']:.4f}")
        if "loss" not in logs:
            return
        said = f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}"
        said += f"  {logs['tokens_per_second']:,.0f} tokens/s  peak {logs['peak_mib']:,.0f} MiB"
        said += f" ({self.predicted:,.0f} predicted)" if self.predicted else ""
        recent = [entry["step_seconds"] for entry in state.log_history if "step_seconds" in entry][-10:]
        if left := state.max_steps - state.global_step:
            said += f"  {tqdm.format_interval(left * median(recent))} left"
        self.say(f"{self.name}: {said}")
