"""The first training step compares itself with the untiled model: it finds what is wrong, and leaves no trace."""

import copy
import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import seqtile
from seqtile.models.first_step import outcome_of
from seqtile.models.trial_batch import TOKENS, trial_batch
from seqtile.ops import leaf_gradients, tiled
from tiny import CHUNK, batch_of, build, checkpointing

EQUAL = "equal the untiled model's up to rounding"
DTYPES = [torch.float32, torch.bfloat16]
TYPES = ["llama", "qwen3", "gemma3_text", "granite", "mixtral", "qwen3_moe", "olmo2", "phi3", "smollm3"]


class Mixing(nn.Module):
    """An activation that mixes tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) + x.mean(-2, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", [False, True], ids=["parts", "layer"])
@pytest.mark.parametrize("arch", TYPES)
def test_no_false_alarm(arch: str, layer: bool, dtype: torch.dtype) -> None:
    model = build(arch).to(dtype)
    seqtile.apply_seqtile(model, layer=layer, chunk_tokens=CHUNK, check="full")
    model(**batch_of(2, 61))
    assert EQUAL in outcome_of(model) and "every gradient" in outcome_of(model)
    assert EQUAL in str(seqtile.status(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_no_false_alarm_under_autocast(arch: str, dtype: torch.dtype) -> None:
    model = build(arch)
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK)
    with torch.autocast("cpu", dtype):
        model(**batch_of(2, 61))
    assert EQUAL in outcome_of(model)


def put_mixing_activation(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = Mixing()


def wrong_gradients_of_weights(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every leaf's hooks run once a chunk, and once more at the end."""

    def gradients_of(outputs, inputs, d_outputs, retain_graph: bool = False):
        return torch.autograd.grad(outputs, inputs, d_outputs, retain_graph=retain_graph, allow_unused=True)

    monkeypatch.setattr(tiled, "gradients_of", gradients_of)
    assert leaf_gradients.gradients_of is not gradients_of


WRONG: dict[str, tuple[str, dict, Callable, str]] = {  # model, options, what is spoiled, what is named
    "an activation that mixes tokens": (
        "llama",
        {},
        lambda model, monkeypatch: put_mixing_activation(model),
        r"mlp \(LlamaMLP\).*mlp=False",
    ),
    "hooks on parameters": ("qwen3_moe", {}, wrong_gradients_of_weights, r"mlp \(Qwen3MoeExperts\).*mlp=False"),
    "hooks on parameters of a layer": ("olmo2", {"layer": True}, wrong_gradients_of_weights, r"layer.*layer=False"),
}


@pytest.mark.parametrize(
    "case, dtype",  # a mixture in bfloat16 routes tokens to other experts for one bit, so gradients differ by as much
    [
        (case, dtype)
        for case, (arch, *_) in WRONG.items()
        for dtype in DTYPES
        if "moe" not in arch or dtype == DTYPES[0]
    ],
    ids=str,
)
def test_what_is_wrong_is_found_and_named(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, options, spoil, named = WRONG[case]
    model = build(arch).to(dtype)
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, **options)
    before = copy.deepcopy(model.state_dict())
    spoil(model, monkeypatch)
    with pytest.raises(ValueError, match=r"Nothing was trained") as error:
        model(**batch_of(2, 61))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert re.search(named, str(error.value)), str(error.value)
    with pytest.raises(ValueError, match="Nothing was trained"):  # asked again at the next forward
        model(**batch_of(2, 61))


def test_a_change_after_the_first_step_is_compared_again() -> None:
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    model(**batch_of(2, 61))
    put_mixing_activation(model)
    with pytest.raises(ValueError, match="computes something else than the untiled one"):
        model(**batch_of(2, 61))


