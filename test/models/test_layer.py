"""Layers tiled whole: with adapters, frozen weights, packed samples and other attentions they train as untiled;
refusals."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, MambaConfig, MambaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import seqtile
from models.layered import KINDS, LAYERED, assert_same_step, gradients_of, in_groups, tiled_copy, whole
from seqtile.proof.small import small_model
from support.assertions import relative_error
from support.choice import every_value
from support.plain_store import offloaded
from support.tiny import CHUNK, CLASSES, VOCAB, batch_of, build, loss_and_gradients
from support.training import with_lora

pytestmark = pytest.mark.on_gpu("a CPU trains all of them by the same lines", only=every_value)

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapters(model: nn.Module, dropout: float, names: list[str]) -> nn.Module:
    """LoRA in float32. The `dropout` drops nothing, but seqtile cannot know that."""
    model = with_lora(model, *names, lora_dropout=dropout)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1e-12
    return model


@pytest.mark.full("of 18 models", but=("llama-ckpt", "qwen3-reentrant", "granite-plain"))
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("arch", LAYERED)
def test_modules_that_cannot_be_read_are_called(arch: str, reentrant: bool | None, device: str) -> None:
    untiled = with_adapters(build(arch, device), 0.1, PROJECTIONS)
    if reentrant:
        untiled.enable_input_require_grads()
    tiled = tiled_copy(untiled)
    assert "dropout" in seqtile.status(tiled).layer.reason
    said = (
        "reads its weights, and q_proj has a LoRA adapter with dropout .*; pass lora_dropout=0 to LoraConfig, or apply"
    )
    with pytest.raises(ValueError, match=said):
        seqtile.apply_seqtile(tiled, layer=True, head_groups=2, chunk_tokens=CHUNK)
    assert_same_step(tiled.get_base_model(), untiled.get_base_model(), batch_of(2, 101, device), reentrant)


def frozen(trained: Callable[[str], bool], device: str) -> nn.Module:
    model = build("qwen3", device, tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
    return model


def adapted(arch: str, names: list[str], device: str) -> nn.Module:
    return with_adapters(build(arch, device), 0.0, names).get_base_model()


SOME, OTHERS = ["q_proj", "v_proj"], ["k_proj", "o_proj", "up_proj"]
MODELS: dict[str, Callable[[str], nn.Module]] = {
    "residuals that are scaled": partial(build, "granite", residual_multiplier=0.3),
    "a layer without positions": partial(build, "smollm3", no_rope_layers=[1, 0]),
    "packed samples": partial(build, "llama"),
    "adapters and biases": partial(adapted, "qwen2", PROJECTIONS),
    "some adapters and biases": partial(adapted, "qwen2", SOME),
    "other adapters and biases": partial(adapted, "qwen2", OTHERS),
    "adapters and norms": partial(adapted, "qwen3", PROJECTIONS),
    "some adapters and norms": partial(adapted, "qwen3", SOME),
    "other adapters and norms": partial(adapted, "qwen3", OTHERS),
    "frozen embedding": partial(frozen, lambda name: "embed" not in name),
    "frozen but the MLP": partial(frozen, lambda name: "mlp" in name),
    "frozen but the norms": partial(frozen, lambda name: "norm" in name),
    "frozen but k": partial(frozen, lambda name: "k_proj" in name),
    "frozen first layer": partial(frozen, lambda name: "embed" not in name and "layers.0" not in name),
}


ALONE = ("packed*-None-plain", "residuals*-None-plain", "adapters*-None-reentrant", "*but*-None-plain")


@pytest.mark.full("of 84 models", but=("*-2-ckpt", *ALONE))
@pytest.mark.parametrize("reentrant", KINDS)
@in_groups
@pytest.mark.parametrize("name", MODELS)
def test_the_same_step(name: str, head_groups: int | None, reentrant: bool | None, device: str) -> None:
    """Models that scale the residual branches, layers without positions, packed samples, adapters over a frozen base,
    biases, norms of heads, and some frozen weights."""
    untiled, batch = MODELS[name](device=device), whole(101, device)
    if reentrant:
        untiled.enable_input_require_grads()
    if name == "packed samples":
        in_one = untiled(**batch).logits.detach()
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (17, 50, 1, 33)])[None].to(device)
        assert relative_error(in_one, untiled(**batch).logits.detach()) > 1e-2, "the documents are not told apart"
    tiled = tiled_copy(untiled, head_groups)
    assert seqtile.status(tiled).layer.reason is None
    assert_same_step(tiled, untiled, batch, reentrant)


@in_groups
def test_accumulation_and_main_grad(head_groups: int | None, device: str) -> None:
    """Two micro-batches, one of which fits in a chunk; then one batch twice into float32 `main_grad`s."""
    untiled = build("qwen2", device)
    tiled = tiled_copy(untiled, head_groups)
    batches = [whole(101, device), whole(40, device)]
    for model in (untiled, tiled):
        for batch in batches:
            model(**batch, num_items_in_batch=120).loss.backward()
    for name, theirs in gradients_of(untiled).items():
        assert relative_error(tiled.get_parameter(name).grad, theirs) <= 1e-5, name
    collecting = tiled_copy(untiled, head_groups)
    collecting.zero_grad()
    layers = {name: parameter for name, parameter in collecting.model.named_parameters() if "embed" not in name}
    for parameter in layers.values():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    for _ in range(2):
        collecting(**batches[0], num_items_in_batch=120).loss.backward()
    _, gradients = loss_and_gradients(untiled, **batches[0], num_items_in_batch=60)
    for name, parameter in layers.items():
        assert parameter.grad is None, name
        assert relative_error(parameter.main_grad, gradients[f"model.{name}"]) <= 1e-5, name


@in_groups
def test_a_graph_that_is_kept_serves_twice(head_groups: int | None, device: str) -> None:
    untiled, batch = build("llama", device), whole(101, device)
    tiled = tiled_copy(untiled, head_groups)
    loss = tiled(**batch).loss
    for _ in range(2):
        loss.backward(retain_graph=True)
    for name, gradient in loss_and_gradients(untiled, **batch)[1].items():
        assert relative_error(tiled.get_parameter(name).grad, 2 * gradient) <= 1e-5, name
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, tiled.model.layers[0].mlp.down_proj.weight, create_graph=True)


@in_groups
def test_offloaded_inputs(head_groups: int | None) -> None:
    untiled = build("llama")
    tiled = tiled_copy(untiled, head_groups)
    pool = offloaded(tiled, keep_last=0)
    assert_same_step(tiled, untiled, whole(101))
    assert pool.total == 2 * 101 * 48 * 4, "the input of each layer"


@pytest.mark.full("10 s of compiler; make test-all compiles whole layers")
def test_compiled_equals_eager(device: str) -> None:
    eager = tiled_copy(build("llama", device), 2)
    compiled = copy.deepcopy(eager)
    compiled.compile(backend="aot_eager")
    assert_same_step(compiled, eager, whole(101, device))


@pytest.mark.full("of 12 models", but=every_value)
@pytest.mark.parametrize("length", [101, 40])
@pytest.mark.parametrize("arch", LAYERED)
def test_attention_is_asked_as_hugging_face_asks_it(arch: str, length: int) -> None:
    """The same module, mask and options, layer by layer."""
    asked: list[tuple] = []

    def recorded(module: nn.Module, q, k, v, mask, **options: object):
        values = {name: value.tolist() if torch.is_tensor(value) else value for name, value in options.items()}
        asked.append((module.layer_idx, q.shape, k.shape, mask is None, values))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)

    AttentionInterface.register("recorded", recorded)
    untiled = build(arch, attn_implementation="recorded", attention_dropout=0.0)
    tiled, batch = tiled_copy(untiled), whole(length) | {"some_option": 7}
    tiled(**batch)  # the first step compares itself with the untiled model
    asked.clear()
    for model in (untiled, tiled):
        model(**batch)
    layers = len(untiled.model.layers)
    assert asked[:layers] == asked[layers:] and all(options["some_option"] == 7 for *_, options in asked)


def applied(arch: str, **options: object) -> Callable[[], object]:
    return lambda: seqtile.apply_seqtile(build(arch), **options)


NO_LAYERS = "the layers of MambaForCausalLM cannot be tiled"
NO_GROUPS = "attention in head chunks reads its weights, and its forward is not that of Llama's layers"
REFUSED: dict[str, tuple[type, str, Callable[[], object]]] = {
    "no attention": (
        ValueError,
        NO_LAYERS,
        lambda: seqtile.apply_seqtile(small_model(MambaForCausalLM, MambaConfig()), layer=True),
    ),
    "classes without attention": (ValueError, NO_LAYERS, lambda: seqtile.apply_seqtile_to_mamba(layer=True)),
    "head chunks in another shape": (ValueError, NO_GROUPS, applied("gemma2", layer=True, head_groups=2)),
    "a number that does not divide": (
        ValueError,
        "expected a divisor of the 2 kv heads, got 3",
        applied("llama", layer=True, head_groups=3),
    ),
    "no number": (TypeError, "head_groups: expected an int", applied("llama", layer=True, head_groups="all")),
    "no group": (ValueError, "at least 1 group", applied("llama", layer=True, head_groups=0)),
    "groups alone": (ValueError, "layer=True too", applied("llama", head_groups=2)),
    "without the MLP": (ValueError, "mlp=False: expected True", applied("llama", layer=True, mlp=False)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    error, message, apply = REFUSED[case]
    before = CLASSES["phi3"][1].forward
    with pytest.raises(error, match=message):
        apply()
    assert CLASSES["phi3"][1].forward is before


def test_layers_that_fsdp2_has_wrapped_are_fused() -> None:
    """FSDP2 makes a subclass of each layer's class, and Hugging Face wraps a subclass's forward once more."""
    theirs = build("llama").train()
    ours, batch = copy.deepcopy(theirs), whole(101, "cpu")
    for layer in ours.model.layers:
        kind = type(layer)
        layer.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch.distributed.fsdp"})
    seqtile.apply_seqtile(ours, layer=True, head_groups=2, chunk_tokens=CHUNK)
    status = seqtile.status(ours).layer
    assert (status.tiled, status.reason) == (2, None)
    assert_same_step(ours, theirs, batch)


def test_an_attention_that_saves_much_is_refused_or_repeated(device: str) -> None:
    """Hugging Face's eager attention saves its weights."""
    untiled = build("llama", device, attn_implementation="eager", num_key_value_heads=4, head_dim=16)
    refusing, repeating = tiled_copy(untiled, "auto"), tiled_copy(untiled, 2)
    batch = whole(101, device)
    with pytest.raises(ValueError, match=r"saves \d+ bytes for its backward besides .* pass head_groups=4"):
        refusing(**batch)
    assert_same_step(repeating, untiled, batch)
    refusing.set_attn_implementation("sdpa")
    assert_same_step(refusing, untiled, batch)


@pytest.mark.full("of 12 models, 1 s each", but=("llama-2", "qwen3-None", "mistral-None"))
@in_groups
@pytest.mark.parametrize("arch", LAYERED)
def test_caches_and_outputs(arch: str, head_groups: int | None, device: str) -> None:
    """Training with a cache, generation from a prompt longer than a chunk, hidden states and attentions."""
    untiled = build(arch, device)
    tiled = tiled_copy(untiled, head_groups)
    assert_same_step(tiled, untiled, whole(101, device) | {"use_cache": True})
    prompt, models = torch.randint(3, VOCAB, (1, 101), device=device), (tiled.eval(), untiled.eval())
    ours, theirs = (model.generate(prompt, max_new_tokens=5, do_sample=False) for model in models)
    assert ours.equal(theirs)
    for model in models:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        found = [model(prompt, output_attentions=True, output_hidden_states=True) for model in models]
    for name in ("attentions", "hidden_states"):
        for ours, theirs in zip(*(output[name] for output in found), strict=True):
            assert relative_error(ours, theirs) <= 1e-5, name
