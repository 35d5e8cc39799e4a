"""The tiled forward of a gated MLP module: gate_proj, up_proj and down_proj, or gate_up_proj and down_proj."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from seqtile.models.experts import are_experts
from seqtile.models.projections import check_not_zero3, has_hooks, read_projection, unreadable
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.gated_mlp import gated_mlp
from seqtile.ops.projection import LowRank
from seqtile.ops.tiled import tiled

_ACTIVATIONS = {  # class or config name -> gated_mlp's
    "silu": "silu",
    "swish": "silu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def tiled_mlp_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """A tiled forward in place of `original`, an MLP's forward (a plain function).

    `gated_mlp` where the projections' tensors can be read, else `original` itself, tile by tile. Which of them is asked
    at every forward: an adapter may have come since. The tensors are read in the same order whatever the length, also
    where the sequence fits in a tile: under ZeRO-3 each reading is a collective, and ranks may hold sequences of
    different lengths.
    """

    @stand_in_for(original)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (reason := why_generic(self)) is not None:
            check_not_zero3(self, reason)
            params = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return tiled(partial(original, self), x, params=params, chunk_tokens=chunk_tokens)
        gate, up, down = read_mlp(self)
        return gated_mlp(
            x,
            gate[0],
            up[0],
            down[0],
            gate_bias=gate[1],
            up_bias=up[1],
            down_bias=down[1],
            gate_lora=gate[2],
            up_lora=up[2],
            down_lora=down[2],
            activation=activation_of(self),
            chunk_tokens=chunk_tokens,
        )

    return forward


def read_mlp(mlp: nn.Module) -> list[tuple[torch.Tensor | None, torch.Tensor | None, LowRank | None]]:
    """Weight, bias and adapter of gate, up and down; up has none of them where gate holds it."""
    gate, *up, down = (read_projection(name, getattr(mlp, name)) for name in _projections(mlp))
    return [gate, *(up or [(None, None, None)]), down]


def activation_of(mlp: nn.Module) -> str:
    """As `gated_mlp` calls it."""
    return _ACTIVATIONS[_activation_name(mlp)]


def why_generic(mlp: nn.Module) -> str | None:
    """Why an MLP is tiled as it is rather than by `gated_mlp`; None if by `gated_mlp`."""
    if are_experts(mlp):
        return "tokens are routed to experts"
    names = _projections(mlp)
    for name in names:
        if (reason := unreadable(name, getattr(mlp, name, None))) is not None:
            return reason
    if _activation_name(mlp) not in _ACTIVATIONS:
        return f"its activation is {_activation_name(mlp)}"
    activation = _activation(mlp)
    if isinstance(activation, nn.Module) and has_hooks(activation, sharded=getattr(mlp, names[0])):
        return "its activation has hooks"
    return None


def check_mlp(mlp: nn.Module) -> None:
    """Raises ValueError where the tiled MLP would refuse to run."""
    if (reason := why_generic(mlp)) is not None:
        check_not_zero3(mlp, reason)


def _projections(mlp: nn.Module) -> tuple[str, ...]:
    fused = hasattr(mlp, "gate_up_proj")
    return ("gate_up_proj", "down_proj") if fused else ("gate_proj", "up_proj", "down_proj")


def _activation(mlp: nn.Module) -> object:
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def _activation_name(mlp: nn.Module) -> str:
    """The class of its activation; where it has none, as Liger's MLPs, what the config says."""
    if (activation := _activation(mlp)) is not None:
        return type(activation).__name__
    return getattr(mlp.config, "hidden_activation", None) or mlp.config.hidden_act
