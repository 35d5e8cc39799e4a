"""Bases quantized by the real bitsandbytes and torchao, under PEFT's LoRA: read, tiled, equal to the untiled model."""

import copy
import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import seqtile
from models.layered import assert_equal
from seqtile.models.quantised import reader_of
from support.choice import every_pair
from support.measure import FlopCount, LiveBytes, eager_memory
from support.tiny import CHUNK, batch_of, build, checkpointing, loss_and_gradients, tiled_copy
from support.training import with_lora

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
KINDS = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4, double": {"quant_type": "nf4", "compress_statistics": True},
    "fp4": {"quant_type": "fp4", "compress_statistics": True},
}
TORCHAO = ("int8", "int8, groups", "int4, groups", "int3", "float8", "ao nf4")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantised(model: nn.Module, compute_dtype: torch.dtype | None = torch.float32, **options: Any) -> nn.Module:
    """The model with the projections of its layers in 4 bits, frozen."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if name in PROJECTIONS:
                sizes, bias = (child.in_features, child.out_features), child.bias is not None
                layer = bnb.nn.Linear4bit(*sizes, bias, compute_dtype, **options)
                layer.load_state_dict(child.state_dict())
                setattr(module, name, layer.to("cpu"))
    return model.requires_grad_(False)


def of_torchao(model: nn.Module, kind: str) -> nn.Module:
    """The model with the projections of its layers in one of torchao's weight-only layouts, frozen."""
    ao = pytest.importorskip("torchao.quantization")
    model.requires_grad_(False)
    configs = {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "int8, groups": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(16)),
        "int4, groups": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(16)),
        "int3": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int3, mapping_type=ao.MappingType.ASYMMETRIC),
        "float8": lambda: ao.Float8WeightOnlyConfig(),
        "int8, inputs too": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
    }
    for layer in model.model.layers:
        for name, module in list(layer.named_modules()):
            if name.endswith(PROJECTIONS) and kind == "ao nf4":
                weight = ao.NF4Tensor.from_tensor(module.weight.detach(), 16, 4)
                module.weight = nn.Parameter(weight, requires_grad=False)
        if kind != "ao nf4":
            ao.quantize_(layer, configs[kind](), filter_fn=lambda module, name: name.endswith(PROJECTIONS))
    return model


def of_few_bits(model: nn.Module, kind: str) -> nn.Module:
    return quantised(model, **KINDS[kind]) if kind in KINDS else of_torchao(model, kind)


FROZEN = [*product(("llama", "qwen3", "gemma2"), KINDS), *product(["llama"], TORCHAO)]
OPTIONS = [{}, {"layer": True}, {"layer": True, "head_groups": 2}]  # Gemma's layers have no groups
CASES = [(*each, options) for each in FROZEN for options in OPTIONS if (each[0], len(options)) != ("gemma2", 2)]


@pytest.mark.full("of 84 cases", but=every_pair)
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize(("arch", "kind", "options"), CASES, ids=str)
def test_equals_untiled(arch: str, kind: str, options: dict, reentrant: bool | None) -> None:
    model, batch = with_lora(of_few_bits(build(arch, intermediate_size=128), kind), *PROJECTIONS), batch_of(2, 101)
    checkpointing(model.get_base_model(), reentrant)
    expected = loss_and_gradients(model, **batch)  # of the same model: a copy quantizes an NF4Tensor again
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, **options)
    status = seqtile.status(model)
    assert status.mlp.tiled == 2 and (arch == "gemma2" or (status.layer or status.mlp).reason is None)
    assert_equal(loss_and_gradients(model, **batch), expected, 1e-5, 2e-5)


