"""The tiled forward of a model's RMSNorm, which keeps no float32 copies of what it is given."""

from collections.abc import Callable

import torch
from torch import nn

from seqtile.arch import ARCHS
from seqtile.models.placement import computed_forward
from seqtile.models.plain import named, origin, why_call_changed, why_none_is_plain
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.decoder_layer.params import Norm
from seqtile.ops.rms_norm import rms_norm
from seqtile.ops.tiles import resolve_chunk_tokens

_FORWARDS = {  # where one that `rms_norm` computes was written
    "liger_kernel.transformers.rms_norm.LigerRMSNorm.forward",
    *(f"{arch.modeling_name}.{arch.prefix}RMSNorm.forward" for arch in ARCHS.values() if arch.layer),
}


def tiled_norm_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """A forward in place of `original`, an RMSNorm's forward (a plain function); rows need no tiles.

    `original` itself in evaluation, where a sequence fits in a tile, and for heads [B, S, H, K].
    """

    @stand_in_for(original)
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fits = hidden_states.shape[:-1].numel() <= resolve_chunk_tokens(chunk_tokens, hidden_states.shape[-1])
        if fits or not self.training or hidden_states.dim() != 3 or why_none_is_plain() is not None:
            return original(self, hidden_states)
        return rms_norm(hidden_states, *read_norm(self))

    return forward


def read_norm(norm: nn.Module) -> Norm:
    """Weight and eps. Under ZeRO-3 each reading is a collective."""
    return Norm(norm.weight, norm.variance_epsilon)


def check_norm(norm: nn.Module) -> None:
    """Raises ValueError where the tiled forward would not compute what `norm` computes."""
    if (reason := why_no_norm("norm", norm)) is not None:
        raise ValueError(f"a tiled norm reads its weight, and {reason}; apply with layer=False")


def why_no_norm(name: str, norm: nn.Module) -> str | None:
    """Why a norm must be called rather than read; None if it may be read, unless `why_none_is_plain`."""
    cls = type(norm)
    if origin(computed_forward(norm)) not in _FORWARDS:
        own = "forward" in vars(norm)
        return f"{name} has a forward of its own" if own else f"{name} is a {named(cls)}"
    if getattr(norm, "offset", 0) or getattr(norm, "casting_mode", "llama") != "llama":
        return f"{name} is another kind of RMSNorm than Llama's"
    reason = why_call_changed(norm)
    return None if reason is None else f"{name} {reason}"
