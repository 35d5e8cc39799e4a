"""The first-step comparison on one rank. It works under every reducer and does not change the training. If one rank
finds a difference or fails, the comparison stops on all ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import seqtile
from distributed.worker import ddp, fsdp2, full, trainable, zero
from seqtile import sp
from seqtile.models.forward import mlp as tiled_mlp
from seqtile.models.status import outcome_of
from seqtile.proof import ranks as trial_ranks
from seqtile.proof.batch import TOKENS
from seqtile.protocols import FIRST_STEP
from support.tiny import batch_of, build
from support.training import halved, update, with_lora

LENGTHS = ((61, 40, 70), (4, 61, 33))  # of each rank's batches; one is too short to compare


class Wrapper(nn.Module):
    """A user's wrapper whose parts are sharded and which is itself sharded."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def get_base_model(self) -> nn.Module:
        return self.model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def parts(model: nn.Module, **options: object):
    """FSDP2 on each layer alone; the trainer must reduce the other gradients."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return model, torch.optim.SGD(trainable(model), lr=1.0)


def fsdp1(model: nn.Module, **options: object):
    wrapped = FullyShardedDataParallel(model, **options, device_id=torch.device("cpu"))
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=1.0)


EQUAL = "equal the untiled model's up to rounding"
BELOW = f"the last hidden states and 21 gradients below the head {EQUAL}"


@dataclass(frozen=True)
class Case:
    strategy: Callable
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    apply: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    spread: bool = False
    """True if the ranks share sequences."""
    outcome: str = f"the loss and 22 gradients {EQUAL}"


def lora(model: nn.Module) -> nn.Module:
    return with_lora(model, "q_proj", "up_proj", "down_proj")


def hooked(model: nn.Module) -> nn.Module:
    """A user's hook that treats every token alike, on a module that is sharded when the first step runs."""
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, output: 0.5 * output)
    return model


def below_the_head(model: nn.Module) -> nn.Module:
    """The trainer computes the loss itself, from the hidden states, as TRL's do."""

    def forward(labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch: Any = None, **inputs: Tensor):
        states = model.model(**inputs).last_hidden_state
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = model.lm_head(states)
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()))

    model.forward = forward
    return model


def reads_of_another(model: nn.Module) -> nn.Module:
    """The second layer's attention reads a weight of the first layer. ZeRO-3 then gathers it, and records that."""
    first, attention = model.model.layers[0], model.model.layers[1].self_attn
    attend = attention.forward

    def forward(hidden_states: torch.Tensor, **options: Any) -> Any:
        return attend(hidden_states + 0 * first.self_attn.q_proj.weight.sum(), **options)

    attention.forward = forward
    return model


by_layer = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
TORCH = {
    "ddp": Case(ddp),
    "fsdp2": Case(fsdp2),
    "fsdp2 layers": Case(fsdp2, apply={"layer": True}),
    "fsdp2 keep": Case(partial(fsdp2, reshard_after_forward=False)),
    "fsdp2 wrapper": Case(fsdp2, Wrapper),
    "fsdp2 hook": Case(fsdp2, hooked),
    "fsdp2 peft": Case(fsdp2, lora, outcome=f"12 gradients {EQUAL}"),
    "fsdp2 parts": Case(parts),
    "fsdp2 below the head": Case(fsdp2, below_the_head, outcome=BELOW),
    "fsdp2 mixed parts": Case(partial(parts, **MIXED), apply={"layer": True}),
    "fsdp2 sp": Case(fsdp2, apply={"layer": True}, spread=True),
    "fsdp2 sp peft": Case(fsdp2, lora, spread=True, outcome=f"12 gradients {EQUAL}"),
    "fsdp2 sp below the head": Case(fsdp2, below_the_head, spread=True, outcome=BELOW),
    "fsdp1": Case(fsdp1, outcome=f"2 gradients {EQUAL}"),  # its one parameter is flat
    "fsdp1 by names": Case(partial(fsdp1, use_orig_params=True)),
    "fsdp1 parts": Case(partial(fsdp1, auto_wrap_policy=by_layer), outcome="FullyShardedDataParallel"),
}
ZERO = {
    "zero2": Case(zero(2)),
    "zero3": Case(zero(3)),
    "zero3 layers": Case(zero(3), apply={"layer": True, "head_groups": 2}),
    "zero3 full": Case(zero(3), apply={"check": "full"}, outcome=f"every gradient {EQUAL}"),
    "zero3 peft": Case(zero(3), lora, {"layer": True}, outcome=f"12 gradients {EQUAL}"),
    "zero3 tied": Case(zero(3), tied=True, outcome=f"21 gradients {EQUAL}"),
    "zero3 weights of another": Case(zero(3), reads_of_another, outcome="the untiled model fails on a few tokens"),
    "zero3 persistent": Case(zero(3, stage3_param_persistence_threshold=1000)),
    "zero3 leaf": Case(zero(3, leaf=True)),
    "zero3 sp": Case(zero(3), spread=True),
    "zero3 below the head": Case(zero(3), below_the_head, outcome=BELOW),
    "zero3 sp below the head": Case(zero(3), below_the_head, spread=True, outcome=BELOW),
}
CASES = TORCH | ZERO
TOGETHER = ("fsdp2", "fsdp2 wrapper", "fsdp2 parts", "zero3")
EVERY_DAY = ("ddp", "fsdp2 mixed parts", "fsdp2 sp peft", "zero3 weights of another")
"""In addition to those above."""


