"""Every parameter's gradient, tiled against untiled, in every combination that a user may train with."""

import copy

import pytest
import torch

import seqtile
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
)

CHECKPOINTING = [pytest.param(None, id="plain"), pytest.param(False, id="ckpt"), pytest.param(True, id="reentrant")]


@pytest.mark.on_gpu(
    "of 444 models; a CPU trains all of them by the same lines, and each kernel has its own tests", only=every_pair
)
@pytest.mark.in_interpreter(
    "one model of each kind, and Liger's kernels in the same one",
    only=("llama-liger-plain-1-63-None", "mistral-hf-reentrant-1-63-None", "qwen3-liger-ckpt-1-63-None"),
)
@pytest.mark.parametrize("num_items", [None, 77])
@pytest.mark.parametrize(("batch_size", "length"), [(1, 63), (3, 101)])
@pytest.mark.parametrize("reentrant", CHECKPOINTING)
@pytest.mark.parametrize("liger", [False, True], ids=["hf", "liger"])
@pytest.mark.parametrize("arch", CLASSES)
def test_gradients_equal(
    arch: str, liger: bool, reentrant: bool | None, batch_size: int, length: int, num_items: int | None, device: str
) -> None:
    if interpreted() and (arch not in ("llama", "mistral", "qwen3") or num_items is not None):
        pytest.skip("the interpreter is slow, and has none of the functions that Liger's other kernels call")
    if liger:
        liger_or_skip(arch, device)
    untiled = build(arch, device)
    tiled = copy.deepcopy(untiled)
    batch = batch_of(batch_size, length, device)
    if num_items is not None:
        batch["num_items_in_batch"] = torch.tensor(num_items, device=device)
    checkpointing(untiled, reentrant)
    loss, gradients = loss_and_gradients(untiled, **batch)

    with modeling_restored():
        if liger:
            apply_liger(arch, model=tiled)
        seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
        checkpointing(tiled, reentrant)
        tiled_loss, tiled_gradients = loss_and_gradients(tiled, **batch)

    assert relative_error(tiled_loss, loss) <= 1e-6
    assert tiled_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = relative_error(tiled_gradients[name], gradient)
        assert error <= 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("arch", CLASSES)
def test_bfloat16_is_as_exact_as_untiled(arch: str, device: str) -> None:
    """Against the float64 model of the same weights: no further from it than the untiled bfloat16 model, twice over."""
    all_experts = {"num_experts_per_tok": 4, "num_experts": 4} if ARCHS[arch].routed else {}  # no route can change
    untiled = build(arch, device, **all_experts).bfloat16()
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    truth = copy.deepcopy(untiled).double()
    if ARCHS[arch].routed:
        truth.set_experts_implementation("eager")  # the grouped product knows no float64
    batch = batch_of(3, 101, device)
    _, same = loss_and_gradients(untiled, **batch)
    _, ours = loss_and_gradients(tiled, **batch)
    _, true = loss_and_gradients(truth, **batch)
    assert_each_as_exact(ours, same, true)


def test_gradient_accumulation(device: str) -> None:
    """Two micro-batches of different lengths, counted together, as Trainer does it."""
    untiled = build("llama", device)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    batches = [batch_of(1, 101, device), batch_of(2, 77, device)]
    items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    for model in (untiled, tiled):
        for batch in batches:
            model(**batch, num_items_in_batch=items).loss.backward()
    for (name, theirs), ours in zip(untiled.named_parameters(), tiled.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) <= 1e-5, name


def test_compiled_equals_eager(device: str) -> None:
    eager = build("llama", device)
    seqtile.apply_seqtile(eager, chunk_tokens=CHUNK)
    compiled = copy.deepcopy(eager)
    batch = batch_of(1, 101, device)
    loss, gradients = loss_and_gradients(eager, **batch)
    compiled.compile(backend="aot_eager")
    compiled_loss, compiled_gradients = loss_and_gradients(compiled, **batch)
    assert relative_error(compiled_loss, loss) <= 1e-6
    for name, gradient in gradients.items():
        assert relative_error(compiled_gradients[name], gradient) <= 1e-5, name


LOGITS = [
    ("llama", {"tie_word_embeddings": False}, True),
    ("gemma2", {"final_logit_softcapping": None}, False),
    ("gemma2", {"final_logit_softcapping": 0.5}, True),
    ("granite", {"logits_scaling": 0.2}, False),
    ("cohere", {"logit_scale": 2.5}, False),
]


@pytest.mark.parametrize(("arch", "changes", "bias"), LOGITS, ids=str)
def test_what_is_done_to_the_logits_is_done(arch: str, changes: dict, bias: bool, device: str) -> None:
    """Soft caps, scales and a bias of the head: from what they are, not merely from what is usual."""
    untiled = build(arch, device, **changes)
    if bias:
        untiled.lm_head.bias = torch.nn.Parameter(torch.randn(untiled.config.vocab_size, device=device))
    plain = copy.deepcopy(untiled)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    batch = batch_of(3, 101, device)
    loss, gradients = loss_and_gradients(untiled, **batch)
    tiled_loss, tiled_gradients = loss_and_gradients(tiled, **batch)
    assert relative_error(tiled_loss, loss) <= 1e-6
    assert tiled_gradients.keys() == gradients.keys() and ("lm_head.bias" in gradients) == bias
    for name, gradient in gradients.items():
        assert relative_error(tiled_gradients[name], gradient) <= 1e-5, name
    if any(changes.values()) and arch != "llama":  # the test sees it: without it, the loss is another
        for name in changes:
            setattr(plain.config, name, 1.0 if "softcap" not in name else None)
        plain.logit_scale = 1.0
        other, _ = loss_and_gradients(plain, **batch)
        assert relative_error(other, loss) > 1e-3
