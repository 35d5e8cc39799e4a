"""The tiled forward of a model's RMSNorm, which keeps no float32 copies of what it is given."""

from collections.abc import Callable

import torch
from torch import nn

from seqtile.models.placement import package_of
from seqtile.models.projections import has_hooks
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.layer_parts import Norm
from seqtile.ops.rms_norm import rms_norm


def tiled_norm_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """A forward in place of `original`, an RMSNorm's forward (a plain function); rows need no tiles."""

    @stand_in_for(original)
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
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
    """Why a norm must be called rather than read; None if it may be read."""
    cls = type(norm)
    plain = cls.__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon")
    if not plain or package_of(cls.forward) not in ("transformers", "liger_kernel", "seqtile"):
        return f"{name} is a {cls.__module__}.{cls.__qualname__}"
    if getattr(norm, "offset", 0) or getattr(norm, "casting_mode", "llama") != "llama":
        return f"{name} is another kind of RMSNorm than Llama's"
    own = vars(norm).get("forward")
    if own is not None and package_of(getattr(own, "__func__", own)) not in ("liger_kernel", "seqtile"):
        return f"{name} has a forward of its own"
    return f"{name} has hooks" if has_hooks(norm, norm) else None
