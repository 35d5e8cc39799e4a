"""Layers of bitsandbytes whose weights have 4 bits, read by decoding them once a call."""

import sys
from functools import partial
from typing import Any

from seqtile.ops.linear import Encoding

_MODULES = "bitsandbytes.nn.modules"


def is_quantised(module: Any) -> bool:
    """Says if a module is bitsandbytes' layer of 4 bits (NF4 or FP4), or of a subclass that computes as it does."""
    layer = getattr(sys.modules.get(_MODULES), "Linear4bit", None)
    return layer is not None and isinstance(module, layer)


def decoding_reason(module: Any) -> str | None:
    """Says why a quantised layer cannot be read."""
    forward = type(module).forward
    if forward.__module__ != _MODULES or forward.__qualname__ != "Linear4bit.forward":
        return f"is a {type(module).__module__}.{type(module).__name__}, which has a forward of its own"
    state = getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is None:
        return "is of 4 bits and not yet quantised: move the model to its device"
    if getattr(state, "packing_format_for_cpu", False):
        return "is of 4 bits, packed for evaluation on a CPU"
    return None


def encoding_of(module: Any) -> Encoding | None:
    """Returns how a readable layer's weight is stored; None if as numbers."""
    if not is_quantised(module):
        return None
    from bitsandbytes.functional import dequantize_4bit

    state = getattr(module.weight, "quant_state", None) or module.quant_state
    return Encoding(state.shape, partial(dequantize_4bit, quant_state=state))
