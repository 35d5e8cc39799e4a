"""TRL's SFTTrainer wraps the model's forward and computes the loss from hidden states by itself. seqtile then tiles the
MLP, and also the loss if `compute_loss` is Trainer's."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from transformers import Trainer

import seqtile
import seqtile.models.forward.loss
import seqtile.models.forward.mlp
from seqtile.integrations.trl import apply_seqtile_to_trl, restore_trl
from support.assertions import assert_each_as_exact, relative_error
from support.tiny import CHUNK, gentle, modeling_restored, tiled_copy
from support.trainers import Run, assert_same_training, run
from support.trl_trainers import LENGTHS, token_documents, trainer, words

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")


class OwnLoss(trl.SFTTrainer):
    """Uses the model's own loss, as Trainer does."""

    compute_loss = Trainer.compute_loss


TRAINERS = [pytest.param(trl.SFTTrainer, id="trl's loss"), pytest.param(OwnLoss, id="seqtile's loss")]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Counts the calls of seqtile's loss and MLP; untiles after each test."""
    counted: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kw: counted.update([name]) or function(*args, **kw))

    count(seqtile.models.forward.loss, "linear_cross_entropy")
    count(seqtile.models.forward.mlp, "gated_mlp_of")
    with modeling_restored():
        yield counted
        seqtile.restore()


