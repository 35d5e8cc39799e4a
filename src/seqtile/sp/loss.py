"""Makes a group's loss from its ranks' partial losses, and prevents a backward without that.

Source: Arctic Long Sequence Training, 4.2.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from seqtile.ops.graph import nodes_behind
from seqtile.sp.groups import SequenceParallel


class PartialLossFunction(torch.autograd.Function):
    """Returns the loss of a shard unchanged. Its backward raises RuntimeError unless the gradient comes from a loss on
    which `allow_backward` was called."""

    @staticmethod
    def forward(node, loss: Tensor, size: int) -> Tensor:
        node.size, node.is_reduced = size, False
        return loss.clone()  # a view could not be changed in place, as Trainer does

    @staticmethod
    def backward(node, d_loss: Tensor) -> tuple[Tensor, None]:
        if not node.is_reduced:
            raise RuntimeError(
                f"a rank's partial loss leaves 1/{node.size} of the gradients once ranks average them; expected "
                "loss = sp.reduce_loss(loss, ctx) before loss.backward(), or sp.SequenceParallelTrainerMixin"
            )
        node.is_reduced = False  # so that the next backward of this graph is checked too
        return d_loss, None


def _is_partial(node: Node) -> bool:
    return hasattr(node, "is_reduced")


def allow_backward(loss: Tensor, sp_group: SequenceParallel) -> Tensor:
    """Returns `loss`, which must be scaled by the size of the group, and allows a backward through the partial losses
    that it was computed from."""
    if sp_group.size == 1 or not loss.requires_grad:
        return loss
    partials = list(filter(_is_partial, nodes_behind([loss.grad_fn], stops=_is_partial)))

    def let(d_loss: Tensor) -> None:
        for node in partials:
            node.is_reduced = True

    loss.register_hook(let)
    return loss


def reduce_loss(loss: Tensor, ctx: SequenceParallel) -> Tensor:
    """Returns the group's loss, on every rank, from the ranks' partial losses. One all-reduce.

    A partial loss is the sum over a rank's tokens divided by the group's number of labelled tokens. A model computes it
    if it gets `num_items_in_batch` from `DataShardingCollator`. The gradient is multiplied by the size of the group, so
    that a reducer that averages over all ranks (DDP, FSDP2, ZeRO) produces the gradient of one process: the average of
    the data-parallel groups' gradients. With DeepSpeed call `engine.backward(loss, scale_wrt_gas=False)`. Do not call
    `reduce_loss` with Hugging Face's Trainer and the mixin, which scale by themselves. Without it, the backward of a
    partial loss that a model returned raises RuntimeError. Nothing can check this for a loss that you compute from
    logits.
    """
    if loss is None:
        raise ValueError("the model returned no loss: the batch has no labels")
    reduced = loss * ctx.size  # for the gradient; the value is the sum of the ranks' losses
    with torch.no_grad():
        dist.all_reduce(reduced.copy_(loss), group=ctx.group)
    return allow_backward(reduced, ctx)
