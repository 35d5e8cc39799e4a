"""One rank of a distributed run: trains untiled and tiled models the same way and compares them.

torchrun --standalone --nproc-per-node 2 worker.py TREE
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
from distributed.cases import Case, cases
from tiny import CHUNK, batch_of, build, checkpointing

LENGTHS = ((101, 30, 63), (60, 160, 30))  # a tile is 50: both ranks tiled, one of them, the other
KINDS = {"plain": None, "ckpt": False, "reentrant": True}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def ddp(model: nn.Module):
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, torch.optim.SGD(trainable(model), lr=1.0)


def fsdp2(model: nn.Module, group: bool = False, head: bool = False, mlp: bool = False, **options: object):
    from torch.distributed.fsdp import fully_shard

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        if mlp:
            fully_shard(layer.mlp, **options)
        fully_shard(layer, **options)
    if group:
        fully_shard([base.model.norm, base.lm_head], **options)
    if head:
        fully_shard(base.lm_head, **options)
    fully_shard(model, **options)
    return model, torch.optim.SGD(trainable(model), lr=1.0)


def mixed(model: nn.Module):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def zero(stage: int):
    def wrap(model: nn.Module):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.SGD(trainable(model), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine, engine

    return wrap


STRATEGIES = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_group": partial(fsdp2, group=True),
    "fsdp2_head": partial(fsdp2, head=True),
    "fsdp2_mlp": partial(fsdp2, mlp=True),
    "fsdp2_keep": partial(fsdp2, reshard_after_forward=False),
    "fsdp2_mixed": mixed,
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
}


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's trainable parameters, gathered."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if any(hasattr(parameter, "ds_id") for parameter in named.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: parameter.detach().clone() for name, parameter in named.items()}
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in named.items()
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
    weights = full(model)
    if wrapped is optimizer:
        wrapped.destroy()
    return losses, weights


def made(case: Case) -> nn.Module:
    """The model of a case, the same on every rank, with weights small enough for a learning rate of 1."""
    torch.manual_seed(0)
    model = build(case.arch, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    if case.adapter == "generic":
        for layer in model.model.layers:
            setattr(layer.mlp, "act_fn" if hasattr(layer.mlp, "act_fn") else "activation_fn", nn.GELU())
    if case.adapter == "lora":
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "qkv_proj"]
        names = [name for name in targets if any(path.endswith(name) for path, _ in model.named_modules())]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        model.enable_input_require_grads()  # a reentrant checkpoint needs an input that requires a gradient
    return model.train()


def run(case: Case, rank: int) -> None:
    untiled = made(case)
    tiled = copy.deepcopy(untiled)
    base = tiled.get_base_model() if case.adapter == "lora" else tiled
    start = full(untiled)
    seqtile.apply_seqtile(base, chunk_tokens=CHUNK)
    generic = seqtile.status(base).mlp.generic
    assert (generic is not None) == (case.adapter == "generic"), generic
    for model in (untiled, tiled):
        checkpointing(model.get_base_model() if case.adapter == "lora" else model, KINDS[case.checkpointing])
    torch.manual_seed(rank + 1)
    batches = [batch_of(1, length) for length in LENGTHS[rank]]

    theirs, their_weights = train(untiled, case.strategy, batches)
    ours, our_weights = train(tiled, case.strategy, batches)
    tolerance = 3e-2 if case.strategy == "fsdp2_mixed" else 1e-4  # bfloat16
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance / 10, atol=tolerance / 10)
    for name, weight in their_weights.items():
        moved = weight - start[name]
        assert moved.norm() > 0, name
        error = relative_error(our_weights[name] - start[name], moved)
        assert error <= tolerance, f"{case}: the update of {name} is {error:.1e} off"
    print(f"rank {rank}: {case} equal", flush=True)


def main(tree: str) -> None:
    if tree.startswith("zero"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    for case in cases(tree):
        run(case, dist.get_rank())
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, one run in ten


if __name__ == "__main__":
    main(sys.argv[1])
