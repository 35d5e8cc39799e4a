"""What a projection must be for its weight to be read directly, without calling the projection."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from seqtile.ops.checks import DTYPES

_UNTILED = "leave this part untiled (mlp=False or loss=False; if it is tiled already, seqtile.restore(model) first)"
_REMEDY = f"apply to the plain model, before adapters or quantisation, or {_UNTILED}"


def check_plain_linear(name: str, module: nn.Module | None, *, bias: bool = False) -> None:
    """Raises ValueError unless `module` computes exactly x @ weight.T, or with `bias` x @ weight.T + bias, of plain
    floating-point parameters.

    An adapter or a quantised layer computes something else, and a hook may do anything. FSDP2 and ZeRO-3 may hold the
    weight sharded, and have hooks of their own that gather it.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ValueError(f"{name} is a {_full_name(type(module))}, expected a plain torch.nn.Linear; {_REMEDY}")
    if "forward" in vars(module):
        raise ValueError(f"{name} has a forward of its own, such as Accelerate's device_map gives it; load without it")
    if module.bias is not None and not bias:
        raise ValueError(f"{name} has a bias, which is not supported yet; {_UNTILED}")
    weight = module.weight
    if type(weight) not in (torch.Tensor, nn.Parameter) and not isinstance(weight, DTensor):
        raise ValueError(f"{name}.weight is a {_full_name(type(weight))}, expected a plain tensor; {_REMEDY}")
    if weight.dtype not in DTYPES:
        expected = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"{name}.weight is {weight.dtype}, expected one of {expected}; {_REMEDY}")
    check_no_hooks(name, module, sharded=module)


def check_no_hooks(name: str, module: nn.Module, sharded: nn.Linear) -> None:
    """Raises ValueError if `module`, which a tiled forward does not call, has hooks.

    FSDP2's and ZeRO-3's are no obstacle; theirs are known by the weight of `sharded`, since ZeRO-3 hooks every module.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) and not (isinstance(sharded, FSDPModule) or hasattr(sharded.weight, "ds_id")):
        raise ValueError(f"{name} has hooks, which a tiled forward would not call; remove them, or {_UNTILED}")


def local_weight(name: str, module: nn.Linear) -> torch.Tensor:
    """The weight of a projection, whole and on this rank; a ValueError if it is sharded just now."""
    if isinstance(module.weight, DTensor):
        raise ValueError(
            f"{name}.weight is sharded while its parent runs; with FSDP2 shard {name} together with its parent "
            "(fully_shard(model) alone, or in one group), and leave it out of a tensor-parallel plan"
        )
    return module.weight


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


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
