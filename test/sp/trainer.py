"""Hugging Face's Trainer on ranks that share sequences, against Trainer in one process."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from seqtile import apply_seqtile, sp
from sp import recurrences
from sp.over_ranks import context
from support.tiny import build
from support.training import halved, with_lora

SAMPLES, EPOCHS, ACCUMULATE = 8, 3, 4


def documents() -> list[dict[str, torch.Tensor]]:
    """Documents of unequal lengths with masked prompts of very different lengths."""
    generator, rows = torch.Generator().manual_seed(5), []
    for i in range(SAMPLES):
        ids = torch.randint(3, 211, (20 + 5 * (i % 7),), generator=generator)
        labels = ids.clone()
        labels[: 3 + 2 * (i % 8)] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class Stream(torch.utils.data.IterableDataset):
    """The documents in order, from a data set without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(documents())


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


class SequenceParallelTrainer(sp.SequenceParallelTrainerMixin, Trainer):
    pass


class Recorded(TrainerCallback):
    """Records the weights after every update."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: object, state: object, control: object, model: nn.Module, **_: object) -> None:
        self.weights.append(weights_of(model))


def weights_of(model: nn.Module) -> torch.Tensor:
    """Returns all trained weights, also of a model that ZeRO-3 shards."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gathered = nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in trained):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(trained)
    with gathered:
        return torch.cat([parameter.detach().flatten() for parameter in trained])


MODELS = ("llama", "llama, adapter", "qwen3_5")


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = halved(build("llama") if "llama" in name else recurrences.build(name))
    return with_lora(model, "q_proj", "up_proj") if "adapter" in name else model


def trainer(
    output: str, name: str, accumulate: int, ctx: sp.SequenceParallel | None, **options: object
) -> tuple[Trainer, Recorded]:
    common = dict(per_device_train_batch_size=1, gradient_accumulation_steps=accumulate, gradient_checkpointing=True)
    common |= dict(num_train_epochs=EPOCHS, learning_rate=0.3, lr_scheduler_type="constant", optim="sgd")
    common |= dict(max_grad_norm=0.5, logging_steps=1, save_steps=3, prediction_loss_only=True, report_to=[])
    common |= dict(use_cpu=True, disable_tqdm=True, seed=1, data_seed=7)
    arguments = TrainingArguments(output, **common, **options)
    recorded = Recorded()
    data = {
        "train_dataset": Stream() if "max_steps" in options else documents(),
        "eval_dataset": documents(),
        "data_collator": collate,
    }
    data["callbacks"] = [recorded]
    if ctx is None:
        return Trainer(model_of(name), arguments, **data), recorded

    def tiled() -> nn.Module:
        model = model_of(name)
        apply_seqtile(model, chunk_tokens=10)
        return model

    model = {"model_init": tiled} if "adapter" in name else {"model": tiled()}
    return SequenceParallelTrainer(**model, args=arguments, sequence_parallel=ctx, **data), recorded


def losses_of(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def evaluate(run: Trainer, batch_size: int) -> float:
    run.args.per_device_eval_batch_size = batch_size
    loss = run.evaluate()["eval_loss"]
    assert abs(run.predict(documents()).metrics["test_loss"] / loss - 1) <= 1e-5
    return loss


def evaluated_by_hand(model: nn.Module, batch_size: int, processes: int) -> float:
    """Trainer's loss on several processes: the mean over steps of the mean over all of a step's labels."""
    rows, losses = documents(), []
    with torch.no_grad():
        for start in range(0, SAMPLES, batch_size * processes):
            firsts = range(start, start + batch_size * processes, batch_size)
            batches = [collate(rows[first : first + batch_size]) for first in firsts]
            items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
            losses.append(sum(model.eval()(**batch, num_items_in_batch=items).loss.item() for batch in batches))
    return sum(losses) / len(losses)


Run = tuple[list[float], dict[int, float], torch.Tensor, torch.Tensor]
"""Losses, evaluations by batch size, and the weights after each update; those after each update on a stream."""
STREAMED = {"max_steps": SAMPLES // ACCUMULATE, "save_strategy": "no"}


def one_process(name: str) -> Run:
    """Returns the results of a process without ranks, for comparison."""
    with tempfile.TemporaryDirectory() as output:
        run, recorded = trainer(output, name, ACCUMULATE, None)
        run.train()
        streaming, streamed = trainer(output, name, ACCUMULATE, None, **STREAMED)
        streaming.train()
        evaluated = {size: evaluate(run, size) for size in (2, 5)}
        return losses_of(run), evaluated, torch.stack(recorded.weights), torch.stack(streamed.weights)


def train(expected: Run, size: int, name: str) -> None:
    """Every update equals that of one process, also when resumed in the middle of an epoch, and on a stream."""
    ctx = context(size)
    losses, evaluated, weights, streamed = expected
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    accumulate = ACCUMULATE // ctx.data_parallel_size
    run, recorded = trainer(shared[0], name, accumulate, ctx, ddp_backend="gloo")
    start = weights_of(run.model)
    run.train()
    check(recorded.weights, weights, start, losses_of(run), losses)
    for batch_size, loss in evaluated.items():
        if SAMPLES % (batch_size * ctx.data_parallel_size) == 0 or ctx.data_parallel_size == 1:
            if ctx.data_parallel_size > 1:
                loss = evaluated_by_hand(run.model, batch_size, ctx.data_parallel_size)
            found = evaluate(run, batch_size)
            assert abs(found / loss - 1) <= 1e-5, f"evaluated by {batch_size}: {found}, expected {loss}"
    resumed, again = trainer(shared[0], name, accumulate, ctx, ddp_backend="gloo")
    resumed.train(resume_from_checkpoint=f"{shared[0]}/checkpoint-3")  # an epoch has two updates
    check(again.weights, weights[3:], start, losses_of(resumed), losses)
    streaming, found = trainer(shared[0], name, accumulate, ctx, ddp_backend="gloo", **STREAMED)
    streaming.train()
    assert_same_weights(found.weights, streamed, start)


def train_zero3(expected: Run, size: int) -> None:
    """Under DeepSpeed, as Trainer starts it."""
    ctx = context(size)
    losses, _, weights, _ = expected
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "gradient_clipping": "auto"}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    with tempfile.TemporaryDirectory() as output:
        options = {"deepspeed": config, "save_strategy": "no"}
        run, recorded = trainer(output, "llama", ACCUMULATE // ctx.data_parallel_size, ctx, **options)
        start = weights_of(run.model)
        run.train()
    check(recorded.weights, weights, start, losses_of(run), losses)


def check(
    found: list[torch.Tensor], weights: torch.Tensor, start: torch.Tensor, losses: list[float], expected: list[float]
) -> None:
    assert len(losses) == len(expected) == EPOCHS * SAMPLES // ACCUMULATE
    assert_same_weights(found, weights, start)
    assert all(abs(a / b - 1) <= 1e-4 for a, b in zip(losses, expected, strict=True)), json.dumps([losses, expected])


def assert_same_weights(found: list[torch.Tensor], weights: torch.Tensor, start: torch.Tensor) -> None:
    for step, (ours, theirs) in enumerate(zip(found, weights, strict=True)):
        error = (ours - theirs).norm() / (theirs - start).norm()
        assert error <= 1e-4, f"update {step} is {error:.1e} off"