class Trained(NamedTuple):
    """The result of three steps."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    state: list
    """ZeRO-3's state after each step."""
    outcome: str | None


def train(case: Case, check: bool, before: Callable[..., Any] = lambda *_: None, again: bool = False) -> Trained:
    """Trains a model, the same at every call, for three steps. `before` is applied to it before the first one. With
    `again` each step is compared: from the third on ZeRO-3 knows the order of modules and prefetches."""
    rank, batches = dist.get_rank(), []
    torch.manual_seed(0)
    model = halved(build("llama", tie_word_embeddings=case.tied))
    ctx = sp.initialize(2) if case.spread else None
    if ctx is not None:
        sp.apply_ulysses(model, ctx)
    seqtile.apply_seqtile(model, chunk_tokens=20, **{"check": True} | case.apply | ({} if check else {"check": False}))
    wrapped, optimizer = case.strategy(case.wrap(model).train())
    torch.manual_seed(1 if case.spread else rank + 1)
    for length in LENGTHS[0 if case.spread else rank]:
        batch = batch_of(1, length)
        batch["labels"][0, -1] = 5  # also in the shortest row
        batches.append(sp.shard(batch, ctx) if case.spread else batch)
    before(model, wrapped, batches[0])
    losses, states = [], []
    for batch in batches:
        for module in (model, model.model) if again else ():
            vars(module).pop(FIRST_STEP, None)
        loss = wrapped(**batch).loss
        loss = sp.reduce_loss(loss, ctx) if case.spread else loss
        losses.append(loss.item())
        update(wrapped, optimizer, loss)
        states.append(zero_state(wrapped))
    weights = full(model)
    if wrapped is optimizer:
        wrapped.destroy()
    return Trained(losses, weights, states, outcome_of(model))


def zero_state(engine: Any) -> tuple | None:
    """Returns ZeRO-3's records, by name, and the parameters that it holds whole."""
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
    """A compared model trains bitwise as an uncompared one."""
    unchecked = train(case, False)
    checked = train(case, True, again=True)
    assert unchecked.outcome is None and case.outcome in str(checked.outcome), f"{name}: {checked.outcome}"
    assert_same(checked, unchecked, name)
    return unchecked


