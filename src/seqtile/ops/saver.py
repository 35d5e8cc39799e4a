"""The node that saves a function's input before the function runs.

Non-reentrant `torch.utils.checkpoint` stops replaying a region as soon as the last tensor that the region saved has
been saved again. What an autograd Function saves is packed only after its forward has run, so a Function that saves
its own input is always replayed. `save_input` places an identity before it that saves the input instead. The Function
keeps `node`, saves nothing itself, and its backward reads `node.saved_tensors`. Where nothing behind it saves a tensor
either, as in a Llama layer, the replay stops before the Function, and its forward is never run a second time: a tiled
MLP under checkpointing then costs what an untiled one costs.

Nothing is detected and nothing is skipped by a flag: where the replay does go on, everything is still right.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import Node


class SaveInputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, also: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ctx.save_for_backward(x, *also)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_x, None


def save_input(x: torch.Tensor, *also: torch.Tensor) -> tuple[torch.Tensor, Node]:
    """Saves `x` and `also`, now. `x` must require a gradient, in grad mode.

    Returns x itself (a view) and the node whose `saved_tensors` are (x, *also) in the backward. `also` are tensors
    the backward needs besides, such as weights: they are saved like any saved tensor, so that changing one in place
    before the backward raises torch's own error. Allocates nothing.
    """
    saved = SaveInputFunction.apply(x, also)
    return saved, saved.grad_fn


class Saved(NamedTuple):
    """Tensors that a node saves."""

    node: Node
    first: int | None
    """Which of them the node saves foremost; None if that is none of them."""

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order in which they were given."""
        foremost, *others = self.node.saved_tensors
        if self.first is None:
            return tuple(others)
        return (*others[: self.first], foremost, *others[self.first :])


def save_inputs(
    tensors: Sequence[torch.Tensor | None], *also: torch.Tensor
) -> tuple[list[torch.Tensor | None], Saved | None]:
    """Saves the tensors, then `also`, now, by the first of `tensors` that requires a gradient. Returns `tensors`, that
    one as a view, and where all are saved; None if none of them requires a gradient, or none is wanted."""
    first = next((i for i, tensor in enumerate(tensors) if tensor is not None and tensor.requires_grad), None)
    if first is None or not torch.is_grad_enabled():
        return list(tensors), None
    view, node = save_input(tensors[first], *tensors[:first], *tensors[first + 1 :], *also)
    return [*tensors[:first], view, *tensors[first + 1 :]], Saved(node, first)
