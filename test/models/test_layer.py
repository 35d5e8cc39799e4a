"""Layers tiled whole: trained with adapters, frozen weights, packed samples, other attentions, as untiled; refusals."""

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, MambaConfig, MambaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import seqtile
from models.layered import KINDS, LAYERED, assert_equal, tiled_copy, whole
from seqtile.models.small import small_model
from seqtile.offload.checkpointing import Checkpoints, install
from seqtile.offload.store import Store
from support.assertions import relative_error
from support.choice import every_value
from support.tiny import (
    CHUNK,
    CLASSES,
    VOCAB,
    batch_of,
    build,
    checkpointing,
    loss_and_gradients,
)

pytestmark = pytest.mark.on_gpu("a CPU trains all of them by the same lines", only=every_value)

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapters(model: nn.Module, dropout: float, names: list[str]) -> nn.Module:
    """LoRA in float32; with a `dropout` that is none, but that is not known to be."""
    model = get_peft_model(model, LoraConfig(r=3, lora_dropout=dropout, target_modules=names))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1e-12
    return model


@pytest.mark.parametrize("names", [PROJECTIONS, ["q_proj", "v_proj"], ["k_proj", "o_proj", "up_proj"]], ids=len)
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("head_groups", [None, 2])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_adapters(arch: str, head_groups: int | None, reentrant: bool | None, names: list[str], device: str) -> None:
    """Over a frozen base; of some projections or of all; with biases and with norms of heads."""
    untiled = with_adapters(build(arch, device), 0.0, names)
    if reentrant:
        untiled.enable_input_require_grads()
    tiled = tiled_copy(untiled, head_groups)
    assert seqtile.status(tiled).layer.reason is None
    for model in (untiled, tiled):
        checkpointing(model.get_base_model(), reentrant)
    batch = whole(101, device)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("arch", LAYERED)
def test_modules_that_cannot_be_read_are_called(arch: str, reentrant: bool | None, device: str) -> None:
    untiled = with_adapters(build(arch, device), 0.1, PROJECTIONS)
    if reentrant:
        untiled.enable_input_require_grads()
    tiled = tiled_copy(untiled)
    assert "dropout" in seqtile.status(tiled).layer.reason
    with pytest.raises(ValueError, match="reads its weights, and q_proj has a LoRA adapter with dropout"):
        seqtile.apply_seqtile(tiled, layer=True, head_groups=2, chunk_tokens=CHUNK)
    for model in (untiled, tiled):
        checkpointing(model.get_base_model(), reentrant)
    batch = batch_of(2, 101, device)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


