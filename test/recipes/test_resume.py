"""`--save-every` and `--resume`: a run that ended early and was resumed is bitwise equal to an uninterrupted run."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes.cases import JOB, STEPS, Killed, ended_in, kill, press_ctrl_c, run_of_a_rank
from recipes.tiny_pretrained import contents, save_tiny, small_files_only
from seqtile.recipes import checkpoint_in
from seqtile.recipes.data import load_config
from seqtile.recipes.state import Run, Training, check_same
from seqtile.recipes.train import train
from support.pool import Pool


def save_with_dropout(directory: Path) -> None:
    """A model that draws random numbers in every step."""
    save_tiny(directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.3}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("seqtile.recipes.train.return_freed_memory", lambda: None)  # it permanently changes the process
    save_with_dropout(tmp_path / "start")
    job = replace(JOB, model=str(tmp_path / "start"), output=tmp_path / "run")
    job.output.mkdir()
    rows = torch.randint(3, 90, (STEPS, 1, 50))
    return Run(job, load_config(job.model), rows, tiled=True, save_to=job.output / "model")


def with_options(run: Run, **options: object) -> Run:
    job = replace(run.job, **options)
    return replace(run, job=job, save_to=job.output / "model")


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(output / "model" / "model.safetensors") for output in (one, other))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_one_process(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Interrupted, and then killed between two checkpoints."""
    with ended_in(2, press_ctrl_c):
        part = train(run)
    assert len(part.losses) == 2 and "checkpoint after step 2 of 5 saved in" in capsys.readouterr().out
    resumed = with_options(run, resume=True, save_every=2)
    with ended_in(3, kill), pytest.raises(Killed):
        train(resumed)
    printed = capsys.readouterr().out
    assert "seqtile: goes on after step 2 of 5\n" in printed and "checkpoint after step 4 of 5 saved in" in printed
    rest = train(resumed)
    assert "checkpoint after step 5 of 5 saved in" in capsys.readouterr().out, "after the last one in any case"
    whole = train(with_options(run, output=tmp_path / "whole"))
    assert rest.losses == whole.losses and rest.losses[:2] == part.losses and len(rest.step_seconds) == STEPS
    assert_same_weights(run.job.output, tmp_path / "whole")
    again = train(with_options(run, resume=True, output=run.job.output))
    assert again.losses == whole.losses, "with nothing left to do the model is saved once more"
    assert_same_weights(run.job.output, tmp_path / "whole")
    assert checkpoint_in(tmp_path / "whole") is None, "none that was not asked for"


@pytest.mark.full("8 s; what of ZeRO-3 is saved differs by DeepSpeed alone", but=("fsdp2",))
@pytest.mark.dist
@pytest.mark.parametrize(
    ("pool", "shard"), [((2, "own"), "fsdp2"), ((2, "own, zero3"), "zero3")], indirect=["pool"], ids=["fsdp2", "zero3"]
)
def test_ranks(pool: Pool, shard: str, tmp_path: Path) -> None:
    save_with_dropout(tmp_path / "start")
    once = shard == "zero3"  # DeepSpeed keeps the process groups of its first run
    _, printed, _ = (
        pool.run(run_of_a_rank, str(tmp_path), shard, name, leaves_traces=once) for name in ("part", "rest", "whole")
    )
    assert "".join(printed).count(f"seqtile: goes on after step 2 of {STEPS}\n") == 1, "one rank prints"
    rest, whole = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("run", "whole"))
    assert rest["seqtile"]["losses"] == whole["seqtile"]["losses"] and rest["steps"] == STEPS
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    job = replace(JOB, model=str(tmp_path / "start"), shard=shard, output=tmp_path / "run")
    with pytest.raises(ValueError, match=r"--resume: expected ranks 2, as in .*checkpoint, got 1; repeat the comm"):
        check_same(Run(job, None, torch.zeros(STEPS, 2, 50, dtype=torch.int64), tiled=True))


