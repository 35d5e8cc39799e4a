"""One rank of a distributed run: trains the untiled and the tiled model the same way and compares them.

torchrun --standalone --nproc-per-node 2 worker.py STRATEGY CHECKPOINTING
"""

import copy
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import seqtile
from assertions import relative_error
from tiny import CHUNK, batch_of, build, checkpointing

LENGTHS = ((101, 30, 63, 20), (60, 160, 30, 25))  # a tile is 50: both tiled, one of them, the other, neither


def ddp(model: nn.Module):
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, torch.optim.SGD(model.parameters(), lr=1.0)


def fsdp2(model: nn.Module, group_head: bool = False, shard_head: bool = False):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    if group_head:
        fully_shard([model.model.norm, model.lm_head])
    if shard_head:
        fully_shard(model.lm_head)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def zero(stage: int):
    def wrap(model: nn.Module):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine, engine

    return wrap


STRATEGIES = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_group": partial(fsdp2, group_head=True),
    "fsdp2_head": partial(fsdp2, shard_head=True),
    "zero2": zero(2),
    "zero3": zero(3),
}


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters, gathered."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def train(model: nn.Module, strategy: str, batches: list[dict]) -> tuple[list[float], dict[str, torch.Tensor]]:
    wrapped, optimizer = STRATEGIES[strategy](model)
    losses = []
    for batch in batches:
        loss = wrapped(**batch).loss
        losses.append(loss.item())
        if wrapped is optimizer:  # DeepSpeed's engine
            wrapped.backward(loss)
            wrapped.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, full(model)


def main(strategy: str, reentrant: bool | None) -> None:
    if strategy.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    untiled = build("llama", tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in untiled.parameters():
            parameter.mul_(0.5)  # learning rate 1 must not diverge
    tiled = copy.deepcopy(untiled)
    start = full(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    for model in (untiled, tiled):
        checkpointing(model, reentrant)
    torch.manual_seed(rank + 1)
    batches = [batch_of(1, length) for length in LENGTHS[rank]]

    theirs, their_weights = train(untiled, strategy, batches)
    ours, our_weights = train(tiled, strategy, batches)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-5)
    for name, weight in their_weights.items():
        moved = weight - start[name]
        assert moved.norm() > 0, name
        error = relative_error(our_weights[name] - start[name], moved)
        assert error <= 1e-4, f"{name}: the update is {error:.1e} off"
    print(f"rank {rank}: {len(ours)} steps equal", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, one run in ten


if __name__ == "__main__":
    main(sys.argv[1], {"plain": None, "ckpt": False}[sys.argv[2]])
