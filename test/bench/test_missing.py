"""What stands for missing layers: the peak of two layers with it is that of six."""

import pytest
import torch
from benchmark.missing import Missing
from benchmark.models import build, offloaded
from benchmark.shapes import Shape

from measure import LiveBytes
from seqtile import apply_seqtile
from seqtile.offload.checkpointing import enable_checkpointing

SHAPE = Shape(64, 96, 6, 2, 1, 32, 50)


def peak(layers: int, tokens: int, offloads: bool) -> int:
    """Of a second step: what is registered in the first is."""
    torch.manual_seed(0)
    model = build(SHAPE, torch.float32, layers)
    enable_checkpointing(model)
    apply_seqtile(model, chunk_tokens=64)
    if offloads:
        offloaded(model)
        model._seqtile_offload.small = 0  # everything, however small
    ids = torch.randint(SHAPE.vocab, (1, tokens))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with Missing(model, SHAPE, tokens, inputs=not offloads) as missing, LiveBytes() as memory:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad(set_to_none=True)
            missing.end()
    return weights + missing.weights.nbytes + memory.peak


@pytest.mark.parametrize("offloads", [False, True], ids=["kept", "offloaded"])
@pytest.mark.parametrize("tokens", [8, 700, 1400])
def test_the_peak_is_that_of_all_layers(tokens: int, offloads: bool) -> None:
    """Where gradients are most, and where inputs are."""
    whole = peak(SHAPE.layers, tokens, offloads)
    assert abs(peak(2, tokens, offloads) / whole - 1) < 0.002
