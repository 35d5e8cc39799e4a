"""What stands for layers left out: one or two layers with it have the same peak as six layers."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from benchmark.left_out_layers import LeftOutLayers
from benchmark.methods import lora
from benchmark.models import build, offloaded
from benchmark.shapes import Shape
from torch import nn

from seqtile import apply_seqtile
from seqtile.renamed import enable_checkpointing
from support.measure import LiveBytes

SHAPE = Shape(64, 96, 6, 2, 1, 32, 50)
KEPT, INPUTS, ALL = (), ("activations",), ("activations", "weights")


def gradients_leave(model: nn.Module) -> None:
    """Simulates a copy to host memory: a layer's gradients are freed when the layer below has its own."""
    layers = model.model.layers

    def leave(above: nn.Module) -> Callable[[torch.Tensor], None]:
        return lambda gradient: above.zero_grad(set_to_none=True)

    def watch(above: nn.Module) -> Callable[..., None]:
        return lambda layer, args, output: output.requires_grad and output.register_hook(leave(above)) and None

    for layer, above in zip(layers, layers[2:], strict=False):
        layer.register_forward_hook(watch(above))


@cache
def peak(layers: int, tokens: int, offload: tuple[str, ...], adapters: bool = False) -> int:
    """Returns the peak of a second step; the first one registers memory. If all layers' weights are in host memory,
    only two layers count."""
    torch.manual_seed(0)
    model = build(SHAPE, torch.float32, layers)
    if adapters:
        lora(model)
    enable_checkpointing(model)
    apply_seqtile(model, chunk_tokens=64)
    if offload:
        offloaded(model)
        model._seqtile_offload.small = 0  # everything, whatever its size
    ids = torch.randint(SHAPE.vocab, (1, tokens))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if "weights" in offload and layers > 2:
        gradients_leave(model)
        weights -= (layers - 2) * SHAPE.layer_parameters * 4
    lacking = layers < SHAPE.layers
    with (
        LeftOutLayers(model, SHAPE, tokens, offload=offload) if lacking else nullcontext() as left_out,
        LiveBytes() as memory,
    ):
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad(set_to_none=True)
            if left_out is not None:
                left_out.end()
    return weights + (left_out.weights.nbytes if left_out is not None else 0) + memory.peak


@pytest.mark.full("of three lengths, most that can be in host memory", but=("700-all*",))
@pytest.mark.parametrize(
    "layers, offload",
    [(2, KEPT), (2, INPUTS), (1, INPUTS), (2, ALL), (1, ALL)],
    ids=["kept", "inputs", "inputs, one layer", "all", "all, one layer"],
)
@pytest.mark.parametrize("tokens", [8, 700, 1400])
def test_the_peak_is_that_of_all_layers(tokens: int, layers: int, offload: tuple[str, ...]) -> None:
    """Where gradients use most memory, and where inputs do."""
    whole = peak(SHAPE.layers, tokens, offload)
    assert abs(peak(layers, tokens, offload) / whole - 1) < 0.002


@pytest.mark.full("10 s", but=("kept", "inputs, one layer"))
@pytest.mark.parametrize(
    "layers, offload", [(2, KEPT), (2, INPUTS), (1, INPUTS)], ids=["kept", "inputs", "inputs, one layer"]
)
def test_the_peak_of_adapters(layers: int, offload: tuple[str, ...]) -> None:
    """LoRA's parameters have gradients; the frozen weights have none."""
    whole = peak(SHAPE.layers, 300, offload, adapters=True)
    assert abs(peak(layers, 300, offload, adapters=True) / whole - 1) < 0.002


def test_what_it_cannot_stand_for() -> None:
    """Kept inputs of a single layer cannot be represented: they are freed before its gradients are allocated."""
    with pytest.raises(AssertionError):
        LeftOutLayers(build(SHAPE, torch.float32, 1), SHAPE, 8, offload=KEPT)
