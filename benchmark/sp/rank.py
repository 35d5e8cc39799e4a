"""One rank of the sequence-parallel benchmark: a contestant's cases, a JSON line each.

torchrun --standalone --nproc-per-node N rank.py CONTESTANT CASES FILE

CASES is a JSON list of them. A step is a forward and a backward; gradients are not reduced over ranks in it, which is a
reducer's work and the same for all. For the error they are, see the contestants.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmark.device import DEVICE, DTYPE, peak_bytes
from benchmark.errors import relative_error
from benchmark.sp.cases import Batch, Case, batch_of, build, shape_of
from benchmark.sp.sent_bytes import SentBytes

from seqtile.renamed import enable_checkpointing

BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
ROUNDS = 10 if DEVICE == "cuda" else 2
SMALL = 64  # tokens a rank of the input for which the error is measured


class Contestant(Protocol):
    """Made once in a process, with the model of the first case."""

    any_heads: bool
    """Whether a process can go on with another number of heads."""

    def __init__(self, model: nn.Module): ...

    def shard(self, model: nn.Module, batch: Batch) -> Batch:
        """This rank's part of the batch; makes the model fit for it."""

    def loss(self, model: nn.Module, shard: Batch) -> torch.Tensor:
        """The whole sequence's."""

    def reduced(self, model: nn.Module, shard: Batch) -> torch.Tensor:
        """The loss, after a step whose gradients are reduced over the ranks as the documentation asks."""


class Seqtile:
    """Gradients are averaged over the ranks, which is what DDP, FSDP2 and ZeRO do."""

    any_heads = True

    def __init__(self, model: nn.Module):
        from seqtile import sp

        dist.init_process_group(BACKEND)
        self.sp, self.ctx = sp, sp.initialize(dist.get_world_size())

    def shard(self, model: nn.Module, batch: Batch) -> Batch:
        self.sp.apply_ulysses(model, self.ctx)
        return self.sp.shard(batch, self.ctx)

    def loss(self, model: nn.Module, shard: Batch) -> torch.Tensor:
        return self.sp.reduce_loss(model(**shard).loss, self.ctx)

    def reduced(self, model: nn.Module, shard: Batch) -> torch.Tensor:
        loss = self.loss(model, shard)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.ctx.size
        return loss


class DeepSpeed:
    """As its tutorial has it: its loader's shards, its sum of losses, its engine's gradients, without ZeRO."""

    any_heads = False

    def __init__(self, model: nn.Module):
        import deepspeed
        from deepspeed.runtime.sequence_parallel import ulysses_sp

        if BACKEND == "gloo":  # on a CPU it would compile collectives for inference in C++: 40 s
            deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(BACKEND)
        self.engine, self.loader = deepspeed.initialize, ulysses_sp.UlyssesSPDataLoaderAdapter
        self.mpu = ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(
            model, "sdpa", sequence_parallel_size=dist.get_world_size(), micro_batch_size=1
        )

    def shard(self, model: nn.Module, batch: Batch) -> Batch:
        group, ranks = self.mpu.get_sequence_parallel_group(), self.mpu.get_sequence_parallel_world_size()
        shards = self.loader([dict(batch)], self.mpu.get_sequence_parallel_rank(), group, ranks, DEVICE)
        return {name: tensor.to(DEVICE) for name, tensor in next(shards).items()}

    def loss(self, model: nn.Module, shard: Batch) -> torch.Tensor:
        from torch.distributed.nn.functional import all_gather

        labels, group = shard["shift_labels"], self.mpu.get_sequence_parallel_group()
        logits = model(**shard).logits
        model = getattr(model, "module", model)  # the engine's
        mean = model.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=model.config.vocab_size)
        means, items = all_gather(mean, group=group), all_gather((labels != -100).sum(), group=group)
        return sum(mean * count for mean, count in zip(means, items, strict=True)) / sum(items)

    def reduced(self, model: nn.Module, shard: Batch) -> torch.Tensor:
        config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": dist.get_world_size()}
        config["zero_allow_untested_optimizer"] = True
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = self.engine(model=model, optimizer=optimizer, config=config, mpu=self.mpu)
        loss = self.loss(engine, shard)
        engine.backward(loss)
        engine.destroy()
        return loss


