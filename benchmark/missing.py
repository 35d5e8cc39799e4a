"""What stands for the layers that a model of few layers lacks."""

import torch
from benchmark.device import DEVICE, DTYPE
from benchmark.shapes import Shape
from torch import nn


def held(size: float) -> torch.Tensor:
    return torch.empty(int(size), dtype=torch.uint8, device=DEVICE)


class Missing:
    """Holds the bytes that the missing layers would, when they would: their weights always; in the forward, where they
    are not offloaded, their checkpointed inputs; and, from where the backward reaches the first layer, their gradients.

    They stand between the first layer and the second. At the loss, and in the backward of the last layer, all inputs
    are held and no gradients; in that of the first layer no inputs and all gradients. Where inputs are offloaded, the
    peak of a whole model is in the backward of its second layer, when the first one's input is already back: there is
    that much more, and a layer's gradients less. So each peak of a whole model is met.
    """

    def __init__(self, model: nn.Module, shape: Shape, tokens: int, *, inputs: bool):
        layers = model.model.layers
        assert len(layers) > 1
        missing = shape.layers - len(layers)
        self.weights = held(missing * shape.layer_parameters * DTYPE.itemsize)
        self._inputs = missing * tokens * shape.hidden * DTYPE.itemsize * inputs
        early = tokens * shape.hidden * DTYPE.itemsize - shape.layer_parameters * DTYPE.itemsize
        self._gradients = self.weights.nbytes + (0 if inputs else max(0, early))
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

    def __enter__(self) -> "Missing":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        for hook in self._hooks:
            hook.remove()
