"""A small model has exactly what the config has: every kind of layer, shared keys, and head sizes by layer."""

import pytest
import torch
from transformers import CONFIG_MAPPING, Gemma4TextConfig

from models.layered import small_of
from seqtile.models.find import layers_of
from seqtile.models.known import unknown_in
from seqtile.models.model_types import model_classes, model_types
from seqtile.models.parts import EXPERTS, LAYER, LOSS, MLP
from seqtile.proof.findings import findings
from seqtile.proof.small import config_for, structure_of, with_few_layers

LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 60}
SMALL = {"num_attention_heads": 2, "hidden_size": 24, "pad_token_id": 3}
LONG_ROPE |= {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]}


@pytest.mark.full("a third of a second each; test_types.py has others every day", but=("gemma3n_text", "evolla"))
@pytest.mark.parametrize("model_type", model_types())
def test_every_kind_of_layer(model_type: str) -> None:
    """Every kind of layer of the full-size model exists, with smaller sizes."""
    if model_type in ("inkling2_loop", "inkling2_loop_text"):
        pytest.skip("the numbers of its loops make more kinds than a small model has; the others stay untiled")
    try:
        model, cls = small_of(model_type), model_classes(model_type)[0]
        with torch.device("meta"):
            whole = cls(config_for(cls, CONFIG_MAPPING[model_type]()))
    except Exception as error:  # raised by Hugging Face's code
        pytest.skip(f"cannot be built: {error}")
    kinds = {structure_of(layer) for layer in layers_of(model)}
    if model_type == "evolla":  # its code inserts adapters by the number of layers
        kinds |= {kind for kind in map(structure_of, layers_of(whole)) if any(set(kind) <= set(one) for one in kinds)}
    assert {structure_of(layer) for layer in layers_of(whole)} <= kinds
    parts = [module for part in (MLP, EXPERTS, LAYER) for module in part.modules(whole) if part.refusal(module) is None]
    assert [unknown_in(module) for module in parts] == [None] * len(parts)
    head = whole.get_output_embeddings()
    assert head is None or unknown_in(head, "head") is None


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma4_text", {"num_kv_shared_layers": 18}),
        ("gemma4_unified_text", {"num_kv_shared_layers": 6}),
        ("gemma4", {"text_config": {"num_kv_shared_layers": 20}}),
        ("gemma3n_text", {}),
    ],
)
def test_shared_keys(model_type: str, changes: dict) -> None:
    """For every kind of layer one layer writes keys, and one reads those of another."""
    layers = [layer.self_attn for layer in layers_of(small_of(model_type, **changes))]
    for slides in (True, False):
        alike = [layer for layer in layers if layer.is_sliding is slides]
        assert {layer.is_kv_shared_layer for layer in alike} == {True, False}
        assert any(layer.store_full_length_kv for layer in alike)
    assert len(layers) <= 6


@pytest.mark.parametrize(("model_type", "whole"), [("shieldgemma2", True), ("llama4", False)])
def test_the_config_of_a_class(model_type: str, whole: bool) -> None:
    """The whole also where a type has the class of another type; the text config where the class is of text alone."""
    config, (cls, *_) = CONFIG_MAPPING[model_type](), model_classes(model_type)
    assert config_for(cls, config) is (config if whole else config.text_config)


@pytest.mark.parametrize("layers", [0, 15])
def test_shared_keys_of_a_few_layers(layers: int) -> None:
    few = with_few_layers(Gemma4TextConfig(num_kv_shared_layers=layers))
    assert few.hidden_size == Gemma4TextConfig().hidden_size
    assert few.num_kv_shared_layers == (2 if layers else 0) and few.num_hidden_layers == (4 if layers else 2)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", SMALL | {"vocab_size": 40}),
        ("phi3", SMALL | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 60}),
        ("glm4_moe", {"n_shared_experts": 0}),
    ],
    ids=["few words", "few factors", "weights without elements"],
)
def test_sizes_smaller_than_a_small_models(model_type: str, changes: dict) -> None:
    """Its proof still runs."""
    found = list(findings(small_of(model_type, **changes)))
    assert {one.part for one in found} - {EXPERTS} == {LOSS, MLP, LAYER} and all(one.refusal is None for one in found)


def test_what_is_not_there_is_not_made() -> None:
    assert small_of("gemma4_text").config.get_text_config().num_kv_shared_layers == 0
    assert all(layer.shared_mlp is None for layer in layers_of(small_of("granitemoeshared")))
    assert small_of("deepseek_v4").config.num_nextn_predict_layers == 1
    assert small_of("deepseek_v4", num_nextn_predict_layers=0).config.num_nextn_predict_layers == 0


def test_layers_of_several_kinds() -> None:
    """Other head sizes in full attention; an MLP in layers 3 and 5 of a mixture."""
    sizes = {layer.self_attn.layer_type: layer.self_attn.head_dim for layer in layers_of(small_of("gemma4_text"))}
    assert sizes["full_attention"] != sizes["sliding_attention"]
    of = small_of("qwen2_moe", num_hidden_layers=8, mlp_only_layers=[3, 5])
    assert {type(layer.mlp).__name__ for layer in layers_of(of)} == {"Qwen2MoeSparseMoeBlock", "Qwen2MoeMLP"}
    assert len(layers_of(of)) == 2
