"""Hugging Face's Trainer: gradient accumulation over uneven labels, evaluation, saving."""

import copy
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import seqtile
from support.assertions import relative_error
from support.tiny import CHUNK, batch_of, build


class Documents(Dataset):
    """Eight documents of one length, with prompts of very different lengths masked."""

    def __init__(self) -> None:
        self.rows = []
        for i in range(8):
            batch = batch_of(1, 101)
            batch["labels"][0, : 11 * i] = -100
            self.rows.append({name: batch[name][0] for name in ("input_ids", "labels")})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def trainer(model: torch.nn.Module, documents: Documents, output: Path) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        gradient_checkpointing=True,
        max_steps=3,
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
    )
    return Trainer(model=model, args=arguments, train_dataset=documents, eval_dataset=documents)


def test_same_training_as_untiled(tmp_path: Path) -> None:
    untiled = build("llama")
    with torch.no_grad():
        for parameter in untiled.parameters():
            parameter.mul_(0.5)  # learning rate 1 must not diverge
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    start = copy.deepcopy(untiled.state_dict())
    documents = Documents()
    theirs, ours = trainer(untiled, documents, tmp_path), trainer(tiled, documents, tmp_path)
    theirs.train()
    ours.train()

    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (theirs, ours)]
    assert len(losses[0]) == 3
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=1e-4)
    for name, parameter in untiled.named_parameters():
        moved = parameter - start[name]
        assert moved.count_nonzero() > 0
        assert relative_error(tiled.get_parameter(name) - start[name], moved) <= 1e-4, name
    assert abs(ours.evaluate()["eval_loss"] - theirs.evaluate()["eval_loss"]) < 1e-4

    ours.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, parameter in tiled.named_parameters():
        assert loaded.get_parameter(name).equal(parameter), name
