"""Whether calling a module does what its class says and nothing else: only then may its tensors be read instead.

The one place that decides it. Everything is known by the object itself: a function by the module in which it was
written, a class by identity, never by a name alone, which anything can take. Whatever is not known is called as it is.

A TorchDispatchMode is no reason to call: it sees what is computed here as well, operation by operation.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import linear as linear_module
from torch.nn.modules import module as module_module
from torch.utils._device import DeviceContext
from transformers.activations import GELUTanh, SiLUActivation

_HARMLESS = (  # where hooks are written that only watch, or gather what a module is made of
    "torch.utils.module_tracker.",
    "torch.distributed._tools.mod_tracker.",
    "torch.distributed.tensor.debug._comm_mode.",
    "torch.distributed.fsdp.",
    "deepspeed.runtime.zero.",
)
_RECORDING = "transformers.utils.output_capturing."


def origin(function: Any) -> str:
    """Where a function was written, such as "torch.nn.modules.linear.Linear.forward"; empty for anything else.

    A wrapper is its own author's, whatever name functools.wraps gave it, since it keeps the globals of its own module.
    """
    function = getattr(function, "__func__", function)
    if type(function) is not FunctionType:
        return ""
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    if module is None or vars(module) is not function.__globals__:
        return ""
    # A compiler that traces this knows no __qualname__; a code's is there since Python 3.11.
    return f"{name}.{getattr(function.__code__, 'co_qualname', None) or function.__qualname__}"


_ACTIVATIONS = {  # class -> as `gated_mlp` calls it, and where its forward was written
    nn.SiLU: ("silu", "torch.nn.modules.activation.SiLU.forward"),
    SiLUActivation: ("silu", "transformers.activations.SiLUActivation.forward"),
    GELUTanh: ("gelu_tanh", "transformers.activations.GELUTanh.forward"),
}


_SILU = F.silu if origin(F.silu) == "torch.nn.functional.silu" else None  # a compiler knows it by identity alone


def why_calls_matter() -> str | None:
    """Why every call of a module does more than its forward says; None if it does not."""
    for function, name in ((nn.Module.__call__, "_wrapped_call_impl"), (nn.Module._call_impl, "_call_impl")):
        if origin(function) != f"torch.nn.modules.module.Module.{name}":
            return f"the __call__ of torch.nn.Module was replaced by {named(function)}"
    for hooks in (
        module_module._global_forward_hooks,
        module_module._global_forward_pre_hooks,
        module_module._global_backward_hooks,
        module_module._global_backward_pre_hooks,
    ):
        for hook in hooks.values():
            if not is_harmless(hook, recording=True):
                return f"there is a global module hook, {named(hook)}"
    return None


def why_none_is_plain() -> str | None:
    """Why no module at all may be read just now; None if some may. Asked once, before any module is looked at."""
    if (reason := why_calls_matter()) is not None:
        return reason
    for i in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(i)
        if type(mode) is not DeviceContext:  # which torch.set_default_device leaves active: it only places new tensors
            return f"the TorchFunctionMode {named(type(mode))} is active"
    return None


def why_changed(module: nn.Module, *, recording: bool = True) -> str | None:
    """Why calling `module` is not calling its class's forward; None if it is. For `recording` see `has_hooks`."""
    if "forward" in vars(module):
        return "has a forward of its own, such as Accelerate's device_map gives it"
    return why_call_changed(module, recording=recording)


def why_call_changed(module: nn.Module, *, recording: bool = True) -> str | None:
    """Why calling `module` is not calling its forward, whosever that is; None if it is. For `recording` see
    `has_hooks`."""
    cls = type(module)
    changed = cls.__call__ is not nn.Module.__call__ or cls._call_impl is not nn.Module._call_impl
    if changed or "_call_impl" in vars(module):
        return f"is a {named(cls)}, which has a __call__ of its own"
    return "has hooks" if has_hooks(module, recording=recording) else None


def has_hooks(module: nn.Module, *, recording: bool = True) -> bool:
    """Whether `module` has hooks that a tiled forward would not call. Those by which FSDP2 and ZeRO gather weights do
    not count; nor, unless `recording`, those by which Hugging Face records outputs, which do nothing until asked to."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        for hook in hooks.values():
            if not is_harmless(hook, recording):
                return True
    return False


def why_no_linear(module: Any) -> str | None:
    """Why calling `module` is not F.linear(x, module.weight, module.bias); None if it is."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return f"is a {named(type(module))}"
    if origin(nn.Linear.forward) != "torch.nn.modules.linear.Linear.forward":
        return "is a torch.nn.Linear, whose forward was replaced"
    if linear_module.F is not F or not _is_linear(F.linear):
        return f"calls torch.nn.functional.linear, which was replaced by {named(F.linear)}"
    return why_changed(module)


def activation_name(activation: Any) -> str | None:
    """What `gated_mlp` calls an activation of this class; None if it does not know it."""
    return _ACTIVATIONS.get(type(activation), (None,))[0]


def why_no_activation(activation: Any) -> str | None:
    """Why calling `activation` is not what its class says, or that this class is not known; None if all is well."""
    cls = type(activation)
    if cls not in _ACTIVATIONS:
        known = cls.__module__.split(".")[0] in ("torch", "transformers")
        return f"its activation is {cls.__name__ if known else named(activation)}"
    if origin(cls.forward) != _ACTIVATIONS[cls][1]:
        return f"the forward of {named(cls)}, its activation, was replaced"
    if (reason := why_changed(activation)) is not None:
        return f"its activation {reason}"
    if cls is not GELUTanh:
        if F.silu is _SILU or origin(F.silu) == "torch.nn.functional.silu":
            return None
        return f"torch.nn.functional.silu was replaced by {named(F.silu)}"
    function = activation.act
    if type(function) is not partial or function.keywords != {"approximate": "tanh"} or function.args:
        return f"its activation calls {named(function)}"
    if _is_builtin(function.func, "gelu"):
        return None
    return f"torch.nn.functional.gelu was replaced by {named(function.func)}"


def _is_linear(function: Any) -> bool:
    """Whether a function is torch's linear, or DeepSpeed's, which every run under ZeRO-3 puts in its place."""
    return _is_builtin(function, "linear") or origin(function) == "deepspeed.runtime.zero.linear.zero3_linear_wrap"


def _is_builtin(function: Any, name: str) -> bool:
    """Whether a function is the one that torch has compiled under this name."""
    return function is getattr(torch._C._nn, name) and isinstance(function, BuiltinFunctionType)


def is_harmless(hook: Callable, recording: bool) -> bool:
    """Whether a module hook changes nothing that is not done to a module whose tensors are read, too."""
    return origin(_innermost(hook)).startswith(_HARMLESS if recording else (*_HARMLESS, _RECORDING))


def _innermost(function: Any) -> Any:
    """What runs inside the wrappers that torch and DeepSpeed put around their own hooks, which only pass it on."""
    while True:
        function = getattr(function, "__func__", function)
        package = getattr(function, "__globals__", {}).get("__name__")
        if package == "torch._dynamo.eval_frame" and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif package == "deepspeed.utils.nvtx" and function.__closure__:
            function = function.__closure__[0].cell_contents
        else:
            return function


def named(thing: Any) -> str:
    """A function or a class, of anything else its class, as a reader would look for it."""
    while isinstance(thing, partial):
        thing = thing.func
    thing = _innermost(thing)
    if not isinstance(thing, type | FunctionType | BuiltinFunctionType):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"
