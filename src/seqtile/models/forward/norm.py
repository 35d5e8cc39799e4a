"""The tiled forward of the norm after the last layer, and how a norm is read."""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from seqtile.models.find import text_model_of
from seqtile.models.functions import defining_path, named
from seqtile.models.placement import Options, computed_forward
from seqtile.models.read import call_unfused_reason, is_plain, process_unfused_reason
from seqtile.models.recognise import is_llamas_norm
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.ops.decoder_layer.params import Norm
from seqtile.ops.rms_norm import rms_norm

_LIGERS_NORM = "liger_kernel.transformers.rms_norm.LigerRMSNorm.forward"


def tiled_norm_forward(options: Options, original: Callable) -> Callable:
    """Returns a forward in place of `original`, an RMSNorm's forward (a plain function); rows need no chunks.

    `original` itself where a sequence fits in a chunk, and for heads [B, S, H, K].
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            forward.seqtile_placement.check()
        fits = hidden_states.shape[:-1].numel() <= resolve_chunk_tokens(options.chunk_tokens, hidden_states.shape[-1])
        is_readable = is_plain(self._parameters.get("weight")) and process_unfused_reason() is None
        if fits or hidden_states.dim() != 3 or not is_readable:
            return original(self, hidden_states)
        weight, eps = read_norm(self)
        return rms_norm(hidden_states, weight, eps, _output_dtype(self, hidden_states.dtype))

    return forward


def read_norm(norm: nn.Module) -> Norm:
    """Reads weight and eps. Under ZeRO-3 each reading is a collective."""
    return Norm(norm.weight, norm.variance_epsilon)


def _output_dtype(norm: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of what a norm returns for an input of `dtype`: Llama's multiplies by its weight last."""
    of_liger = defining_path(computed_forward(norm)) == _LIGERS_NORM
    return dtype if of_liger else _promoted(dtype, norm.weight.dtype)


_promoted = cache(torch.promote_types)  # which selective checkpointing would record


def norms_of(model: nn.Module) -> list[nn.Module]:
    """Returns the norms after the last layer that the tiled forward computes; none if it is of another kind."""
    return [child for child in text_model_of(model).children() if _is_norm(child)]


def _is_norm(module: nn.Module) -> bool:
    """Returns whether a module is Llama's RMSNorm, or Liger's with the settings of Llama's."""
    if defining_path(forward := computed_forward(module)) == _LIGERS_NORM:
        return not getattr(module, "offset", 0) and getattr(module, "casting_mode", "llama") == "llama"
    return is_llamas_norm(forward)


def norm_unfused_reason(name: str, norm: nn.Module, dtype: torch.dtype | None = None) -> str | None:
    """Says why a norm cannot be fused; see `process_unfused_reason`, too. `dtype`: of the products of what it returns,
    if known; autocast casts to it."""
    if not _is_norm(norm):
        own = "forward" in vars(norm)
        return f"{name} has a forward of its own" if own else f"{name} is a {named(type(norm))}, not Llama's"
    if not is_plain(weight := norm._parameters.get("weight")):
        return f"{name}.weight is a {named(type(weight))}"
    # FSDP2 may gather a shard in another dtype.
    known = dtype is not None and not torch._C._is_any_autocast_enabled() and not isinstance(norm.weight, DTensor)
    if known and (returned := _output_dtype(norm, dtype)) != dtype:
        return f"{name} returns {returned}, where its input is in {dtype}"
    reason = call_unfused_reason(norm)
    return None if reason is None else f"{name} {reason}"
