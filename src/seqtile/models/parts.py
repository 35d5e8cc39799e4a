"""The table of tiled parts: how each kind of module is found, judged and computed. What users put into one is judged by
known.py."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from seqtile.models.find import experts_in, layers_of, mlps_of
from seqtile.models.forward.layer import check_head_groups, layer_verdict, tiled_layer_forward
from seqtile.models.forward.loss import loss_verdict, tiled_loss_forward
from seqtile.models.forward.mlp import experts_verdict, mlp_verdict, tiled_experts_forward, tiled_mlp_forward
from seqtile.models.forward.norm import norms_of, tiled_norm_forward
from seqtile.models.forward.without_cache import base_models_of, forward_without_cache
from seqtile.models.placement import Options
from seqtile.models.read import check_untransformed
from seqtile.models.verdict import Verdict


class Part(NamedTuple):
    """A kind of module that has a tiled forward."""

    option: str
    """The option of `apply_seqtile_to_llama` that asks for it."""
    modules: Callable[[nn.Module], list[nn.Module]]
    """All such modules of a model."""
    tiled_forward: Callable[[Options, Callable], Callable] = lambda _, original: original
    """Returns the tiled forward that replaces a forward (a plain function)."""
    verdict: Callable[[nn.Module], Verdict] = lambda _: Verdict("untiled")
    """Finds how a module is computed."""
    swapped: bool = False
    """Its class is swapped for a subclass, rather than changed."""
    takes_head_groups: bool = False
    """Its attention can be computed in head chunks."""
    is_model: bool = False
    """Its modules are models, whose first training step is compared with the untiled model's."""

    def refusal(self, module: nn.Module) -> str | None:
        """Says why a module, by its kind, is left untiled."""
        verdict = self.verdict(module)
        return None if verdict.tileable else verdict.reason

    def check(self, module: nn.Module, options: Options) -> None:
        """Raises ValueError if the tiled forward would refuse a module."""
        check_untransformed()
        verdict = self.verdict(module)
        if verdict.error is not None:
            raise ValueError(verdict.error)
        if options.head_groups is not None and self.takes_head_groups:
            check_head_groups(module, verdict, options)


LOSS = Part("loss", lambda model: [model], tiled_loss_forward, loss_verdict, is_model=True)
MLP = Part("mlp", mlps_of, tiled_mlp_forward, mlp_verdict, swapped=True)
EXPERTS = Part("mlp", experts_in, tiled_experts_forward, experts_verdict, swapped=True)
LAYER = Part("layer", layers_of, tiled_layer_forward, layer_verdict, takes_head_groups=True)
NORM = Part("layer", norms_of, tiled_norm_forward, swapped=True)
BASE = Part("layer", base_models_of, forward_without_cache, is_model=True)
ATTENTION = Part("attention", base_models_of, forward_without_cache, is_model=True)
# Where neither the loss nor layers are tiled; below the head for those who call that alone.
CHECK = Part(
    "", lambda model: list(dict.fromkeys((model, model.base_model))), lambda _, original: original, is_model=True
)
PARTS = (LOSS, MLP, EXPERTS, ATTENTION, LAYER, NORM, BASE)
