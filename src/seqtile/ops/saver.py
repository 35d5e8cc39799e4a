"""The node that saves a function's input before the function runs.

Non-reentrant `torch.utils.checkpoint` stops replaying a region as soon as the last tensor that the region saved has
been saved again. What an autograd Function saves is packed only after its forward has run, so a Function that saves
its own input is always replayed. `save_input` places an identity before it that saves the input instead. The Function
keeps `node`, saves nothing itself, and its backward reads `node.saved_tensors`. Where nothing behind it saves a tensor
either, as in a Llama layer, the replay stops before the Function, and its forward is never run a second time: a tiled
MLP under checkpointing then costs what an untiled one costs.

Nothing is detected and nothing is skipped by a flag: where the replay does go on, everything is still right.
"""

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
