"""Trainer's evaluation and other readers of a tiled model's logits get the same figures; a loss alone computes no
logits."""

import copy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import EvalPrediction, Trainer, TrainingArguments

import seqtile
from seqtile.models.logits.lazy import LazyLogits
from support.assertions import relative_error, unread
from support.tiny import batch_of, build, tiled_copy
from support.trainers import OPTIONS


@pytest.fixture
def documents() -> list[dict[str, torch.Tensor]]:
    batches = [batch_of(1, length) for length in (101, 101, 64, 64)]
    return [{name: batch[name][0] for name in ("input_ids", "attention_mask", "labels")} for batch in batches]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts how often logits were computed, and the most rows at once."""
    found: Counter = Counter()
    read = LazyLogits._read

    def counted(self: LazyLogits, *args: Any) -> torch.Tensor:
        found["all" if not args or args[0] is None else "by rows"] += 1
        return read(self, *args)

    monkeypatch.setattr(LazyLogits, "_read", counted)
    return found


def accuracy(found: EvalPrediction) -> dict[str, float]:
    words = found.predictions if found.predictions.ndim == 2 else found.predictions.argmax(-1)
    counts = found.label_ids[:, 1:] != -100
    return {"accuracy": float((words[:, :-1] == found.label_ids[:, 1:])[counts].mean())}


WAYS: dict[str, tuple[dict, dict, dict[str, int]]] = {  # options of Trainer and its arguments -> what is computed
    "the loss alone": ({}, {}, {}),
    "metrics": ({"compute_metrics": accuracy}, {}, {"all": 2}),
    "words": (
        {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
        {},
        {"by rows": 2},
    ),
    "in batches": ({"compute_metrics": accuracy}, {"eval_accumulation_steps": 1}, {"all": 2}),
    "in half": ({"compute_metrics": accuracy}, {"bf16": True}, {"all": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_trainer_evaluates(way: str, documents: list, runs: Counter, tmp_path: Path) -> None:
    options, arguments, expected = WAYS[way]
    untiled = build("llama")
    figures = []
    for model in (untiled, tiled_copy(untiled)):
        given = OPTIONS | {"per_device_eval_batch_size": 2, "report_to": []} | arguments
        training = TrainingArguments(output_dir=str(tmp_path), **given)
        trainer = Trainer(model=model, args=training, eval_dataset=documents, **options)
        figures.append({name: value for name, value in trainer.evaluate().items() if "per_second" not in name})
    within = {"rel": 2e-2, "abs": 0.03} if way == "in half" else {"rel": 1e-5}  # of near words another may be the first
    times = {name for name in figures[0] if "time" in name}
    assert {*figures[0]} == {*figures[1]} and dict(runs) == expected
    for name in {*figures[0]} - times:
        assert figures[1][name] == pytest.approx(figures[0][name], **within), name


class OwnLoss(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_ones_own(documents: list, runs: Counter, tmp_path: Path) -> None:
    """A Trainer whose loss knows nothing of tiling reads rows of logits, in the forward and for gradients."""
    untiled = build("gemma2")
    trained = []
    for model in (untiled, tiled_copy(untiled)):
        options = OPTIONS | {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "optim": "sgd"}
        arguments = TrainingArguments(output_dir=str(tmp_path), **options | {"learning_rate": 0.1, "seed": 0})
        trainer = OwnLoss(model=model, args=arguments, train_dataset=documents[:2] * 2, eval_dataset=documents[:2])
        before = copy.deepcopy(model.state_dict())
        trainer.train()
        moved = {name: weight - before[name] for name, weight in model.state_dict().items()}
        trained.append((moved, trainer.evaluate()["eval_loss"]))
    (theirs, loss), (ours, found) = trained
    assert found == pytest.approx(loss, rel=1e-5) and set(runs) == {"by rows"}
    for name, weight in theirs.items():
        assert weight.norm() == 0 or relative_error(ours[name], weight) <= 1e-3, name


def test_accelerate_gathers_and_casts(documents: list) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # another test's, in this process
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    untiled = build("llama").eval()
    tiled, batch = tiled_copy(untiled), batch_of(2, 101)
    model = accelerator.prepare(tiled)
    with torch.no_grad():
        logits = model(**batch).logits
        assert unread(logits) and logits.dtype == torch.float32, "Accelerate casts outputs"
        gathered = accelerator.gather_for_metrics((logits, batch["labels"]))[0]
        padded = accelerator.pad_across_processes(logits, dim=1)
        assert relative_error(gathered, untiled(**batch).logits) <= 2e-2 and relative_error(padded, gathered) == 0


@pytest.mark.full("10 s of a compiler")
def test_compiled() -> None:
    """The graph breaks where the logits are created, not in the model."""
    untiled = build("llama").eval()
    tiled, batch = tiled_copy(untiled), batch_of(1, 101)
    expected = untiled(**batch)
    tiled.compile(backend="eager")
    with torch.no_grad():
        output = tiled(**batch)
    assert relative_error(output.loss, expected.loss) <= 1e-5 and unread(output.logits)
    assert relative_error(output.logits, expected.logits) <= 1e-5


@pytest.mark.full("15 s of a compiler")
def test_trained_compiled() -> None:
    """Graphs that break in the MLPs leave the loss tiled; a second step compiles nothing anew."""
    untiled, batch = build("llama"), batch_of(1, 101)
    tiled = tiled_copy(untiled).train()
    expected = untiled.train()(**batch)
    expected.loss.backward()
    tiled.compile(backend="aot_eager")
    for step in range(3):
        with torch.compiler.set_stance("fail_on_recompile") if step == 2 else nullcontext():
            output = tiled(**batch)
        assert unread(output.logits) and relative_error(output.loss, expected.loss) <= 1e-5
        output.loss.backward()
        for ours, truth in zip(tiled.parameters(), untiled.parameters(), strict=True):
            assert relative_error(ours.grad, truth.grad) <= 1e-5
        tiled.zero_grad()
    assert "lm_head" not in vars(tiled) and "_loss_function" not in vars(tiled)


def test_what_a_hook_on_the_head_sees() -> None:
    """A declared hook sees the loss's chunks and the logits that are read, as docs/evaluation.md says."""
    model, batch, seen = tiled_copy(build("llama")), batch_of(1, 101), []
    hook = seqtile.tokenwise(lambda module, given, output: seen.append(output[..., 0].numel()))
    model.lm_head.register_forward_hook(hook)

    def rows() -> list[int]:
        found = seen.copy()
        seen.clear()
        return found

    model(**batch).loss.backward()
    first = rows()
    outputs = model(**batch)
    of_forward = rows()
    outputs.loss.backward()
    assert max(of_forward) < sum(of_forward) == 101 and rows() == of_forward
    assert sum(first) > 2 * 101 and max(first) < 101, "the comparison of the first step, too"
    model.eval()
    logits = model(input_ids=batch["input_ids"]).logits
    assert rows() == []
    logits[:, :7].sum()
    assert rows() == [7]