FROZEN = {
    "embedding": lambda name: "embed" in name,
    "all but the MLP": lambda name: "mlp" not in name,
    "all but the norms": lambda name: "norm" not in name,
    "all but k": lambda name: "k_proj" not in name,
    "the first layer": lambda name: "embed" in name or "layers.0" in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("head_groups", [None, 2])
def test_frozen_weights(frozen: str, reentrant: bool | None, head_groups: int | None, device: str) -> None:
    untiled = build("qwen3", device, tie_word_embeddings=False)
    for name, parameter in untiled.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    tiled = tiled_copy(untiled, head_groups)
    for model in (untiled, tiled):
        checkpointing(model, reentrant)
    batch = whole(101, device)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("head_groups", [None, 2])
def test_packed_samples(head_groups: int | None, device: str) -> None:
    untiled = build("llama", device)
    tiled = tiled_copy(untiled, head_groups)
    batch = whole(101, device)
    batch["position_ids"] = torch.cat([torch.arange(n) for n in (17, 50, 1, 33)])[None].to(device)
    without = {name: value for name, value in batch.items() if name != "position_ids"}
    theirs = loss_and_gradients(untiled, **batch)
    logits, in_one = (untiled(**inputs).logits.detach() for inputs in (batch, without))
    assert relative_error(in_one, logits) > 1e-2, "the documents are not told apart"
    assert_equal(loss_and_gradients(tiled, **batch), theirs)


@pytest.mark.parametrize("head_groups", [None, 2])
def test_accumulation_and_main_grad(head_groups: int | None, device: str) -> None:
    """Two micro-batches, one that fits in a chunk; then the same into float32 `main_grad`s of a bfloat16 model."""
    untiled = build("qwen2", device)
    tiled = tiled_copy(untiled, head_groups)
    batches = [whole(101, device), whole(40, device)]
    for model in (untiled, tiled):
        for batch in batches:
            model(**batch, num_items_in_batch=120).loss.backward()
    for (name, theirs), ours in zip(untiled.named_parameters(), tiled.parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) <= 1e-5, name
    collecting = tiled_copy(untiled, head_groups)
    collecting.zero_grad()
    layers = {name: parameter for name, parameter in collecting.model.named_parameters() if "embed" not in name}
    for parameter in layers.values():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    for _ in range(2):
        collecting(**batches[0], num_items_in_batch=120).loss.backward()
    untiled.zero_grad()
    untiled(**batches[0], num_items_in_batch=60).loss.backward()
    for name, theirs in untiled.model.named_parameters():
        if name not in layers:
            continue
        assert layers[name].grad is None, name
        assert relative_error(layers[name].main_grad, theirs.grad) <= 1e-5, name


@pytest.mark.parametrize("head_groups", [None, 2])
def test_a_graph_that_is_kept_serves_twice(head_groups: int | None, device: str) -> None:
    untiled = build("llama", device)
    tiled = tiled_copy(untiled, head_groups)
    batch = whole(101, device)
    loss = tiled(**batch).loss
    for _ in range(2):
        loss.backward(retain_graph=True)
    _, gradients = loss_and_gradients(untiled, **batch)
    for name, parameter in tiled.named_parameters():
        assert relative_error(parameter.grad, 2 * gradients[name]) <= 1e-5, name
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, tiled.model.layers[0].mlp.down_proj.weight, create_graph=True)


class HostMemory:
    """In the place of pinned memory."""

    def take(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def give(self, memory: torch.Tensor) -> None: ...


class Copied:
    device = torch.device("cpu")

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> None:
        block.copy_(tensor)

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, None]:
        return block.clone(), None

    def wait(self, copied: object) -> None: ...

    def abandon(self, tensor: torch.Tensor) -> None: ...


@pytest.mark.parametrize("head_groups", [None, 2])
def test_offloaded_inputs(head_groups: int | None) -> None:
    untiled = build("llama")
    tiled = tiled_copy(untiled, head_groups)
    checkpointing(tiled, False)
    store = Store(HostMemory(), Copied())
    install(Checkpoints(store, small=1), tiled, keep_last=0)
    batch = whole(101)
    ours = loss_and_gradients(tiled, **batch)
    assert store.count == len(tiled.model.layers)
    assert_equal(ours, loss_and_gradients(untiled, **batch))


@pytest.mark.full("10 s of compiler; make test-all compiles whole layers")
def test_compiled_equals_eager(device: str) -> None:
    eager = tiled_copy(build("llama", device), 2)
    compiled = copy.deepcopy(eager)
    batch = whole(101, device)
    expected = loss_and_gradients(eager, **batch)
    compiled.compile(backend="aot_eager")
    assert_equal(loss_and_gradients(compiled, **batch), expected)


@pytest.mark.parametrize("length", [101, 40])
@pytest.mark.parametrize("arch", LAYERED)
def test_attention_is_asked_as_hugging_face_asks_it(arch: str, length: int) -> None:
    """The same module, mask and options, layer by layer."""
    asked: list[tuple] = []

    def recorded(module: nn.Module, q, k, v, mask, **options: object):
        asked.append((module.layer_idx, tuple(q.shape), tuple(k.shape), mask is None, {**options}))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)

    AttentionInterface.register("recorded", recorded)
    untiled = build(arch, attn_implementation="recorded", attention_dropout=0.0)
    tiled = tiled_copy(untiled)
    batch = whole(length)
    tiled(**batch, some_option=7)  # the first step compares itself with the untiled model
    asked.clear()
    for model in (untiled, tiled):
        model(**batch, some_option=7)
    layers = len(untiled.model.layers)
    for theirs, ours in zip(asked[:layers], asked[layers:], strict=True):
        for options in (theirs[4], ours[4]):
            tensors = {name: options.pop(name) for name in list(options) if isinstance(options[name], torch.Tensor)}
            options |= {name: tensor.tolist() for name, tensor in tensors.items()}
        assert ours == theirs and ours[4]["some_option"] == 7


