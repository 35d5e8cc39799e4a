"""The loss of a group from the shares of its ranks."""

import torch
import torch.distributed as dist

from seqtile.sp.collator import IGNORED
from seqtile.sp.context import SequenceParallel, device_of


class ReduceLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
        ctx.size = size
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, d_total: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return d_total * ctx.size, None, None


class ShareFunction(torch.autograd.Function):
    """The loss of a shard, as it is. Its backward raises RuntimeError, unless the gradient comes from a loss that
    `let_through` was given."""

    @staticmethod
    def forward(ctx, loss: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size, ctx.is_let_through = size, False
        return loss.clone()  # a view could not be changed in place, as Trainer does

    @staticmethod
    def backward(ctx, d_loss: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not ctx.is_let_through:
            raise RuntimeError(
                f"the backward of one rank's share of the loss would leave 1/{ctx.size} of the gradients once they are "
                "averaged; expected loss = sp.reduce_loss(loss, ctx) before loss.backward(), or Hugging Face's Trainer "
                "with sp.SequenceParallelTrainerMixin"
            )
        ctx.is_let_through = False  # the next backward of this graph has to come the same way
        return d_loss, None


def share_of_loss(loss: torch.Tensor, ctx: SequenceParallel) -> torch.Tensor:
    """The loss that a model returned for this rank's shard, which has to be reduced before its backward."""
    return ShareFunction.apply(loss, ctx.size)


def let_through(loss: torch.Tensor, ctx: SequenceParallel) -> torch.Tensor:
    """`loss`, whose gradient may go to the shares that it was computed from: it is scaled by the size of the group."""
    if ctx.size == 1 or not loss.requires_grad:
        return loss
    shares, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "is_let_through"):
            shares.append(node)
        else:
            nodes += [before for before, _ in node.next_functions]

    def let(d_loss: torch.Tensor) -> None:
        for share in shares:
            share.is_let_through = True

    loss.register_hook(let)
    return loss


def reduce_loss(loss: torch.Tensor, ctx: SequenceParallel) -> torch.Tensor:
    """The group's loss, on every rank, from the ranks' shares of it. One all-reduce.

    A share is what a rank's tokens add to the loss: their sum divided by the group's number of labelled tokens, as a
    model computes it that is given `num_items_in_batch` by `DataShardingCollator`. Its gradient is multiplied by the
    size of the group, so that a reducer that averages over all ranks (DDP, FSDP2, ZeRO) ends with the gradient that
    one process would have: the average over data-parallel groups of their groups' gradients. A DeepSpeed engine is told
    `backward(loss, scale_wrt_gas=False)`. Hugging Face's Trainer scales by itself: with its mixin, this is not called.
    The backward of a share that a model returned and that did not come here raises RuntimeError; of a share that is
    computed from logits by hand nobody can tell.
    """
    if loss is None:
        raise ValueError("the model returned no loss: the batch has no labels")
    return let_through(ReduceLossFunction.apply(loss, ctx.group, ctx.size), ctx)


def count_items(batches: list[dict[str, torch.Tensor]], ctx: SequenceParallel) -> torch.Tensor:
    """The labelled tokens of an accumulation window, over all ranks, for each data-parallel group on average: what
    `num_items_in_batch` must be for losses that are summed over the window and averaged over the groups.

    `batches` are this rank's shards, with `shift_labels`. One all-reduce.
    """
    counts = torch.stack([(batch["shift_labels"] != IGNORED).sum() for batch in batches])
    total = counts.sum().to(device_of(ctx))
    dist.all_reduce(total)
    return (total / ctx.data_parallel_size).to(counts.device)
