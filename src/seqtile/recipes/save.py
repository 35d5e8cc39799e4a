"""Saving: nothing half-written stays, what was there is kept until it is replaced, and nothing trained is lost."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Where to write a file or a directory that then takes the place of `path`, unless an exception is raised.

    Of a directory that it replaces, files that the new one lacks stay in it, but for weights.
    """
    path, new, old = places(path)
    remove(new)
    try:
        yield new
        if not path.is_dir():
            new.replace(path)
            return
        remove(old)  # a directory is not replaced in one step
        path.rename(old)
        new.rename(path)
        for entry in list(old.iterdir()):
            if ".safetensors" not in entry.name and not (path / entry.name).exists():
                entry.rename(path / entry.name)
        remove(old)
    finally:
        remove(new)


def places(path: Path) -> tuple[Path, Path, Path]:
    """`path` itself, or what it links to; what is written first, beside it and so on the same disk; and the old one."""
    path = path.resolve()
    return path, path.with_name(f"{path.name}.incomplete"), path.with_name(f"{path.name}.replaced")


def remove_incomplete(path: Path) -> None:
    """What a process left that was killed in `written_beside`."""
    path, new, old = places(path)
    if path.exists() or not old.exists():  # else it was killed between two renames, and `new` is complete
        remove(new)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def save_model(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], tokenizer: Path | None, directory: Path
) -> Path:
    """Saves as `save_pretrained` does, with the files of the directory `tokenizer`, and returns where: `directory`, or
    a new temporary one if that cannot be.

    Raises OSError if neither can be.
    """

    def save(place: Path) -> None:
        with written_beside(place) as new:
            model.save_pretrained(new, state_dict=dict(weights))
            if tokenizer is not None:
                shutil.copytree(tokenizer, new, dirs_exist_ok=True)

    try:
        save(directory)
        return directory
    except Exception as error:  # safetensors has its own; whatever it is, the weights are not to be lost
        failed = error
    other = Path(tempfile.mkdtemp(prefix="seqtile-")) / directory.name
    try:
        save(other)
        return other
    except Exception as error:
        remove(other.parent)
        raise OSError(
            f"the trained model is lost: it could be saved neither in {directory} ({failed}) nor in {other} ({error}); "
            "make room before the next run"
        ) from failed
