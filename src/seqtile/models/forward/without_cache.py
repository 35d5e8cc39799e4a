"""The forward of a model without its head where its layers are tiled as a whole: it makes no cache in training."""

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers.utils import logging

from seqtile.models.find import layers_of, positional_of
from seqtile.models.placement import Options
from seqtile.models.varlen import choose_varlen_by_class
from seqtile.renamed import CACHE_NAMES, cache_in

logger = logging.get_logger(__name__)


def base_models_of(model: nn.Module) -> list[nn.Module]:
    """Returns the models inside `model` that hold its layers and can make a cache, such as the one without its head."""
    layers = set(layers_of(model))
    inside = [module for module in model.modules() if module is not model and module not in layers]
    around = [module for module in inside if not layers.isdisjoint(module.modules())]
    arguments = {module: inspect.signature(type(module).forward).parameters for module in around}
    return [module for module, names in arguments.items() if "use_cache" in names and names.keys() & {*CACHE_NAMES}]


def forward_without_cache(options: Options, original: Callable) -> Callable:
    """Returns a forward in place of `original`, that of a model without its head (a plain function), which makes no
    cache in training, however long the sequence, unless it is given one. With `attention` among the options, as on a
    class, it chooses that attention in a model's first forward.

    Hugging Face's config asks for a cache by default, in training too. With one, packed documents are not told apart.
    """
    names = [each.name for each in positional_of(original)]

    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        if options.attention:
            choose_varlen_by_class(self)
        in_training = self.training and torch.is_grad_enabled()
        if not in_training or cache_in(given) is not None:
            return original(self, *args, **kwargs)
        if (wanted := given.get("use_cache")) is None:
            wanted = getattr(self.config, "use_cache", False)
        if wanted and not torch.compiler.is_compiling():
            logger.warning_once(
                "tiled layers make no cache in training; pass use_cache=False, or a cache that is to be filled"
            )
        return original(self, **given | {"use_cache": False})

    return forward
