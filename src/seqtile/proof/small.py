"""Small models of any class, for tests on them: a config with reduced sizes and one layer of every kind.

`LayerKinds` is what a config says of each of a model's layers, which it copies for fewer layers of the same kinds:

layer_types             sliding  sliding  full  sliding  sliding  full        a list, an entry a layer
mlp_only_layers         [0]                                                   a list of layers
first_k_dense_replace   1                                                     so many of the first
num_kv_shared_layers    3                                                     so many of the last
per_layer_config        {2: {"head_dim": 512}, 5: {"head_dim": 512}}          what is another for some layers
kept: layers            0        1        2     3                 5
"""

import copy
import json
import re
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from seqtile.models.find import layers_of

HIDDEN, HEADS, HEAD_DIM, WORDS, MLP = 64, 4, 16, 131, 72
Structure = tuple[tuple[str, str, tuple[str, ...], str], ...]
_CHANGING = ("training", "gradient_checkpointing")  # attributes that change while a module is used
Rule = Callable[[int], int]


def _at_most(limit: int) -> Rule:
    return lambda size: min(size, limit)


def _always(size: int) -> Rule:
    return lambda before: size if before else 0


def _known_word(instead: int) -> Rule:
    return lambda word: word if word < WORDS else instead


_SIZES: tuple[tuple[Rule, str], ...] = (  # the new value of a config's field, by its name; the first match counts
    (_always(WORDS), "vocab_size"),
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
    (_at_most(1), "first_k_dense_replace|moe_layer_start_index|num_dense_layers|num_nextn_predict_layers"),
    (_at_most(2), "num_*layers|n_*layers|n_layer|encoder_layers|decoder_layers|num_hidden_groups|depth"),
    (_at_most(4), "*num_experts|*num_local_experts|*routed_experts|zero_expert_num"),
    (_at_most(2), "*experts_per_tok|*experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts"),
    (_always(1), "n_group|topk_group|num_expert_group|num_expert_groups|mamba_n_groups|mamba_ngroups|n_groups"),
    (_at_most(256), "max_*positions|max_*position_embeddings|max_*seq_len|max_*length|n_positions|n_ctx"),
    (_at_most(256), "context_length|seq_length"),
    (_at_most(16), "*window|*window_size|attention_chunk_size|local_attention|index_topk"),
    (_at_most(16), "*d_state|*state_size|chunk_size|mamba_chunk_size|index_block_size"),
)
_OF_NO_CODE = (  # fields that do not affect which code a model runs
    *("*_token_id", "*_token_ids", "*_token_index", "vocab_offset", "architectures", "auto_map", "pretraining_tp"),
    *("*dtype", "quantization_config", "initializer_*", "_name_or_path", "*attn_implementation*"),
    *("transformers_version", "id2label", "label2id", "task_specific_params", "tokenizer_class"),
)
DROPOUT_FIELDS = re.compile(r".*(drop|jitter|noise).*")  # fields that make two runs of a model differ
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")


def small_config(config: PreTrainedConfig, layers: list[int] | None = None) -> PreTrainedConfig:
    """Returns a copy of a config with reduced sizes, no dropout, and one layer of every kind that the config names, at
    least two. With `layers` the text model keeps these layers instead."""
    small = copy.deepcopy(config)
    parts = configs_in(small).values()
    text = small.get_text_config()
    for part in parts:
        kinds = LayerKinds(part)
        _shrink(part)
        kinds.keep(kinds.chosen() if layers is None or part is not text else layers, _shrunk)
        _set_rotary(part, of_images=len(parts) > 1)
    small._attn_implementation = "eager"
    return small


