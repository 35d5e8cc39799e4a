"""The forward of a model whose layers are tiled as a whole, which fills no cache in training unless it is given one."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.utils import logging

from seqtile.models.stand_in import stand_in_for
from seqtile.ops.tiles import resolve_chunk_tokens

logger = logging.get_logger(__name__)
_UNFILLED = "_seqtile_unfilled"  # on a cache that only tells how masks are to be made


def uncached_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """A forward in place of `original`, that of a model without its head (a plain function), which fills no cache in
    training, unless it is given one.

    Hugging Face's config asks for a cache by default, in training too, and makes other masks where there is one: so
    there is one, which stays empty and is not returned.
    """
    names = list(inspect.signature(original).parameters)[1:]

    @stand_in_for(original)
    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        if not _makes_cache(self, given, chunk_tokens):
            return original(self, *args, **kwargs)
        logger.warning_once(
            "layers that are tiled as a whole make no cache in training; pass use_cache=False, or a cache to be filled"
        )
        cache = DynamicCache(config=self.config)
        setattr(cache, _UNFILLED, True)
        outputs = original(self, **given | {"past_key_values": cache})
        if isinstance(outputs, tuple):
            return tuple(output for output in outputs if output is not cache)
        outputs.past_key_values = None
        return outputs

    return forward


def _makes_cache(model: nn.Module, given: dict[str, Any], chunk_tokens: int | None) -> bool:
    """Whether a model that is called so would fill a cache of its own while it is trained on more than a tile."""
    if not (model.training and torch.is_grad_enabled()) or given.get("past_key_values") is not None:
        return False
    wanted = given.get("use_cache")
    if not (model.config.use_cache if wanted is None else wanted):
        return False
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens = ids.numel() if ids is not None else 0 if embeds is None else embeds.shape[:-1].numel()
    return tokens > resolve_chunk_tokens(chunk_tokens, model.config.hidden_size)


def is_unfilled(cache: Any) -> bool:
    """Whether a layer is to leave a cache empty."""
    return hasattr(cache, _UNFILLED)
