"""Trainer trains a tiled model as untiled, whether it is tiled before or by SeqtileCallback at the start of
training."""

import copy
import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers.trainer
from torch import nn
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from support.assertions import assert_each_as_exact, relative_error
from support.tiny import CHUNK, batch_of, gentle, tiled_copy
from support.trainers import OPTIONS, Run, assert_same_training, run

Rows = list[dict[str, torch.Tensor]]


@pytest.fixture
def documents() -> Rows:
    """Eight documents with masked prompts of very different lengths."""
    rows = [{name: batch_of(1, 101)[name][0] for name in ("input_ids", "attention_mask")} for _ in range(8)]
    for i, row in enumerate(rows):
        row["labels"] = row["input_ids"].clone()
        row["labels"][: 5 + 11 * i] = -100
    return rows


def trainer(model: nn.Module, documents: Rows, output: Path, *callbacks: Any, **changes: Any) -> Trainer:
    """A trainer for two steps of three documents."""
    options = OPTIONS | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 2}
    options |= {"gradient_checkpointing": True, "report_to": [], "seed": 0}
    arguments = TrainingArguments(output_dir=str(output), **options | changes)
    return Trainer(model=model, args=arguments, train_dataset=documents, eval_dataset=documents, callbacks=[*callbacks])


def tiled_parts(model: nn.Module) -> tuple[int, int]:
    status = seqtile.status(model)
    return status.loss.tiled, status.mlp.tiled


def test_offloading_is_turned_on_after_the_trainers_own_checkpointing(documents: Rows, tmp_path: Path) -> None:
    """As `offload.enable` needs, which replaces it."""
    model = gentle("llama")
    with patch("seqtile.integrations.trainer.enable_offload") as enable:
        enable.side_effect = lambda model: seen.append(model.is_gradient_checkpointing)
        seen: list[bool] = []
        run(trainer(model, documents, tmp_path, SeqtileCallback(offload=True)))
    enable.assert_called_once_with(model)
    assert seen == [True]


def test_the_log_of_a_loaded_model_says_nothing_of_evaluation(
    documents: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in evaluation mode, as loaded, until the first step."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = gentle("llama").eval()
    with caplog.at_level("INFO", logger="seqtile"):
        trainer(model, documents, tmp_path, SeqtileCallback(chunk_tokens=CHUNK), max_steps=1).train()
    assert "2 of 2 fused" in caplog.text and "first step" in caplog.text and "evaluation" not in caplog.text


@pytest.mark.full("two seconds each", but=("llama-options0-callback", "llama-options1-before"))
@pytest.mark.parametrize("when", ["callback", "before"])
@pytest.mark.parametrize(
    ("arch", "options"), [("llama", {"layer": True, "head_groups": "auto"}), ("llama", {}), ("gemma2", {"layer": True})]
)
def test_same_training(arch: str, options: dict, when: str, documents: Rows, tmp_path: Path) -> None:
    """Hugging Face can also load the saved model."""
    untiled = gentle(arch)
    callbacks = [SeqtileCallback(chunk_tokens=CHUNK, **options)] if when == "callback" else []
    tiled = copy.deepcopy(untiled) if callbacks else tiled_copy(untiled, **options)
    theirs = run(trainer(untiled, documents, tmp_path))
    ours = run(training := trainer(tiled, documents, tmp_path, *callbacks))
    assert tiled_parts(tiled) == (1, 2)
    assert_same_training(ours, theirs, each=1e-3 if options else 1e-4)
    training.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(loaded.get_parameter(name).equal(parameter) for name, parameter in tiled.named_parameters())


def test_documents_in_one_row_without_masks(documents: Rows, tmp_path: Path) -> None:
    """Batches of two documents, one behind the other, told apart by positions and by cumulative lengths."""
    untiled = gentle("llama")
    untiled.config.use_cache = False  # with one, Hugging Face forgets the documents in the evaluation
    tiled = copy.deepcopy(untiled)
    rows = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in documents]
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "remove_unused_columns": False}

    def trained(model: nn.Module, *callbacks: Any) -> Run:
        training = trainer(model, rows, tmp_path, *callbacks, **options)
        training.data_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        return run(training)

    theirs = trained(untiled)
    ours = trained(tiled, SeqtileCallback(chunk_tokens=CHUNK, layer=True, attention="varlen"))
    assert_same_training(ours, theirs)
    assert seqtile.status(tiled).attention == "sdpa"


def test_below_autocast(documents: Rows, tmp_path: Path) -> None:
    """Accelerate's mixed precision still wraps the tiled forward. Training in float32 is the reference."""
    models = [gentle("llama")]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    truth = run(trainer(models[0], documents, tmp_path)).moved
    theirs = run(trainer(models[1], documents, tmp_path, bf16=True))
    ours = run(trainer(models[2], documents, tmp_path, SeqtileCallback(chunk_tokens=CHUNK), bf16=True))
    for moved in (ours.moved, theirs.moved):
        assert min(relative_error(moved[name], truth[name]) for name in truth) > 1e-4, "not in bfloat16"
    assert tiled_parts(models[2]) == (1, 2)
    assert_each_as_exact(ours.moved, theirs.moved, truth)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=0.02)


def test_after_liger(
    documents: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer applies Liger to the model itself, before it calls the callback, which logs what it did."""
    seen = []
    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", lambda model, _: seen.append(tiled_parts(model)))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("INFO", logger="seqtile.integrations.trainer"):
        model = gentle("llama")
        trainer(model, documents, tmp_path, SeqtileCallback(chunk_tokens=CHUNK), use_liger_kernel=True).train()
    assert seen == [(0, 0)] and tiled_parts(model) == (1, 2)
    assert "mlp   seqtile, 50 tokens a chunk, 2 of 2 fused" in caplog.text


def test_lora_and_a_second_training(documents: Rows, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(gentle("llama"), peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    training = trainer(model, documents, tmp_path, SeqtileCallback(chunk_tokens=CHUNK), bf16=True, max_steps=1)
    for _ in range(2):
        training.train()
        assert tiled_parts(model) == (1, 2)


@pytest.mark.full("2 s each", but=("options0-chunk_tokens-False",))
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("options", "message"), [({"chunk_tokens": 0}, "chunk_tokens"), ({"head_groups": 2}, "pass layer=True too")]
)
def test_bad_options_change_nothing(options: dict, message: str, bf16: bool, documents: Rows, tmp_path: Path) -> None:
    model = gentle("llama")
    training = trainer(model, documents, tmp_path, SeqtileCallback(**options), bf16=bf16, max_steps=1)
    with pytest.raises(ValueError, match=message):
        training.train()
    assert tiled_parts(model) == (0, 0)
    assert ("_original_forward" in vars(model)) == bf16
    training.pop_callback(SeqtileCallback)
    training.train()
