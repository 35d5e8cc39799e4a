"""Reading a projection's tensors directly, without calling the projection, where that computes the same.

So read a plain nn.Linear and a plain LoRA of PEFT's over one, see `plain.py`. Anything else, such as a quantised
layer, an exotic adapter or a layer with hooks, is called as it is, tile by tile; `unreadable` says why.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from seqtile.models.plain import named, origin, why_changed, why_no_linear
from seqtile.ops.checks import DTYPES
from seqtile.ops.projection import LowRank

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)  # the last: a simulation of the first two


class Layers(NamedTuple):
    """The modules whose tensors a projection is made of."""

    base: nn.Linear
    a: nn.Linear | None = None
    b: nn.Linear | None = None
    scale: float = 1.0


def read_projection(name: str, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None, LowRank | None]:
    """Weight, bias and adapter of a readable projection, whole and on this rank.

    Raises ValueError if they are sharded just now. Under ZeRO-3 each reading is a collective.
    """
    layers = _layers_of(module)
    assert isinstance(layers, Layers), f"{name} {layers}"
    base, a, b, scale = layers
    weight = _whole(name, base.weight)
    adapter = None if a is None else LowRank(_whole(name, a.weight), _whole(name, b.weight), scale)
    return weight, base.bias, adapter


def unreadable(name: str, module: nn.Module | None) -> str | None:
    """Why a projection must be called rather than read; None if it may be read, unless `why_none_is_plain`."""
    layers = _layers_of(module)
    if isinstance(layers, str):
        return f"{name} {layers}"
    for layer in layers[:3]:
        weight = None if layer is None else layer.weight
        if weight is not None and type(weight) not in _PLAIN and not isinstance(weight, DTensor):
            return f"{name}.weight is a {named(type(weight))}"
        if weight is not None and weight.dtype not in DTYPES:
            return f"{name}.weight is {weight.dtype}"
    return None


def trained(*modules: nn.Module) -> list[torch.Tensor]:
    """Every leaf that requires a gradient and that calling the modules uses: parameters, and the scaling of LoRA
    adapters where it is learned, which PEFT keeps in a plain dict."""
    found = [parameter for module in modules for parameter in module.parameters()]
    for part in (part for module in modules for part in module.modules()):
        if _is_lora(part):
            found += [scale for scale in part.scaling.values() if isinstance(scale, torch.Tensor)]
    return list({id(leaf): leaf for leaf in found if leaf.requires_grad}.values())


def _layers_of(module: Any) -> Layers | str:
    """What a projection is made of, if it is a plain linear layer or a plain LoRA over one; else what it is instead."""
    if _is_lora(module):
        return _lora_layers(module)
    return why_no_linear(module) or Layers(module)


def _is_lora(module: Any) -> bool:
    """Whether a module is PEFT's LoRA of a linear layer, and of no subclass."""
    return type(module) is getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)


def _lora_layers(module: Any) -> Layers | str:
    """Of PEFT's LoRA: without dropout, of the plain kind, one active adapter at most, neither half merged."""
    if origin(type(module).forward) != "peft.tuners.lora.layer.Linear.forward":
        return f"is a {named(type(module))}, whose forward was replaced"
    if (reason := why_changed(module)) is not None:
        return reason
    base = _layers_of(module.base_layer)
    if isinstance(base, str):
        return f"is a LoRA adapter whose base layer {base}"
    if base.a is not None:
        return "is a LoRA adapter over another"
    if module.merged and module.disable_adapters:
        return "is a LoRA adapter that is merged and disabled"
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.merged or module.disable_adapters or not active:
        return base
    if len(active) > 1:
        return f"has {len(active)} active LoRA adapters"
    return _adapted(base, module, active[0])


def _adapted(base: Layers, module: Any, name: str) -> Layers | str:
    """`base` with the adapter `name`."""
    a, b, dropout, scale = (part[name] for part in (module.lora_A, module.lora_B, module.lora_dropout, module.scaling))
    if name in module.lora_variant:
        return f"has a LoRA adapter of another kind, {type(module.lora_variant[name]).__name__}"
    for half, part in (("lora_A", a), ("lora_B", b)):
        if (reason := why_no_linear(part)) is not None:
            return f"has a LoRA adapter whose {half} {reason}"
    if a.bias is not None or b.bias is not None:
        return "has a LoRA adapter with a bias"
    if not isinstance(scale, int | float):
        return f"has a LoRA adapter whose scaling is a {named(type(scale))}"
    if type(dropout) is nn.Dropout and dropout.training and dropout.p > 0:
        return f"has a LoRA adapter with dropout {dropout.p}"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"has a LoRA adapter whose dropout is a {named(type(dropout))}"
    if (reason := why_changed(dropout)) is not None:
        return f"has a LoRA adapter whose dropout {reason}"
    return Layers(base.base, a, b, scale)


def _whole(name: str, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, DTensor):
        raise ValueError(
            f"{name}.weight is sharded while its parent runs; with FSDP2 shard {name} together with its parent "
            "(fully_shard(model) alone, or in one group), and leave it out of a tensor-parallel plan"
        )
    return weight


def call_in_place_of(module: nn.Module, function: Callable, *args: torch.Tensor) -> Any:
    """function(*args), inside the module's own call if FSDP2 shards it by itself: its hooks then gather the weight for
    `function` and see to its gradient."""
    if not isinstance(module, FSDPModule):
        return function(*args)

    def once(*args: torch.Tensor) -> Any:
        del module.forward  # before anyone asks whether the module has a forward of its own
        return function(*args)

    module.forward = once
    try:
        return module(*args)
    finally:
        vars(module).pop("forward", None)


def check_untransformed() -> None:
    """Raises ValueError inside a transform of torch.func."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():  # a node in a compiled graph
        raise ValueError(
            "expected no transform of torch.func (grad, vmap, jvp, ...) around a tiled model, whose tiles they cannot "
            "follow: use torch.autograd, or take seqtile off first with seqtile.restore(model)"
        )


def check_not_zero3(module: nn.Module, reason: str) -> None:
    """Raises ValueError for a module that would be called once per tile under ZeRO-3."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ValueError(
            f"{reason}, so it is called once per tile; under ZeRO-3 each call gathers its parameters, and ranks with "
            "different numbers of tiles would wait for each other for ever: leave this part untiled (mlp=False or "
            "loss=False; seqtile.restore(model) first), or use ZeRO-2 or FSDP2"
        )
