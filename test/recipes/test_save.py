"""Saving: the earlier model stays until the new one is complete, no partial files remain, and nothing is lost."""

import errno
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.tiny_pretrained import contents, save_tiny, small_files_only
from seqtile.recipes import Job, check_output
from seqtile.recipes.data import load_config
from seqtile.recipes.output import remove_incomplete, save_model, written_beside
from seqtile.recipes.state import Run
from seqtile.recipes.train import train
from support.tiny import build


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory."""
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_model_takes_the_place_of_another(tmp_path: Path, elsewhere: Path) -> None:
    """Also if its directory is a link. Files that are no weights and are not rewritten stay."""
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "model").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "big" / "model")
    for name in ("README.md", "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / "model" / name).write_text("old")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    model = build("llama")
    place = save_model(model, dict(model.named_parameters()), tokenizer, tmp_path / "model")
    assert place == tmp_path / "model" and not names(elsewhere) and names(tmp_path / "big") == {"model"}
    expected = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names(place) == expected and (place / "README.md").read_text() == "old"
    saved = AutoModelForCausalLM.from_pretrained(place)
    assert all(ours.equal(theirs) for ours, theirs in zip(model.parameters(), saved.parameters(), strict=True))


def test_a_full_disk(tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is saved elsewhere, existing files do not change, and no partial files remain."""
    save_tiny(tmp_path / "model")
    before = contents(tmp_path / "model")
    model = build("llama")
    weights = dict(model.named_parameters())
    save_pretrained = type(model).save_pretrained

    def full(model: torch.nn.Module, directory: Path, **options: object) -> None:
        save_pretrained(model, directory, **options)
        if elsewhere not in Path(directory).parents:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", full)
    place = save_model(model, weights, None, tmp_path / "model")
    assert elsewhere in place.parents and (place / "model.safetensors").is_file() and names(place.parent) == {"model"}
    assert contents(tmp_path / "model") == before
    assert names(tmp_path) == {"model", "elsewhere"}


def test_no_disk_has_room(tmp_path: Path, elsewhere: Path) -> None:
    """A system limit: writing fails in the middle of the weights, as on a full disk."""
    model = build("llama")
    (tmp_path / "model").mkdir()
    with small_files_only():
        with pytest.raises(OSError, match=r"could be saved neither in .*model.* nor in .*elsewhere.*; make room"):
            save_model(model, dict(model.named_parameters()), None, tmp_path / "model")
    assert not names(elsewhere) and names(tmp_path) == {"model", "elsewhere"} and not names(tmp_path / "model")


def test_a_killed_process_leaves_nothing_half_written(tmp_path: Path) -> None:
    with written_beside(tmp_path / "model") as new:
        new.mkdir()
    (tmp_path / "model.incomplete").mkdir()
    remove_incomplete(tmp_path / "model")
    assert names(tmp_path) == {"model"}
    (tmp_path / "model").rename(tmp_path / "model.replaced")
    (tmp_path / "model.incomplete").mkdir()
    remove_incomplete(tmp_path / "model")
    assert names(tmp_path) == {"model.replaced", "model.incomplete"}, "killed between two renames: the new one is whole"


def test_room_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--output: saving the model needs 1,000,000,000.00 GB in .*not, but .* free"):
        check_output(tmp_path / "not", {"model": 10**18})
    assert not names(tmp_path)
    check_output(tmp_path / "not" / "yet", {"model": 1000, "checkpoint": 1000})
    assert (tmp_path / "not" / "yet").is_dir()
    (tmp_path / "model").write_text("")
    with pytest.raises(ValueError, match=r"--output: .*model is a file, but the model's directory goes there"):
        check_output(tmp_path, {"model": 1000})
    with pytest.raises(ValueError, match=r"--output: saving the checkpoint needs 1,000,000,000.00 GB"):
        check_output(tmp_path / "not", {"model": 1000, "checkpoint": 10**18})


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place where nobody may write")
def test_a_place_that_cannot_be_written_to_is_not_called_full() -> None:
    with pytest.raises(ValueError, match=r"--output: /proc/nowhere cannot be written to .*; choose another directory"):
        check_output(Path("/proc/nowhere"), {"model": 1000})


@pytest.mark.parametrize(
    ("steps", "learning_rate", "said"),
    [
        (3, 1e30, r"the loss of step 2 is (nan|inf), after \d.*; train with a smaller --learning-rate; nothing was"),
        (1, 0, r"holds nan or inf after the last step, so nothing was saved; train with a smaller --learning-rate"),
        (1, None, r"the loss of step 1 is nan, before any update, so --model's weights or --dtype are to blame"),
    ],
    ids=["at a step", "after the last step", "from the beginning"],
)
def test_what_is_not_finite_is_not_saved(
    steps: int, learning_rate: float | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seqtile.recipes.train.return_freed_memory", lambda: None)  # it permanently changes the process
    save_tiny(tmp_path / "start")
    if learning_rate is None:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
        model.model.norm.weight.data[0] = torch.nan
        model.save_pretrained(tmp_path / "start")
    if learning_rate == 0:
        after = "seqtile.recipes.state.Training.update"
        monkeypatch.setattr(after, lambda self, loss: self.model.lm_head.weight.data.fill_(torch.inf))
    save_to = tmp_path / "run" / "model"
    save_to.mkdir(parents=True)
    job = Job(str(tmp_path / "start"), seq_len=50, steps=steps, learning_rate=learning_rate or 1e-5, device="cpu")
    job = replace(job, output=tmp_path)
    with pytest.raises(ValueError, match=said):
        train(Run(job, load_config(job.model), torch.randint(3, 90, (steps, 1, 50)), tiled=True, save_to=save_to))
    assert names(tmp_path / "run") == {"model"} and not names(save_to)
