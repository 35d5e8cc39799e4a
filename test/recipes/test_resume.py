"""A run that was ended early goes on as if it had not been: checkpoints are complete or absent."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import Trainer

from recipes.cases import Killed, ended_in, interrupted_on_rank, kill, on_rank, press_ctrl_c
from recipes.tiny_pretrained import save_tiny, small_files_only
from seqtile.recipes.tuner import Tuner
from support.pool import Pool

STEPS = 5
TEXT = "".join(f"line {number} of a long document\n" for number in range(60))


@pytest.fixture
def job(tmp_path: Path) -> tuple[object, ...]:
    save_tiny(tmp_path / "start")
    (tmp_path / "book.txt").write_text(TEXT)
    common = ("--model", tmp_path / "start", "--data", tmp_path / "book.txt", "--seq-len", 50, "--steps", STEPS)
    return *common, "--learning-rate", 1e-3, "--save-every", 2


def trained(output: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = json.loads((output / "report.json").read_text())["runs"]["seqtile"]["loss"]
    return losses, load_file(output / "model" / "model.safetensors")


def assert_same(output: Path, whole: Path) -> None:
    """Bit for bit."""
    (losses, weights), (expected, those) = trained(output), trained(whole)
    assert losses == expected and len(losses) == STEPS
    assert all(weights[name].equal(those[name]) for name in those)


def checkpoints(output: Path) -> list[str]:
    return sorted(file.name for file in output.iterdir() if "checkpoint" in file.name)


def killed_in(method: str) -> Callable[..., None]:
    def die(*arguments: object, **options: object) -> None:
        raise Killed

    return patch.object(Tuner, method, die)


@pytest.mark.full("10 s each", but=("full", "lora with dropout"))
@pytest.mark.parametrize("kind", ["full", "lora with dropout", "4 bits"])
def test_one_process(job: tuple, kind: str, tmp_path: Path) -> None:
    """Ended by Ctrl-C, killed in a step, killed in the middle of a checkpoint: the losses and weights of a run that was
    not."""
    adapters = {"full": (), "lora with dropout": ("--use-peft", "--lora-dropout", 0.2)}
    job = (*job, *adapters.get(kind, ("--use-peft", "--load-in-4bit")))
    output, whole = tmp_path / "run", tmp_path / "whole"
    assert on_rank(*job, "--output", whole)[0] == 0
    with ended_in(1, press_ctrl_c):
        code, said = on_rank(*job, "--output", output)
    assert code == 128 + signal.SIGINT and "interrupted: after this step the model is saved" in said
    assert checkpoints(output) == ["checkpoint-1"] and (output / "model").is_dir()
    with pytest.raises(Killed), ended_in(2, kill):
        on_rank(*job, "--output", output, "--resume")
    assert checkpoints(output) == ["checkpoint-2"]
    with pytest.raises(Killed), killed_in("_save_optimizer_and_scheduler"):
        on_rank(*job, "--output", output, "--resume")
    assert checkpoints(output) == [".incomplete-checkpoint-4", "checkpoint-2"]
    code, said = on_rank(*job, "--output", output, "--resume")
    assert code == 0 and "goes on after step 2" in said and checkpoints(output) == [f"checkpoint-{STEPS}"]
    if kind == "full":
        assert_same(output, whole)
    else:
        assert json.loads((output / "report.json").read_text())["runs"]["seqtile"]["loss"] == pytest.approx(
            json.loads((whole / "report.json").read_text())["runs"]["seqtile"]["loss"], abs=0
        )


def test_another_job_is_refused(job: tuple, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with ended_in(3, press_ctrl_c):
        on_rank(*job, "--output", output)
    for more, message in (
        (("--seed", 3), "--resume: seed was 42 and is 3 now; pass the same options"),
        (("--learning-rate", 1e-4), "learning_rate was 0.001 and is 0.0001 now"),
        (("--use-peft",), "use_peft was False and is True now"),
        (("--num-train-epochs", 2), "num_train_epochs was 1.0 and is 2.0 now"),
        (("--warmup-steps", 2), "warmup_steps was 0.03 and is 2.0 now"),
        (("--steps", 9), f"the run has {STEPS} steps, and --steps is 9 now; another number is possible only with"),
    ):
        code, said = on_rank(*job, "--output", output, "--resume", *more)
        assert code == 1 and message in said, said
    code, said = on_rank(*job, "--output", output)
    assert code == 1 and "holds checkpoint-3 of an earlier run; pass --resume, or another --output" in said


def test_more_steps_at_a_constant_rate(job: tuple, tmp_path: Path) -> None:
    """Come to what a run of so many would have; not if there are other rows."""
    output, whole, constant = tmp_path / "run", tmp_path / "whole", ("--lr-scheduler-type", "constant")
    on_rank(*job, *constant, "--steps", 2, "--output", output)
    code, said = on_rank(*job, *constant, "--output", output, "--resume")
    assert code == 0 and f"step {STEPS}/{STEPS}" in said, said
    on_rank(*job, *constant, "--output", whole)
    assert_same(output, whole)
    with (tmp_path / "book.txt").open("a") as book:
        book.write(TEXT)
    code, said = on_rank(*job, *constant, "--output", output, "--resume")
    assert code == 1 and "--resume: rows was 32 and is 64 now" in said, said


@pytest.mark.parametrize("method", ["save_model", "train"])
def test_a_signal_after_the_last_step(method: str, job: tuple, tmp_path: Path) -> None:
    """While the model is saved: it is saved. Before training: nothing is trained."""
    original = getattr(Tuner, method)

    def interrupted(self, *arguments: object, **options: object) -> object:
        press_ctrl_c()
        return original(self, *arguments, **options)

    output = tmp_path / "run"
    with patch.object(Tuner, method, interrupted):
        code, said = on_rank(*job, "--save-every", 0, "--output", output)
    assert code == 128 + signal.SIGINT, said
    assert (output / "model").exists() == (output / "report.json").exists() == (method == "save_model")


def test_the_best_model(job: tuple, tmp_path: Path) -> None:
    output = tmp_path / "run"
    best = ("--load-best-model-at-end", "--test-split-size", 0.2, "--eval-strategy", "steps", "--eval-steps", 2)
    code, said = on_rank(*job, *best, "--steps", 4, "--output", output)
    assert code == 0, said
    state = json.loads((output / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(output / f"checkpoint-{state['best_global_step']}")


@pytest.mark.parametrize("how", ["full", "quota", "read-only"])
def test_no_room_for_a_checkpoint(how: str, job: tuple, tmp_path: Path) -> None:
    """A note that says why, and the training goes on; the earlier checkpoint stays until the new one is complete."""
    output, before = tmp_path / "run", Tuner._save_optimizer_and_scheduler
    number = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "read-only": errno.EROFS}[how]

    def fail(self, directory: str) -> None:
        if "checkpoint-4" in directory:
            raise OSError(number, os.strerror(number))
        before(self, directory)

    with patch.object(Tuner, "_save_optimizer_and_scheduler", fail):
        code, said = on_rank(*job, "--steps", 4, "--output", output)
    assert code == 0 and checkpoints(output) == ["checkpoint-2"]
    assert f"note: no checkpoint after step 4 of 4 ([Errno {number}] {os.strerror(number)})" in said
    assert len(trained(output)[0]) == 4


def test_a_model_that_cannot_be_saved_where_it_should(job: tuple, tmp_path: Path) -> None:
    """It is saved elsewhere, and the error, last, says where."""
    output = tmp_path / "run"
    with small_files_only():
        code, said = on_rank(*job, "--output", output)
    assert code == 1 and said.count("note: no checkpoint after step") == 3, said
    assert "the trained model is lost: it could be saved neither in" in said and not (output / "model").exists()

    save = Tuner.save_model

    def no_room(self, directory: str, **options: object) -> None:
        if str(output) in directory and "checkpoint" not in directory:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, directory, **options)

    with patch.object(Tuner, "save_model", no_room):
        code, said = on_rank(*job, "--output", output)
    elsewhere = Path(said.rsplit("it is in ", 1)[1].strip())
    assert code == 1 and "the model could not be saved in" in said and len(trained(elsewhere)[0]) == STEPS


def test_a_loss_or_weight_that_is_not_finite(job: tuple, tmp_path: Path) -> None:
    """Ends the run; the last good checkpoint stays, and no model is written."""
    output, step = tmp_path / "run", Trainer.training_step

    def nan(self, *arguments: object, **options: object) -> torch.Tensor:
        loss = step(self, *arguments, **options)
        return loss * float("nan") if self.state.global_step == 3 else loss

    with patch.object(Trainer, "training_step", nan):
        code, said = on_rank(*job, "--output", output)
    assert code == 1 and "the loss of step 4 is nan; nothing was saved of it" in said
    assert checkpoints(output) == ["checkpoint-2"] and not (output / "model").exists()

    def broken(self, *arguments: object, **options: object) -> torch.Tensor:
        loss = step(self, *arguments, **options)
        if self.state.global_step == STEPS - 1:
            next(self.model.parameters()).data[0, 0] = torch.inf
        return loss

    with patch.object(Trainer, "training_step", broken):
        code, said = on_rank(*job, "--output", output, "--resume")
    assert code == 1 and "holds nan or inf, so it was not saved" in said and checkpoints(output) == ["checkpoint-4"]


def test_two_runs_into_one_output(job: tuple, tmp_path: Path) -> None:
    """The second is refused, by a lock of the kernel's, which a killed run does not leave."""
    output = tmp_path / "run"
    output.mkdir()
    with FileLock(output / ".lock"):
        code, said = on_rank(*job, "--output", output)
    assert code == 1 and f"--output: another run writes to {output}; choose another directory" in said
    assert on_rank(*job, "--steps", 1, "--output", output)[0] == 0


