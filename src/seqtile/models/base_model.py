"""The forward of a model without its head where its layers are tiled as a whole: it makes no cache in training."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from seqtile.models.find import layers_of
from seqtile.models.placement import Options, placement_at, stand_in_for

logger = logging.get_logger(__name__)


def base_models_of(model: nn.Module) -> list[nn.Module]:
    """Returns the models inside `model` that hold its layers and can make a cache, such as the one without its head."""
    layers = set(layers_of(model))
    inside = [module for module in model.modules() if module is not model and module not in layers]
    able = [module for module in inside if {"past_key_values", "use_cache"} <= set(_arguments(type(module).forward))]
    return [module for module in able if not layers.isdisjoint(module.modules())]


def _arguments(forward: Callable) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def uncached_forward(options: Options, original: Callable) -> Callable:
    """Returns a forward in place of `original`, that of a model without its head (a plain function), which makes no
    cache in training, however long the sequence, unless it is given one.

    Hugging Face's config asks for a cache by default, in training too. With one, packed documents are not told apart.
    """
    names = _arguments(original)

    @stand_in_for(original)
    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        in_training = self.training and torch.is_grad_enabled()
        if not in_training or given.get("past_key_values") is not None:
            return original(self, *args, **kwargs)
        if _wants_cache(self, given) and not torch.compiler.is_compiling():
            logger.warning_once(
                "tiled layers make no cache in training; pass use_cache=False, or a cache that is to be filled"
            )
        return original(self, **given | {"use_cache": False})

    return forward


def _wants_cache(model: nn.Module, given: dict[str, Any]) -> bool:
    wanted = given.get("use_cache")
    return bool(getattr(model.config, "use_cache", False) if wanted is None else wanted)


def note_that_all_is_kept(model: nn.Module, tokens: int) -> None:
    """Says so, once, where a model in training has tiled layers that are not checkpointed, and keep more each than its
    weights take."""
    if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    layer = next(iter(layers_of(model)), None)
    placement = None if layer is None else placement_at(layer)
    attention = getattr(layer, "self_attn", None)
    config, head_dim = getattr(attention, "config", None), getattr(attention, "head_dim", None)
    if placement is None or is_checkpointed(model) or config is None or not isinstance(head_dim, int):
        return
    query_heads = getattr(config, "num_attention_heads", 0)
    heads, kv = query_heads * head_dim, getattr(config, "num_key_value_heads", query_heads) * head_dim
    weights = sum(getattr(weight, "ds_numel", weight.numel()) for weight in layer.parameters())
    kept = config.hidden_size + heads + (heads + 2 * kv if placement.options.head_groups is None else 0)
    if tokens * kept > weights:
        logger.warning_once(
            "whole layers are tiled, but activation checkpointing is off: at this length every layer keeps more for "
            "its backward than its weights take; model.gradient_checkpointing_enable() has it keep its input alone"
        )


def is_checkpointed(model: nn.Module) -> bool:
    return any(getattr(layer, "gradient_checkpointing", False) for layer in layers_of(model))
