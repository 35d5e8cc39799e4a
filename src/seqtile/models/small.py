"""Small models of any class, to try things out on: a config with its sizes cut down, and of every kind of layer one."""

import copy
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

HIDDEN, HEADS, HEAD_DIM, WORDS, MLP = 64, 4, 16, 131, 72


Rule = Callable[[int], int]


def _at_most(limit: int) -> Rule:
    return lambda size: min(size, limit)


def _always(size: int) -> Rule:
    return lambda _: size


def _known_word(instead: int) -> Rule:
    return lambda word: word if word < WORDS else instead


_FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")  # of another kind
_SIZES: tuple[tuple[Rule, str], ...] = (  # what becomes of a config's sizes, by their names; the first that fits
    (_at_most(WORDS), "*vocab|*vocab_size|vocab_size_*|*_vocab_size_base|codebook_size|num_image_tokens"),
    (_known_word(0), "pad_token_id"),
    (_known_word(1), "bos_token_id"),
    (_known_word(2), "eos_token_id"),
    (_known_word(3), "*_token_id|*_token_index|vocab_offset"),
    (_at_most(16), "*_size_per_layer_input|d_rel|altup*|*_rank|*lowrank"),
    (_always(2 * HEAD_DIM), "qk_head_dim"),
    (_at_most(HEAD_DIM // 2), "rotary_dim"),
    (_always(HEAD_DIM), "*head_dim|*head_size|*headdim|*d_head|*dim_head|*d_kv|*kv_channels"),
    (_always(2 * HIDDEN // HEAD_DIM), "mamba_num_heads|mamba_n_heads"),
    (_always(2 * HIDDEN), "mamba_d_ssm"),
    (_at_most(2), "n_mamba_heads|*key_value_heads|*kv_heads|*kv_n_heads|*num_key_heads|*query_groups"),
    (_at_most(HEADS), "*_heads|n_head|n_heads"),
    (_always(MLP), "*intermediate_size|*intermediate_size_mlp|*ffn_dim|*ffn_hidden_size|*_inner|*_ff|dff|mlp_dim"),
    (_always(MLP), "feed_forward_size"),
    (_always(HIDDEN), "*hidden_size|*hidden_size_global|*d_model|*n_embd|*embed_dim|*embedding_size|*embedding_dim"),
    (_always(HIDDEN), "emb_dim|dim_model|*hidden_dim|word_embed_proj_dim|lru_width|index_dim"),
    (_at_most(1), "|".join(_FIRST_LAYERS)),
    (_at_most(2), "num_*layers|n_*layers|n_layer|encoder_layers|decoder_layers|num_hidden_groups|depth"),
    (_at_most(4), "*num_experts|*num_local_experts|*routed_experts|zero_expert_num"),
    (_at_most(2), "*experts_per_tok|*experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts"),
    (_always(1), "n_group|topk_group|num_expert_group|num_expert_groups|mamba_n_groups|mamba_ngroups|n_groups"),
    (_at_most(256), "max_*positions|max_*position_embeddings|max_*seq_len|max_*length|n_positions|n_ctx"),
    (_at_most(256), "context_length|seq_length"),
    (_at_most(16), "*window|*window_size|attention_chunk_size|local_attention|index_topk"),
    (_at_most(16), "*d_state|*state_size|chunk_size|mamba_chunk_size|index_block_size"),
)
_NO_SHARING = ("num_kv_shared_layers", "num_nextn_predict_layers")
_RATES = re.compile(r".*(drop|jitter|noise).*")  # what makes two runs of one model differ
_OF_LAYERS = re.compile(r".*layer.*|block_types|attention_types|.*indexer_types|activation_sparsity_pattern")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config with its sizes cut down, without dropout, and one layer of every kind at least."""
    small = copy.deepcopy(config)
    parts = list(_parts_of(small))
    for part in parts:
        _shrink(part)
        _set_rotary(part, of_images=len(parts) > 1)
    small._attn_implementation = "eager"
    return small


def with_few_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config with all its widths, and one layer of every kind, two at least."""
    few = copy.deepcopy(config)
    for part in _parts_of(few):
        before = _first_of(part, _COUNTS)
        for name in vars(part).keys() & {*_COUNTS, *_FIRST_LAYERS, *_NO_SHARING}:
            limit = 0 if name in _NO_SHARING else 1 if name in _FIRST_LAYERS else 2
            _set(part, name, min(getattr(part, name) or 0, limit))
        _set_layers(part, before)
    return few


def _first_of(config: PreTrainedConfig, names: tuple[str, ...]) -> int | None:
    return next((getattr(config, name) for name in names if isinstance(vars(config).get(name), int)), None)


def config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the part of a config that a model class is built from: all of it, or that of its text."""
    return config if isinstance(config, model_class.config_class) else config.get_text_config()


def small_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model of a class, float32 on a CPU, by `small_config(config)`; its weights are random, also those that
    begin as zeros or ones. Random numbers are drawn without a trace. ValueError if it is not small, or cannot be built.
    """
    small = small_config(config_for(model_class, config))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(small)).parameters())
    if size > 15_000_000:
        raise ValueError(f"{model_class.__name__}: its config does not say how to make it small: {size:,} parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(small).float()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yields the configs inside a config, and then itself."""
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts_of(value)
    yield config


def _shrink(config: PreTrainedConfig) -> None:
    whole_head = vars(config).get("qk_head_dim", -1) == vars(config).get("head_dim")  # without and with rotation
    heads_before = _first_of(config, _HEADS)
    layers_before = _first_of(config, _COUNTS)
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            rule = _rule_of(name)
            if value == heads_before and re.search("heads", name):  # as many keys and values as queries
                rule = _at_most(HEADS)
            if name in _NO_SHARING:
                _set(config, name, 0)
            elif rule is not None:
                _set(config, name, rule(value))
        elif isinstance(value, float) and _RATES.fullmatch(name):
            _set(config, name, 0.0)
        elif name == "use_cache":
            _set(config, name, False)
        elif value is None and name == "head_dim":
            _set(config, name, HEAD_DIM)
    if whole_head:
        _set(config, "head_dim", 2 * HEAD_DIM)
    if "expand" in vars(config) and "num_heads" in vars(config):
        _set(config, "num_heads", config.expand * HIDDEN // HEAD_DIM)
    if "mamba_headdim" in vars(config):
        _set(config, "mamba_headdim", 2 * HIDDEN // config.n_mamba_heads)
    _set_layers(config, layers_before)


def _rule_of(name: str) -> Rule | None:
    return next((rule for rule, names in _SIZES if any(fnmatchcase(name, one) for one in names.split("|"))), None)


def _set_layers(config: PreTrainedConfig, before: int | None) -> None:
    """Cuts what a config says of each layer to as many layers as there are kinds, two at least."""
    lists = {name: list(value) for name, value in vars(config).items() if isinstance(value, list | tuple)}
    lists = {name: value for name, value in lists.items() if len(value) == before and _OF_LAYERS.fullmatch(name)}
    chosen: list[int] = []
    for i in range(before or 0):
        kind = [value[i] for value in lists.values()]
        if all(kind != [value[j] for value in lists.values()] for j in chosen):
            chosen.append(i)
    if not lists:
        return
    others = [i for i in range(before) if i not in chosen]
    chosen = sorted((chosen + others[: max(0, 2 - len(chosen))])[:6])
    for name, value in lists.items():
        _set(config, name, [value[i] for i in chosen])
    for name in _COUNTS:
        if name in vars(config):
            _set(config, name, len(chosen))


def _set_rotary(config: PreTrainedConfig, of_images: bool) -> None:
    """Cuts the sections of a rotary embedding of three axes to half of what it rotates of a head."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = vars(config).get(name)
        if isinstance(rope, dict) and (rope.get("mrope_section") or of_images):
            half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1)) // 2
            rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _set(config: PreTrainedConfig, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError):  # what this config computes from others
        pass
