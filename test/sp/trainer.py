"""Hugging Face's Trainer on ranks that share sequences, against Trainer in one process."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))

from seqtile import apply_seqtile, sp
from tiny import build

SAMPLES, EPOCHS, ACCUMULATE = 24, 3, 4


class Documents(Dataset):
    """Of unequal lengths, with prompts of very different lengths masked."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = []
        for i in range(SAMPLES):
            ids = torch.randint(3, 211, (20 + 5 * (i % 7),), generator=generator)
            labels = ids.clone()
            labels[: 3 + 2 * (i % 8)] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


class SequenceParallelTrainer(sp.SequenceParallelTrainerMixin, Trainer):
    pass


class Recorded(TrainerCallback):
    """The weights after every update."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: object, state: object, control: object, model: nn.Module, **_: object) -> None:
        self.weights.append(torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]))


def model_of(adapter: bool) -> nn.Module:
    torch.manual_seed(0)
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    if adapter:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return model


def trainer(output: str, adapter: bool, accumulate: int, ctx: sp.SequenceParallel | None) -> tuple[Trainer, Recorded]:
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=accumulate,
        gradient_checkpointing=True,
        num_train_epochs=EPOCHS,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=4,
        prediction_loss_only=True,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if ctx else None,
        disable_tqdm=True,
        seed=1,
    )
    recorded = Recorded()
    options = {
        "train_dataset": Documents(),
        "eval_dataset": Documents(),
        "data_collator": collate,
        "callbacks": [recorded],
    }
    model = model_of(adapter)
    if ctx is None:
        return Trainer(model, arguments, **options), recorded
    apply_seqtile(model, chunk_tokens=10)
    return SequenceParallelTrainer(model, arguments, sequence_parallel=ctx, **options), recorded


def losses_of(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def one_process(file: str) -> None:
    """What one process does, for the ranks to compare with: written to `file`."""
    found = {}
    for adapter in (False, True):
        with tempfile.TemporaryDirectory() as output:
            run, recorded = trainer(output, adapter, ACCUMULATE, None)
            run.train()
            found[adapter] = (losses_of(run), run.evaluate()["eval_loss"], torch.stack(recorded.weights))
    torch.save(found, file)


def train(file: str, size: str) -> None:
    """Every update is that of one process, resumed in the middle of an epoch too."""
    ctx = sp.initialize(int(size))
    expected = torch.load(file)
    for adapter, (losses, evaluated, weights) in expected.items():
        shared = [tempfile.mkdtemp()]
        dist.broadcast_object_list(shared)
        accumulate = ACCUMULATE // ctx.data_parallel_size
        run, recorded = trainer(shared[0], adapter, accumulate, ctx)
        start = torch.cat([p.detach().flatten() for p in run.model.parameters() if p.requires_grad])
        run.train()
        check(recorded.weights, weights, start, losses_of(run), losses)
        if ctx.data_parallel_size == 1:  # with more groups Trainer weights their batches by their labels
            assert abs(run.evaluate()["eval_loss"] / evaluated - 1) <= 1e-4
        resumed, again = trainer(shared[0], adapter, accumulate, ctx)
        resumed.train(resume_from_checkpoint=f"{shared[0]}/checkpoint-8")  # epochs have six updates
        check(again.weights, weights[8:], start, losses_of(resumed), losses)
        print(f"rank {dist.get_rank()}: trained, adapter {adapter}", flush=True)


def check(
    found: list[torch.Tensor], weights: torch.Tensor, start: torch.Tensor, losses: list[float], expected: list[float]
) -> None:
    assert len(found) == len(weights) and len(losses) == len(expected) == EPOCHS * SAMPLES // ACCUMULATE
    for step, (ours, theirs) in enumerate(zip(found, weights, strict=True)):
        error = (ours - theirs).norm() / (theirs - start).norm()
        assert error <= 1e-4, f"update {step} is {error:.1e} off"
    assert all(abs(a / b - 1) <= 1e-4 for a, b in zip(losses, expected, strict=True)), json.dumps([losses, expected])


if __name__ == "__main__":
    one_process(sys.argv[1])
