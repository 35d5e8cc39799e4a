"""What is said, once, where a part of seqtile that was asked for does nothing, or less than it could."""

import torch
from torch import nn
from transformers.utils import logging

from seqtile.models.placement import placement_at

logger = logging.get_logger(__name__)


def note_that_it_fits(module: nn.Module, tokens: int, tile: int) -> None:
    """Of an MLP in training whose input is no longer than a tile."""
    if tokens <= tile and module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        logger.warning_once(
            f"a sequence fits in one tile of {tile} tokens: its MLPs, and its layers with layer=True, run untiled and "
            "keep what they keep untiled; for less memory train on longer sequences, or pass a smaller chunk_tokens"
        )


def note_that_all_is_kept(model: nn.Module, tokens: int) -> None:
    """Of a model in training whose layers are tiled, not checkpointed, and keep more each than its weights take."""
    if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    layer = model.base_model.layers[0]
    placement = placement_at(layer)
    if placement is None or is_checkpointed(model):
        return
    config, attention = model.config, layer.self_attn
    heads, kv = config.num_attention_heads * attention.head_dim, config.num_key_value_heads * attention.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    kept = config.hidden_size + heads + (heads + 2 * kv if placement.head_groups is None else 0)
    if tokens * kept > weights:
        logger.warning_once(
            "whole layers are tiled, but activation checkpointing is off: at this length every layer keeps more for "
            "its backward than its weights take; model.gradient_checkpointing_enable() has it keep its input alone"
        )


def is_checkpointed(model: nn.Module) -> bool:
    return any(getattr(layer, "gradient_checkpointing", False) for layer in model.base_model.layers)