def meaning_of_config(config: PreTrainedConfig) -> str:
    """Returns the fields of a small config that decide which code its model runs. They are the same for configs that
    differ only in sizes."""
    defaults = PreTrainedConfig().to_dict()

    def meaning(said: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in said.items():
            if any(fnmatchcase(name, one) for one in _OF_NO_CODE) or value == defaults.get(name, ...):
                continue
            if isinstance(value, dict) and "model_type" in value:
                found[name] = meaning(value)
            elif isinstance(value, int) and value < HEAD_DIM and _rule_of(name):
                found[name] = value  # a count, such as of shared kv heads or chosen experts
            else:
                found[name] = meaning_of(value)
        return found

    return json.dumps(meaning(config.to_dict()), sort_keys=True, default=str)


def with_few_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of a config with its full widths and one layer of every kind, at least two."""
    few = copy.deepcopy(config)
    for part in configs_in(few).values():
        kinds = LayerKinds(part)
        kinds.keep(kinds.chosen())
    return few


def config_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the part of a config from which a model class is built: its text config if that alone is of the class's
    kind, else the whole."""
    if isinstance(config, model_class.config_class):
        return config
    text = config.get_text_config()
    return text if isinstance(text, model_class.config_class) else config


def small_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a small float32 model of a class, on the CPU, with a layer of every kind. All weights are random, also
    those that are initialised to zeros or ones. torch's random state stays as it was. Raises ValueError if the model
    is not small, or cannot be built.
    """
    small = config_of_all_kinds(model_class, config)
    size = sum(parameter.numel() for parameter in unfilled(model_class, small).parameters())
    if size > 15_000_000:
        raise ValueError(f"{model_class.__name__}: cannot be made small from its config: {size:,} parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(small).float()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def unfilled(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model whose weights have shapes but no values."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config))


def config_of_all_kinds(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a small config whose model has a layer of every kind that the config's model has.

    If a config gives the kinds by a rule, such as every eighth layer, as many of the first layers are kept as it
    takes."""
    config = config_for(model_class, config)

    def kinds_of(config: PreTrainedConfig) -> list[Structure]:
        return [structure_of(layer) for layer in layers_of(unfilled(model_class, config))]

    small = small_config(config)
    try:
        kinds = kinds_of(small_config(config, list(range(count_of(config.get_text_config()) or 0))))
    except Exception:  # the model's own code may not run so many small layers
        return small

    def number_of_kinds(config: PreTrainedConfig) -> int:
        return len(set(kinds_of(config)) & set(kinds))

    first_of_kind = sorted(kinds.index(kind) for kind in set(kinds))[:MOST_LAYERS]
    if len(first_of_kind) < 2 or number_of_kinds(small) == len(set(kinds)):
        return small
    tried = first_of_kind, list(range(min(first_of_kind[-1] + 1, MOST_LAYERS)))
    return max(small, *(small_config(config, layers) for layers in tried), key=number_of_kinds)


def structure_of(module: nn.Module) -> Structure:
    """Returns what a module consists of, without sizes: for it and each submodule the name, class, parameters, and
    attributes that are not numbers."""
    found: dict[tuple, None] = {}
    for name, part in module.named_modules():
        plain = ((key, value) for key, value in vars(part).items() if not key.startswith("_") and key not in _CHANGING)
        switches = sorted((key, value) for key, value in plain if value is None or isinstance(value, bool | str))
        cls = f"{type(part).__module__}.{type(part).__qualname__}"
        found[re.sub(r"\d+", "#", name), cls, tuple(sorted(part._parameters)), str(switches)] = None
    return tuple(found)


def configs_in(config: PreTrainedConfig, prefix: str = "") -> dict[str, PreTrainedConfig]:
    """Returns a config and those inside it, by the prefix of their fields' names, such as "attn_config."."""
    found = {prefix: config}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found |= configs_in(value, f"{prefix}{name}.")
    return found


def _shrink(config: PreTrainedConfig) -> None:
    whole_head = vars(config).get("qk_head_dim", -1) == vars(config).get("head_dim")  # both parts, rotated and not
    heads_before = _heads_of(config)
    for name, value in list(vars(config).items()):
        if _is_count(value):
            same = value == heads_before and re.search("heads", name)  # as many kv heads as query heads
            set_field(config, name, _at_most(HEADS)(value) if same else _shrunk(name, value))
        elif isinstance(value, float) and DROPOUT_FIELDS.fullmatch(name):
            set_field(config, name, 0.0)
        elif name == "use_cache":
            set_field(config, name, False)
        elif value is None and name == "head_dim":
            set_field(config, name, HEAD_DIM)
    if whole_head:
        set_field(config, "head_dim", 2 * HEAD_DIM)
    if "expand" in vars(config) and "num_heads" in vars(config):
        set_field(config, "num_heads", config.expand * HIDDEN // HEAD_DIM)
    if "mamba_headdim" in vars(config):
        set_field(config, "mamba_headdim", 2 * HIDDEN // config.n_mamba_heads)


def _heads_of(config: PreTrainedConfig) -> int | None:
    return next((vars(config)[name] for name in _HEADS if isinstance(vars(config).get(name), int)), None)


def _rule_of(name: str) -> Rule | None:
    return next((rule for rule, names in _SIZES if any(fnmatchcase(name, one) for one in names.split("|"))), None)


def _shrunk(name: str, value: Any) -> Any:
    """Returns the reduced value of a config's field."""
    rule = _rule_of(name)
    return rule(value) if rule is not None and _is_count(value) else value


def _set_rotary(config: PreTrainedConfig, of_images: bool) -> None:
    """Fits the sections of a three-axis rotary embedding, and factors by frequency, to half of the rotated width."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = vars(config).get(name)
        if not isinstance(rope, dict):
            continue
        head_dim = HEAD_DIM if vars(config).get("head_dim") else HIDDEN // (_heads_of(config) or HEADS)
        half = int(head_dim * rope.get("partial_rotary_factor", 1)) // 2
        if rope.get("mrope_section") or of_images:
            rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        given = {name: rope[name] for name in ("short_factor", "long_factor") if rope.get(name)}
        rope |= {name: [*factors, *factors[-1:] * half][:half] for name, factors in given.items()}


MOST_LAYERS = 12
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_LAST = ("num_kv_shared_layers",)
_NEXT_TOKEN = ("num_nextn_predict_layers",)
_ENTRY_A_LAYER = re.compile(r".*layer.*|block_types|attention_types|.*indexer_types|activation_sparsity_pattern")
_LIST_OF_LAYERS = re.compile(r".*layers?(_ids|_idxs?|_indices)?|.*_idxs?")
_MANY = 8  # layers: a list that is as long is no accident


class LayerKinds:
    """The fields of a config that concern single layers, as they are when this is made."""

    def __init__(self, config: PreTrainedConfig):
        self._config = config
        said = vars(config)
        self.count = number = count_of(config) or 0
        self._lists: dict[str, list] = {}
        self._sets: dict[str, list[int]] = {}
        for name, value in said.items():
            if not number or not isinstance(value, list | tuple):
                continue
            if len(value) == number and (_ENTRY_A_LAYER.fullmatch(name) or number >= _MANY):
                self._lists[name] = list(value)
            elif _LIST_OF_LAYERS.fullmatch(name) and all(_is_count(i) and i < number for i in value):
                self._sets[name] = list(value)
        self._ends = {name: range(said[name]) for name in _FIRST if _is_count(said.get(name))}
        self._ends |= {name: range(number - said[name], number) for name in _LAST if _is_count(said.get(name))}
        is_mixed = getattr(config, "is_heterogeneous", False)  # not of an older transformers
        self._others = {int(i): said for i, said in config.to_dict()["per_layer_config"].items()} if is_mixed else {}

    def chosen(self) -> list[int]:
        """Returns a layer of every kind, two at least, in their order; no more than MOST_LAYERS."""
        kinds = [repr(self._kind(i)) for i in range(self.count)]
        found = [i for i, kind in enumerate(kinds) if kinds.index(kind) == i][:MOST_LAYERS]
        others = [i for i in range(self.count) if i not in found]
        return sorted(found + others[: max(0, 2 - len(found))])

    def keep(self, layers: list[int], sizes: Callable[[str, Any], Any] = lambda name, value: value) -> None:
        """Reduces the config to these layers. `sizes(name, value)` reduces the values that single layers have."""
        if not self.count:
            return
        said = vars(self._config)
        changes: dict[str, Any] = {name: [sizes(name, value[i]) for i in layers] for name, value in self._lists.items()}
        changes |= {name: [new for new, i in enumerate(layers) if i in value] for name, value in self._sets.items()}
        changes |= {name: sum(i in value for i in layers) for name, value in self._ends.items()}
        changes |= {name: min(said[name], 1) for name in _NEXT_TOKEN if _is_count(said.get(name))}
        changes |= {name: len(layers) for name in _COUNTS if name in said}
        for name, value in changes.items():
            set_field(self._config, name, value)
        if self._others:
            others = {
                new: {name: _another(said.get(name), sizes(name, value)) for name, value in self._others[i].items()}
                for new, i in enumerate(layers)
                if i in self._others
            }
            self._config.per_layer_config = None
            self._config.per_layer_config = others

    def _kind(self, i: int) -> list[Any]:
        """Returns the config's values for a layer, without sizes."""
        others = {name: meaning_of(value) for name, value in sorted(self._others.get(i, {}).items())}
        of_lists = [meaning_of(value[i]) for value in self._lists.values()]
        inside = [i in value for value in (*self._sets.values(), *self._ends.values())]
        return [of_lists, inside, others]


def count_of(config: PreTrainedConfig) -> int | None:
    """Returns a config's number of layers; None if it has none."""
    return next((vars(config)[name] for name in _COUNTS if _is_count(vars(config).get(name))), None)


def meaning_of(value: Any) -> Any:
    """Returns a value with every number but 0 and 1 replaced by "number", and runs of equal entries shortened to
    one."""
    if isinstance(value, dict):
        return {str(key): meaning_of(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [meaning for meaning, _ in groupby(map(meaning_of, value))]
    if isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1):
        return "number"
    return value


def set_field(config: PreTrainedConfig, name: str, value: Any) -> None:
    with suppress(AttributeError, TypeError, ValueError):  # what this config computes from others
        setattr(config, name, value)


def _another(everywhere: Any, here: Any) -> Any:
    """Returns a size of some layers that stays different from the other layers' when both are reduced."""
    return 2 * here if _is_count(here) and here == everywhere else here


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
