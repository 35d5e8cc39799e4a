"""A cache by each name that forwards have for it: `cache` from transformers 5.24 on, and the earlier ones."""

import inspect
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from seqtile.models.forward import without_cache as base_model
from seqtile.models.forward.around_attention import LayerArguments
from seqtile.models.placement import Options
from seqtile.proof import first_step
from seqtile.renamed import CACHE_NAMES, cache_in
from seqtile.sp import sharding_hooks, whole_batches
from seqtile.sp.groups import ALONE
from support.tiny import build, tiled_copy

by_each_name = pytest.mark.parametrize("name", CACHE_NAMES)


@by_each_name
def test_a_cache_among_arguments(name: str) -> None:
    assert cache_in({"use_cache": True, name: 7}) == 7 and cache_in({name: None}) is None
    assert cache_in(dict.fromkeys(CACHE_NAMES) | {name: 7}) == 7, "also if another name is there, without a cache"


@by_each_name
def test_a_cache_is_not_cut_sharded_or_compared(name: str) -> None:
    given = {name: DynamicCache()}
    for is_alone in (True, False):
        assert whole_batches._row_by_row(given, is_alone) == "a cache was given"
        assert whole_batches._row_by_row({name: None}, is_alone) is None
    with pytest.raises(ValueError, match="a cache is not sharded over ranks"):
        sharding_hooks.check_tokens(given, 1, 4)
    sharding_hooks.check_tokens({name: None}, 1, 4)
    assert first_step._not_comparable(build("llama"), LlamaForCausalLM.forward, [], given) == "it was given a cache"


@by_each_name
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_forward_given_a_cache_records_no_masks(name: str, is_alone: bool) -> None:
    """Its whole batch runs as it is: no mask is replaced by a recipe, which nobody would read."""
    model = build("llama")
    ctx = ALONE if is_alone else replace(ALONE, size=2)
    hooks = sharding_hooks.ShardingHooks(model, model.model, ctx, 2, whole_batches.WholeBatches)
    hooks.batches.begin(model, (), {"input_ids": torch.zeros(1, 4), name: DynamicCache()})
    assert hooks.forward.is_bypassed and model.config._attn_implementation == "sdpa"


@by_each_name
def test_a_cache_is_given_to_each_chunk_whole(name: str) -> None:
    cache = DynamicCache()
    arguments = LayerArguments({name: cache, "position_ids": torch.zeros(1, 8)}, 1, 8)
    assert arguments.of_chunk((torch.zeros(1, 4, 1),)).given[name] is cache


@by_each_name
def test_a_model_in_training_keeps_a_cache_that_it_is_given(name: str) -> None:
    """Whatever its forward calls it."""
    made = []

    class Model(torch.nn.Module):
        pass

    def original(self: Model, x: int, cache: object = None, use_cache: bool | None = None, **named: object) -> None:
        made.append(use_cache)

    parameters = inspect.signature(original).parameters.values()
    renamed = [each.replace(name=name) if each.name == "cache" else each for each in parameters]
    original.__signature__ = inspect.Signature(renamed)
    forward, model = base_model.forward_without_cache(Options(check=False), original), Model()
    model.config = type("Config", (), {"use_cache": False})
    forward(model, 1, use_cache=True)
    forward(model, 1, DynamicCache(), use_cache=True)
    forward(model, 1, use_cache=True, **{name: DynamicCache()})
    assert made == [False, True, True]


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@torch.no_grad()
def test_a_tiled_layer_fills_a_cache_by_its_name(arch: str, recwarn: pytest.WarningsRecorder) -> None:
    """Of Llama's shape and of another, by the name that the installed transformers has for it, without a warning."""
    model = build(arch).eval()
    tiled = tiled_copy(model, layer=True, chunk_tokens=16)
    layer, hidden = tiled.model.layers[0], torch.randn(1, 40, model.config.hidden_size)
    name = next(name for name in CACHE_NAMES if name in inspect.signature(type(layer).forward).parameters)
    angles = tiled.model.rotary_emb(hidden, torch.arange(40)[None])
    cache = DynamicCache(config=model.config)
    layer(hidden, position_embeddings=angles, **{name: cache})
    assert cache.get_seq_length() == 40
    assert not [one for one in recwarn if "deprecated" in str(one.message)]
