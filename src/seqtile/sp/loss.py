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


def reduce_loss(loss: torch.Tensor, ctx: SequenceParallel) -> torch.Tensor:
    """The group's loss, on every rank, from the ranks' shares of it. One all-reduce.

    A share is what a rank's tokens add to the loss: their sum divided by the group's number of labelled tokens, as a
    model computes it that is given `num_items_in_batch` by `DataShardingCollator`. Its gradient is multiplied by the
    size of the group, so that a reducer that averages over all ranks (DDP, FSDP2, ZeRO) ends with the gradient that
    one process would have: the average over data-parallel groups of their groups' gradients. A DeepSpeed engine is told
    `backward(loss, scale_wrt_gas=False)`. Hugging Face's Trainer scales by itself: with its mixin, this is not called.
    """
    if loss is None:
        raise ValueError("the model returned no loss: the batch has no labels")
    return ReduceLossFunction.apply(loss, ctx.group, ctx.size)


def count_items(batches: list[dict[str, torch.Tensor]], ctx: SequenceParallel) -> torch.Tensor:
    """The labelled tokens of an accumulation window, over all ranks, for each data-parallel group on average: what
    `num_items_in_batch` must be for losses that are summed over the window and averaged over the groups.

    `batches` are this rank's shards, with `shift_labels`. One all-reduce.
    """
    counts = torch.stack([(batch["shift_labels"] != IGNORED).sum() for batch in batches])
    total = counts.sum().to(device_of(ctx))
    dist.all_reduce(total)
    return (total / ctx.data_parallel_size).to(counts.device)
