"""Modules that are called tile by tile are called again in the backward: there as they were called in the forward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_module
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from seqtile.models.plain import is_harmless


def called_again(function: Callable, *modules: nn.Module) -> Callable:
    """`function`, which calls the modules, for `tiled`, whose backward then calls it under the TorchFunctionModes that
    are active now, as autograd would have recorded it under them.

    RuntimeError from it where something else has changed since that decides what is computed: hooks, a forward, a
    function of torch's, dropout on or off.
    """
    if torch.compiler.is_compiling():  # whose guards ask the same
        return function
    modes, surroundings = _modes(), list(_surroundings(modules))

    def call(*tensors: torch.Tensor) -> Any:
        active = _modes()
        if (active and active != modes) or list(_surroundings(modules)) != surroundings:
            raise RuntimeError(
                "a module is called tile by tile, in the forward and again in the backward, and what it computes has "
                "changed in between: expected the same hooks, forwards, torch functions and training mode; call "
                "backward() before they are changed back"
            )
        with ExitStack() as stack:
            for mode in modes if active != modes else ():
                stack.enter_context(mode)
            return function(*tensors)

    return call


def _modes() -> list[TorchFunctionMode]:
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return [mode for mode in modes if type(mode) is not DeviceContext]


def _surroundings(modules: tuple[nn.Module, ...]) -> Iterator[Any]:
    """What decides, beside tensors, what calling the modules computes."""
    yield from (nn.Module.__call__, nn.Module._call_impl, F.linear, F.silu, F.gelu, F.cross_entropy)
    yield from _counted(
        module_module._global_forward_hooks,
        module_module._global_forward_pre_hooks,
        module_module._global_backward_hooks,
        module_module._global_backward_pre_hooks,
    )
    for module in modules:
        for part in module.modules():
            yield type(part)
            yield type(part).forward
            yield vars(part).get("forward")
            yield part.training
            yield from _counted(
                part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
            )


def _counted(*kinds: dict[int, Callable]) -> Iterator[int]:
    for hooks in kinds:
        yield from (key for key, hook in hooks.items() if not is_harmless(hook, recording=False))