def chats() -> Any:
    """Conversations of two turns each."""
    roles = ("user", "assistant", "user", "assistant")
    turns = [[{"role": role, "content": words(n // 4 + i)} for i, role in enumerate(roles)] for n in LENGTHS]
    return datasets.Dataset.from_list([{"messages": messages} for messages in turns])


def tiled_by(model: nn.Module, how: str) -> nn.Module:
    """A tiled copy of `model`, or a copy built of tiled classes."""
    if how == "model":
        return tiled_copy(model)
    getattr(seqtile, f"apply_seqtile_to_{model.config.model_type}")(chunk_tokens=CHUNK)
    built = type(model)(copy.deepcopy(model.config)).train()
    built.load_state_dict(model.state_dict())
    return built


def both(
    cls: type, model: nn.Module, documents: Any, output: Path, calls: Counter, how: str = "model", **options: Any
) -> tuple[Run, Run]:
    """Returns the tiled training and the untiled one; checks that seqtile's loss ran where expected, and its MLP."""
    calls.clear()
    start = copy.deepcopy(model)
    theirs = run(trainer(cls, model, documents, output, **options))
    assert not calls
    ours = run(trainer(cls, tiled_by(start, how), documents, output, **options))
    assert calls["gated_mlp_of"] > 0 and (calls["linear_cross_entropy"] > 0) == (cls is OwnLoss)
    return ours, theirs


DATA = {
    "plain": (token_documents, {}),
    "completions": (token_documents, {"completion_only_loss": True}),
    "assistant": (chats, {"assistant_only_loss": True}),
    "packed": (token_documents, {"packing": True, "max_length": 150, "completion_only_loss": True}),
    "wrapped": (token_documents, {"packing": True, "packing_strategy": "wrapped", "max_length": 70}),
    "padding-free": (token_documents, {"padding_free": True, "max_length": None}),
    "reentrant": (token_documents, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "selective": (token_documents, {"gradient_checkpointing_kwargs": {"selective": True}}),
    "no checkpointing": (token_documents, {"gradient_checkpointing": False}),
}
MODELS = [("llama", "classes"), ("gemma2", "model"), ("phi3", "classes")]


@pytest.mark.full(
    "each trainer costs seconds; what TRL does to a batch is over before any line of ours",
    but=("phi3-classes-plain-seqtile*", "llama-model-completions-trl*", "*packed-seqtile*", "*padding-free-trl*"),
)
@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize(
    ("arch", "how", "data"), [*((*each, "plain") for each in MODELS), *(("llama", "model", name) for name in DATA)]
)
def test_same_training(arch: str, how: str, data: str, cls: type, tmp_path: Path, calls: Counter) -> None:
    make, options = DATA[data]
    model, documents = gentle(arch), make()
    labels = trainer(cls, copy.deepcopy(model), documents, tmp_path, **options).train_dataset["labels"]
    assert any(-100 in row for row in labels) == any("only" in option for option in options)
    assert_same_training(*both(cls, model, documents, tmp_path, calls, how, **options))


@pytest.mark.full("each trainer costs seconds; how a model was tiled is tested without TRL", but=("classes-seqtile*",))
@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize("how", ["model", "classes"])
def test_lora(how: str, cls: type, tmp_path: Path, calls: Counter) -> None:
    peft = pytest.importorskip("peft")
    targets = ["gate_proj", "up_proj", "down_proj", "q_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    ours, theirs = both(cls, gentle("llama"), token_documents(), tmp_path, calls, how, peft_config=config)
    assert len(theirs.moved) == 2 * 2 * len(targets)
    assert_same_training(ours, theirs)


@pytest.mark.full("each trainer costs seconds", but=("trl*",))
@pytest.mark.parametrize("cls", TRAINERS)
def test_bfloat16_autocast(cls: type, tmp_path: Path, calls: Counter) -> None:
    """TRL's default; training in float32 is the reference."""
    model, documents = gentle("llama"), token_documents()
    true = run(trainer(cls, copy.deepcopy(model), documents, tmp_path))
    ours, theirs = both(cls, model, documents, tmp_path, calls, bf16=None)
    for name, truth in true.moved.items():
        assert relative_error(theirs.moved[name], truth) > 1e-4, f"{name}: not in bfloat16"
    assert_each_as_exact(ours.moved, theirs.moved, true.moved)


def test_after_the_trainer_the_mlp_alone(tmp_path: Path) -> None:
    model, documents = gentle("llama"), token_documents()
    theirs = run(trainer(trl.SFTTrainer, copy.deepcopy(model), documents, tmp_path))
    late = trainer(trl.SFTTrainer, model, documents, tmp_path)
    with pytest.raises(ValueError, match="the forward of LlamaForCausalLM is from trl"):
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    assert seqtile.status(model).mlp.tiled == 0
    assert "by TRL's own loss function; apply_seqtile_to_trl() puts seqtile's there" in str(seqtile.status(model).loss)
    apply_seqtile_to_trl()
    try:
        said = "TRL's trainer computes it, by seqtile's loss function (apply_seqtile_to_trl)"
        assert str(seqtile.status(model).loss) == said
        unwrapped = vars(model)["forward"]
        model.forward = MethodType(convert_outputs_to_fp32(unwrapped.__func__), model)  # as Accelerate does
        assert str(seqtile.status(model).loss) == said
        model.forward = unwrapped
    finally:
        restore_trl()
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, loss=False)
    assert seqtile.status(model).mlp.tiled == 2
    assert_same_training(run(late), theirs)


@pytest.mark.parametrize("how", ["model", "classes"])
def test_status_tells_of_both_and_restore_is_refused(how: str, tmp_path: Path) -> None:
    """TRL's forward decides at every call who computes the loss, so `status` names it and seqtile. It holds the forward
    that it found, so seqtile cannot be removed inside it."""
    model = tiled_by(gentle("llama"), how)
    trainer(trl.SFTTrainer, model, token_documents(), tmp_path)
    status = seqtile.status(model)
    assert (status.loss.tiled, status.mlp.tiled) == (1, 2)
    assert "seqtile" in str(status.loss) and "trl" in str(status.loss)
    assert "apply seqtile to this model" not in str(status.loss)  # that would be refused
    if how == "model":
        with pytest.raises(ValueError, match="wrapped by another library's"):
            seqtile.restore(model)
        assert seqtile.status(model).mlp.tiled == 2
