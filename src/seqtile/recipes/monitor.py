"""What shows a run of `seqtile finetune`, a line a step, and ends it on a signal, with what was trained saved."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch import nn
from tqdm import tqdm
from transformers import TrainerCallback

import seqtile
from seqtile.fitting import gather_numbers, on_any_rank
from seqtile.recipes.memory import peak_mib

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


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
