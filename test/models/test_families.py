"""The model families that people train now, in their usual settings: with all parts tiled they compute the same as
untiled."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import seqtile
from models import layered
from models.layered import KINDS, packed, small_of
from seqtile.proof.small import WORDS
from support.choice import every_value
from support.tiny import checkpointing

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNK = 7
FAMILIES = ("gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gemma4_text", "gemma4_unified_text", "phi")
FAMILIES += ("deepseek_v3", "glm4_moe", "qwen3_vl", "ministral3", "olmo3", "seed_oss", "ernie4_5", "gpt2")
FAMILIES += ("starcoder2", "minimax_m2", "lfm2")
EACH = "half a second each"
UNLIKE = ("gpt_oss-ckpt", "qwen3_5_text-reentrant", "deepseek_v3-plain", "gpt2-plain", "gemma4_text-ckpt")
UNLIKE += ("minimax_m2-reentrant", "lfm2-plain")


def batch(length: int = 40) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, WORDS - 5, (2, length))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)}


def gradients(model: nn.Module, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(**{"use_cache": False} | inputs).loss
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach()} | {name: gradient.clone() for name, gradient in found.items()}


def errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """The error of every tensor, relative to its norm or to a millionth of the norm of all."""
    assert found.keys() == truth.keys()
    least = 1e-6 * max(tensor.norm() for tensor in truth.values())
    return {name: float((found[name] - true).norm() / max(true.norm(), least)) for name, true in truth.items()}


tiled_copy = partial(layered.tiled_copy, chunk_tokens=CHUNK)


def assert_same(model: nn.Module, tiled: nn.Module, nudged: Any = None, use_cache: Any = False, **inputs: Any) -> None:
    """`nudged` is another such model, for models that cannot be copied; `use_cache` is for the tiled one."""
    truth, nudged = gradients(model, **inputs), nudged or copy.deepcopy(model)
    with torch.no_grad():
        for weight in nudged.parameters():
            weight.mul_(1 + 2**-23)
    ill = errors(gradients(nudged, **inputs), truth)  # the effect of one ulp of the weights on a gradient
    for name, error in errors(gradients(tiled, **inputs, use_cache=use_cache), truth).items():
        assert error <= 2 * ill[name] + 2e-5, f"{name}: {error:.1e}, nudged {ill[name]:.1e}"


@pytest.mark.full(EACH, but=UNLIKE)
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_parts(model_type: str, reentrant: bool | None) -> None:
    """Three documents, separated by their positions, also if the config requests a cache as Hugging Face's do; applied,
    and removed again."""
    model, inputs = small_of(model_type), packed(11, 3, 26)
    inputs["labels"] = inputs["labels"].masked_fill(torch.rand(1, 40) < 0.3, -100)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = True
    tiled = tiled_copy(model)
    status = seqtile.status(tiled)
    assert status.loss.tiled == 1 and status.mlp.tiled == status.mlp.total > 0 and status.layer.tiled > 0
    for each in (model, tiled):
        checkpointing(each, reentrant)
    assert_same(model, tiled, use_cache=None, **inputs)
    text = str(seqtile.status(tiled))
    assert "equal the untiled model's" in text and "a training step makes no cache" in text
    assert tiled(**inputs).past_key_values is None
    with torch.no_grad():
        assert tiled.eval()(**inputs).past_key_values is None
        assert tiled(input_ids=inputs["input_ids"]).past_key_values is not None
    seqtile.restore(tiled)
    assert seqtile.status(tiled).mlp.tiled == 0


@pytest.mark.full(EACH, but=("gpt_oss-after", "deepseek_v3-before"))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_lora(model_type: str, when: str) -> None:
    base = small_of(model_type)
    tiled_base = tiled_copy(base) if when == "before" else copy.deepcopy(base)
    kind = {"task_type": "CAUSAL_LM", "fan_in_fan_out": model_type == "gpt2"}
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **kind)
    torch.manual_seed(3)
    model = get_peft_model(base, config)
    tiled = get_peft_model(tiled_base, config)
    tiled.load_state_dict(model.state_dict())
    if when == "after":
        seqtile.apply_seqtile(tiled, layer=True, chunk_tokens=CHUNK)
    assert_same(model, tiled, **batch())


def test_image_tokens() -> None:
    """A model of images and text, with an image."""
    model = small_of("qwen3_vl")
    config, vision = model.config, model.config.vision_config
    patches = torch.randn(16, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    ids = torch.randint(5, WORDS - 5, (1, 40))
    ids[ids == config.image_token_id] = 7
    ids[0, 3:7] = config.image_token_id
    types = (ids == config.image_token_id).long()
    inputs = {"input_ids": ids, "labels": ids.clone(), "pixel_values": patches, "mm_token_type_ids": types}
    assert_same(model, tiled_copy(model), **inputs, image_grid_thw=torch.tensor([[1, 4, 4]]))


@pytest.mark.full(EACH, but=("solar_open",))
@pytest.mark.parametrize("model_type", ["kimi_k25", "solar_open", "deepseek_v3"])
def test_no_shared_expert(model_type: str) -> None:
    """Hugging Face's code then makes an MLP of width 0."""
    changes = {"n_shared_experts": 0}
    model = small_of(model_type, **{"text_config": changes} if model_type == "kimi_k25" else changes)
    tiled = tiled_copy(model, layer=False)
    status = seqtile.status(tiled).mlp
    assert status.tiled == status.total > 0
    assert_same(model, tiled, **batch())


@pytest.mark.parametrize("has_run", [False, True])
def test_tensors_of_a_graph_on_modules(has_run: bool) -> None:
    """RecurrentGemma keeps such tensors, which cannot be copied. Its layers with attention are tiled, the others are
    not."""
    model, tiled, inputs = small_of("recurrent_gemma"), small_of("recurrent_gemma"), batch()
    for one in (model, tiled) if has_run else ():
        gradients(one, **inputs)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    status = seqtile.status(tiled)
    assert status.loss.tiled == 1 and status.mlp.tiled == status.mlp.total == 3
    assert_same(model, tiled, small_of("recurrent_gemma"), **inputs)


PLACES = ("0.mlp.gate_proj", "1.mlp.down_proj", "0.self_attn.q_proj", "1.self_attn.o_proj")
PARAMETRISED = [*((weight_norm, f"model.layers.{place}") for place in PLACES), (weight_norm, "lm_head")]
PARAMETRISED += [(orthogonal, "model.layers.0.mlp.gate_proj")]


@pytest.mark.full("of 48 cases", but=every_value)
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("what", PARAMETRISED, ids=lambda case: f"{case[0].__name__}-{case[1]}")
@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
def test_weights_computed_anew(model_type: str, what: tuple, layer: bool, reentrant: bool | None) -> None:
    """torch.nn.utils.parametrizations computes them in every forward."""
    parametrise, place = what
    model = small_of(model_type, tie_word_embeddings=False)
    parametrise(model.get_submodule(place))
    tiled = tiled_copy(model, layer=layer)
    status = seqtile.status(tiled)
    assert status.loss.tiled == 1 and status.mlp.tiled == 2 and (not layer or status.layer.tiled == 2)
    for one in (model, tiled):
        checkpointing(one, reentrant)
    assert_same(model, tiled, **batch())
