"""Every parameter's gradient, tiled against untiled, in every combination that a user may train with."""

import copy

import pytest
import torch

import seqtile
from models.layered import KINDS, assert_equal, assert_same_step
from seqtile.arch import ARCHS
from support.assertions import assert_each_as_exact, relative_error
from support.choice import every_pair
from support.tiny import (
    CHUNK,
    CLASSES,
    apply_liger,
    batch_of,
    build,
    checkpointing,
    interpreted,
    liger_or_skip,
    loss_and_gradients,
    modeling_restored,
    tiled_copy,
)

ON_GPU = "a CPU trains all of them by the same lines, and each kernel has its own tests"


@pytest.mark.on_gpu(ON_GPU, only=every_pair)
@pytest.mark.in_interpreter("one model of each kind", only=("mistral-reentrant-shape0-None",))
@pytest.mark.full("of 168 models", but=every_pair)
@pytest.mark.parametrize("items", [None, 77])
@pytest.mark.parametrize("shape", [(1, 63), (3, 101)])
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("arch", CLASSES)
def test_gradients_equal(arch: str, reentrant: bool | None, shape: tuple, items: int | None, device: str) -> None:
    options = {}
    if interpreted():
        if arch not in ("llama", "mistral", "qwen3") or items is not None:
            pytest.skip("the interpreter is slow")
        shape, options = (1, 11), {"chunk_tokens": 6, "check": False}
    untiled, batch = build(arch, device), batch_of(*shape, device)
    if items is not None:
        batch["num_items_in_batch"] = torch.tensor(items, device=device)
    tiled = tiled_copy(untiled, **options)
    status = seqtile.status(tiled)
    assert status.loss.tiled == 1 and status.mlp.tiled == status.mlp.total > 0
    assert_same_step(tiled, untiled, batch, reentrant)


@pytest.mark.on_gpu(ON_GPU)
@pytest.mark.in_interpreter("test_liger_orders.py has the kernels that it can run", only=())
@pytest.mark.full("Liger's kernels need a GPU or the interpreter")
@pytest.mark.parametrize("arch", CLASSES)
def test_over_liger(arch: str, device: str) -> None:
    if interpreted() and arch not in ("llama", "mistral", "qwen3"):
        pytest.skip("the interpreter has none of the functions that Liger's other kernels call")
    liger_or_skip(arch, device)
    untiled, batch = build(arch, device), batch_of(3, 63, device)
    tiled, truth = copy.deepcopy(untiled), loss_and_gradients(untiled, **batch)
    with modeling_restored():
        apply_liger(arch, model=tiled)
        seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
        checkpointing(tiled, False)
        assert_equal(loss_and_gradients(tiled, **batch), truth)


@pytest.mark.full("one with all kernels of the row, one with experts", but=("gemma2", "qwen3_moe"))
@pytest.mark.parametrize("arch", CLASSES)
def test_bfloat16_is_as_exact_as_untiled(arch: str, device: str) -> None:
    """Against the float64 model with the same weights: at most twice as far from it as the untiled bfloat16 model."""
    all_experts = {"num_experts_per_tok": 4, "num_experts": 4} if ARCHS[arch].routed else {}  # no route can change
    untiled = build(arch, device, **all_experts).bfloat16()
    truth = copy.deepcopy(untiled).double()
    if ARCHS[arch].routed:
        truth.set_experts_implementation("eager")  # the grouped product does not support float64
    batch = batch_of(3, 101, device)
    assert_each_as_exact(*(loss_and_gradients(each, **batch)[1] for each in (tiled_copy(untiled), untiled, truth)))


LOGITS = [
    ("llama", {"tie_word_embeddings": False}, True),
    ("gemma2", {"final_logit_softcapping": None}, False),
    ("gemma2", {"final_logit_softcapping": 0.5}, True),
    ("granite", {"logits_scaling": 0.2}, False),
    ("cohere", {"logit_scale": 2.5}, False),
]


@pytest.mark.parametrize(("arch", "changes", "bias"), LOGITS, ids=str)
def test_what_is_done_to_the_logits_is_done(arch: str, changes: dict, bias: bool, device: str) -> None:
    """Soft caps, scales and a bias of the head, also with unusual values."""
    untiled = build(arch, device, **changes)
    if bias:
        untiled.lm_head.bias = torch.nn.Parameter(torch.randn(untiled.config.vocab_size, device=device))
    plain, batch = copy.deepcopy(untiled), batch_of(3, 101, device)
    loss, gradients = loss_and_gradients(untiled, **batch)
    assert_equal(loss_and_gradients(tiled_copy(untiled), **batch), (loss, gradients))
    assert ("lm_head.bias" in gradients) == bias
    if any(changes.values()) and arch != "llama":  # the test must notice: without it the loss differs
        for name in changes:
            setattr(plain.config, name, 1.0 if "softcap" not in name else None)
        plain.logit_scale = 1.0
        other, _ = loss_and_gradients(plain, **batch)
        assert relative_error(other, loss) > 1e-3