REFUSED: dict[str, tuple[type, str, Callable[[], object]]] = {
    "no attention": (
        ValueError,
        "the layers of MambaForCausalLM cannot be tiled",
        lambda: seqtile.apply_seqtile(small_model(MambaForCausalLM, MambaConfig()), layer=True),
    ),
    "classes without attention": (
        ValueError,
        "the layers of MambaForCausalLM cannot be tiled",
        lambda: seqtile.apply_seqtile_to_mamba(layer=True),
    ),
    "groups of heads in another shape": (
        ValueError,
        "attention by groups of heads reads its weights, and its forward is not that of Llama's layers",
        lambda: seqtile.apply_seqtile(build("gemma2"), layer=True, head_groups=2),
    ),
    "a number that does not divide": (
        ValueError,
        "expected a divisor of the 2 kv heads, got 3",
        lambda: seqtile.apply_seqtile(build("llama"), layer=True, head_groups=3),
    ),
    "no number": (
        TypeError,
        "head_groups: expected an int",
        lambda: seqtile.apply_seqtile(build("llama"), layer=True, head_groups="all"),
    ),
    "no group": (
        ValueError,
        "at least 1 group",
        lambda: seqtile.apply_seqtile(build("llama"), layer=True, head_groups=0),
    ),
    "groups alone": (ValueError, "layer=True too", lambda: seqtile.apply_seqtile(build("llama"), head_groups=2)),
    "without the MLP": (
        ValueError,
        "mlp=False: expected True",
        lambda: seqtile.apply_seqtile(build("llama"), layer=True, mlp=False),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    error, message, apply = REFUSED[case]
    before = CLASSES["phi3"][1].forward
    with pytest.raises(error, match=message):
        apply()
    assert CLASSES["phi3"][1].forward is before


def test_hooks_on_attention_are_refused() -> None:
    model = build("llama")
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="attention's forward, which has hooks"):
        seqtile.apply_seqtile(model, layer=True)
    assert seqtile.status(model).loss.tiled == 0 and "forward" not in vars(model.model.layers[0])


def test_an_attention_that_saves_much_is_refused_or_repeated(device: str) -> None:
    """Hugging Face's eager attention saves its weights."""
    untiled = build("llama", device, attn_implementation="eager", num_key_value_heads=4, head_dim=16)
    refusing, repeating = tiled_copy(untiled, "auto"), tiled_copy(untiled, 2)
    batch = whole(101, device)
    with pytest.raises(ValueError, match=r"saves \d+ bytes for its backward besides .* pass head_groups=4"):
        refusing(**batch)
    assert_equal(loss_and_gradients(repeating, **batch), loss_and_gradients(untiled, **batch))
    refusing.set_attn_implementation("sdpa")
    assert_equal(loss_and_gradients(refusing, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("head_groups", [None, 2])
@pytest.mark.parametrize("arch", LAYERED)
def test_caches_and_outputs(arch: str, head_groups: int | None, device: str) -> None:
    """Training with a cache, generation from a prompt longer than a chunk, hidden states and attentions."""
    untiled = build(arch, device)
    tiled = tiled_copy(untiled, head_groups)
    batch = whole(101, device) | {"use_cache": True}
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))
    prompt = torch.randint(3, VOCAB, (1, 101), device=device)
    for model in (untiled, tiled):
        model.eval()
    ours, theirs = (model.generate(prompt, max_new_tokens=5, do_sample=False) for model in (tiled, untiled))
    assert ours.equal(theirs)
    for model in (untiled, tiled):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        found = [model(prompt, output_attentions=True, output_hidden_states=True) for model in (tiled, untiled)]
    for name in ("attentions", "hidden_states"):
        for ours, theirs in zip(*(getattr(output, name) for output in found), strict=True):
            assert relative_error(ours, theirs) <= 1e-5, name
