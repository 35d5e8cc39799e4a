"""Layers tiled whole: every parameter's gradient as untiled, in every dtype, after Liger, with every checkpointing."""

import copy

import pytest
import torch

import seqtile
from models.layered import KINDS, LAYERED, assert_equal, tiled_copy, whole
from support.assertions import assert_each_as_exact
from support.choice import every_pair
from support.tiny import (
    CHUNK,
    apply_liger,
    batch_of,
    build,
    checkpointing,
    interpreted,
    liger_or_skip,
    loss_and_gradients,
    modeling_restored,
)


@pytest.mark.on_gpu(
    "of 444 models; a CPU trains all of them by the same lines, and each kernel has its own tests", only=every_pair
)
@pytest.mark.in_interpreter(
    "one model of each kind",
    only=(
        "llama-2-ckpt-1-101",
        "qwen3-None-ckpt-1-101",
    ),
)
@pytest.mark.parametrize(("batch_size", "length"), [(1, 101), (3, 63)])
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("head_groups", [None, 1, 2])
@pytest.mark.parametrize("arch", LAYERED)
def test_gradients_equal(
    arch: str, head_groups: int | None, reentrant: bool | None, batch_size: int, length: int, device: str
) -> None:
    """Padded rows have a mask, under which sdpa saves more than queries, keys and values: it is computed once more."""
    if interpreted() and (arch not in ("llama", "qwen3") or reentrant is not False or batch_size > 1):
        pytest.skip("the interpreter is slow")
    untiled = build(arch, device)
    tiled = tiled_copy(untiled, head_groups)
    batch = whole(length, device) if batch_size == 1 else batch_of(batch_size, length, device)
    for model in (untiled, tiled):
        checkpointing(model, reentrant)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("head_groups", [None, 2])
def test_what_is_added_is_scaled(head_groups: int | None, device: str) -> None:
    """What attention and MLP add to the residual stream, as Granite has it."""
    untiled = build("granite", device, residual_multiplier=0.3)
    tiled, batch = tiled_copy(untiled, head_groups), whole(101, device)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("head_groups", [None, 2])
def test_layers_without_positions(head_groups: int | None, device: str) -> None:
    """As SmolLM3 has them, one in four."""
    untiled = build("smollm3", device, no_rope_layers=[1, 0])
    assert [layer.self_attn.use_rope for layer in untiled.model.layers] == [1, 0]
    tiled, batch = tiled_copy(untiled, head_groups), whole(101, device)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("head_groups", [None, "auto"])
@pytest.mark.parametrize("arch", LAYERED)
def test_bfloat16_is_as_exact_as_untiled(arch: str, head_groups: str | None, device: str) -> None:
    if interpreted():
        pytest.skip("the interpreter does not round to bfloat16, it truncates")
    untiled = build(arch, device, num_key_value_heads=4, sliding_window=None, head_dim=64).bfloat16()
    truth, tiled = copy.deepcopy(untiled).double(), tiled_copy(untiled, head_groups)
    batch = whole(101, device)
    (_, ours), (_, same), (_, true) = (loss_and_gradients(model, **batch) for model in (tiled, untiled, truth))
    assert_each_as_exact(ours, same, true)


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("head_groups", [None, 2])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_autocast(arch: str, head_groups: int | None, reentrant: bool | None, device: str) -> None:
    """Weights in float32 under bfloat16's autocast: no further from float64 than the untiled model, twice over."""
    if interpreted():
        pytest.skip("the interpreter does not round to bfloat16, it truncates")
    untiled = build(arch, device, head_dim=64)  # norms of a dozen weights would be noise
    truth, tiled = copy.deepcopy(untiled).double(), tiled_copy(untiled, head_groups)
    batch = whole(101, device)
    _, true = loss_and_gradients(truth, **batch)
    found = []
    for model in (tiled, untiled):
        checkpointing(model, reentrant)
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_each_as_exact(*found, true)


@pytest.mark.in_interpreter(
    "one model of each kind",
    only=(
        "llama-2",
        "qwen3-None",
    ),
)
@pytest.mark.parametrize("head_groups", [None, 2])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_after_liger(arch: str, head_groups: int | None, device: str) -> None:
    """Whose norms are read, and whose MLP's projections."""
    liger_or_skip(arch, device)
    untiled = build(arch, device)
    tiled = copy.deepcopy(untiled)
    batch = whole(63, device)
    truth = loss_and_gradients(untiled, **batch)
    with modeling_restored():
        apply_liger(arch, model=tiled)
        seqtile.apply_seqtile(tiled, layer=True, head_groups=head_groups, chunk_tokens=CHUNK)
        assert seqtile.status(tiled).layer.reason is None
        assert_equal(loss_and_gradients(tiled, **batch), truth)
