"""The first training step's comparison raises no false alarm, for every Hugging Face model type in each training
precision."""

import gc
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import seqtile
from models.layered import small_of
from seqtile.models.model_types import model_types
from seqtile.models.status import outcome_of
from seqtile.proof.small import WORDS
from seqtile.protocols import FIRST_STEP

PRECISIONS = {  # the dtype of the weights, and of autocast
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast bfloat16": (torch.float32, torch.bfloat16),
    "autocast float16": (torch.float32, torch.float16),
    "bfloat16 in autocast float16": (torch.bfloat16, torch.float16),
    "float16 in autocast bfloat16": (torch.float16, torch.bfloat16),
}
CHUNK = 50
pytestmark = pytest.mark.usefixtures("one_thread")


def tiled(model_type: str, layer: bool) -> PreTrainedModel | None:
    """A small model of a type with all possible parts tiled; None if it has none, or if `layer` is True and no layer
    can be."""
    try:
        model = small_of(model_type)
    except Exception as error:
        pytest.skip(f"cannot be built small: {error}")
    for parts in ({}, {"loss": False}):
        try:
            seqtile.apply_seqtile(model, layer=layer, chunk_tokens=CHUNK, check="full", **parts)
        except ValueError:
            continue
        return model
    return None


def batch() -> dict[str, torch.Tensor]:
    """Two rows, the second padded at its end; the first tokens of each have no labels."""
    ids = torch.randint(5, WORDS - 5, (2, 31))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :9], labels[1, 24:], mask[1, 24:] = -100, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def step(model: nn.Module, autocast: torch.dtype | None) -> None:
    """A forward and a backward; in float16 with a scaled loss."""
    scaler = torch.amp.GradScaler("cpu", enabled=autocast == torch.float16)
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        loss = model(**batch()).loss
    scaler.scale(loss).backward()


def below_the_head(model: PreTrainedModel, autocast: torch.dtype | None) -> None:
    """The model below the head is compared, too, where it runs by itself."""
    base = model.base_model
    for module in (model, base):
        vars(module).pop(FIRST_STEP, None)
    given = {name: value for name, value in batch().items() if name != "labels"}
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        base(**given)
    assert base is model or "equal the untiled model's up to rounding" in outcome_of(model), outcome_of(model)


EVERY_DAY = ("gpt2-float32", "bart-float16", "qwen3-bfloat16", "olmo2-autocast float16")


@pytest.mark.full("of each type and precision, a second each", but=EVERY_DAY)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model_type", model_types())
def test_no_false_alarm(model_type: str, precision: str) -> None:
    """The loss with MLPs, and also whole layers."""
    dtype, autocast = PRECISIONS[precision]
    compared = 0
    for layer in (False, True):
        if (model := tiled(model_type, layer)) is None:
            continue
        model.train().to(dtype)
        try:
            step(model, autocast)
        except Exception as error:
            seqtile.restore(model)
            error = error.__cause__ or error
            with pytest.raises(type(error), match=re.escape(str(error)[:60])):  # untiled it cannot be trained either
                step(model, autocast)
            continue
        compared += "equal the untiled model's up to rounding" in outcome_of(model)
        assert not compared or "every gradient" in outcome_of(model)
        assert compared or "the untiled model fails" in outcome_of(model), outcome_of(model)
        if compared and layer:
            below_the_head(model, autocast)
    if not compared:
        pytest.skip("it cannot be trained so, or has nothing that is tiled")


def with_a_graph() -> set[int]:
    return {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.grad_fn is not None}


@pytest.mark.full("of each type, a second each", but=("afmoe-True", "big_bird-False"))
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("model_type", model_types())
def test_no_tensor_of_the_comparison_outlives_it(model_type: str, layer: bool) -> None:
    """Nor does one of the step, but for what the model itself keeps. Nothing is left to the garbage collector."""
    if (model := tiled(model_type, layer)) is None:
        pytest.skip("nothing is tiled")
    model.train()
    gc.collect()
    gc.disable()
    try:
        before = with_a_graph()
        try:
            step(model, None)
        except Exception:
            pytest.skip("it cannot be trained")
        assert outcome_of(model) is not None
        if left := with_a_graph() - before:
            before, plain = with_a_graph(), small_of(model_type).train()
            step(plain, None)
            assert len(left) <= len(with_a_graph() - before)
    finally:
        gc.enable()
