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
from operator import attrgetter, is_
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_VERSION = attrgetter("_version")


class Unchanged:
    """Leaves that a backward reads once more, and their versions and storages as they are now.

    The storages are kept and compared, not the addresses of their data: FSDP frees and refills them. ZeRO-3 exchanges
    those of its parameters, and tensor subclasses have none of their own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors = [each for each in tensors if not each.is_inference()]  # those have no version
        self._versions = [*map(_VERSION, tensors)]
        plain = [each for each in tensors if type(each) in _PLAIN and "ds_id" not in each.__dict__]
        with torch._C.DisableTorchFunction():
            self._plain, self._storages = plain, [*map(torch.Tensor.untyped_storage, plain)]

    @classmethod
    def parameters(cls, tensors: Sequence[torch.Tensor | None]) -> "Unchanged":
        """Returns those that are parameters: other weights may be made for one call, and are not kept alive here."""
        return cls([each for each in tensors if isinstance(each, torch.nn.Parameter)])

    def changed(self) -> tuple[torch.Tensor, str] | None:
        """Returns the first tensor that was changed, and how; None if none was."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                return tensor, "was changed in place"
        with torch._C.DisableTorchFunction():
            same = [*map(is_, map(torch.Tensor.untyped_storage, self._plain), self._storages)]
        return None if all(same) else (self._plain[same.index(False)], "had its .data replaced")

    def check(self) -> None:
        """Raises RuntimeError if one was changed."""
        if (found := self.changed()) is not None:
            raise RuntimeError(
                f"a parameter {list(found[0].shape)} that a tiled function uses {found[1]} between its forward and its "
                "backward; expected parameters to stay as they are until the backward has run"
            )


class SaveEarlyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, also: Sequence[torch.Tensor | None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *also)
        ctx.unchanged = Unchanged.parameters(also)
        views = tuple([tensor.view_as(tensor) for tensor in tensors])
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
    """Returns the tensors saved for a node: by `ctx.node`, which `save_early` returned, or by `ctx` if that is None.
    Raises RuntimeError if one was changed since."""
    if ctx.node is None:
        return ctx.saved_tensors
    saved = ctx.node.saved_tensors
    ctx.node.unchanged.check()
    return saved


def saved_unseen() -> saved_tensors_hooks:
    """Returns a context that hides what autograd saves from the hooks of a checkpoint around it.

    Results are kept detached: a node whose hook kept its own result as it is would never be freed.
    """
    return saved_tensors_hooks(lambda tensor: tensor if tensor.is_leaf else tensor.detach(), lambda tensor: tensor)
