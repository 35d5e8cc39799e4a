"""Reading a projection's tensors directly, without calling the projection, where that computes the same.

So read a plain nn.Linear and a plain LoRA of PEFT's over one. Anything else, such as a quantised layer, an exotic
adapter or a layer with hooks, is called as it is, tile by tile; `unreadable` says why.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
    """Why a projection must be called rather than read; None if it may be read."""
    layers = _layers_of(module)
    if isinstance(layers, str):
        return f"{name} {layers}"
    for part in {module, *(layer for layer in layers[:3] if layer is not None)}:
        if "forward" in vars(part):
            return f"{name} has a forward of its own, such as Accelerate's device_map gives it"
        if _has_hooks(part, layers.base):
            return f"{name} has hooks"
    for layer in layers[:3]:
        weight = None if layer is None else layer.weight
        if weight is not None and type(weight) not in _PLAIN and not isinstance(weight, DTensor):
            return f"{name}.weight is a {_full_name(type(weight))}"
        if weight is not None and weight.dtype not in DTYPES:
            return f"{name}.weight is {weight.dtype}"
    return None


def has_hooks(module: nn.Module, sharded: nn.Module) -> bool:
    """Whether `module` has hooks that a tiled forward would not call; see `_has_hooks` for `sharded`."""
    layers = _layers_of(sharded)
    return _has_hooks(module, layers.base if isinstance(layers, Layers) else sharded)


def _has_hooks(module: nn.Module, base: nn.Module) -> bool:
    """FSDP2's and ZeRO-3's do not count; theirs are known by the weight of `base`, since ZeRO-3 hooks every module."""
    if isinstance(base, FSDPModule) or hasattr(getattr(base, "weight", None), "ds_id"):
        return False
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _layers_of(module: nn.Module | None) -> Layers | str:
    """What a projection is made of, if it is a plain linear layer or a plain LoRA over one; else what it is instead."""
    if type(module).__module__ == "peft.tuners.lora.layer" and type(module).__name__ == "Linear":
        return _lora_layers(module)
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return Layers(module)
    return f"is a {_full_name(type(module))}"


def _lora_layers(module: Any) -> Layers | str:
    """Of PEFT's LoRA: without dropout, of the plain kind, one active adapter at most, neither half merged."""
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
    name = active[0]
    dropout = module.lora_dropout[name]
    if len(active) > 1:
        return f"has {len(active)} active LoRA adapters"
    if name in module.lora_variant:
        return f"has a LoRA adapter of another kind, {type(module.lora_variant[name]).__name__}"
    if module.lora_B[name].bias is not None:
        return "has a LoRA adapter with a bias"
    if not isinstance(dropout, nn.Identity) and dropout.training and dropout.p > 0:
        return f"has a LoRA adapter with dropout {dropout.p}"
    return Layers(base.base, module.lora_A[name], module.lora_B[name], module.scaling[name])


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
    module.forward = function
    try:
        return module(*args)
    finally:
        del module.forward


def check_not_zero3(module: nn.Module, reason: str) -> None:
    """Raises ValueError for a module that would be called once per tile under ZeRO-3."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ValueError(
            f"{reason}, so it is called once per tile; under ZeRO-3 each call gathers its parameters, and ranks with "
            "different numbers of tiles would wait for each other for ever: leave this part untiled (mlp=False or "
            "loss=False; seqtile.restore(model) first), or use ZeRO-2 or FSDP2"
        )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
