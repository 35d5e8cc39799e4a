"""What stands for the layers that a model of few layers lacks."""

from collections.abc import Collection

import torch
from benchmark.device import DEVICE, DTYPE
from benchmark.shapes import Shape
from torch import nn


def held(size: float) -> torch.Tensor:
    return torch.empty(int(size), dtype=torch.uint8, device=DEVICE)


class LeftOutLayers:
    """Holds the bytes that the layers left out would, when they would: their weights always; in the forward, where they
    are not offloaded, their checkpointed inputs; and, from where the backward reaches the first layer, their gradients.

    They stand between the first layer and what is above it. At the loss, and in the backward of the last layer, all
    inputs are held and no gradients; in that of the first layer no inputs and all gradients. Where inputs are
    offloaded, the peak of a whole model is in the backward of its second layer, when the first one's input is already
    back: there is that much more, and a layer's gradients less. So each peak of a whole model is met, where inputs are
    offloaded by a single layer too.

    With weights in host memory, and the gradients with them, a layer's backward has on the GPU: its own weights and
    gradients, the weights of the next layer, which are on their way, and the gradients of the layer before, which are
    on theirs. Two layers have them all; for a single one, bytes stand for those of the others. Embedding and head stay
    on the GPU with their gradients, and nothing is copied: what is shown is memory.

    Where only some parameters of a layer are trained, as LoRA's, they are held beside the frozen weights, and gradients
    are theirs. The first layer then computes no gradient of its input; a single layer stands for others, which do.

    Args:
        offload: what is in host memory: activations, weights.
    """

    def __init__(self, model: nn.Module, shape: Shape, tokens: int, *, offload: Collection[str]):
        layers = model.model.layers
        inputs, weights = "activations" not in offload, "weights" not in offload
        assert len(layers) > inputs and (weights or not inputs)
        left_out = (shape.layers if weights else max(2, len(layers))) - len(layers)
        an_input, a_layer = (DTYPE.itemsize * size for size in (tokens * shape.hidden, shape.layer_parameters))
        trained = sum(each.nbytes for each in layers[0].parameters() if each.requires_grad)
        frozen = any(not each.requires_grad for each in layers[0].parameters())
        gradients = trained if frozen else a_layer
        self.weights = held(left_out * (a_layer + trained * frozen))
        self._inputs = left_out * an_input if inputs else 0
        early = max(0, an_input - gradients) if weights else an_input  # of the input that is back already
        early += an_input if frozen and len(layers) == 1 else 0
        self._gradients = left_out * gradients + (0 if inputs else early)
        self._held: torch.Tensor | None = None
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: self._hold(self._inputs)),
            layers[0].register_forward_hook(self._between),
        ]

    def _between(self, layer: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._hold(self._gradients))

    def _hold(self, size: float) -> None:
        self._held = None
        self._held = held(size)

    def end(self) -> None:
        """Of a step: gradients are freed."""
        self._held = None

    def __enter__(self) -> "LeftOutLayers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        for hook in self._hooks:
            hook.remove()
