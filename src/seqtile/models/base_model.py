"""The forward of a model without its head where its layers are tiled as a whole: it makes no cache in training."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.utils import logging

from seqtile.models.find import layers_of, text_model_of
from seqtile.models.layer_form import LayerForm, layer_form_of
from seqtile.models.placement import Options, placement_at, stand_in_for
from seqtile.ops.chunks import resolve_chunk_tokens

logger = logging.get_logger(__name__)
UNFILLED = "_seqtile_unfilled"  # on a cache that only tells how masks are to be made


def base_models_of(model: nn.Module) -> list[nn.Module]:
    """Returns the text model without its head, if it makes caches."""
    base = text_model_of(model)
    names = inspect.signature(type(base).forward).parameters
    return [base] if {"past_key_values", "use_cache"} <= set(names) and base is not model else []


def uncached_forward(options: Options, original: Callable) -> Callable:
    """Returns a forward in place of `original`, that of a model without its head (a plain function), which fills no
    cache in training, unless it is given one.

    Hugging Face's config asks for a cache by default, in training too, and makes other masks where there is one: so
    there is one, which stays empty and is not returned.
    """
    names = list(inspect.signature(original).parameters)[1:]

    @stand_in_for(original)
    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        if not _makes_cache(self, given, options):
            return original(self, *args, **kwargs)
        logger.warning_once(
            "layers that are tiled as a whole make no cache in training; pass use_cache=False, or a cache to be filled"
        )
        if not all(isinstance(layer_form_of(layer), LayerForm) for layer in layers_of(self)):
            return original(self, **given | {"use_cache": False})
        cache = DynamicCache(config=self.config)
        setattr(cache, UNFILLED, True)
        outputs = original(self, **given | {"past_key_values": cache})
        if isinstance(outputs, tuple):
            return tuple(output for output in outputs if output is not cache)
        outputs.past_key_values = None
        return outputs

    return forward


def _makes_cache(model: nn.Module, given: dict[str, Any], options: Options) -> bool:
    """Says if a model that is called so would fill a cache of its own while it is trained on more than a chunk."""
    if not (model.training and torch.is_grad_enabled()) or given.get("past_key_values") is not None:
        return False
    wanted = given.get("use_cache")
    if not (model.config.use_cache if wanted is None else wanted):
        return False
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens = ids.numel() if ids is not None else 0 if embeds is None else embeds.shape[:-1].numel()
    return tokens > resolve_chunk_tokens(options.chunk_tokens, model.config.hidden_size)


def note_that_all_is_kept(model: nn.Module, tokens: int) -> None:
    """Says so, once, where a model in training has tiled layers that are not checkpointed, and keep more each than its
    weights take."""
    if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    layer = next(iter(layers_of(model)), None)
    placement = None if layer is None else placement_at(layer)
    attention = getattr(layer, "self_attn", None)
    if placement is None or is_checkpointed(model) or not hasattr(attention, "head_dim"):
        return
    config = attention.config
    heads, kv = config.num_attention_heads * attention.head_dim, config.num_key_value_heads * attention.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    kept = config.hidden_size + heads + (heads + 2 * kv if placement.options.head_groups is None else 0)
    if tokens * kept > weights:
        logger.warning_once(
            "whole layers are tiled, but activation checkpointing is off: at this length every layer keeps more for "
            "its backward than its weights take; model.gradient_checkpointing_enable() has it keep its input alone"
        )


def is_checkpointed(model: nn.Module) -> bool:
    return any(getattr(layer, "gradient_checkpointing", False) for layer in layers_of(model))
