"""A fine-tuned model is saved with all that it computes with, of every type that has more than weights."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.layered import small_of
from recipes.cases import on_rank
from recipes.tiny_pretrained import save_tiny
from seqtile.models.model_types import model_types

NOT_TRAINED = {  # model type -> why
    "deepseek_v4": "TRL's loss asks its config for num_experts",
    "dots3_note": "a small config of it cannot be saved",
    "dots3_note_text": "a small config of it cannot be saved",
    "gemma4_unified_assistant": "it reads the keys of another model",
}
CHECKED = ("glm4_moe", "deepseek_v3", "minimax_m2")


def buffers_of(model: nn.Module) -> set[str]:
    """Returns the names of the persistent ones."""
    return set(model.state_dict()) & set(dict(model.named_buffers()))


def with_buffers() -> list[str]:
    """The types of text models with persistent buffers, such as routers' biases."""
    found = []
    for model_type in model_types():
        try:
            model = small_of(model_type, vocab_size=100)
        except Exception:  # needs a package, or a GPU
            continue
        if buffers_of(model) and type(model.config) in AutoModelForCausalLM._model_mapping:
            found.append(model_type)
    return found


def survives(model_type: str, directory: Path) -> None:
    """The saved model loads, and has what the trained one had: its loss on the last batch is the trained model's."""
    save_tiny(directory / "start")
    model = small_of(model_type, vocab_size=100)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer) * 0.1)
    model.save_pretrained(directory / "start")
    buffers = buffers_of(model)
    assert buffers, model_type
    (directory / "book.txt").write_text("a long document, " * 60)
    job = ("--model", directory / "start", "--data", directory / "book.txt", "--seq-len", 40, "--steps", 2)
    code, said = on_rank(*job, "--save-every", 1, "--output", directory / "run")
    assert code == 0, said
    saved = AutoModelForCausalLM.from_pretrained(directory / "run" / "model", dtype=torch.float32)
    last = AutoModelForCausalLM.from_pretrained(directory / "run" / "checkpoint-2", dtype=torch.float32)
    for name in buffers:  # others than routers' biases change in training
        expected = model if model_type in CHECKED else last
        assert saved.state_dict()[name].equal(expected.state_dict()[name]), name
    ids = AutoTokenizer.from_pretrained(directory / "run" / "model")("a long document", return_tensors="pt").input_ids
    losses = [each.eval()(ids, labels=ids).loss.item() for each in (saved, last)]
    assert losses[0] == losses[1]
    assert json.loads((directory / "run" / "report.json").read_text())["runs"]["seqtile"]["step"] == [1, 2]


@pytest.mark.full("2 s each", but=CHECKED)
@pytest.mark.parametrize("model_type", CHECKED)
def test_buffers(model_type: str, tmp_path: Path) -> None:
    survives(model_type, tmp_path)


@pytest.mark.full("a minute and more")
def test_every_type_with_buffers(tmp_path: Path) -> None:
    names = with_buffers()
    assert set(CHECKED) <= set(names) and len(names) >= 20
    for name in set(names) - set(NOT_TRAINED):
        survives(name, tmp_path / name)