def first_step_refuses(model: nn.Module, wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    """Each rank raises if tiled MLPs compute something else than untiled ones on rank 1 alone."""
    said = refusal(wrapped, batch)
    assert ("on another rank" in said) == (dist.get_rank() == 0), said


def refusal(wrapped: Any, batch: dict[str, torch.Tensor]) -> str:
    right = tiled_mlp.gated_mlp_of

    def wrong(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return right(x, *args, **options) + (0.3 * x if dist.get_rank() == 1 else 0)

    named = r"something else .*the part is mlp \(LlamaMLP\)\. Nothing was trained"
    with patch.object(tiled_mlp, "gated_mlp_of", wrong), pytest.raises(ValueError, match=named) as error:
        wrapped(**batch)
    return str(error.value)


def fails_on_few_tokens(in_backward: bool, model: nn.Module, wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    """The second layer's attention fails on rank 1 alone, for inputs as short as those of the comparison."""

    def fail(*_: Any) -> None:
        raise IndexError("too few tokens")

    def forward(hidden_states: torch.Tensor, **options: Any) -> Any:
        output, weights = attend(hidden_states, **options)
        if dist.get_rank() == 1 and hidden_states.shape[1] == TOKENS:
            output.register_hook(fail) if in_backward else fail()
        return output, weights

    attention = model.model.layers[1].self_attn
    attend, attention.forward = attention.forward, forward


def one_rank_is_watched(model: nn.Module, wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    """After the comparison rank 0 gets a hook, as loggers add on the main process: it must not compare again alone."""
    wrapped(**batch)
    if dist.get_rank() == 0:
        model.model.layers[0].register_forward_hook(lambda *_: None)


WORLDS = {  # which of four ranks run together, two by two
    "fsdp2 on two": (True, lambda mesh: mesh["sp"]),
    "sp on two": (True, None),
    "hsdp": (False, lambda mesh: mesh),
    "fsdp2 and sp": (False, lambda mesh: mesh["dp"]),
}


def in_a_larger_world(name: str) -> None:
    """All ranks that share a model stop if one of them finds a difference; the others do not join."""
    on_two, part_of = WORLDS[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    ctx = sp.initialize(mesh=mesh["sp"])
    if on_two and dist.get_rank() > 1:
        return
    torch.manual_seed(0)
    model, batch = build("llama"), batch_of(1, 60)
    if "sp" in name:
        sp.apply_ulysses(model, ctx)
        batch = sp.shard(batch, ctx)
    seqtile.apply_seqtile(model, chunk_tokens=20)
    if part_of is not None:
        model, _ = fsdp2(model, mesh=part_of(mesh))
    refusal(model, batch)
    loss = model(**batch).loss
    (sp.reduce_loss(loss, ctx) if "sp" in name else loss).backward()
    assert EQUAL in outcome_of(model), outcome_of(model)


def held() -> None:
    """ZeRO-3 holds one layer at a time, and the parameters outside of layers."""
    held, gather, partition = [0], trial_ranks._gather, trial_ranks._partition

    def counted_gather(parameters: Iterable[nn.Parameter]) -> list:
        found = gather(parameters)
        held.append(held[-1] + sum(parameter.ds_numel for parameter, *_ in found))
        return found

    def counted_partition(before: list) -> None:
        held.append(held[-1] - sum(parameter.ds_numel for parameter, *_ in before))
        partition(before)

    with patch.multiple(trial_ranks, _gather=counted_gather, _partition=counted_partition):
        train(CASES["zero3"], True)
    model = build("llama")
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers]
    rest = sum(parameter.numel() for parameter in model.parameters()) - sum(layers)
    assert (max(held), held[-1]) == (rest + max(layers), 0), held


def compared(name: str) -> None:
    """The first step is compared, and three steps are bitwise the same as with check=False."""
    same_training(name, CASES[name])


def stopped(name: str) -> None:
    """The same, but a failure on rank 1 alone stops the comparison on every rank; training is not affected."""
    case = CASES[name]
    unchecked = same_training(name, case)
    found = train(case, True, first_step_refuses)
    assert case.outcome in str(found.outcome), found.outcome
    assert_same(found._replace(state=unchecked.state), unchecked, name)  # ZeRO-3 has recorded an aborted forward
    found = train(case, True, one_rank_is_watched)
    assert_same(found._replace(state=unchecked.state), unchecked, name)
    for in_backward in (False, True):
        found = train(case, True, partial(fails_on_few_tokens, in_backward))
        reason = "IndexError: too few tokens" if dist.get_rank() == 1 else "OtherRankFailed"
        assert reason in str(found.outcome), f"{name}: {found.outcome}"
        assert_same(found, unchecked, name)
