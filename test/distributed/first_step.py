"""One rank's first steps: that they are compared under every reducer, change nothing of what is trained, and that what one
rank finds, or cannot run, every rank hears of."""

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import seqtile
from distributed.worker import base_of, ddp, fsdp2, full, trainable, zero
from seqtile import sp
from seqtile.models import mlp as tiled_mlp
from seqtile.models.first_step import outcome_of
from tiny import batch_of, build

TIME_LIMIT = 120  # seconds a case: ranks that wait for each other end with a traceback of where
LENGTHS = ((61, 40, 70), (33, 61, 52))  # of each rank's batches


class Wrapper(nn.Module):
    """A user's, whose parts are sharded, and which is itself."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def get_base_model(self) -> nn.Module:
        return self.model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def parts(model: nn.Module, **options: object):
    """FSDP2 on each layer alone; who trains so reduces the rest."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return model, torch.optim.SGD(trainable(model), lr=1.0)


def fsdp1(model: nn.Module, **options: object):
    wrapped = FullyShardedDataParallel(model, **options, device_id=torch.device("cpu"))
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=1.0)


class Case(NamedTuple):
    strategy: Callable
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    apply: dict[str, Any] = {}
    spread: bool = False
    """Whether the ranks share sequences."""
    evaluations: int = 0
    """Before training: from two on ZeRO-3 has the order of modules, and fetches ahead."""
    outcome: str = "up to rounding"


def lora(model: nn.Module) -> nn.Module:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
TORCH = {
    "ddp": Case(ddp),
    "fsdp2": Case(fsdp2),
    "fsdp2 layers": Case(fsdp2, apply={"layer": True}),
    "fsdp2 keep": Case(partial(fsdp2, reshard_after_forward=False)),
    "fsdp2 wrapper": Case(fsdp2, Wrapper),
    "fsdp2 peft": Case(fsdp2, lora),
    "fsdp2 parts": Case(parts),
    "fsdp2 mixed parts": Case(partial(parts, **MIXED), apply={"layer": True}),
    "fsdp2 sp": Case(fsdp2, apply={"layer": True}, spread=True),
    "fsdp2 sp peft": Case(fsdp2, lora, spread=True),
    "fsdp1": Case(fsdp1, outcome="FullyShardedDataParallel"),
}
ZERO = {
    "zero2": Case(zero(2)),
    "zero3": Case(zero(3)),
    "zero3 layers": Case(zero(3), apply={"layer": True, "head_groups": 2}),
    "zero3 full": Case(zero(3), apply={"check": "full"}),
    "zero3 peft": Case(zero(3), lora, {"layer": True}),
    "zero3 persistent": Case(zero(3, stage3_param_persistence_threshold=1000), evaluations=1),
    "zero3 ahead": Case(zero(3), evaluations=2),
    "zero3 leaf": Case(zero(3, leaf=True)),
    "zero3 sp": Case(zero(3), spread=True),
}
CASES = {"torch": TORCH, "zero": ZERO}
TOGETHER = {"torch": ("fsdp2", "fsdp2 wrapper", "fsdp2 parts"), "zero": ("zero3", "zero3 ahead")}


class Trained(NamedTuple):
    """What came of three steps."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    state: list
    """ZeRO-3's, after each step."""
    outcome: str | None


def train(case: Case, check: bool | str, before: Callable[[nn.Module], Any] = lambda model: None) -> Trained:
    """Three steps of a model, the same at every call; `before` is done to it before the first."""
    rank, batches = dist.get_rank(), []
    torch.manual_seed(0)
    model = build("llama", tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    ctx = sp.initialize(2) if case.spread else None
    if ctx is not None:
        sp.apply_ulysses(model, ctx)
    seqtile.apply_seqtile(model, chunk_tokens=20, **{"check": check} | (case.apply if check else {**case.apply, "check": False}))
    wrapped, optimizer = case.strategy(case.wrap(model).train())
    torch.manual_seed(1 if case.spread else rank + 1)
    for length in LENGTHS[0 if case.spread else rank]:
        batch = batch_of(1, length)
        del batch["attention_mask"]
        batches.append(sp.shard(batch, ctx) if case.spread else batch)
    for _ in range(case.evaluations):
        with torch.no_grad():
            wrapped.eval()(**batches[0])
        wrapped.train()
    before(model)
    losses, states = [], []
    for batch in batches:
        loss = wrapped(**batch).loss
        loss = sp.reduce_loss(loss, ctx) if case.spread else loss
        losses.append(loss.item())
        if wrapped is optimizer:  # DeepSpeed's engine
            wrapped.backward(loss)
            wrapped.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(zero_state(wrapped))
    weights = {} if case.strategy is fsdp1 else full(model)
    if wrapped is optimizer:
        wrapped.destroy()
    return Trained(losses, weights, states, outcome_of(model))


def zero_state(engine: Any) -> tuple | None:
    """What ZeRO-3 has recorded, by names, and which parameters it holds whole."""
    if getattr(engine, "zero_optimization_partition_weights", bool)() is False:
        return None
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    names = {module: name for name, module in engine.module.named_modules()}
    own = {name.split("__")[-1]: value for name, value in vars(coordinator).items()}
    external = {names[module]: len(module._external_params) for module in names}
    order = [names[module] for module in own["submodule_order"]]
    queued = [(each.param.ds_numel, each.step_id_last_used_at) for each in own["param_order"]]
    status = [parameter.ds_status.name for parameter in engine.module.parameters()]
    return str(own["trace_mode"]), own["step_id"], own["n_available_params"], order, queued, status, external


def assert_same(found: Trained, expected: Trained, name: str) -> None:
    assert found.losses == expected.losses, f"{name}: {found.losses}, expected {expected.losses}"
    assert found.state == expected.state, f"{name}: {found.state}, expected {expected.state}"
    for part, weight in expected.weights.items():
        assert torch.equal(found.weights[part], weight), f"{name}: {part}"


def same_training(name: str, case: Case) -> Trained:
    """A model that is compared is trained to the bit as one that is not."""
    unchecked, checked = train(case, False), train(case, True)
    assert unchecked.outcome is None and case.outcome in str(checked.outcome), f"{name}: {checked.outcome}"
    assert_same(checked, unchecked, name)
    print(f"rank {dist.get_rank()}: {name} {checked.outcome}", flush=True)
    return unchecked


@contextmanager
def wrong_on_rank_1() -> Iterator[None]:
    """Tiled MLPs there compute something else."""
    right = tiled_mlp.gated_mlp_of

    def wrong(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return right(x, *args, **options) + (0.3 * x if dist.get_rank() == 1 else 0)

    with patch.object(tiled_mlp, "gated_mlp_of", wrong):
        yield


def found_everywhere(name: str, case: Case, unchecked: Trained) -> None:
    def first_step_fails(model: nn.Module) -> None:
        batch = batch_of(1, 61)
        engine = engines.pop() if engines else model
        with wrong_on_rank_1(), pytest.raises(ValueError, match=r"something else .*mlp \(LlamaMLP\).* Nothing was trained"):
            engine(**batch)

    raise NotImplementedError


def main(family: str) -> None:
    if family == "zero":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    import os, sys
    only = os.environ.get("ONLY")
    for name, case in CASES[family].items():
        if only and name not in only.split(","): continue
        faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
        same_training(name, case)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
