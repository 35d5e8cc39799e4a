"""TRL's SFTTrainer as `seqtile finetune` runs it: a line a step; checkpoints that are complete or absent; nothing is
lost to a signal, a full disk or a loss that is not finite."""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer

from seqtile import sp
from seqtile.fitting import of_every_rank
from seqtile.recipes.data import in_brief
from seqtile.recipes.memory import peak_mib
from seqtile.recipes.output import RunResult, remove, step_figures

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
RESULT = "seqtile.json"
"""The file of a checkpoint with the options of its run, and what was measured until then."""
CHECKPOINT, INCOMPLETE = "checkpoint", ".incomplete-"


class Tuner(SFTTrainer):
    """Writes a checkpoint beside its place and renames it once it is whole; if that cannot be, says so and trains on.

    `figures` are the options that a run that goes on must share.
    """

    beside: str | None = None
    """The directory in which a checkpoint is being written."""

    def __init__(self, *args: Any, figures: dict[str, Any], watch: "Watch", **kwargs: Any):
        self.figures, self.watch = figures, watch
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.watch.losses.append(loss.detach())
        return loss

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.beside or super()._get_output_dir(trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL would write one into --output for every checkpoint."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        check_finite(self.model)
        output, name, failed = Path(self.args.output_dir), f"{CHECKPOINT}-{self.state.global_step}", None
        if (output / name).exists():
            return
        aside, main = output / f"{INCOMPLETE}{name}", self.is_world_process_zero()
        try:
            self.beside = str(aside)
            if main:
                remove(aside)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if main:
                found = {"options": self.figures, "result": vars(self.watch.result)}
                (aside / name / RESULT).write_text(json.dumps(found), encoding="utf-8")
                (aside / name).replace(output / name)
        except Exception as error:  # safetensors, torch and the system have one each for a full disk
            failed = error
        finally:
            self.beside = None
        if anywhere(failed is not None):
            why = "on another rank" if failed is None else in_brief(failed)
            self.watch.say(f"note: no checkpoint after step {self.state.global_step} of {self.state.max_steps} ({why})")
        elif main:
            rotate_checkpoints(str(output), save_total_limit=self.args.save_total_limit)
        if main:
            remove(aside)
        self.accelerator.wait_for_everyone()


class OverRanks(sp.SequenceParallelTrainerMixin, Tuner):
    """The same on sequences that ranks share."""


def anywhere(here: bool) -> bool:
    """Returns whether it is so on any rank."""
    return bool(of_every_rank(float(here)).any())


def check_finite(model: nn.Module) -> None:
    """Raises ValueError if a weight is NaN or infinite."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(weight.detach().isfinite().all()):
            raise ValueError(f"{name} holds nan or inf, so it was not saved; train with a smaller --learning-rate")


class Watch(TrainerCallback):
    """Shows a line a step, ends the run at a loss that is not finite, and saves and ends it on a signal."""

    def __init__(self, name: str, console: Console, tokens: int):
        self.name, self.console, self.tokens = name, console, tokens
        self.result, self.losses, self.got = RunResult(), [], None
        self.start = 0.0
        self._bar: Any = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Lets the step at hand end before a signal ends the run. A second Ctrl-C raises KeyboardInterrupt, but not on
        ranks, to which torchrun passes on what their terminal has told them already."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.got == number == signal.SIGINT and not dist.is_initialized():
            raise KeyboardInterrupt
        if self.got is None and not dist.is_initialized():
            self.say("interrupted: after this step the model is saved; Ctrl-C again ends it at once")
        self.got = number

    @contextmanager
    def bar(self, total: int) -> Iterator[None]:
        step, figures = "{task.description} {task.completed}/{task.total}", "{task.fields[figures]}"
        disable = not self.console.is_terminal
        with Progress(step, BarColumn(bar_width=12), figures, console=self.console, disable=disable) as progress:
            self._bar = (
                progress,
                progress.add_task(self.name, total=total, completed=len(self.result.losses), figures=""),
            )
            yield

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()
        self.losses.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = torch.stack(self.losses).sum()
        device = "cpu" if args.use_cpu else "cuda"
        ranks = of_every_rank(loss.item(), float(self.got is not None), peak_mib(device))
        result = self.result
        result.losses.append(ranks[:, 0].mean().item())
        result.step_seconds.append(time.perf_counter() - self.start)
        result.peak_mib = max(result.peak_mib, ranks[:, 2].max().item())
        said = step_figures(result, self.tokens, state.max_steps)
        progress, bar = self._bar
        progress.update(bar, total=state.max_steps, completed=state.global_step, figures=said)
        if not self.console.is_terminal:
            self.say(f"{self.name}: step {state.global_step}/{state.max_steps}  {said}")
        if not math.isfinite(result.losses[-1]):
            raise ValueError(
                f"the loss of step {state.global_step} is {result.losses[-1]}; nothing was saved of it. Train with a "
                "smaller --learning-rate, or look at the data"
            )
        if ranks[:, 1].any():
            control.should_save = control.should_training_stop = True
            self.got = self.got or signal.SIGTERM
        elif state.global_step == state.max_steps and args.save_strategy != "no":
            control.should_save = True
