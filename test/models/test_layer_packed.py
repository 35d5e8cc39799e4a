"""Packed documents with whole layers tiled: told apart by their positions, also where the config asks for a cache."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

import seqtile
from models.layered import tiled_copy
from seqtile.models.model_types import model_classes
from seqtile.models.small import WORDS, small_model
from support.assertions import relative_error
from support.choice import every_value
from support.tiny import loss_and_gradients

TYPES = ["llama", "qwen3", "olmo2", "starcoder2", "ministral3", "phi", "qwen3_vl", "minimax_m2", "lfm2"]


def asking_for_a_cache(model_type: str) -> nn.Module:
    """A small model whose config asks for a cache, as Hugging Face's do."""
    model = small_model(model_classes(model_type)[0], CONFIG_MAPPING[model_type]()).train()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = True
    return model


def packed(*lengths: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, WORDS - 5, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.mark.full("of 18 models", but=every_value)
@pytest.mark.parametrize("length", [23, 6], ids=["chunks", "a chunk"])
@pytest.mark.parametrize("model_type", TYPES)
def test_documents_are_told_apart(model_type: str, length: int) -> None:
    untiled, batch = asking_for_a_cache(model_type), packed(4, length - 4)
    tiled = tiled_copy(untiled, loss=False, chunk_tokens=7)
    assert seqtile.status(tiled).layer.tiled > 0
    theirs = loss_and_gradients(untiled, **batch, use_cache=False)
    ours = loss_and_gradients(tiled, **batch)
    assert relative_error(ours[0], theirs[0]) <= 1e-5
    for name, gradient in theirs[1].items():
        if gradient is not None:
            assert relative_error(ours[1][name], gradient) <= 1e-3, name
    assert tiled(**batch).past_key_values is None
    with torch.no_grad():
        assert tiled.eval()(**batch).past_key_values is not None
    assert "in training none is made unless one is given" in str(seqtile.status(tiled))
