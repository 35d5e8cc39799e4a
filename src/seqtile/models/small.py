"""Small models of any class, to try things out on: a config with its sizes cut down, of every kind of layer at least one."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

HIDDEN, HEADS, HEAD_DIM, WORDS, MLP = 64, 4, 16, 131, 72


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda size: min(size, limit)


_SIZES: dict[
    str, Callable[[int], int]
] = {  # the names of a config's sizes -> what becomes of them; the first that fits
    r".*vocab(_size|_size_per_layer_input|_size_base)?|codebook_size|num_image_tokens|.*hash_byte_group_vocab": _at_most(
        WORDS
    ),
    r"pad_token_id": lambda i: i if i < WORDS else 0,
    r"bos_token_id": lambda i: i if i < WORDS else 1,
    r"eos_token_id": lambda i: i if i < WORDS else 2,
    r".*_token_(id|index)|vocab_offset": lambda i: i if i < WORDS else 3,
    r"(num_|n_)?hidden_size_per_layer_input|d_rel|altup.*|laurel_rank|.*low_?rank|.*lora_rank|adapter_rank|.*norm_rank": (
        _at_most(16)
    ),
    r"qk_head_dim": lambda _: 2 * HEAD_DIM,
    r"rotary_dim": _at_most(HEAD_DIM // 2),
    r".*(head_dim|head_size|headdim|d_head|dim_head|d_kv|kv_channels)": lambda _: HEAD_DIM,
    r"mamba_(num|n)_heads": lambda _: 2 * HIDDEN // HEAD_DIM,
    r"mamba_d_ssm": lambda _: 2 * HIDDEN,
    r"n_mamba_heads": _at_most(2),
    r".*(key_value_heads|kv_heads|kv_n_heads|num_key_heads|query_groups)": lambda n: min(n, 2),
    r".*(attention_|n_|num_|value_|index_n_)heads|n_head|attention_heads": _at_most(HEADS),
    r".*(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|n_inner|d_inner|d_ff|dim_ff|dff|mlp_dim|feed_forward_size)": (
        lambda _: MLP
    ),
    r".*(hidden_size(_global)?|d_model|n_embd|n_embed|embed_dim|embedding_(size|dim)|embd_dim|emb_dim|dim_model|hidden_dim)": (
        lambda _: HIDDEN
    ),
    r"word_embed_proj_dim|lru_width|attention_hidden_size|ple_embed_dim|index_dim": lambda _: HIDDEN,
    r"(num_|n_|encoder_|decoder_|num_encoder_|num_decoder_)(hidden_)?(layers|layer|groups)|depth": _at_most(2),
    r".*(num_experts|num_local_experts|routed_experts|moe_num_experts)|zero_expert_num": _at_most(4),
    r"(num_)?experts_per_tok(en)?|moe_(top_?)?k|top_k_experts|num_experts_per_tok": _at_most(2),
    r"n_group|topk_group|num_expert_groups?|mamba_n_?groups|n_groups": lambda _: 1,
    r"max_.*(positions|position_embeddings|seq_len|length)|n_positions|n_ctx|context_length|seq_length": _at_most(256),
    r".*(window|window_size|attention_chunk_size|local_attention|index_topk|keep_window_size)": _at_most(16),
    r"(mamba_)?(ssm_)?(d_state|state_size|state_dim)|(mamba_)?chunk_size|index_block_size": _at_most(16),
    r"first_k_dense_replace|moe_layer_start_index|num_dense_layers|num_kv_shared_layers|num_nextn_predict_layers": (
        _at_most(1)
    ),
}
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
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
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
    heads_before = next((getattr(config, name) for name in _HEADS if isinstance(vars(config).get(name), int)), None)
    layers_before = next((getattr(config, name) for name in _COUNTS if isinstance(vars(config).get(name), int)), None)
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            rule = next((rule for pattern, rule in _SIZES.items() if re.fullmatch(pattern, name)), None)
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
