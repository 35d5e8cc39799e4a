"""Runs the forward of modules that cannot be fused, once per chunk.

The backward runs the modules again under the same TorchFunctionModes. It raises an error if anything else that
determines their result has changed since the forward.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from itertools import chain, repeat
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from seqtile.models.gathered import hooks_in_loop, silent
from seqtile.models.hooks import hooks_of, is_harmless
from seqtile.models.weights import leaves_of
from seqtile.ops.state import found_in
from seqtile.ops.tiled import Holding, Outputs, tiled_part

_inside_chunk: ContextVar[bool] = ContextVar("inside_chunk", default=False)


def inside_chunk() -> bool:
    """Returns whether the current call computes one chunk of a module."""
    return _inside_chunk.get()


class InChunks:
    """Modules that run in chunks: their trainable parameters, their state, and everything else that determines their
    result.

    All of it is found once and holds until the modules' structure changes. Only weak references lead to the modules,
    because a module may hold this object.
    """

    def __init__(self, **modules: nn.Module):
        self.name = type(next(iter(modules.values()), None)).__name__
        self._modules = [ref(module) for module in modules.values()]
        parts = dict.fromkeys(part for module in modules.values() for part in module.modules())
        self._inside = [part for part in parts if part not in modules.values()]
        self._hooks = [*hooks_of(None), *(hooks for part in parts for hooks in hooks_of(part))]
        self._leaves = leaves_of(*modules.values())
        found = found_in([(name, module, None) for name, module in modules.items()])
        self._state = [(name, thing, owner and ref(owner)) for name, thing, owner in found]

    @property
    def state(self) -> list[tuple[str, Any, nn.Module | None]] | None:
        """The tensors and generators that the modules hold, see `found_in`. None if the called code is not known."""
        if not self._modules:
            return None
        return [(name, thing, owner and owner()) for name, thing, owner in self._state]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The leaves that require a gradient."""
        return [leaf for leaf in self._leaves if leaf.requires_grad]

    def environment(self) -> "_Environment":
        """Returns everything except tensors that determines what the modules compute."""
        parts = [*(module() for module in self._modules), *self._inside]
        types = [*map(type, parts)]
        own = (map(dict.get, map(vars, parts), repeat(name)) for name in ("forward", "training"))
        of_parts = (types, map(getattr, types, repeat("forward")), *own)
        of_torch = (nn.Module.__call__, nn.Module._call_impl, F.linear, F.silu, F.gelu, F.cross_entropy)
        hooks = [*chain.from_iterable(map(dict.items, self._hooks))]
        return _Environment([*of_torch, *chain.from_iterable(of_parts)], hooks)


class _Environment(NamedTuple):
    computed: list[Any]
    hooks: list[tuple[int, Callable]]

    def computes_as(self, other: "_Environment") -> bool:
        """Returns whether both environments compute the same. Hooks that change nothing may be added or removed."""
        if self.hooks == other.hooks:
            return self.computed == other.computed
        mine, others = ([key for key, hook in each.hooks if not is_harmless(hook, False)] for each in (self, other))
        return mine == others and self.computed == other.computed


def call_in_chunks(
    function: Callable[..., Outputs],
    modules: InChunks,
    *inputs: torch.Tensor,
    params: Sequence[torch.Tensor] | None = None,
    **options: Any,
) -> Outputs:
    """Returns function(*inputs), computed by `tiled_part` with these options. `function` calls the modules; `params`
    defaults to the modules' trainable parameters."""
    params = modules.trained if params is None else params
    fn, state = _repeatable(function, modules), modules.state
    options["always"] = hooks_in_loop() is not None and not inside_chunk()
    return tiled_part(fn if state is None else Holding(fn, state), *inputs, params=params, **options)


def _repeatable(function: Callable, modules: InChunks) -> Callable:
    """Returns `function` for a forward and a backward that calls it again, under the TorchFunctionModes that are active
    now.

    The returned function raises RuntimeError if hooks, a forward, a torch function or training mode has changed since.
    """
    if torch.compiler.is_compiling():  # the compiler's guards check the same
        return function
    modes, environment, hooks = _modes(), modules.environment(), hooks_in_loop()

    def call(*tensors: torch.Tensor) -> Any:
        active = _modes()
        if (active and active != modes) or not modules.environment().computes_as(environment):
            raise RuntimeError(
                "a module is called chunk by chunk, in the forward and again in the backward, and what it computes has "
                "changed in between: expected the same hooks, forwards, torch functions and training mode; call "
                "backward() before they are changed back"
            )
        token = _inside_chunk.set(True)
        try:
            with ExitStack() as stack:
                stack.enter_context(silent(hooks))
                for mode in modes if active != modes else ():
                    stack.enter_context(mode)
                return function(*tensors)
        finally:
            _inside_chunk.reset(token)

    return call


def _modes() -> list[TorchFunctionMode]:
    count = torch._C._len_torch_function_stack()
    return [mode for mode in map(torch._C._get_function_stack_at, range(count)) if type(mode) is not DeviceContext]
