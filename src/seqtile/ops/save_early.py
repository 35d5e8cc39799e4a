"""A node that saves a function's inputs before the function runs.

Non-reentrant `torch.utils.checkpoint` recomputes a region only until the last tensor that the region saved (early
stop). An autograd Function saves its tensors after its forward, so a Function that saves its own inputs always runs
again. `save_early` places an identity before the Function that saves them instead:

    forward         x ── SaveEarly ── x ── GatedMLP ── y   the Function saves nothing, and keeps SaveEarly's node
    recomputation   x ── SaveEarly ┃                       the last tensor is saved: it stops here
    backward                       x ── GatedMLP           reads node.saved_tensors, and recomputes gate and up

If nothing after the Function saves a tensor either, as in a Llama layer, the Function's forward never runs twice: a
tiled MLP under checkpointing costs as much as an untiled one. This needs no flag and does not detect checkpointing. If
the recomputation does continue, the result is still right.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks


class SaveEarlyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, also: Sequence[torch.Tensor | None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *also)
        views = tuple(tensor.view_as(tensor) for tensor in tensors)
        needed = zip(views, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(view for view, need in needed if not need))
        return views

    @staticmethod
    def backward(ctx, *d: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *d


def save_early(
    tensors: Sequence[torch.Tensor], also: Sequence[torch.Tensor | None] = ()
) -> tuple[Sequence[torch.Tensor], Node | None]:
    """Saves `tensors` and `also` for a backward now.

    Returns views of the tensors, and the node whose `saved_tensors` are (*tensors, *also). If none of the tensors
    requires a gradient or gradients are off, returns the tensors themselves and None. `also` are other tensors that the
    backward needs, such as weights: like any saved tensor, they must not change in place before it. Allocates nothing.
    """
    first = next((i for i, tensor in enumerate(tensors) if tensor.requires_grad), None)
    if first is None or not torch.is_grad_enabled():
        return tensors, None
    views = SaveEarlyFunction.apply(also, *tensors)
    return views, views[first].grad_fn


def saved_for(ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """Returns the tensors saved for a node: by `ctx.node`, which `save_early` returned, or by `ctx` if that is None."""
    return ctx.saved_tensors if ctx.node is None else ctx.node.saved_tensors


def saved_unseen() -> saved_tensors_hooks:
    """Returns a context that hides what autograd saves from the hooks of a checkpoint around it.

    Results are kept detached: a node whose hook kept its own result as it is would never be freed.
    """
    return saved_tensors_hooks(lambda tensor: tensor if tensor.is_leaf else tensor.detach(), lambda tensor: tensor)
