"""TRL's SFTTrainer as `seqtile finetune` runs it: checkpoints are complete or absent; nothing is lost to a full disk or
a loss that is not finite."""

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer

from seqtile import sp
from seqtile.fitting import on_any_rank
from seqtile.recipes import in_brief
from seqtile.recipes.memory import MIB
from seqtile.recipes.monitor import Monitor
from seqtile.recipes.output import remove

OPTIONS_FILE = "seqtile.json"
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

    def __init__(self, *args: Any, fixed: dict[str, Any], monitor: Monitor, **kwargs: Any):
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
        except RuntimeError as error:
            if "assistant tokens" not in str(error):
                raise
            expected = "expected an assistant's answer in every row, and a chat template with {% generation %}"
            raise ValueError(
                f"--assistant-only-loss: TRL finds a row without an assistant's tokens; {expected}"
            ) from error
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
            self.failed = write_error(error, Path(self.args.output_dir))

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
                (aside / name / OPTIONS_FILE).write_text(json.dumps(self.fixed), encoding="utf-8")
        except Exception as error:  # safetensors, torch and the system have one each for a full disk
            self.failed = write_error(error, output)  # a text, since the error's frames hold files open
        finally:
            self.incomplete = None
        if not on_any_rank(self.failed is not None) and main:
            try:
                (aside / name).replace(output / name)
            except OSError as error:
                self.failed = write_error(error, output)
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


def write_error(error: Exception, directory: Path) -> str:
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
