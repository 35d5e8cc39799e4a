"""Models with whole layers tiled, sequences for them, and comparisons."""

import copy

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

import seqtile
from seqtile.arch import ARCHS
from seqtile.models.model_types import model_classes
from seqtile.proof.small import WORDS, small_model
from support.assertions import relative_error
from support.tiny import CHUNK, batch_of, build, checkpointing, loss_and_gradients

LAYERED = [name for name, arch in ARCHS.items() if arch.layer]
KINDS = [pytest.param(None, id="plain"), pytest.param(False, id="ckpt"), pytest.param(True, id="reentrant")]
MODES = {"mlp": {}, "layer": {"layer": True}, "groups": {"layer": True, "head_groups": 2}}
in_groups = pytest.mark.parametrize("head_groups", [None, 2])
on_model_or_classes = pytest.mark.parametrize("on_classes", [False, True], ids=["model", "classes"])


def small_of(model_type: str, **changes: object) -> PreTrainedModel:
    """A small model of a Hugging Face model type, in training mode."""
    return small_model(model_classes(model_type)[0], CONFIG_MAPPING[model_type](**changes)).train()


def whole(length: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One sequence without padding, for which attention needs no mask."""
    batch = batch_of(1, length, device)
    del batch["attention_mask"]
    return batch


def packed(*lengths: int) -> dict[str, torch.Tensor]:
    """Packed documents, separated by their positions. The model decides whether to make a cache."""
    ids = torch.randint(5, WORDS - 5, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def tiled_copy(model: nn.Module, head_groups: int | str | None = None, **options: object) -> nn.Module:
    tiled = copy.deepcopy(model)
    seqtile.apply_seqtile(tiled, **{"layer": True, "head_groups": head_groups, "chunk_tokens": CHUNK} | options)
    return tiled


def tiled_model(arch: str, on_classes: bool = False, **options: object) -> nn.Module:
    """A tiled model: the model alone, or built of tiled classes."""
    options = {"chunk_tokens": CHUNK} | options
    if on_classes:
        getattr(seqtile, f"apply_seqtile_to_{arch}")(**options)
    model = build(arch)
    if not on_classes:
        seqtile.apply_seqtile(model, **options)
    return model


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(ours: tuple, theirs: tuple, loss: float = 1e-6, gradients: float = 1e-5) -> None:
    """Asserts that two results of loss_and_gradients are equal within these relative errors."""
    assert (error := relative_error(ours[0], theirs[0])) <= loss, f"loss: relative error {error:.1e}"
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        if gradient is None:
            assert ours[1][name] is None, name
        else:
            error = relative_error(ours[1][name], gradient)
            assert error <= gradients, f"{name}: relative error {error:.1e}"


def assert_same_step(ours: nn.Module, theirs: nn.Module, batch: dict, reentrant: bool | None = None) -> None:
    """Asserts that two models have the same loss and gradients for a batch, with the given checkpointing if any."""
    for model in (ours, theirs):
        checkpointing(model, reentrant)
    assert_equal(loss_and_gradients(ours, **batch), loss_and_gradients(theirs, **batch))
