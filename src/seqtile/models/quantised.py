"""Linear layers whose frozen weights are stored in fewer bits, read by decoding them once a call.

These are bitsandbytes' of 4 bits and torchao's layouts for weights alone. Every other way to store a weight is called
chunk by chunk; so are layers that also quantise their input: decoding the weight alone would compute something else.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from seqtile.ops.linear import QuantizedWeight

_BITSANDBYTES = "bitsandbytes.nn.modules"


class _Layout(NamedTuple):
    """A class of torchao's for weights."""

    decode: Callable[[Any], torch.Tensor]
    """Makes [out, in] numbers of a weight, in its own dtype."""
    of_inputs: tuple[str, ...] = ()
    """Its attributes that are set where a product rounds or scales its input, too."""


def _decoded_int8(weight: Any) -> torch.Tensor:
    """Decodes as torchao multiplies: with one scale a row or a tensor its product knows no zero point."""
    if weight.block_size[-1] < weight.shape[-1]:
        return weight.dequantize()
    return weight.qdata.to(weight.dtype).mul_(weight.scale.to(weight.dtype))


_LAYOUTS = {  # of torchao.quantization
    "Int8Tensor": _Layout(_decoded_int8, ("act_quant_kwargs", "act_pre_scale")),
    "IntxUnpackedToInt8Tensor": _Layout(lambda weight: weight.dequantize(), ("activation_quantization",)),
    "Float8Tensor": _Layout(lambda weight: weight.dequantize(), ("act_quant_kwargs",)),
    "NF4Tensor": _Layout(lambda weight: weight.to(weight.dtype)),
}


def seen_weight(module: torch.nn.Module) -> Any:
    """Returns a layer's weight for inspection only: ZeRO-3 does not gather it, which would last until the module that
    is running, or its backward, ends."""
    parameter = module._parameters.get("weight")
    return module.weight if parameter is None else parameter


def is_quantised(module: Any) -> bool:
    """Returns whether a module is a linear layer with a weight of one of bitsandbytes' or torchao's kinds above."""
    return _is_4_bits(module) or _layout_of(module) is not None


def decoding_reason(module: Any) -> str | None:
    """Says why F.linear with the decoded weight of a quantised layer differs from its forward; looks at no hooks."""
    if (layout := _layout_of(module)) is not None:
        if any(getattr(module.weight, name, None) is not None for name in layout.of_inputs):
            return f"quantises or scales its input ({type(module.weight).__name__})"
        return None
    forward = type(module).forward
    if forward.__module__ != _BITSANDBYTES or forward.__qualname__ != "Linear4bit.forward":
        return f"is a {type(module).__module__}.{type(module).__name__}, which has a forward of its own"
    state = getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is None:
        return "is of 4 bits and not yet quantised: move the model to its device"
    if getattr(state, "packing_format_for_cpu", False):
        return "is of 4 bits, packed for evaluation on a CPU"
    return None


def has_4_bits(model: torch.nn.Module) -> bool:
    """Returns whether a model has bitsandbytes' layers of 4 bits."""
    return any(map(_is_4_bits, model.modules()))


def computing_dtype(module: Any) -> torch.dtype | None:
    """Returns the fixed dtype in which a quantised layer computes; None if it computes in that of its input."""
    return module.weight.dtype if _layout_of(module) is not None else getattr(module, "compute_dtype", None)


def reader_of(module: Any) -> Callable[[Any], QuantizedWeight] | None:
    """Returns a function that reads the weight of a readable layer such as this one; None if it is stored as
    numbers."""
    if (layout := _layout_of(module)) is not None:
        return lambda module: QuantizedWeight(module.weight.shape, partial(layout.decode, module.weight))
    return _read_4_bits if _is_4_bits(module) else None


def _read_4_bits(module: Any) -> QuantizedWeight:
    from bitsandbytes.functional import dequantize_4bit

    state = getattr(module.weight, "quant_state", None) or module.quant_state
    return QuantizedWeight(state.shape, partial(dequantize_4bit, module.weight.data, quant_state=state))


def _is_4_bits(module: Any) -> bool:
    layer = getattr(sys.modules.get(_BITSANDBYTES), "Linear4bit", None)
    return layer is not None and isinstance(module, layer)


def _layout_of(module: Any) -> _Layout | None:
    """Returns the layout of a layer's weight, if torchao's own class made it."""
    torchao = sys.modules.get("torchao.quantization")
    if torchao is None or not isinstance(module, torch.nn.Linear):
        return None
    kind = type(seen_weight(module))
    layout = _LAYOUTS.get(kind.__name__)
    return layout if layout is not None and kind is getattr(torchao, kind.__name__, None) else None