def in_8_bits(model: nn.Module) -> nn.Module:
    """The model with one projection of each MLP as a frozen bitsandbytes layer with 8-bit products."""
    for layer in model.requires_grad_(False).model.layers:
        up = layer.mlp.up_proj
        eight = bnb.nn.Linear8bitLt(up.in_features, up.out_features, bias=False, has_fp16_weights=False)
        eight.load_state_dict(up.state_dict())
        layer.mlp.up_proj = eight.to("cpu").requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("kind", "reason", "rtol"),
    [("torchao", "quantises or scales its input (Int8Tensor)", 1e-5), ("bitsandbytes", "Linear8bitLt", 1e-3)],
)
def test_what_quantises_its_input_is_called(kind: str, reason: str, rtol: float) -> None:
    """Token by token, so chunks compute the same as the whole; reading their weights would compute something else."""
    model = build("llama", intermediate_size=128)
    theirs = of_torchao(model, "int8, inputs too") if kind == "torchao" else in_8_bits(model)
    ours = tiled_copy(theirs)
    assert reason in str(seqtile.status(ours).mlp)
    batch = batch_of(2, 101)
    torch.testing.assert_close(ours(**batch).loss, theirs(**batch).loss, rtol=rtol, atol=0)
    with pytest.raises(ValueError, match=re.escape(reason)):
        seqtile.apply_seqtile(ours, layer=True, head_groups=2)


def test_without_an_adapter() -> None:
    """The gradient passes through to the trainable layers below."""
    theirs = quantised(build("llama"), **KINDS["nf4"])
    theirs.model.embed_tokens.requires_grad_(True)
    batch = batch_of(2, 101)
    assert_equal(
        loss_and_gradients(tiled_copy(theirs, layer=True), **batch), loss_and_gradients(theirs, **batch), 1e-5, 2e-5
    )


def test_another_dtype_is_called() -> None:
    """A layer that computes in bfloat16 for float32 inputs is called; reading its weights would compute in float32."""
    theirs = with_lora(quantised(build("llama"), torch.bfloat16, **KINDS["nf4"]), *PROJECTIONS)
    ours, batch = tiled_copy(theirs, check=False), batch_of(2, 101)
    torch.testing.assert_close(ours(**batch).loss, theirs(**batch).loss, rtol=1e-5, atol=0)


def test_products() -> None:
    """A frozen, checkpointed 4-bit MLP: 3 u in the forward, and 2 u and 3 u in the backward."""
    model = tiled_copy(quantised(build("llama"), **KINDS["nf4"]))
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 101, 48, requires_grad=True)
    unit = 2 * 101 * 48 * 130
    with FlopCount() as forward:
        y = mlp(x)
    with FlopCount() as backward:
        y.sum().backward()
    assert (forward.total, backward.total) == (3 * unit, 5 * unit) and not backward.unknown


@pytest.mark.full("a second each", but=("nf4, double", "int8", "ao nf4"))
@eager_memory
@pytest.mark.parametrize("kind", ["nf4, double", *TORCHAO])
def test_memory(kind: str) -> None:
    """At most the memory of the same MLP with a plain base, plus its dequantized weights once; for torchao's NF4 also
    the temporaries of one dequantization."""
    hidden, width, tokens = 256, 704, 1024

    def peak(model: nn.Module) -> int:
        seqtile.apply_seqtile(model, chunk_tokens=64)
        x = torch.randn(1, tokens, hidden, requires_grad=True)
        mlp = model.model.layers[0].mlp
        mlp(x).sum().backward()
        with LiveBytes() as memory:
            mlp(x).sum().backward()
        return memory.peak

    plain = build("llama", hidden_size=hidden, intermediate_size=width).requires_grad_(False)
    ours = of_few_bits(copy.deepcopy(plain), kind)
    decoded, beside = 3 * 4 * hidden * width, 0
    if kind == "ao nf4":
        down = ours.model.layers[0].mlp.down_proj
        with LiveBytes() as decoding:
            reader_of(down)(down).dequantize()
        beside = decoding.peak - decoded // 3
    assert peak(ours) <= 1.05 * (peak(plain) + decoded + beside)


def test_a_weight_that_is_not_quantised_yet() -> None:
    model = build("llama")
    model.model.layers[0].mlp.down_proj = bnb.nn.Linear4bit(130, 48, bias=False)
    model.model.layers[0].mlp.down_proj.weight.quant_state = None
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    assert "not yet quantised" in str(seqtile.status(model).mlp)
