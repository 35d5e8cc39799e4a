"""The fallback: modules whose tensors cannot be read are called as they are, chunk by chunk.

They are called again in the backward, and there as they were called in the forward: under the same TorchFunctionModes,
and only if nothing else has changed that decides what they compute.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from seqtile.models.weights import hooks_of, is_harmless, trained
from seqtile.ops.tiled import Outputs, tiled

_inside_chunk: ContextVar[bool] = ContextVar("inside_chunk", default=False)


def inside_chunk() -> bool:
    """Says if a module is just being called for a chunk."""
    return _inside_chunk.get()


def call_tiled(
    function: Callable[..., Outputs],
    modules: Sequence[nn.Module],
    *inputs: torch.Tensor,
    params: Sequence[torch.Tensor] | None = None,
    **options: Any,
) -> Outputs:
    """Returns function(*inputs), which calls the modules, computed by `seqtile.tiled` with these options; `params` are
    by default what the modules train."""
    params = trained(*modules) if params is None else params
    return tiled(_repeatable(function, modules), *inputs, params=params, **options)


def _repeatable(function: Callable, modules: Sequence[nn.Module]) -> Callable:
    """Returns `function` for a backward that calls it again, under the TorchFunctionModes that are active now.

    RuntimeError from it where something else has changed since that decides what is computed: hooks, a forward, a
    function of torch's, dropout on or off.
    """
    if torch.compiler.is_compiling():  # whose guards ask the same
        return function
    modes, surroundings = _modes(), list(_call_environment(modules))

    def call(*tensors: torch.Tensor) -> Any:
        active = _modes()
        if (active and active != modes) or list(_call_environment(modules)) != surroundings:
            raise RuntimeError(
                "a module is called chunk by chunk, in the forward and again in the backward, and what it computes has "
                "changed in between: expected the same hooks, forwards, torch functions and training mode; call "
                "backward() before they are changed back"
            )
        with ExitStack() as stack:
            stack.callback(_inside_chunk.reset, _inside_chunk.set(True))
            for mode in modes if active != modes else ():
                stack.enter_context(mode)
            return function(*tensors)

    return call


def _modes() -> list[TorchFunctionMode]:
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return [mode for mode in modes if type(mode) is not DeviceContext]


def _call_environment(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Yields everything but tensors that decides what calling the modules computes."""
    yield from (nn.Module.__call__, nn.Module._call_impl, F.linear, F.silu, F.gelu, F.cross_entropy)
    yield from _kept_hooks(None)
    for part in (part for module in modules for part in module.modules()):
        yield from (type(part), type(part).forward, vars(part).get("forward"), part.training)
        yield from _kept_hooks(part)


def _kept_hooks(module: nn.Module | None) -> Iterator[int]:
    for hooks in hooks_of(module):
        yield from (key for key, hook in hooks.items() if not is_harmless(hook, recording=False))
