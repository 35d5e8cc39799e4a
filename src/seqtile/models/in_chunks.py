"""Runs the forward of modules that cannot be fused, once per chunk.

The backward runs the modules again as they were in the forward, see snapshot.py, under the same TorchFunctionModes.
Weights that are computed from others, such as those of torch.func.functional_call, are computed once: every chunk gets
them, and their gradient goes on from there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from seqtile.models.gathered import hooks_in_loop, silent
from seqtile.models.snapshot import Snapshot, dicts_of
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

    def __init__(self, once: nn.Module | None = None, **modules: nn.Module):
        """`once`: one of the modules, whose parametrized weights the caller computes, once for all chunks."""
        self.name = type(next(iter(modules.values()), None)).__name__
        self._modules = [ref(module) for module in modules.values()]
        parts = dict.fromkeys(part for module in modules.values() for part in module.modules())
        made = {*once.parametrizations.modules()} if once is not None and is_parametrized(once) else ()
        self._inside = [part for part in parts if part not in modules.values() and part not in made]
        # PEFT raises the version of a weight whenever it computes one with an adapter in its place
        self._rewritten = {id(part.get_param()) for part in parts if type(part).__name__ == "ParamWrapper"}
        self._dicts = [each for part in parts for each in dicts_of(part)]
        self._parameters = [part._parameters for part in parts]
        self._leaves = [leaf for leaf in leaves_of(*modules.values()) if leaf.is_leaf]
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

    def computed(self) -> list[tuple[dict[str, Any], str]]:
        """Returns the places of the weights that are computed from others: dicts of parameters, and names there."""
        places = ((own, name, weight) for own in self._parameters for name, weight in dict.items(own))
        return [(own, name) for own, name, weight in places if weight is not None and not weight.is_leaf]

    def snapshot(self, without: Sequence[tuple[dict[str, Any], str]] = ()) -> Snapshot:
        """Returns what determines the modules' result now."""
        parts = [*(module() for module in self._modules), *self._inside]
        return Snapshot(parts, self._dicts, without, self._rewritten)


def call_in_chunks(
    function: Callable[..., Outputs],
    modules: InChunks,
    *inputs: torch.Tensor,
    shared: Sequence[torch.Tensor] = (),
    **options: Any,
) -> Outputs:
    """Returns function(*inputs, *shared), computed by `tiled_part` with these options. `function` calls the modules."""
    options["always"] = hooks_in_loop() is not None and not inside_chunk()
    repeat, state = _Repeat(function, modules), modules.state
    fn = function if torch.compiler.is_compiling() else repeat  # the compiler's guards see what changes
    shared, fn = (*shared, *repeat.computed), fn if state is None else Holding(fn, state)
    outputs = tiled_part(fn, *inputs, params=modules.trained, shared=shared, **options)
    repeat.end_forward()
    return outputs


class _Repeat:
    """A function of a forward and of a backward that calls it again.

    It raises RuntimeError if something has changed since that cannot be put back.
    """

    def __init__(self, function: Callable, modules: InChunks):
        self._function, self._modules, self._snapshot = function, modules, None
        self._modes, self._hooks = _modes(), hooks_in_loop()
        self._places = modules.computed() if torch.is_grad_enabled() else []

    @property
    def computed(self) -> list[torch.Tensor]:
        """The computed weights, which each call gets behind its other arguments."""
        return [own[name] for own, name in self._places]

    def end_forward(self) -> None:
        """Keeps what the modules are, for the backward."""
        if torch.is_grad_enabled():
            self._snapshot = self._modules.snapshot(self._places)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        active, changed = _modes(), [] if self._snapshot is None else self._snapshot.changed()
        changed += ["the TorchFunctionModes"] if active and active != self._modes else []
        if changed:
            raise RuntimeError(
                "a module is called chunk by chunk, in the forward and again in the backward, and what it computes has "
                f"changed in between: {', '.join(changed)}; call backward() before that"
            )
        given = len(tensors) - len(self._places)
        token = _inside_chunk.set(True)
        try:
            with ExitStack() as stack:
                if self._snapshot is not None:
                    stack.enter_context(self._snapshot.put_back())
                stack.enter_context(_placed(self._places, tensors[given:]))
                stack.enter_context(silent(self._hooks))
                for mode in self._modes if active != self._modes else ():
                    stack.enter_context(mode)
                return self._function(*tensors[:given])
        finally:
            _inside_chunk.reset(token)


@contextmanager
def _placed(places: Sequence[tuple[dict[str, Any], str]], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Lets modules compute with these tensors as their weights."""
    before = [own.get(name) for own, name in places]
    for (own, name), tensor in zip(places, tensors, strict=True):
        own[name] = tensor
    try:
        yield
    finally:
        for (own, name), tensor in zip(places, before, strict=True):
            own[name] = tensor


def _modes() -> list[TorchFunctionMode]:
    count = torch._C._len_torch_function_stack()
    return [mode for mode in map(torch._C._get_function_stack_at, range(count)) if type(mode) is not DeviceContext]
