"""The table of what is tiled: for each kind of module how it is found, checked and computed."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from seqtile.models.base_model import base_models_of, uncached_forward
from seqtile.models.find import experts_in, layers_of, mlps_of
from seqtile.models.first_step import checked_forward
from seqtile.models.layer import check_layer, layer_refusal, tiled_layer_forward
from seqtile.models.loss import check_loss, tiled_loss_forward
from seqtile.models.mlp import check_experts, check_mlp, tiled_experts_forward, tiled_mlp_forward
from seqtile.models.norm import check_norm, norms_of, tiled_norm_forward
from seqtile.models.placement import Options


class Part(NamedTuple):
    """A kind of module that has a tiled forward."""

    option: str
    """The option of `apply_seqtile_to_llama` that asks for it."""
    modules: Callable[[nn.Module], list[nn.Module]]
    """All such modules of a model."""
    tiled_forward: Callable[[Options, Callable], Callable]
    """Returns the tiled forward that stands in for one (a plain function)."""
    check: Callable[[nn.Module, Options], str | None] = lambda *_: None
    """Raises ValueError where the tiled forward would refuse a module; returns why it falls back, if it does."""
    refusal: Callable[[nn.Module], str | None] = lambda _: None
    """Says why a module, by its kind, is left untiled."""
    swapped: bool = False
    """Its class is swapped for a subclass, rather than changed."""


LOSS = Part("loss", lambda model: [model], tiled_loss_forward, check_loss)
MLP = Part("mlp", mlps_of, tiled_mlp_forward, check_mlp, swapped=True)
EXPERTS = Part("mlp", experts_in, tiled_experts_forward, check_experts, swapped=True)
LAYER = Part("layer", layers_of, tiled_layer_forward, check_layer, layer_refusal)
NORM = Part("layer", norms_of, tiled_norm_forward, check_norm, swapped=True)
BASE = Part("layer", base_models_of, uncached_forward)
CHECK = Part("check", lambda model: [model], checked_forward)  # where the loss is not tiled, whose forward checks, too
PARTS = (LOSS, MLP, EXPERTS, LAYER, NORM, BASE)
