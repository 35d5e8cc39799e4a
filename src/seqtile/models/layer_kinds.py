"""What a config says of each of a model's layers, and a copy of that for fewer layers of the same kinds.

layer_types             sliding  sliding  full  sliding  sliding  full        a list, an entry a layer
mlp_only_layers         [0]                                                   a list of layers
first_k_dense_replace   1                                                     so many of the first
num_kv_shared_layers    3                                                     so many of the last
per_layer_config        {2: {"head_dim": 512}, 5: {"head_dim": 512}}          what is another for some layers
kept: layers            0        1        2     3                 5
"""

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

from transformers import PreTrainedConfig

MOST_LAYERS = 12
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_LAST = ("num_kv_shared_layers",)
_NEXT_TOKEN = ("num_nextn_predict_layers",)
_ENTRY_A_LAYER = re.compile(r".*layer.*|block_types|attention_types|.*indexer_types|activation_sparsity_pattern")
_LIST_OF_LAYERS = re.compile(r".*layers?(_ids|_idxs?|_indices)?|.*_idxs?")
_MANY = 8  # layers: a list that is as long is no accident
Sizes = Callable[[str, Any], Any]
"""Returns the new value of a field, given its name and value."""


class LayerKinds:
    """The fields of a config that concern single layers, as they are when this is made."""

    def __init__(self, config: PreTrainedConfig):
        self._config = config
        said = vars(config)
        self.count = count_of(config)
        number = self.count or 0
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
        number = self.count or 0
        first_of_kind: dict[str, int] = {}
        for i in range(number):
            first_of_kind.setdefault(repr(self._kind(i)), i)
        found = sorted(first_of_kind.values())[:MOST_LAYERS]
        others = [i for i in range(number) if i not in found]
        return sorted(found + others[: max(0, 2 - len(found))])

    def keep(self, layers: list[int], sizes: Sizes = lambda name, value: value) -> None:
        """Reduces the config to these layers. `sizes` reduces the values that single layers have."""
        if self.count is None:
            return
        for name, value in self._lists.items():
            set_field(self._config, name, [sizes(name, value[i]) for i in layers])
        for name, value in self._sets.items():
            set_field(self._config, name, [new for new, i in enumerate(layers) if i in value])
        for name, value in self._ends.items():
            set_field(self._config, name, sum(i in value for i in layers))
        for name in _NEXT_TOKEN:
            if _is_count(vars(self._config).get(name)):
                set_field(self._config, name, min(vars(self._config)[name], 1))
        for name in _COUNTS:
            if name in vars(self._config):
                set_field(self._config, name, len(layers))
        if self._others:
            said = vars(self._config)
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
    """Returns a value with only 0 and 1 left of the numbers, since a size is a size, and of what is said several times
    in a row one."""
    if isinstance(value, dict):
        return {str(key): meaning_of(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [meaning for meaning, _ in groupby(map(meaning_of, value))]
    if isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1):
        return "number"
    return value


def set_field(config: PreTrainedConfig, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError, ValueError):  # what this config computes from others
        pass


def _another(everywhere: Any, here: Any) -> Any:
    """Returns a size of some layers so that it differs from the others' even if both were reduced to the same."""
    return 2 * here if _is_count(here) and here == everywhere else here


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
