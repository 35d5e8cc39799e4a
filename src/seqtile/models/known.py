"""Finds what in a part of a model is neither known nor declared: such a part is left untiled, see `seqtile.tokenwise`.

....layers.#.mlp            LlamaMLP      Hugging Face's, which proof.py compares on a small model
....layers.#.mlp.act_fn     user.Act      neither known nor declared: this MLP is left untiled
....layers.#.mlp.up_proj    Linear4bit    of a library whose layers are listed in known_libraries.py
....layers.#.mlp.down_proj  nn.Linear     of PyTorch, treats each token by itself

Nothing is called or copied: classes, functions and hooks are recognised by where they are written.
"""

import inspect
from collections.abc import Callable, Iterator
from dis import get_instructions
from functools import cache
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from seqtile.declared import is_declared
from seqtile.models.hooks import innermost, unknown_hook
from seqtile.models.known_libraries import is_of_library, refusal_of
from seqtile.models.placement import class_of, computed_forward, decorated, home_of
from seqtile.models.weights import PARAMETRIZATIONS, named

_ACTIVATIONS = """CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU RReLU ReLU
ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold""".split()
_FUNCTIONS = {name.lower() for name in _ACTIVATIONS} | {"leaky_relu", "linear"}
_OF_TORCH = {nn.Module, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential}
_OF_TORCH |= {nn.Linear, nn.Identity, nn.Dropout, *(getattr(nn, name) for name in _ACTIVATIONS)}
_OF_TORCH |= {*PARAMETRIZATIONS}
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_OF_TORCHS_OWN = ("torch.nn.modules.", "torch.nn.utils.", "torch._dynamo.", "torch.distributed.", "torch.utils.")
_OF_TORCHS_OWN += ("torch._compile",)  # in which torch.utils.checkpoint's functions are wrapped
HUGGING_FACE = ("transformers", "transformers_modules")  # the latter: code that from_pretrained loads from the hub
_OTHERS = ("seqtile", "accelerate", "deepspeed")
_UNKNOWN = "which is neither known nor declared to treat each token by itself"


def unknown_in(root: nn.Module, name: str = "") -> str | None:
    """Says which module, function or hook in a part of a model is neither known nor declared; None if none is.

    With `name`, such as "head", `root` is called once a chunk, so its own hooks count. Without, `root` is the part: it
    is called once, with all tokens, and its hooks run once. A compiler, which cannot follow this, gets None: what it
    compiles asks `unknown_apart` where it would run in chunks.
    """
    if torch.compiler.is_compiling():
        return None
    if (hook := unknown_hook(None)) is not None:
        return f"every module has a hook, {named(hook)}, {_UNKNOWN}"
    for function in (F.linear, F.silu, F.gelu, nn.Module.__call__, nn.Module._call_impl):
        if not _is_known_function(function):
            return f"PyTorch calls {named(function)}, {_UNKNOWN}"
    for place, module, maker, is_inside_declared in _walk(root, name):
        its = f"its {place}" if place else "it"
        if place and (hook := unknown_hook(module)) is not None:
            return f"{its} has a hook, {named(hook)}, {_UNKNOWN}"
        if not is_inside_declared and (reason := _unknown(module, maker)) is not None:
            return f"{its} {reason}"
    return None


unknown_apart = torch.compiler.disable(unknown_in, reason="seqtile looks at what a part is made of")


def is_known_home(home: str) -> bool:
    return home.split(".")[0] in ("torch", *HUGGING_FACE, *_OTHERS) or is_of_library(home)


def _is_of(module: nn.Module, *packages: str) -> bool:
    return class_of(module).__module__.split(".")[0] in packages


def _is_declared(module: nn.Module) -> bool:
    return is_declared(module) or is_declared(class_of(module))


