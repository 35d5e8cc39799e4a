"""Weights that are computed anew at every forward: torch.nn.utils.parametrizations."""

import copy
from collections.abc import Callable

import pytest
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import seqtile
from models.test_families import assert_same, batch, made

CHUNK = 7
PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "gate": lambda model: model.model.layers[0].mlp.gate_proj,
    "down": lambda model: model.model.layers[1].mlp.down_proj,
    "queries": lambda model: model.model.layers[0].self_attn.q_proj,
    "output": lambda model: model.model.layers[1].self_attn.o_proj,
    "head": lambda model: model.lm_head,
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
def test_weight_norm(model_type: str, place: str, layer: bool, checkpointed: bool) -> None:
    model = made(model_type, tie_word_embeddings=False)
    weight_norm(PLACES[place](model))
    tiled = copy.deepcopy(model)
    seqtile.apply_seqtile(tiled, layer=layer, chunk_tokens=CHUNK)
    status = seqtile.status(tiled)
    assert status.loss.tiled == 1 and status.mlp.tiled == 2 and (not layer or status.layer.tiled == 2)
    if checkpointed:
        for one in (model, tiled):
            one.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(model, tiled, **batch())


def test_orthogonal() -> None:
    model = made("llama")
    orthogonal(model.model.layers[0].mlp.gate_proj)
    tiled = copy.deepcopy(model)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    assert seqtile.status(tiled).mlp.tiled == 2
    assert_same(model, tiled, **batch())
