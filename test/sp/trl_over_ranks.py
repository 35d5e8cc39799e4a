"""TRL's trainers on ranks that share sequences, against the same trainers in one process."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from integrations.test_trl import CASES as TRL_CASES
from integrations.test_trl import CLOCKS, pairs
from seqtile import apply_seqtile, sp
from seqtile.integrations.trl import apply_seqtile_to_trl
from seqtile.models.status import outcome_of
from seqtile.sp.trainer import _Groups
from sp.first_step import EQUAL, scaled_mlps
from sp.over_ranks import context
from sp.trainer import Recorded, weights_of
from support import trl_trainers
from support.tiny import config_of, gentle
from support.training import with_lora

trl = pytest.importorskip("trl")

STEPS = 3
KINDS = ("plain", "adapter", "tiled")
EVERY_DAY = ((4, "plain", "grpo"), (2, "tiled", "sft-packed"), (2, "tiled", "distillation"))
CASES = TRL_CASES | {"dpo": (*TRL_CASES["dpo"][:2], {})}  # its other loss is a mean over a process's tokens
Log = list[dict[str, float]]
Run = tuple[Log, torch.Tensor, torch.Tensor]
"""The logs, the weights' distance from their start after each update, and their initial norm."""


class Answers:
    """Replaces sampling: a prompt's place among those of all processes determines its completion."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completions = found[0] if isinstance(found, tuple) else found
        first = self.accelerator.process_index * len(prompt_ids)
        first += 1000 * getattr(getattr(self, "sequence_parallel", None), "rank", 0)  # the group uses its first rank's
        for i, ids in enumerate(completions):
            ids[:] = answer(self.state.global_step, first + i)
        return found


def answer(step: int, place: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * step + place)
    return torch.randint(3, 211, (4 + (step + place) % 5,), generator=generator).tolist()


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        found = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        yield Path(found[0])
        if dist.is_initialized():
            dist.barrier()


def loaded(model: nn.Module, folder: Path) -> nn.Module:
    """A model as TRL expects it: TRL loads a reference model from the model's folder."""
    model.save_pretrained(folder)
    trl_trainers.tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()  # only the first rank has saved anything
    return AutoModelForCausalLM.from_pretrained(folder)


def trained(name: str, how: str, ctx: sp.SequenceParallel | None) -> Run:
    """Returns a trainer's logs of three steps, each of two windows of two samples, and the weights after each step."""
    kind, documents, options = CASES[name]
    torch.manual_seed(7)
    rows, model, teacher = documents(), gentle("llama"), gentle("llama")
    bases = [getattr(trl, f"{kind}Trainer")]
    if kind in ("GRPO", "RLOO", "Distillation"):
        bases.insert(0, Answers)
    recorded = Recorded()
    given: dict[str, Any] = {"callbacks": [recorded]}
    if ctx is not None:
        bases.insert(0, sp.SequenceParallelTrainerMixin)
        given["sequence_parallel"] = ctx
        options = options | {"per_device_train_batch_size": 2 // ctx.data_parallel_size, "ddp_backend": "gloo"}
    if kind == "Distillation":
        given["teacher_model"] = teacher
    options = {"learning_rate": 0.1 if kind == "SFT" else 0.01, "seed": 1} | options
    with shared_folder() as output:
        model = loaded(model, output / "start")
        if how == "adapter":
            model = with_lora(model, "q_proj", "up_proj")
        if how == "tiled" and ctx is not None:
            apply_seqtile_to_trl()
            apply_seqtile(model, loss=False, chunk_tokens=20)
        trainer = trl_trainers.trainer(type("Mine", tuple(bases), {}), model, rows, output, given=given, **options)
        start = weights_of(trainer.model)
        if how == "tiled" and ctx is not None and kind == "SFT":
            wrong = "the tiled model computes something else than the untiled one"
            in_each_group = ctx.data_parallel_rank * ctx.size + 1
            with scaled_mlps(only_on=in_each_group), pytest.raises(ValueError, match=wrong):  # on every rank of a group
                trainer.train()
            assert weights_of(trainer.model).equal(start)
        trainer.train()
        if kind == "SFT" and ctx is not None and ctx.data_parallel_size == 1:
            trainer.evaluate()
        if how == "tiled" and ctx is not None:
            from_logits = "the loss and 22 gradients equal the untiled model's up to rounding, on "
            said = from_logits if "label_smoothing_factor" in options else f"the last hidden states and 21 {EQUAL}"
            assert said in str(outcome_of(model)), outcome_of(model)
    return trainer.state.log_history, torch.stack([weights - start for weights in recorded.weights]), start.norm()


def over_ranks(expected: Run, size: int, name: str, how: str) -> None:
    ours, moved, _ = trained(name, how, context(size))
    theirs, moves, norm = expected
    assert len(moved) == len(moves) == STEPS
    for step, (mine, their) in enumerate(zip(moved, moves, strict=True)):
        error = (mine - their).norm() / their.norm()
        rounding = 1.2e-7 * norm / their.norm()  # of the weights; the changes are their differences
        assert their.norm() > 0 and error <= 3e-5 + rounding, f"update {step} is {error:.1e} off"
    for our, their in zip(ours, theirs, strict=False):
        for key in [key for key in their if not key.endswith(CLOCKS) and key != "total_flos"]:
            scale = 10 if key == "kl" or key.startswith("rewards/") else 1
            same = math.isclose(our[key], their[key], rel_tol=1e-4, abs_tol=1e-4 * scale)
            assert same or math.isnan(their[key]), (key, our[key], their[key])


def rewards(ctx: sp.SequenceParallel | None) -> list[float]:
    """Returns the losses of a reward model, which has no LM head, and whose trainer computes the loss from its values.
    The first step is compared below the values, and refused if MLPs are wrong."""
    torch.manual_seed(7)
    model, documents = LlamaForSequenceClassification(config_of("llama", num_labels=1)).train(), pairs()
    apply_seqtile(model, loss=False, chunk_tokens=20)
    bases, options = [trl.RewardTrainer], {}
    given: dict[str, Any] = {}
    if ctx is not None:
        bases.insert(0, sp.SequenceParallelTrainerMixin)
        given, options = {"sequence_parallel": ctx}, {"ddp_backend": "gloo"}
    with shared_folder() as output:
        options |= {"learning_rate": 0.01, "seed": 1}
        trainer = trl_trainers.trainer(type("Mine", tuple(bases), {}), model, documents, output, given=given, **options)
        if ctx is not None:
            with scaled_mlps(only_on=1), pytest.raises(ValueError, match="computes something else than the untiled"):
                trainer.train()
        trainer.train()
    assert f"the last hidden states and 21 {EQUAL}" in str(outcome_of(model)), outcome_of(model)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def rewards_over_ranks(expected: list[float]) -> None:
    found = rewards(context())
    assert all(math.isclose(*each, rel_tol=1e-4) for each in zip(found, expected, strict=True)), (found, expected)


def unseen() -> None:
    """A trainer that sees one of two ranks would train wrong, because nothing averages gradients."""
    accelerator = SimpleNamespace(num_processes=1)
    with pytest.raises(ValueError, match="the trainer sees 1 of 2 ranks, expected all, whose gradients it averages"):
        _Groups(context()).take(accelerator)
    assert type(accelerator) is SimpleNamespace
