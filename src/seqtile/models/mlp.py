"""The tiled forward of a gated MLP module: gate_proj, up_proj and down_proj, or gate_up_proj and down_proj."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from seqtile.arch import ARCHS
from seqtile.models.called_again import called_again
from seqtile.models.experts import are_experts
from seqtile.models.notes import note_that_it_fits
from seqtile.models.placement import forward_in_place_of
from seqtile.models.plain import activation_name, named, origin, why_no_activation, why_none_is_plain
from seqtile.models.projections import check_not_zero3, check_untransformed, read_projection, trained, unreadable
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.gated_mlp import gated_mlp
from seqtile.ops.projection import LowRank
from seqtile.ops.tiled import tiled
from seqtile.ops.tiles import resolve_chunk_tokens

_GIVEN = "given"  # the activation is the module that the MLP holds
_FORWARDS = {  # where an MLP's forward that `gated_mlp` computes was written -> its activation
    "liger_kernel.transformers.geglu.LigerGEGLUMLP.forward": "gelu_tanh",
    "liger_kernel.transformers.swiglu.LigerPhi3SwiGLUMLP.forward": "silu",
    "liger_kernel.transformers.swiglu.LigerQwen3MoeSwiGLUMLP.forward": "silu",
    "liger_kernel.transformers.swiglu.LigerSwiGLUMLP.forward": "silu",
    **{f"{arch.modeling_name}.{arch.prefix}MLP.forward": _GIVEN for arch in ARCHS.values()},
}


def tiled_mlp_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """A tiled forward in place of `original`, an MLP's forward (a plain function).

    `gated_mlp` where the projections' tensors can be read, else `original` itself, tile by tile. Which of them is asked
    at every forward: an adapter may have come since. The tensors are read in the same order whatever the length, also
    where the sequence fits in a tile: under ZeRO-3 each reading is a collective, and ranks may hold sequences of
    different lengths.
    """
    activation, unknown = _FORWARDS.get(origin(original)), f"its forward is {named(original)}"

    @stand_in_for(original)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, tile = x.shape[:-1].numel(), resolve_chunk_tokens(chunk_tokens, x.shape[-1])
        note_that_it_fits(self, tokens, tile)
        if tokens > tile:
            check_untransformed()
        if (reason := _why_called(self, activation) if activation else unknown) is not None:
            check_not_zero3(self, reason)
            return tiled(
                called_again(partial(original, self), self), x, params=trained(self), chunk_tokens=chunk_tokens
            )
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
            activation=_activation_name(self, activation),
            chunk_tokens=chunk_tokens,
        )

    return forward


def read_mlp(mlp: nn.Module) -> list[tuple[torch.Tensor | None, torch.Tensor | None, LowRank | None]]:
    """Weight, bias and adapter of gate, up and down; up has none of them where gate holds it."""
    gate, *up, down = (read_projection(name, getattr(mlp, name)) for name in _projections(mlp))
    return [gate, *(up or [(None, None, None)]), down]


def activation_of(mlp: nn.Module) -> str:
    """Of an MLP that `gated_mlp` computes, as that calls it."""
    return _activation_name(mlp, _FORWARDS[origin(forward_in_place_of(mlp))])


def is_gated_mlp(forward: Callable) -> bool:
    """Whether an MLP's forward is one that `gated_mlp` computes."""
    return origin(forward) in _FORWARDS


def why_generic(mlp: nn.Module) -> str | None:
    """Why an MLP is tiled as it is rather than by `gated_mlp`; None if by `gated_mlp`."""
    if are_experts(mlp):
        return "tokens are routed to experts"
    forward = forward_in_place_of(mlp)
    if not is_gated_mlp(forward):
        return f"its forward is {named(forward)}"
    return _why_called(mlp, _FORWARDS[origin(forward)])


def _why_called(mlp: nn.Module, activation: str) -> str | None:
    """`why_generic` of an MLP whose forward is known to have this `activation`, as the table has it."""
    if (reason := why_none_is_plain()) is not None:
        return reason
    for name in _projections(mlp):
        if (reason := unreadable(name, getattr(mlp, name, None))) is not None:
            return reason
    return why_no_activation(_activation(mlp)) if activation == _GIVEN else None


def check_mlp(mlp: nn.Module) -> None:
    """Raises ValueError where the tiled MLP would refuse to run."""
    if (reason := why_generic(mlp)) is not None:
        check_not_zero3(mlp, reason)


def _projections(mlp: nn.Module) -> tuple[str, ...]:
    fused = hasattr(mlp, "gate_up_proj")
    return ("gate_up_proj", "down_proj") if fused else ("gate_proj", "up_proj", "down_proj")


def _activation_name(mlp: nn.Module, activation: str) -> str:
    return activation_name(_activation(mlp)) if activation == _GIVEN else activation


def _activation(mlp: nn.Module) -> object:
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
