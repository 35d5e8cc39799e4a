"""Prompts longer than a chunk, and other forwards that fill a cache: in chunks, with the same words and the same
cache."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import seqtile
from models.layered import small_of
from seqtile.models.forward import around_attention
from seqtile.proof.small import WORDS
from support.assertions import relative_error
from support.measure import LiveBytes
from support.tiny import tiled_copy

CHUNK = 16
TYPES = {"llama": {0}, "gpt2": {2}, "qwen3_5_text": {1}, "lfm2": {3}, "gpt_oss": {2}, "deepseek_v3": {0}}
TYPES |= {"gpt_neox": {2}, "gpt_bigcode": {2}}  # their layers say layer_past
TYPES |= {"gemma4_text": {2, 4}}  # 4 in transformers 5.16
"""A model type -> its layers that run in chunks and fill a cache. DeepSeek's attention uses other keys than it
caches."""


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_the_same_words_and_cache(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled, add = [], around_attention._CacheOfChunks.add
    monkeypatch.setattr(around_attention._CacheOfChunks, "add", lambda *args: filled.append(0) or add(*args))
    model = small_of(model_type).eval()
    tiled = tiled_copy(model, layer=True, chunk_tokens=CHUNK)
    ids = torch.randint(5, WORDS - 5, (2, 60))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "use_cache": True}
    theirs, ours = (each.generate(ids, return_dict_in_generate=True, **options) for each in (model, tiled))
    assert ours.sequences.equal(theirs.sequences) and len(filled) in TYPES[model_type]
    for one, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        if getattr(other, "keys", None) is not None:
            assert relative_error(one.keys[:, :, 8:], other.keys[:, :, 8:]) <= 1e-5  # a padded row's are of no token
            assert relative_error(one.values[:, :, 8:], other.values[:, :, 8:]) <= 1e-5


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@torch.no_grad()
def test_a_prompt_in_two_parts(arch: str) -> None:
    model = small_of(arch).eval()
    tiled, ids, found = tiled_copy(model, layer=True, chunk_tokens=CHUNK), torch.randint(5, WORDS - 5, (1, 90)), []
    for each in (model, tiled):
        cache = DynamicCache(config=each.config)
        logits = [each(input_ids=part, past_key_values=cache).logits for part in ids.split(50, dim=1)]
        assert type(logits[0]) is torch.Tensor and cache.get_seq_length() == 90
        found.append(torch.cat(logits, 1))
    assert relative_error(found[1], found[0]) <= 1e-5


@torch.no_grad()
def test_a_cache_is_filled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure after the attention has filled the cache is reported, and the layer does not run again."""

    def fails(*_: object) -> None:
        raise ValueError("behind its attention")

    tiled = tiled_copy(small_of("gpt2").eval(), layer=True, chunk_tokens=CHUNK)
    cache = DynamicCache(config=tiled.config)
    monkeypatch.setattr(around_attention._LayerCall, "behind_attention", fails)
    with pytest.raises(ValueError, match="a GPT2Block cannot fill a cache in chunks; apply with layer=False"):
        tiled(input_ids=torch.randint(5, WORDS - 5, (1, 60)), past_key_values=cache)
    assert cache.get_seq_length() == 60


def peak_of_prefill(arch: str, layer: bool | None, tokens: int) -> float:
    """Live bytes of a prompt's forward, in units of its hidden states, including keys and values."""
    width = {"hidden_size": 1024, "intermediate_size": 16384, "num_attention_heads": 8, "vocab_size": 1000}
    width |= (
        {"n_embd": 1024, "n_head": 8, "n_inner": 16384, "n_layer": 2} if arch == "gpt2" else {"num_hidden_layers": 2}
    )
    with FakeTensorMode(), torch.no_grad():
        config = AutoConfig.for_model(arch, **width, max_position_embeddings=tokens)
        model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
        if layer is not None:
            seqtile.apply_seqtile(model, layer=layer, chunk_tokens=256)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with LiveBytes() as memory:
            model(input_ids=ids, past_key_values=DynamicCache(config=config), logits_to_keep=1)
    return memory.peak / (tokens * 1024 * 4)


@pytest.mark.full("6 s", but=("llama",))
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_memory_of_a_prompt(arch: str) -> None:
    """Only one chunk of the MLP's states exists, although each token has at least 16 times as many as hidden states."""
    untiled, mlp, layer = (peak_of_prefill(arch, layer, 8_192) for layer in (None, False, True))
    assert untiled > 50 and max(mlp, layer) < 15
