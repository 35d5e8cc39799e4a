"""A verdict is kept while nothing that it depends on changes; it holds linear layers, and reading looks at nothing."""

import copy
import gc
import weakref
from collections.abc import Callable
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import seqtile
from models.layered import assert_same_step, tiled_copy, whole
from support.tiny import build, loss_and_gradients

pytestmark = pytest.mark.usefixtures("pristine")


def exchange(names: dict) -> None:
    """Exchanges the first two names of a dict in place; its values keep their order."""
    first, second, *others = names
    values = dict(zip((second, first, *others), names.values(), strict=True))
    names.clear()
    names.update(values)


def gate_and_up(layer: nn.Module) -> None:
    exchange(layer.mlp._modules)


def scales_of_adapters(layer: nn.Module) -> None:
    exchange(layer.self_attn.q_proj.scaling)


def adapters(layer: nn.Module) -> None:
    for half in (layer.self_attn.q_proj.lora_A, layer.self_attn.q_proj.lora_B):
        exchange(half._modules)


def class_of_a_weight(layer: nn.Module) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    weight = layer.mlp.down_proj.weight
    other = nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
    other.weight.copy_(weight)
    torchao.quantize_(other, torchao.Int8WeightOnlyConfig())
    torch.utils.swap_tensors(weight, other.weight)


@pytest.mark.parametrize("change", [gate_and_up, scales_of_adapters, adapters, class_of_a_weight])
def test_what_is_changed_in_place_is_seen(change: Callable[[nn.Module], None]) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(build("llama").requires_grad_(False), config)
    model.add_adapter("other", LoraConfig(r=4, lora_alpha=40, target_modules=["q_proj"], init_lora_weights=False))
    model, batch = model.train(), whole(101)
    tiled = tiled_copy(model)
    loss_and_gradients(tiled, **batch)  # keeps its verdicts
    for each in (model, tiled):
        change(each.get_base_model().model.layers[0])
    assert_same_step(tiled, model, batch)


def test_a_verdict_keeps_no_head_alive() -> None:
    model, batch = tiled_copy(build("llama", tie_word_embeddings=False)), whole(101)
    gc.disable()
    try:
        for _ in range(2):
            other = copy.deepcopy(model)
            loss_and_gradients(other, **batch)
            weight = weakref.ref(other.lm_head.weight)
            other.lm_head = nn.Linear(*reversed(other.lm_head.weight.shape), bias=False)
            loss_and_gradients(other, **batch)
            assert weight() is None
            weight = weakref.ref(other.lm_head.weight)
            del other
            gc.collect()
            assert weight() is None
    finally:
        gc.enable()


def test_an_attention_that_changes_a_buffer_of_its_module() -> None:
    def attend(module: nn.Module, query: torch.Tensor, *others: object, **options: object) -> tuple:
        module.largest.copy_(query.detach().abs().max())
        return sdpa_attention_forward(module, query, *others, **options)

    AttentionInterface.register("noting", attend)
    model = build("llama", attn_implementation="noting")
    for layer in model.model.layers:
        layer.self_attn.register_buffer("largest", torch.zeros(()))
        layer.mlp.down_proj.register_forward_hook(seqtile.tokenwise(lambda *_: None))  # so layers run in chunks
    tiled = tiled_copy(model, check=False)
    assert seqtile.status(tiled).layer.chunked == len(model.model.layers)
    assert_same_step(tiled, model, whole(101))
    assert tiled.model.layers[0].self_attn.largest > 0


def test_late_logits_of_a_head_that_draws() -> None:
    """Their gradient is that of the numbers that were drawn in the forward, whatever was drawn since."""
    model = build("llama", tie_word_embeddings=False)
    drops = seqtile.tokenwise(lambda head, x: F.linear(F.dropout(x, 0.5, True), head.weight))
    model.lm_head.forward = MethodType(drops, model.lm_head)
    tiled = tiled_copy(model, layer=False, check=False)
    logits = tiled(input_ids=whole(101)["input_ids"]).logits + 0
    torch.rand(3)
    (logits * logits.detach()).sum().backward()
    weight = tiled.lm_head.weight
    torch.testing.assert_close((weight.grad * weight).sum(), logits.detach().square().sum(), rtol=1e-4, atol=0)
