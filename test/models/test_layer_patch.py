"""Applying, restoring and telling of whole layers."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import seqtile
from seqtile.arch import ARCHS
from seqtile.models import layer as layers
from support.assertions import relative_error
from support.tiny import (
    CHUNK,
    apply_liger,
    batch_of,
    build,
    checkpointing,
    counting,
    loss_and_gradients,
    modeling_of,
    modeling_restored,
    name_of_class,
)

LAYERED = [name for name, arch in ARCHS.items() if arch.layer]


@pytest.fixture(autouse=True)
def pristine() -> Iterator[None]:
    with modeling_restored():
        yield
        seqtile.restore()


def snapshot(arch: str, model: nn.Module | None = None) -> list[object]:
    """Everything that a patch of layers could touch."""
    kinds = ("ForCausalLM", "DecoderLayer", "Model", "RMSNorm", "MLP")
    classes = [getattr(modeling_of(arch), name_of_class(arch, kind)) for kind in kinds]
    state: list[object] = [*classes, *(part.forward for part in classes)]
    for module in model.modules() if model is not None else ():
        state += [type(module), sorted(vars(module)), vars(module).get("forward")]
    return state


def tiled_layers(model: nn.Module) -> int:
    """How many layers run tiled in a training step, by what it calls; `status` must say so too."""
    with pytest.MonkeyPatch.context() as patch:
        calls, function = [], layers.decoder_layer
        patch.setattr(layers, "decoder_layer", counting(calls, function))
        model(**batch_of(1, 101))
    status = seqtile.status(model)
    assert (status.layer.tiled if status.layer else 0) == len(calls)
    return len(calls)


@pytest.mark.parametrize("arch", LAYERED)
def test_model_alone(arch: str) -> None:
    model, other = build(arch), build(arch)
    before = snapshot(arch, model)
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK)
    assert tiled_layers(model) == 2 and tiled_layers(other) == 0
    seqtile.restore(model)
    assert snapshot(arch, model) == before and tiled_layers(model) == 0


@pytest.mark.parametrize("arch", LAYERED)
def test_classes(arch: str, tmp_path) -> None:
    before = snapshot(arch)
    getattr(seqtile, f"apply_seqtile_to_{arch}")(layer=True, head_groups=2, chunk_tokens=CHUNK)
    model = build(arch)
    assert tiled_layers(model) == 2
    assert type(model.model.norm).__name__ == name_of_class(arch, "RMSNorm")
    assert tiled_layers(pickle.loads(pickle.dumps(model))) == 2
    model.save_pretrained(tmp_path)
    assert tiled_layers(type(model).from_pretrained(tmp_path).train()) == 2
    seqtile.restore(arch)
    assert snapshot(arch) == before and tiled_layers(model) == 0


def test_options_replace_the_former() -> None:
    for target in (build("llama"), None):
        before = snapshot("llama", target)
        for head_groups in (None, 2, "auto", 1):
            seqtile.apply_seqtile_to_llama(target, layer=True, head_groups=head_groups, chunk_tokens=CHUNK)
            model = target or build("llama")
            assert seqtile.status(model).layer.head_groups == (2 if head_groups == "auto" else head_groups)
            once = snapshot("llama", target)
            seqtile.apply_seqtile_to_llama(target, layer=True, head_groups=head_groups, chunk_tokens=CHUNK)
            assert snapshot("llama", target) == once
        seqtile.restore(target or "llama")
        assert snapshot("llama", target) == before


def test_status_text() -> None:
    model = build("llama")
    assert seqtile.status(model).layer is None
    seqtile.apply_seqtile(model, layer=True, head_groups=2, chunk_tokens=CHUNK)
    assert str(seqtile.status(model)).splitlines()[1:] == [
        "  loss  seqtile, 50 tokens a chunk, fused",
        "  mlp   seqtile, 50 tokens a chunk, 2 of 2 fused",
        "  layer seqtile, 50 tokens a chunk, 2 of 2 fused, attention by 2 groups of heads",
        "  note: in training the loss is computed without logits, which are None; skip_logits=False asks for them",
        "  note: a sequence of at most 50 tokens fits in a chunk: its MLPs and layers run untiled",
        "  note: the config asks for a cache: in training none is made unless one is given, so packed documents are "
        "told apart by their positions, as with use_cache=False",
        "  note: activation checkpointing is off, so every layer keeps what its attention saves as well as its input",
    ]
    checkpointing(model, False)
    assert "checkpointing is off" not in str(seqtile.status(model))
    checkpointing(model, None)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    assert "REFUSES: attention by groups of heads reads its weights, and its activation is GELU" in str(
        seqtile.status(model).layer
    )
    with pytest.raises(ValueError, match="attention by groups of heads reads its weights"):
        model(**batch_of(1, 101))


def test_liger_on_the_model_afterwards_takes_nothing_of_a_layer_back() -> None:
    """Its norms and MLPs are modules whose weights are read."""
    model = build("llama")
    seqtile.apply_seqtile(model, layer=True, loss=False, chunk_tokens=CHUNK)
    apply_liger("llama", model=model)
    assert seqtile.status(model).layer.tiled == 2 and seqtile.status(model).layer.reason is None


@pytest.mark.parametrize("on_classes", [False, True], ids=["model", "classes"])
def test_a_subclass_as_fsdp2_makes_it_is_checkpointed_once(on_classes: bool) -> None:
    """Whose forward transformers wraps once more."""
    if on_classes:
        seqtile.apply_seqtile_to_llama(layer=True, chunk_tokens=CHUNK)
    model = build("llama")
    truth = copy.deepcopy(model)
    if not on_classes:
        seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK)
    for layer in model.model.layers:
        layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
    checkpointing(model, False)
    batch = batch_of(1, 101)
    with pytest.MonkeyPatch.context() as patch:
        calls, function = [], layers.decoder_layer
        patch.setattr(layers, "decoder_layer", counting(calls, function))
        loss, gradients = loss_and_gradients(model, **batch)
    assert len(calls) == 4, "once in the forward and once in the recomputation, of two layers"
    true_loss, true_gradients = loss_and_gradients(truth, **batch)
    assert relative_error(loss, true_loss) <= 1e-6
    assert all(relative_error(gradients[name], true_gradients[name]) <= 1e-5 for name in gradients)


def test_the_norm_behind_the_layers_keeps_its_input_alone() -> None:
    model = build("qwen3").bfloat16()
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK)
    saved: list[torch.Tensor] = []
    x = torch.randn(1, 101, 48, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model.model.norm(x)
    assert {tensor.data_ptr() for tensor in saved} == {x.data_ptr(), model.model.norm.weight.data_ptr()}
