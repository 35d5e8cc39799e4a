"""A checkpointed layer with a tiled MLP multiplies no more than the untiled one (facts: 11 u, u = 2 T D M FLOP)."""

import copy

import pytest

import seqtile
from seqtile.arch import ARCHS
from support.measure import FlopCount
from support.tiny import CHUNK, CLASSES, VOCAB, batch_of, build, checkpointing, loss_and_gradients

TOKENS = 190
IGNORED = 3 * 2 * 5 * 48 * VOCAB  # FLOP that the tiled loss spares: three products of the 5 tokens of a masked prompt


def flops_of(model) -> int:
    batch = batch_of(1, TOKENS)
    with FlopCount() as flops:
        loss_and_gradients(model, **batch)
    assert not flops.unknown
    return flops.total


@pytest.mark.parametrize("arch", [arch for arch in CLASSES if not ARCHS[arch].routed])
def test_tiled_mlp(arch: str) -> None:
    """A norm behind the MLP saves a tensor, so that a checkpoint's recomputation goes through the MLP: 14 u, not 12."""
    untiled = build(arch)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, loss=False, chunk_tokens=CHUNK)
    layers, unit = 2, 2 * TOKENS * 48 * 130
    biases = 2 * TOKENS * (48 + 2 * 130) if untiled.model.layers[0].mlp.down_proj.bias is not None else 0  # their sums
    assert flops_of(tiled) - flops_of(untiled) == layers * ((11 - 9) * unit + biases)
    for model in (untiled, tiled):
        checkpointing(model, reentrant=False)
    checkpointed = flops_of(untiled)
    more = biases + (2 * unit if ARCHS[arch].norm_after else 0)
    assert flops_of(tiled) == checkpointed + layers * more
    del untiled.model.layers[1:], tiled.model.layers[1:]
    for model in (untiled, tiled):
        model.config.num_hidden_layers = 1
    a_layer = checkpointed - flops_of(untiled)
    assert a_layer > 11 * unit and checkpointed + more - flops_of(tiled) == a_layer


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_tiled_experts(experts: str) -> None:
    """A recomputation runs untiled experts whole, since their outputs are saved to be weighted: 12 u both ways."""
    untiled = build("mixtral")
    untiled.set_experts_implementation(experts)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, loss=False, chunk_tokens=CHUNK)
    unit = 2 * 2 * TOKENS * 48 * untiled.config.intermediate_size  # two experts a token
    assert flops_of(tiled) - flops_of(untiled) == 2 * (12 - 9) * unit
    for model in (untiled, tiled):
        checkpointing(model, reentrant=False)
    assert flops_of(tiled) == flops_of(untiled)


@pytest.mark.parametrize("arch", CLASSES)
def test_tiled_loss(arch: str) -> None:
    untiled = build(arch)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, mlp=False, chunk_tokens=CHUNK)
    assert flops_of(tiled) == flops_of(untiled) - IGNORED


@pytest.mark.parametrize("arch", CLASSES)
def test_a_sequence_no_longer_than_a_tile_pays_nothing(arch: str) -> None:
    untiled = build(arch)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=TOKENS)
    assert flops_of(tiled) == flops_of(untiled) - IGNORED
