"""Weights that are computed anew at every forward: torch.nn.utils.parametrizations."""

from collections.abc import Callable

import pytest
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import seqtile
from models.test_families import assert_same, batch, made, tiled_copy
from support.choice import every_pair
from support.tiny import checkpointing

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "gate": lambda model: model.model.layers[0].mlp.gate_proj,
    "down": lambda model: model.model.layers[1].mlp.down_proj,
    "queries": lambda model: model.model.layers[0].self_attn.q_proj,
    "output": lambda model: model.model.layers[1].self_attn.o_proj,
    "head": lambda model: model.lm_head,
}
CASES = [(weight_norm, place) for place in PLACES] + [(orthogonal, "gate")]


@pytest.mark.full("of 48 cases", but=every_pair)
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("what", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
def test_as_untiled(model_type: str, what: tuple, layer: bool, reentrant: bool | None) -> None:
    parametrise, place = what
    model = made(model_type, tie_word_embeddings=False)
    parametrise(PLACES[place](model))
    tiled = tiled_copy(model, layer=layer)
    status = seqtile.status(tiled)
    assert status.loss.tiled == 1 and status.mlp.tiled == 2 and (not layer or status.layer.tiled == 2)
    for one in (model, tiled):
        checkpointing(one, reentrant)
    assert_same(model, tiled, **batch())
