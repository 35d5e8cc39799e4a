"""Code and state that a tiled layer must not skip, lose or mix up."""

from collections.abc import Callable

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, Phi3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import seqtile
from models.layered import (
    assert_equal,
    assert_same_step,
    gradients_of,
    in_groups,
    on_model_or_classes,
    tiled_copy,
    whole,
)
from support.assertions import assert_as_exact, relative_error
from support.tiny import CHUNK, build, checkpointing, loss_and_gradients

pytestmark = pytest.mark.usefixtures("pristine")


def build_with(attention: Callable, **changes: object) -> nn.Module:
    AttentionInterface.register("own", attention)
    return build("llama", attn_implementation="own", **changes)


def sdpa(*args: object, **options: object) -> tuple:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **options)


class OwnAttention(modeling_llama.LlamaAttention):
    def forward(self, *args: object, **options: object):
        attended, weights = super().forward(*args, **options)
        return 2 * attended, weights


class OwnMLP(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("of_class", [False, True])
def test_an_attention_with_a_forward_of_its_own_is_called(of_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    untiled, forward = build("llama"), modeling_llama.LlamaAttention.forward

    def doubled(self: nn.Module, *args: object, **options: object) -> tuple:
        attended, weights = forward(self, *args, **options)
        return 2 * attended, weights

    tiled = tiled_copy(untiled)
    if of_class:
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", doubled)
    for model in () if of_class else (untiled, tiled):
        model.model.layers[1].self_attn.__class__ = OwnAttention
    assert_same_step(tiled, untiled, whole(101))
    assert "self_attn" in seqtile.status(tiled).layer.untiled_reason


def own_class(mlp: nn.Module) -> None:
    vars(mlp).pop("forward", None)
    mlp.__class__ = OwnMLP


def own_wrapper(mlp: nn.Module) -> None:
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 0.5


@in_groups
@pytest.mark.parametrize("change", [own_class, own_wrapper])
def test_an_mlp_with_a_forward_of_its_own_is_called(change: Callable, head_groups: int | None) -> None:
    """A tiled layer reads the weights of its MLP, and would skip the forward."""
    untiled, batch = build("llama"), whole(101)
    tiled = tiled_copy(untiled, head_groups)
    for model in (untiled, tiled):
        change(model.model.layers[1].mlp)
    assert_same_step(tiled, untiled, batch)


def test_a_replaced_rotary_embedding_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    name, rotate = "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, name, lambda q, k, cos, sin, **options: rotate(q, k, sin, cos, **options))
    untiled = build("llama")
    assert_same_step(tiled_copy(untiled), untiled, whole(101))


class FailingFunction(torch.autograd.Function):
    """An identity whose backward fails if one more call is `left`."""

    left = 0

    @staticmethod
    def forward(ctx, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out: torch.Tensor) -> torch.Tensor:
        FailingFunction.left -= 1
        if FailingFunction.left == 0:
            raise RuntimeError("out of memory")
        return d_out


@in_groups
def test_a_backward_that_failed_is_tried_again(head_groups: int | None) -> None:
    """An attention raises in the first backward of a retained graph. The second backward gives the gradients of a new
    graph."""

    def attention(*args: object, **options: object):
        out, weights = sdpa(*args, **options)
        return FailingFunction.apply(out), weights

    untiled, batch = build_with(attention), whole(101)
    tiled, truth = tiled_copy(untiled, head_groups), loss_and_gradients(untiled, **batch)
    loss = tiled(**batch).loss
    FailingFunction.left = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward(retain_graph=True)
    tiled.zero_grad(set_to_none=True)
    loss.backward()
    assert_equal((loss.detach(), gradients_of(tiled)), truth)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_dropout_draws_in_the_backward_what_it_drew_in_the_forward(attention: str) -> None:
    """With no, reentrant and non-reentrant checkpointing: the same seed gives the same gradients; with one group of
    heads, those of the untiled layer."""
    model, batch = build("llama", attn_implementation=attention, attention_dropout=0.4), whole(101)

    def drawn(model: nn.Module, reentrant: bool | None = None) -> tuple:
        checkpointing(model, reentrant)
        torch.manual_seed(7)
        return loss_and_gradients(model, **batch)

    plain = drawn(tiled_copy(model, 2))
    for reentrant in (False, True):
        assert_equal(drawn(tiled_copy(model, 2), reentrant), plain)
    if attention == "eager":
        assert_equal(drawn(tiled_copy(model, 1)), drawn(model))
    undropped = loss_and_gradients(model.eval(), **batch)[1]["lm_head.weight"]
    assert relative_error(plain[1]["lm_head.weight"], undropped) > 1e-3, "nothing was dropped"


@in_groups
def test_prefixes_over_a_frozen_model(head_groups: int | None) -> None:
    """Only the keys and values before the first layer's attention require a gradient."""
    untiled = get_peft_model(build("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    tiled, batch = tiled_copy(untiled, head_groups), whole(101)
    del batch["use_cache"]
    assert_same_step(tiled, untiled, batch)


@pytest.mark.parametrize("of_module", [False, True], ids=["of a closure", "of the attention"])
@in_groups
def test_a_weight_of_attention_over_a_frozen_model(head_groups: int | None, of_module: bool) -> None:
    """A weight that the module holds is known in advance: the attention runs no more often. Another, unused weight of
    the same module has no gradient, as untiled."""
    temperature, calls = torch.full((12,), 0.5, requires_grad=True), []

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        calls.append(module)
        return sdpa(module, q, k, v * (module.temperature if of_module else temperature), mask, **options)

    untiled = build_with(attention).requires_grad_(False)
    for layer in untiled.model.layers if of_module else ():
        layer.self_attn.temperature, layer.self_attn.other = (nn.Parameter(torch.rand(12)) for _ in range(2))
    tiled, batch, found = tiled_copy(untiled, head_groups), whole(101), []
    for model in (untiled, tiled):
        model(**batch)  # the first step compares itself with the untiled model
        temperature.grad = None
        calls.clear()
        loss, count = model(**batch).loss, len(calls)
        loss.backward()
        found.append((loss, gradients_of(model) | {"of the closure": temperature.grad}))
    assert_equal(found[1], found[0])
    assert not of_module or count == len(tiled.model.layers) * (head_groups or 1)


def called_by_itself(model: nn.Module) -> tuple:
    x = torch.randn(1, 101, 48)
    return model.model.layers[0], x, model.model.rotary_emb(x, torch.arange(101)[None])


def test_callers_of_a_layer() -> None:
    """By position and by keyword, with checkpointing; attentions requested by the config; trainable angles."""
    model = tiled_copy(build("llama", attn_implementation="eager"))
    layer, x, angles = called_by_itself(model)
    by_keyword = layer(x, position_embeddings=angles)
    checkpointing(model, False)
    assert layer(x, None, None, None, False, angles).equal(by_keyword)
    with pytest.raises(ValueError, match="expected fixed angles"):
        layer(x, position_embeddings=tuple(angle.clone().requires_grad_() for angle in angles))
    model.config.output_attentions = True
    with torch.no_grad():
        assert len(model.eval()(**whole(101)).attentions) == 2


def test_dtypes_that_do_not_fit() -> None:
    model = tiled_copy(build("llama").bfloat16())
    model.model.layers[0].mlp.gate_proj.float()
    with pytest.raises(TypeError, match=r"decoder_layer: gate_weight is torch.float32, x is torch.bfloat16"):
        model(**whole(101))


def test_a_mask_for_each_head_is_no_groups() -> None:
    layer, x, angles = called_by_itself(tiled_copy(build("llama"), 2))
    with pytest.raises(ValueError, match="a mask for each head cannot be cut into groups"):
        layer(x, torch.zeros(1, 4, 101, 101), position_embeddings=angles)


@in_groups
@pytest.mark.parametrize("changed", ["output", "queries", "queries alone"])
def test_an_attention_that_works_in_place(changed: str, head_groups: int | None) -> None:
    """If Hugging Face raises because tensors needed by the backward changed, a tiled layer raises too; otherwise it is
    right. Queries then cannot be recomputed, even if the attention saves only them."""
    alone = changed == "queries alone"

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        if changed != "output":
            q.mul_(0.5)
        if not alone:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = (out.mul_(0.5) if changed == "output" else out).transpose(1, 2)
        return (out if alone else out.contiguous()), None

    untiled, batch = build_with(attention, num_key_value_heads=4 if alone else 2), whole(101)
    tiled = tiled_copy(untiled, head_groups)
    if changed != "output":
        return assert_same_step(tiled, untiled, batch)
    for model in (untiled, tiled):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place a tensor"):
            loss_and_gradients(model, **batch)


@on_model_or_classes
def test_no_cache_is_made_in_training(on_classes: bool) -> None:
    """Hugging Face's config requests a cache by default. Heads are still grouped and packed documents separated, as
    with use_cache=False."""
    heads: list[int] = []

    def attention(module: nn.Module, q: torch.Tensor, *args: object, **options: object):
        heads.append(q.shape[1])
        return sdpa(module, q, *args, **options)

    untiled = build_with(attention)
    batch = whole(101) | {"position_ids": torch.cat([torch.arange(n) for n in (17, 84)])[None]}
    truth = loss_and_gradients(untiled, **batch)
    del batch["use_cache"]
    if on_classes:
        seqtile.apply_seqtile_to_llama(layer=True, head_groups=2, chunk_tokens=CHUNK)
        tiled = build_with(attention)
        tiled.load_state_dict(untiled.state_dict())
    else:
        tiled = tiled_copy(untiled, 2)
    assert "a training step makes no cache" in str(seqtile.status(tiled))
    tiled(**batch)  # the first step compares itself with the untiled model
    heads.clear()
    assert tiled(**batch).past_key_values is None and heads == [2] * 4
    base = tiled.model(**{name: batch[name] for name in ("input_ids", "position_ids")}, return_dict=False)
    assert isinstance(base, tuple) and len(base) == 1
    assert_equal(loss_and_gradients(tiled, **batch), truth)
    cache = DynamicCache(config=tiled.config)
    mixed = loss_and_gradients(untiled, **batch)  # with a cache Hugging Face does not separate documents
    heads.clear()
    assert_equal(loss_and_gradients(tiled, **batch, past_key_values=cache), mixed)
    assert cache.get_seq_length() == 101 and heads == [4] * 2, "a cache that is given is filled"
    short = {name: tensor[:, :40] for name, tensor in batch.items()}
    assert tiled(**short).past_key_values is None, "nor where the layers run untiled"
    with torch.no_grad():
        assert tiled.eval()(**short).past_key_values is None, "nor for a loss"
        assert tiled(input_ids=short["input_ids"]).past_key_values.get_seq_length() == 40


@in_groups
def test_gradients_through_a_cache(head_groups: int | None) -> None:
    """A sequence in two parts, the second of which attends to the first."""
    untiled, batch, found = build("llama"), whole(160), []
    for model in (untiled, tiled_copy(untiled, head_groups)):
        cache, parts = DynamicCache(config=model.config), (slice(80), slice(80, 160))
        for part in parts:
            loss = model(**{name: batch[name][:, part] for name in ("input_ids", "labels")}, past_key_values=cache).loss
        loss.backward()
        found.append((loss.detach(), gradients_of(model)))
    assert_equal(found[1], found[0])


@pytest.mark.full("seconds of compiler each", but=("qwen3",))
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_short_sequences_run_the_original_norms(arch: str) -> None:
    """A sequence that fits in a chunk compiles to one graph, and its evaluation logits are bitwise Hugging Face's. A
    longer one is as exact."""
    untiled = build(arch, num_hidden_layers=1).bfloat16()
    getattr(seqtile, f"apply_seqtile_to_{arch}")(layer=True, chunk_tokens=CHUNK)
    tiled = build(arch, num_hidden_layers=1).bfloat16()
    tiled.load_state_dict(untiled.state_dict())
    ids = whole(40)["input_ids"]
    torch._dynamo.reset()
    graph = torch.compile(tiled.model, backend="eager", fullgraph=True)
    assert relative_error(graph(ids).last_hidden_state, untiled.model(ids).last_hidden_state) <= 1e-2
    torch._dynamo.reset()
    with torch.no_grad():
        assert tiled.eval()(ids).logits.equal(untiled.eval()(ids).logits)
        x = torch.randn(1, 101, 48, dtype=torch.bfloat16)
        theirs, truth = untiled.model.norm(x), untiled.model.norm.double()(x.double())
        assert_as_exact(tiled.model.norm(x), theirs, truth)


def test_a_layer_whose_mlp_has_gate_and_up_in_one_projection() -> None:
    model = build("llama")
    config = Phi3Config(hidden_size=model.config.hidden_size, intermediate_size=model.config.intermediate_size)
    for layer in model.model.layers:
        layer.mlp = seqtile.tokenwise(Phi3MLP(config))
    tiled = tiled_copy(model)
    assert "one projection" in str(seqtile.status(tiled).layer.reason)
    assert_same_step(tiled, model, whole(101))