@pytest.mark.full("20 s each; other tests send signals inside a process")
@pytest.mark.parametrize("when", ["seqtile", "untiled"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL])
def test_signals(number: int, when: str, job: tuple, tmp_path: Path) -> None:
    """All but SIGKILL finish the step, save, and end the process, and that of a comparison, as the signal would
    have."""
    output = tmp_path / "run"
    command = [sys.executable, "-m", "seqtile.cli", "finetune", *map(str, job), "--device", "cpu", "--output", output]
    command += ["--steps", "20000", *(["--compare"] if when == "untiled" else [])]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=environment) as process:
        while f"{when}: step 3/" not in process.stdout.readline():
            assert process.poll() is None
        others = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == -number
    assert (output / "model").exists() == (number != signal.SIGKILL and when == "seqtile")
    assert not psutil.wait_procs(others, timeout=60)[1], "no process is left"
    if number != signal.SIGKILL:
        assert not list(temporary.iterdir()), "nothing is left"
    if when == "seqtile":
        code, said = on_rank(*job, "--steps", 20_000, "--output", output)
        assert code == 1 and "pass --resume" in said


@pytest.mark.full("7 s", but=("2-2",))
@pytest.mark.dist
@pytest.mark.parametrize("pool", [(2, "own")], indirect=True, ids=["2"])
@pytest.mark.parametrize("shared", [1, 2])
def test_ranks(pool: Pool, shared: int, job: tuple, tmp_path: Path) -> None:
    """One rank gets Ctrl-C: all end after the same step, save, and go on to the weights of a run that was not ended."""
    job, output, whole = (*map(str, job), "--sequence-parallel", str(shared)), tmp_path / "run", tmp_path / "whole"
    assert [code for code, _ in pool.run(on_rank, *job, "--output", str(whole), leaves_traces=True)] == [0, 0]
    found = pool.run(interrupted_on_rank, *job, "--output", str(output), leaves_traces=True)
    assert {code for code, _ in found} <= {128 + signal.SIGINT, 128 + signal.SIGTERM}, found
    found = pool.run(on_rank, *job, "--output", str(output), "--resume", leaves_traces=True)
    assert [code for code, _ in found] == [0, 0] and "goes on after step 2" in found[0][1], found
    assert_same(output, whole)
