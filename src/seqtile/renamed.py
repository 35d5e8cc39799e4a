"""What has another name in some releases of transformers: a forward's cache, and the switch of checkpointing.

Imports nothing, so that every subpackage may import it.
"""

from typing import Any

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")
"""The names of a forward's cache of keys and values, or of states. Most forwards say `cache` from transformers 5.24 on;
the layers of GPT-NeoX, Bloom and others say `layer_past`."""


def cache_in(given: dict[str, Any]) -> Any:
    """Returns the cache among a forward's arguments, under any of its names; None if there is none."""
    for name in CACHE_NAMES:  # makes no call, because every layer runs it
        if name in given and given[name] is not None:
            return given[name]
    return None


def without_cache(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a forward's arguments without a cache."""
    return {name: value for name, value in given.items() if name not in CACHE_NAMES}


def enable_checkpointing(model: Any, reentrant: bool = False) -> None:
    """Turns on activation checkpointing of every layer, by the method's name in the installed transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
