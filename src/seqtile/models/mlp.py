"""The tiled forward of a gated MLP module with `gate_proj`, `up_proj` and `down_proj`."""

from collections.abc import Callable

import torch
from torch import nn

from seqtile.models.plain import check_no_hooks, check_plain_linear, local_weight
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.gated_mlp import gated_mlp

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tiled_mlp_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """A tiled forward in place of `original`, an MLP's forward (a plain function).

    The weights are read in the same order whatever the length, also where the sequence fits in a tile: under ZeRO-3
    each reading is a collective, and ranks may hold sequences of different lengths.
    """

    @stand_in_for(original)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_mlp(self)
        weights = [local_weight(name, getattr(self, name)) for name in _PROJECTIONS]
        return gated_mlp(x, *weights, chunk_tokens=chunk_tokens)

    return forward


def check_mlp(mlp: nn.Module) -> None:
    """Raises ValueError where the tiled MLP would not compute what `mlp` computes."""
    for name in _PROJECTIONS:
        check_plain_linear(name, getattr(mlp, name, None))
    activation = getattr(mlp, "act_fn", None)  # Liger's MLP has none: it is SiLU by name
    name = mlp.config.hidden_act if activation is None else type(activation).__name__
    if name not in ("silu", "swish", "SiLU", "SiLUActivation"):
        raise ValueError(f"the MLP's activation is {name}: seqtile tiles SiLU only so far; apply with mlp=False")
    if isinstance(activation, nn.Module):
        check_no_hooks("act_fn", activation, sharded=mlp.gate_proj)