CONTESTANTS: dict[str, type[Contestant]] = {"deepspeed": DeepSpeed, "seqtile": Seqtile}


def prepared(case: Case, dtype: torch.dtype, small: int = 0, layers: int | None = None) -> tuple[nn.Module, Batch]:
    """Model and whole batch of a case. `small`: other widths, and so many tokens; heads stay."""
    shape = shape_of(case.shape)
    if small:
        shape = replace(shape, hidden=8 * int(case.heads.split("/")[0]), mlp=128, layers=2, vocab=211)
    model = build(replace(shape, layers=layers or shape.layers), case.heads, dtype)
    if case.checkpointed:
        enable_checkpointing(model)
    return model, batch_of(case.kind, small or case.tokens, shape.vocab)


def step_of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return step


def truth_of(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and all gradients as one vector, in float32, of one process that has the whole small sequence."""
    model, batch = prepared(case, torch.float32, small=tokens)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def errors(contestant: Contestant, case: Case, truth: tuple[torch.Tensor, torch.Tensor], tokens: int) -> dict[str, Any]:
    """The larger relative error of loss and gradients, and how many times too large the gradients are.

    A whole number of times is no error, but reported.
    """
    model, batch = prepared(case, torch.float32, small=tokens)
    loss = contestant.reduced(model, contestant.shard(model, batch)).detach()
    ours = gradients(model)
    scale = (ours @ truth[1] / (truth[1] @ truth[1])).item()
    of_gradients = relative_error(ours / max(1, round(scale)), truth[1])
    of_loss = relative_error(loss, truth[0])
    return {"error": max(of_loss, of_gradients), "of_loss": of_loss, "of_gradients": of_gradients, "scale": scale}


def sent(contestant: Contestant, case: Case) -> dict[str, dict[str, list[int]]]:
    """[collectives, bytes sent] of this rank: `layer` for each layer, `step` for what comes once a step."""
    counted = []
    for layers in (1, 2):
        model, batch = prepared(case, DTYPE, layers=layers)
        shard = contestant.shard(model, batch)
        with SentBytes() as count:
            step_of(model, lambda model=model, shard=shard: contestant.loss(model, shard))()
        counted.append(count)
    one, two = counted
    layer = {name: [two.calls[name] - one.calls[name], two.bytes[name] - one.bytes[name]] for name in two.calls}
    step = {name: [one.calls[name] - layer[name][0], one.bytes[name] - layer[name][1]] for name in two.calls}
    return {
        "layer": {name: counts for name, counts in layer.items() if counts[0]},
        "step": {name: counts for name, counts in step.items() if counts[0]},
    }


def median_seconds(step: Callable[[], None]) -> float:
    """The median of some steps, each from a barrier on."""
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(contestant: Contestant, case: Case) -> dict[str, Any]:
    """Of this rank."""
    collectives = sent(contestant, case)
    model, batch = prepared(case, DTYPE)
    shard = contestant.shard(model, batch)
    step = step_of(model, lambda: contestant.loss(model, shard))
    dist.barrier()
    peak = peak_bytes(step)
    return {"seconds": median_seconds(step), "peak_bytes": peak, "wire": collectives}


def main(name: str, listed: str, file: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    todo = [Case(*fields) for fields in json.loads(listed)]
    small = SMALL * int(os.environ["WORLD_SIZE"])
    truths = {case: truth_of(case, small) for case in todo}  # while Hugging Face's attention is what it was
    try:
        contestant, refusal = CONTESTANTS[name](prepared(todo[0], torch.float32, small=small)[0]), None
    except ValueError as error:
        contestant, refusal = None, str(error)
    for case in todo:
        row: dict[str, Any] = {"refused": refusal}
        if contestant is not None:
            try:
                row = errors(contestant, case, truths[case], small) | {"ranks": [None] * dist.get_world_size()}
                dist.all_gather_object(row["ranks"], measure(contestant, case))
            except ValueError as error:  # on all ranks alike
                row = {"refused": str(error)}
        if dist.get_rank() == 0:
            with open(file, "a") as lines:
                print(json.dumps({"case": case} | row), file=lines)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then


if __name__ == "__main__":
    main(*sys.argv[1:])
