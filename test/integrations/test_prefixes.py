"""Trainers compute prefixes that several rows share only once, and train as they do otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from integrations.test_trl import assert_same_log, own_head  # noqa: F401
from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl
from seqtile.renamed import cache_in
from seqtile.unwrapped import unwrapped
from sp.trainer import weights_of
from support import trl_trainers
from support.tiny import gentle
from support.training import with_lora
from support.trl_trainers import tokenizer, words

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
rloo_trainer = pytest.importorskip("trl.trainer.rloo_trainer")
SHARED = 9  # tokens
PROMPTS = (23, 31, 12, 40, 19, 27, 35, 15)
STEPS = 3


class Answers:
    """Replaces sampling: the step and the prompts' positions determine the completions."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completions = found[0] if isinstance(found, tuple) else found
        for i, ids in enumerate(completions):
            generator = torch.Generator().manual_seed(100 * self.state.global_step + i)
            ids[:] = torch.randint(3, 211, (3 + i % 5,), generator=generator).tolist()
        return found


def prompts() -> Any:
    return datasets.Dataset.from_list([{"prompt": words(n)} for n in PROMPTS])


def pairs() -> Any:
    rows = [{"prompt": words(n), "chosen": words(3 + n % 4), "rejected": words(2 + n % 5)} for n in PROMPTS]
    return datasets.Dataset.from_list(rows)


def judged() -> Any:
    """Two completions per prompt, one after the other."""
    rows = [{"prompt": words(n), "label": True} for n in PROMPTS]
    rows = [row | {"completion": words(3 + i), "label": i == 1} for row in rows for i in range(2)]
    return datasets.Dataset.from_list(rows)


SAMPLED = {"num_generations": 4, "max_completion_length": 9, "per_device_train_batch_size": 4, "beta": 0.1}
CASES = {
    "grpo": ("GRPO", prompts, {**SAMPLED, "temperature": 0.7}),
    "rloo": ("RLOO", prompts, SAMPLED),
    "dpo": ("DPO", pairs, {}),
    "kto": ("KTO", judged, {}),
}


EVERY_DAY = ("grpo-adapter", "dpo-plain")


class Forward(NamedTuple):
    """A forward of a model without a cache."""

    rows: int
    prompts: int
    distinct: int
    """Number of tokens, counting each shared prefix once."""
    computed: int
    padded: int
    """Number of rows with padding on the left, of which the last token is computed, too."""


