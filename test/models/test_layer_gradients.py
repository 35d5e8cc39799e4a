"""Layers tiled whole: every parameter's gradient as untiled, in every dtype, after Liger, with every checkpointing."""

import copy

import pytest
import torch

import seqtile
from models.layered import KINDS, LAYERED, assert_equal, assert_same_step, gradients_of, in_groups, tiled_copy, whole
from support.assertions import assert_each_as_exact
from support.choice import every_pair, every_value
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

FEW, FEW_OF_A_CHUNK = 11, 6  # tokens, for the interpreter: more than a chunk


@pytest.mark.full("of 108 models", but=every_pair)
@pytest.mark.on_gpu(
    "of 108 models; a CPU trains all of them by the same lines, and each kernel has its own tests", only=every_pair
)
@pytest.mark.in_interpreter("one model of each kind", only=("llama-2-ckpt-1-101", "qwen3-None-ckpt-1-101"))
@pytest.mark.parametrize(("batch_size", "length"), [(1, 101), (3, 63)])
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("head_groups", [None, 1, 2])
@pytest.mark.parametrize("arch", LAYERED)
def test_gradients_equal(
    arch: str, head_groups: int | None, reentrant: bool | None, batch_size: int, length: int, device: str
) -> None:
    """Padded rows have a mask, with which sdpa saves more than queries, keys and values, so attention is recomputed."""
    options = {"chunk_tokens": CHUNK}
    if interpreted():
        if arch not in ("llama", "qwen3") or reentrant is not False or batch_size > 1:
            pytest.skip("the interpreter is slow")
        length, options = FEW, {"chunk_tokens": FEW_OF_A_CHUNK, "check": False}
    untiled = build(arch, device)
    batch = whole(length, device) if batch_size == 1 else batch_of(batch_size, length, device)
    assert_same_step(tiled_copy(untiled, head_groups, **options), untiled, batch, reentrant)


@pytest.mark.full("of 12 models", but=("llama-auto", "qwen3-None", "granite-None"))
@pytest.mark.parametrize("head_groups", [None, "auto"])
@pytest.mark.parametrize("arch", LAYERED)
def test_bfloat16_is_as_exact_as_untiled(arch: str, head_groups: str | None, device: str) -> None:
    if interpreted():
        pytest.skip("the interpreter does not round to bfloat16, it truncates")
    untiled = build(arch, device, num_key_value_heads=4, sliding_window=None, head_dim=64).bfloat16()
    truth, tiled = copy.deepcopy(untiled).double(), tiled_copy(untiled, head_groups)
    batch = whole(101, device)
    assert_each_as_exact(*(loss_and_gradients(model, **batch)[1] for model in (tiled, untiled, truth)))


@pytest.mark.full("of 12 models", but=every_value)
@pytest.mark.parametrize("reentrant", KINDS)
@in_groups
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_autocast(arch: str, head_groups: int | None, reentrant: bool | None, device: str) -> None:
    """Float32 weights under bfloat16's autocast: at most twice as far from float64 as the untiled model."""
    if interpreted():
        pytest.skip("the interpreter does not round to bfloat16, it truncates")
    untiled = build(arch, device, head_dim=64)  # norms of a dozen weights would be noise
    truth, tiled = copy.deepcopy(untiled).double(), tiled_copy(untiled, head_groups)
    batch, found = whole(101, device), []
    for model in (tiled, untiled):
        checkpointing(model, reentrant)
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        found.append(gradients_of(model))
    assert_each_as_exact(*found, loss_and_gradients(truth, **batch)[1])


@pytest.mark.in_interpreter("one model of each kind", only=("llama-2", "qwen3-None"))
@in_groups
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_after_liger(arch: str, head_groups: int | None, device: str) -> None:
    """seqtile reads the weights of Liger's norms and the projections of Liger's MLP."""
    liger_or_skip(arch, device)
    untiled, batch = build(arch, device), whole(FEW, device)
    tiled, truth = copy.deepcopy(untiled), loss_and_gradients(untiled, **batch)
    with modeling_restored():
        apply_liger(arch, model=tiled)
        options = {"head_groups": head_groups, "chunk_tokens": FEW_OF_A_CHUNK, "check": False}
        seqtile.apply_seqtile(tiled, layer=True, **options)
        assert seqtile.status(tiled).layer.reason is None
        assert_equal(loss_and_gradients(tiled, **batch), truth)
