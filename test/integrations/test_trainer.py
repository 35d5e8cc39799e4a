"""SeqtileCallback: what it tiles when training begins trains as the untiled model does."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import seqtile
from seqtile.integrations.trainer import SeqtileCallback
from support.assertions import assert_each_as_exact, relative_error
from support.tiny import CHUNK, batch_of, build


class Documents(Dataset):
    """Six documents, with prompts of very different lengths masked."""

    def __init__(self) -> None:
        self.rows = [
            {name: rows[0] for name, rows in batch_of(1, 101).items() if name != "use_cache"} for _ in range(6)
        ]
        for i, row in enumerate(self.rows):
            row["labels"][: 11 * i] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def smaller(arch: str) -> nn.Module:
    model = build(arch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # learning rate 1 must not diverge
    return model


def trainer(model: nn.Module, documents: Dataset, output: Path, *callbacks: Any, **changes: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        gradient_checkpointing=True,
        max_steps=2,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **changes,
    )
    return Trainer(model=model, args=arguments, train_dataset=documents, eval_dataset=documents, callbacks=[*callbacks])


def trained(model: nn.Module, *arguments: Any, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, the last in evaluation, and how far the weights were moved."""
    model = copy.deepcopy(model)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run = trainer(model, *arguments, **changes)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry] + [run.evaluate()["eval_loss"]]
    moved = {name: parameter.detach() - start[name] for name, parameter in model.named_parameters()}
    if any(isinstance(argument, SeqtileCallback) for argument in arguments):
        status = seqtile.status(model)
        assert (status.loss.tiled, status.mlp.tiled) == (1, 2)
    return losses, moved


@pytest.mark.parametrize(
    ("arch", "options"), [("llama", {"layer": True, "head_groups": "auto"}), ("llama", {}), ("gemma2", {"layer": True})]
)
def test_same_training(arch: str, options: dict, tmp_path: Path) -> None:
    model, documents = smaller(arch), Documents()
    their_losses, theirs = trained(model, documents, tmp_path)
    losses, ours = trained(model, documents, tmp_path, SeqtileCallback(chunk_tokens=CHUNK, **options))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(their_losses), rtol=1e-5, atol=1e-4)
    whole = [torch.cat([value.flatten() for value in moved.values()]) for moved in (ours, theirs)]
    assert whole[1].norm() > 0 and relative_error(*whole) <= 3e-5


def test_below_autocast(tmp_path: Path) -> None:
    """Accelerate's mixed precision stays around the tiled forward; the training in float32 is the truth."""
    model, documents = smaller("llama"), Documents()
    _, truth = trained(model, documents, tmp_path)
    their_losses, theirs = trained(model, documents, tmp_path, bf16=True)
    losses, ours = trained(model, documents, tmp_path, SeqtileCallback(chunk_tokens=CHUNK), bf16=True)
    for moved in (ours, theirs):
        assert min(relative_error(moved[name], truth[name]) for name in truth) > 1e-4, "not in bfloat16"
    assert_each_as_exact(ours, theirs, truth)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(their_losses), rtol=0, atol=0.02)


def test_after_liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer applies Liger, to the model itself, before the callback is called."""
    seen = []
    monkeypatch.setattr(
        transformers.trainer, "apply_liger_kernel", lambda model, config: seen.append(seqtile.status(model).mlp.tiled)
    )
    trained(smaller("llama"), Documents(), tmp_path, SeqtileCallback(), use_liger_kernel=True)
    assert seen == [0]


def test_lora_and_a_second_training(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(smaller("llama"), peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    run = trainer(model, Documents(), tmp_path, SeqtileCallback(chunk_tokens=CHUNK), bf16=True)
    for _ in range(2):
        run.train()
        assert seqtile.status(model).mlp.tiled == 2 and seqtile.status(model).loss.tiled == 1


def test_under_trl_the_loss_is_left_to_it(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from support.trl_trainers import token_documents
    from support.trl_trainers import trainer as trl_trainer

    model = smaller("llama")
    run = trl_trainer(trl.SFTTrainer, model, token_documents(), tmp_path, bf16=None)
    run.add_callback(SeqtileCallback(chunk_tokens=CHUNK))
    run.train()
    assert (seqtile.status(model).loss.tiled, seqtile.status(model).mlp.tiled) == (0, 2)


def test_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    said = logging.getLogger("seqtile.integrations.trainer")
    with caplog.at_level("INFO", logger=said.name):
        trained(smaller("llama"), Documents(), tmp_path, SeqtileCallback(chunk_tokens=CHUNK))
    assert "mlp   seqtile, 50 tokens a chunk, 2 of 2 fused" in caplog.text


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("options", "message"), [({"chunk_tokens": 0}, "chunk_tokens"), ({"head_groups": 2}, "pass layer=True too")]
)
def test_bad_options_change_nothing(options: dict, message: str, bf16: bool, tmp_path: Path) -> None:
    model = smaller("llama")
    run = trainer(model, Documents(), tmp_path, SeqtileCallback(**options), bf16=bf16)
    with pytest.raises(ValueError, match=message):
        run.train()
    assert seqtile.status(model).mlp.tiled == 0
    assert ("_original_forward" in vars(model)) == bf16
    run.pop_callback(SeqtileCallback)
    run.train()