class Watch(TrainerCallback):
    """Records what a trainer's models compute, and the weights after each update."""

    def __init__(self) -> None:
        self.forwards: dict[str, list[Forward]] = {}
        self.weights: list[torch.Tensor] = []
        self.trainer: Any = None

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        for name in ("model", "ref_model"):
            if isinstance(model := getattr(self.trainer, name, None), nn.Module):
                self.watch(unwrapped(model), self.forwards.setdefault(name, []))

    def watch(self, model: nn.Module, forwards: list[Forward]) -> None:
        computed = []
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: computed.append(args[0].numel())
        )

        def forward(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
            if cache_in(kwargs) is None:
                groups: dict[tuple, list[list[int]]] = {}
                for row, valid in zip(ids, mask, strict=True):
                    groups.setdefault(tuple((own := row[valid.bool()].tolist())[:SHARED]), []).append(own)
                tokens, padded = sum(map(distinct, groups.values())), int((mask[:, 0] == 0).sum())
                forwards.append(Forward(len(ids), len(groups), tokens, computed[-1], padded))

        model.register_forward_hook(forward, with_kwargs=True)

    def on_step_end(self, args: object, state: object, control: object, model: nn.Module, **_: object) -> None:
        self.weights.append(weights_of(model))


def distinct(rows: list[list[int]]) -> int:
    """Counts the distinct tokens of rows that share one prefix."""
    common = 0
    while len({tuple(row[: common + 1]) for row in rows}) == 1 < len(rows):
        common += 1
    return sum(map(len, rows)) - (len(rows) - 1) * common


class Run(NamedTuple):
    log: list[dict[str, float]]
    moved: torch.Tensor
    """[steps, weights], relative to the initial weights."""
    norm: torch.Tensor
    forwards: dict[str, list[Forward]]


def trained(name: str, how: str, start: Path, documents: Any, output: Path, callbacks: list[TrainerCallback]) -> Run:
    kind, _, options = CASES[name]
    model = AutoModelForCausalLM.from_pretrained(start)
    if how == "adapter":
        torch.manual_seed(2)
        model = with_lora(model, "q_proj", "up_proj")
    bases = (Answers,) * (kind in ("GRPO", "RLOO")) + (getattr(trl, f"{kind}Trainer"),)
    watch = Watch()
    options = options | {"learning_rate": 0.01, "seed": 1} | HOW.get(how, {})
    given = {"callbacks": [*callbacks, watch]}
    watch.trainer = trainer = trl_trainers.trainer(
        type("Mine", bases, {}), model, documents, output, given=given, **options
    )
    before = weights_of(trainer.model)
    torch.manual_seed(3)
    trainer.train()
    moved = torch.stack([weights - before for weights in watch.weights])
    return Run(trainer.state.log_history, moved, before.norm(), watch.forwards)


def in_groups(shuffle: Callable) -> Callable:
    """TRL's shuffle, followed by moving each prompt's completions to the place of the first one."""

    def shuffled(rows: dict) -> dict:
        rows = shuffle(rows)
        places: dict[tuple, list[int]] = {}
        for i, prompt in enumerate(rows["prompt_ids"].tolist()):
            places.setdefault(tuple(prompt), []).append(i)
        order = torch.tensor([place for rows_of in places.values() for place in rows_of])
        return {name: rows[name][order] if rows[name].dim() else rows[name] for name in rows}

    return shuffled


HOW = {
    "checkpointed": {"gradient_checkpointing": True},
    "again": {"num_iterations": 2, "steps_per_generation": 4},
}


def same(ours: Run, theirs: Run) -> None:
    assert len(ours.moved) == len(theirs.moved) == STEPS
    for step, (mine, their) in enumerate(zip(ours.moved, theirs.moved, strict=True)):
        error, rounding = (mine - their).norm() / their.norm(), 1.2e-7 * theirs.norm / their.norm()
        assert their.norm() > 0 and error <= 1e-5 + rounding, f"update {step} is {error:.1e} off"
    assert_same_log(ours.log, theirs.log)


@pytest.mark.full("what is shared is the same however weights are trained", but=EVERY_DAY)
@pytest.mark.parametrize("how", ["plain", "adapter", "checkpointed", "again"])
@pytest.mark.parametrize("name", CASES)
def test_same_training(name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the number of tokens that the model and the reference model computed."""
    if how == "again" and name in ("dpo", "kto"):
        pytest.skip("of what is sampled")
    torch.manual_seed(7)
    documents = CASES[name][1]()
    gentle("llama").save_pretrained(tmp_path / "start")
    tokenizer().save_pretrained(tmp_path / "start")
    with monkeypatch.context() as patched:
        for module in (grpo_trainer, rloo_trainer):
            patched.setattr(module, "shuffle_sequence_dict", in_groups(module.shuffle_sequence_dict))
        theirs = trained(name, how, tmp_path / "start", documents, tmp_path, [])
    apply_seqtile_to_trl()
    callback = SeqtileCallback(share_prefixes=SHARED, chunk_tokens=16)
    ours = trained(name, how, tmp_path / "start", documents, tmp_path, [callback])
    same(ours, theirs)
    assert ours.forwards.keys() == theirs.forwards.keys() == ({"model"} if how == "adapter" else {"model", "ref_model"})
    for model, forwards in ours.forwards.items():
        assert [each[:3] for each in forwards] == [each[:3] for each in theirs.forwards[model]]
        for each in forwards:
            assert each.prompts < each.rows and each.computed == each.distinct + each.padded, forwards