def test_another_job_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ended_in(1, press_ctrl_c):
        train(run)
    save_tiny(tmp_path / "other")
    check_same(with_options(run, layer=True, save_every=3, data=[tmp_path]))  # they do not change the training
    more = torch.cat([run.sequences, run.sequences])
    check_same(replace(with_options(run, steps=2 * STEPS), sequences=more))
    for changed, said in (
        (with_options(run, steps=4), "--steps of at least 5, as .*, got 4;"),
        (with_options(run, model=str(tmp_path / "other")), "--model .*start, as .*, got .*other;"),
        (with_options(run, seq_len=49), "--seq-len 50, as .*, got 49;"),
        (with_options(run, dtype="bfloat16"), "--dtype float32, as .*, got bfloat16;"),
        (with_options(run, learning_rate=1e-4), "--learning-rate 0.001, as .*, got 0.0001;"),
        (replace(run, sequences=run.sequences.flip(0)), "--data of SHA-256 "),
    ):
        with pytest.raises(ValueError, match=f"--resume: expected {said}"):
            check_same(changed)
    monkeypatch.setattr("seqtile.recipes.state.ranks", lambda: 2)
    facts = checkpoint_in(run.job.output) / "run.json"
    facts.write_text(
        facts.read_text().replace('"ranks": 1', '"ranks": 2').replace('"--shard": null', '"--shard": "fsdp2"')
    )
    check_same(run)
    with pytest.raises(ValueError, match=r"--resume: expected --shard fsdp2, as .*, got zero3;"):
        check_same(with_options(run, shard="zero3"))


def test_what_cannot_be_gone_on_from(run: Run) -> None:
    for options, said in (
        ({"resume": True}, "--resume: expected a checkpoint in .*run, got none; pass the --output of the run"),
        ({"resume": True, "compare": True}, "--compare does two whole runs, and --resume continues one"),
        ({"save_every": 0}, "--save-every: expected at least 1, or none, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(run.job, **options).check()
    with ended_in(1, press_ctrl_c):
        train(run)
    replace(run.job, resume=True).check()
    next(checkpoint_in(run.job.output).glob("*.distcp")).unlink()
    with pytest.raises(
        OSError, match=r"--resume: rank 0 cannot load .*checkpoint \(.*No such file.*\); leave out --res"
    ):
        train(with_options(run, resume=True))
    (checkpoint_in(run.job.output) / "run.json").unlink()
    with pytest.raises(ValueError, match=r"--resume: the checkpoint in .* cannot be loaded .*; leave out --resume"):
        check_same(run)


@pytest.mark.parametrize("how", ["killed", "disk full", "no room", "nan"])
def test_the_earlier_checkpoint_stays_until_the_new_one_is_complete(
    how: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with ended_in(1, press_ctrl_c):
        train(run)
    before = contents(checkpoint_in(run.job.output))
    save, resumed = Training.save, with_options(run, resume=True, save_every=2)

    def killed(training: Training, directory: Path) -> None:
        save(training, directory)
        raise Killed

    if how == "killed":
        monkeypatch.setattr(Training, "save", killed)
        with pytest.raises(Killed):
            train(resumed)
    elif how == "nan":
        monkeypatch.setattr(Training, "update", lambda self, loss: self.model.lm_head.weight.data.fill_(torch.nan))
        with pytest.raises(ValueError, match="weights hold nan or inf after step 2 of 5, so no checkpoint was saved"):
            train(resumed)
    else:
        with monkeypatch.context() as patch:
            if how == "no room":
                patch.setattr("seqtile.recipes.state.free_bytes", lambda path: 1000)
            else:
                patch.setattr(Training, "save", with_small_files(save))
            losses = train(resumed).losses
        assert len(losses) == STEPS, "it went on"
        why = "0.00 GB more are needed" if how == "no room" else f".*{os.strerror(errno.EFBIG)}.*"
        printed = capsys.readouterr().out
        for step in (2, 4, 5):
            assert f"note: no checkpoint after step {step} of 5 in {run.job.output}/checkpoint (" in printed
        assert "; the earlier one stays\n" in printed and (why in printed or how != "no room")
    found = checkpoint_in(run.job.output)
    assert found.name == "checkpoint" and contents(found) == before
    assert not list(run.job.output.glob("checkpoint.*")), "nothing half-written"


def with_small_files(save: Callable) -> Callable:
    """`save` under a system limit for the size of a file."""

    def limited(training: Training, directory: Path) -> None:
        with small_files_only():
            save(training, directory)

    return limited


def test_killed_at_the_very_moment_of_replacing(run: Run) -> None:
    """Between two renames only the earlier checkpoint exists; a later one then replaces it."""
    with ended_in(1, press_ctrl_c):
        train(run)
    place = checkpoint_in(run.job.output)
    place.rename(place.with_name("checkpoint.replaced"))
    assert checkpoint_in(run.job.output).name == "checkpoint.replaced"
    train(with_options(run, resume=True, save_every=3))
    assert [file.name for file in run.job.output.glob("checkpoint*")] == ["checkpoint"]
    assert json.loads((place / "run.json").read_text())["done"]["losses"][STEPS - 1]