def test_check_false_leaves_it_out() -> None:
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=False)
    model(**batch_of(2, 61))
    assert outcome_of(model) is None
    with pytest.raises(ValueError, match='True, False or "full"'):
        seqtile.apply_seqtile(model, check="some")


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "ckpt", "reentrant"])
@pytest.mark.parametrize("options", [{}, {"layer": True}, {"loss": False}, {"check": "full"}], ids=str)
def test_it_leaves_no_trace(options: dict, reentrant: bool | None) -> None:
    model = build("qwen3_moe", attention_dropout=0.3)
    checkpointing(model, reentrant)
    seen: list[int] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(1))
    model.register_buffer("count", torch.zeros(3))
    parameter = model.model.norm.weight
    hook_calls: list[int] = []
    parameter.register_hook(lambda gradient: hook_calls.append(1))
    parameter.grad = torch.ones_like(parameter)
    states = []
    for check in (False, options.get("check", True)):
        torch.manual_seed(3)
        random.seed(3)
        each = copy.deepcopy(model)
        seqtile.apply_seqtile(each, chunk_tokens=CHUNK, **options | {"check": check})
        attributes = {name: sorted(vars(module)) for name, module in each.named_modules()}
        torch.manual_seed(5)
        batch = batch_of(2, 61)
        seen.clear()
        loss = each(**batch).loss
        assert len(seen) == 1
        attributes[""] = sorted({*attributes[""], *(["_seqtile_first_step"] if check else [])})
        assert {name: sorted(vars(module)) for name, module in each.named_modules()} == attributes
        loss.backward()
        states.append((loss.detach(), torch.get_rng_state(), random.random(), each))
    (loss, generator, number, unchecked), (*found, checked) = states
    assert torch.equal(found[0], loss) and torch.equal(found[1], generator) and found[2] == number
    for (name, ours), theirs in zip(checked.named_parameters(), unchecked.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    assert torch.equal(checked.count, torch.zeros(3))


def test_nothing_is_compared_without_values_or_with_a_compiler() -> None:
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    model.model.layers[0].compile(backend="eager")
    model(**batch_of(2, 61))
    assert "is compiled" in outcome_of(model)
    with torch.device("meta"):
        unfilled = type(model)(model.config).train()
    seqtile.apply_seqtile(unfilled, chunk_tokens=CHUNK)
    ids = torch.zeros(1, 61, dtype=torch.int64, device="meta")
    unfilled(input_ids=ids, labels=ids)
    assert "hold no values" in outcome_of(unfilled)


def test_tokens_are_chosen_about_what_differs() -> None:
    model = build("llama")
    labels = torch.arange(200)[None].repeat(2, 1)
    labels[:, :70] = -100
    positions = torch.cat([torch.arange(150), torch.arange(50)])[None].expand(2, -1)
    mask = torch.ones(2, 200, dtype=torch.int64)
    mask[1, 190:] = 0
    given = {
        "labels": labels,
        "position_ids": positions,
        "attention_mask": mask,
        "pixel_values": torch.rand(2, 3, 8, 8),
    }
    batch = trial_batch(model, type(model).forward, (labels.clamp(min=0),), given)
    columns = batch.inputs["labels"].clamp(min=69)[1].tolist()
    assert batch.shape == (2, TOKENS) and batch.left_out == ["pixel_values"]
    assert {70, 149, 150, 189, 190} <= set(columns) and columns == sorted(columns)
    assert batch.inputs["position_ids"].shape == batch.inputs["attention_mask"].shape == (2, TOKENS)
    vars(model)["_seqtile_ulysses"] = SimpleNamespace(ctx=SimpleNamespace(rank=1, size=2))
    second = trial_batch(model, type(model).forward, (labels.clamp(min=0),), given).inputs
    assert "attention_mask" not in second, "of what two ranks keep the second holds the end, without a gap"
    assert torch.equal(second["position_ids"], torch.arange(TOKENS, 2 * TOKENS).expand(2, -1))
    del model._seqtile_ulysses
    whole = torch.rand(2, 1, 200, 200)
    cut = trial_batch(model, type(model).forward, (), {"input_ids": labels.clamp(min=0), "attention_mask": whole})
    assert torch.equal(cut.inputs["attention_mask"], whole[:, :, :TOKENS, :TOKENS])