def _walk(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, nn.Module | None, bool]]:
    """Yields the name of each module in a part, the module, the nearest module of Hugging Face's around it, and whether
    a module around it is declared."""
    waiting: list[tuple[str, nn.Module, nn.Module | None, bool]] = [(name, root, None, False)]
    while waiting:
        name, module, maker, is_inside_declared = waiting.pop()
        yield name, module, maker, is_inside_declared
        around = module if _is_of(module, *HUGGING_FACE) else maker, is_inside_declared or _is_declared(module)
        children = [(f"{name}.{key}".lstrip("."), child, *around) for key, child in module._modules.items()]
        waiting += [each for each in reversed(children) if each[1] is not None]


def _unknown(module: nn.Module, maker: nn.Module | None) -> str | None:
    """Says what a module is, or which function it calls, that is neither known nor declared; None if all is."""
    if is_declared(module):
        return None
    cls, functions = class_of(module), {}
    if not is_declared(cls):
        if (refusal := refusal_of(module)) is not None:
            return refusal
        if not _is_known_class(cls, module, maker):
            return f"is a {named(cls)}, {_UNKNOWN}"
        functions = {"forward": (forward := computed_forward(module))}
        functions |= {} if cls.__module__.startswith("torch.") else _called_by(forward)
    functions |= {name: value for name, value in vars(module).items() if callable(value)}
    for name, function in functions.items():
        if not isinstance(function, type) and not _is_known_function(function):
            return f"has {named(function)} as its {name}, {_UNKNOWN}"
    hook = vars(module).get("_hf_hook")  # Accelerate's, which calls it from a forward of its own
    for each in getattr(hook, "hooks", (hook,)):
        if each is not None and type(each).__module__.split(".")[0] != "accelerate":
            return f"has Accelerate call {named(type(each))}, {_UNKNOWN}"
    return None


def _is_known_class(cls: type, module: nn.Module, maker: nn.Module | None) -> bool:
    package, *path = cls.__module__.split(".")
    if package == "torch":
        if cls in _OF_TORCH or any(name in module._modules for name in _WRAPPED):
            return True
        if cls in _NORMS and len(module.normalized_shape) == 1:
            return True
        return maker is not None and _is_of(maker, "transformers") and cls.__name__ in _made_by(class_of(maker))
    if package in HUGGING_FACE:
        is_shared = package == "transformers" and "models" not in path
        return is_shared or maker is None or cls.__name__ in _made_by(class_of(maker))
    return package == "seqtile" or is_of_library(cls.__module__)


def _is_known_function(function: Callable) -> bool:
    if is_declared(function):
        return True
    function = innermost(function)
    if isinstance(function, nn.Module):
        home = class_of(function).__module__
        return "forward" not in vars(function) and (is_known_home(home) or home == "kernels.layer.layer")
    if isinstance(function, BuiltinFunctionType):  # such as torch.tanh
        home = getattr(function, "__module__", None) or type(function.__self__).__module__
    else:
        home = home_of(decorated(function))
    if home.split(".")[0] == "torch":
        return home.startswith(_OF_TORCHS_OWN) or getattr(function, "__name__", "") in _FUNCTIONS
    return is_known_home(home)


def _called_by(forward: Any) -> dict[str, Any]:
    """Returns what a forward calls by a global name, such as its rotary embedding, but not attention's function, which
    gets all tokens."""
    code = getattr(forward, "__code__", None)
    read = () if code is None else (each.argval for each in get_instructions(code) if each.opname == "LOAD_GLOBAL")
    found = {name: forward.__globals__.get(name) for name in read if name != "eager_attention_forward"}
    return {name: value for name, value in found.items() if callable(value)}


@cache
def _made_by(cls: type) -> set[str]:
    """Returns the names of the classes that the code of a class's `__init__` uses, and what that calls."""
    names: set[str] = set()
    waiting: list[Any] = [vars(base).get("__init__") for base in cls.__mro__ if base is not nn.Module]
    while waiting:
        function = innermost(inspect.unwrap(waiting.pop()))
        if not isinstance(function, FunctionType):
            continue
        for name in _names_in(function.__code__) - names:
            value = function.__globals__.get(name, getattr(cls, name, None))
            names |= {name, getattr(value, "__name__", name)}
            if isinstance(value, dict):
                names |= {getattr(each, "__name__", "") for each in value.values()}
            elif isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                waiting.append(value)
    return names


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
