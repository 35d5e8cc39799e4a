"""Finds what in a part of a model is neither known nor declared: such a part is left untiled, see `seqtile.tokenwise`.

....layers.#.mlp            LlamaMLP      Hugging Face's, which proof.py compares on a small model
....layers.#.mlp.act_fn     user.Act      neither known nor declared: this MLP is left untiled
....layers.#.mlp.up_proj    Linear4bit    of a library whose layers are listed in known_libraries.py
....layers.#.mlp.down_proj  nn.Linear     of PyTorch, treats each token by itself

Nothing is called or copied: classes, functions and hooks are recognised by where they are written.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from seqtile.declared import is_declared
from seqtile.models.hooks import innermost, unknown_hook
from seqtile.models.known_libraries import is_of_library, refusal_of
from seqtile.models.placement import class_of, computed_forward, decorated, home_of
from seqtile.models.weights import named
from seqtile.ops.state import names_in

_ACTIVATIONS = """CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU RReLU ReLU
ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold""".split()
_FUNCTIONS = {name.lower() for name in _ACTIVATIONS} | {"leaky_relu", "linear"}
_OF_TORCH = {nn.Module, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential}
_OF_TORCH |= {nn.Linear, nn.Identity, nn.Dropout, *(getattr(nn, name) for name in _ACTIVATIONS)}
_OF_TORCH |= {parametrizations._WeightNorm, parametrizations._Orthogonal}
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_OF_TORCHS_OWN = ("torch.nn.modules.", "torch.nn.utils.", "torch._dynamo.", "torch.distributed.", "torch.utils.")
_OF_TORCHS_OWN += ("torch._compile",)  # in which torch.utils.checkpoint's functions are wrapped
HUGGING_FACE = ("transformers", "transformers_modules")  # the latter: code that from_pretrained loads from the hub
_OTHERS = ("seqtile", "accelerate", "deepspeed")
_UNKNOWN = "which is neither known nor declared to treat each token by itself"


def unknown_in(root: nn.Module, name: str = "") -> str | None:
    """Says which module, function or hook in a part of a model is neither known nor declared; None if none is.

    `name` is that of `root` in the part. Without one `root` is the part, and its own hooks do not count: they run once,
    on all tokens.
    """
    if (hook := unknown_hook(None)) is not None:
        return f"every module has a hook, {named(hook)}, {_UNKNOWN}"
    for function in (F.linear, F.silu, F.gelu, nn.Module.__call__, nn.Module._call_impl):
        if not _is_known_function(function):
            return f"PyTorch calls {named(function)}, {_UNKNOWN}"
    for place, module, maker in _walk(root, name):
        its = f"its {place}" if place else "it"
        if place and (hook := unknown_hook(module)) is not None:
            return f"{its} has a hook, {named(hook)}, {_UNKNOWN}"
        if (reason := _unknown(module, maker)) is not None:
            return f"{its} {reason}"
    return None


def users_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model whose class is neither of a library nor declared."""
    return [each for each in model.modules() if not (is_known_home(class_of(each).__module__) or _is_declared(each))]


def is_known_home(home: str) -> bool:
    return home.split(".")[0] in ("torch", *HUGGING_FACE, *_OTHERS) or is_of_library(home)


def _is_of(module: nn.Module, *packages: str) -> bool:
    return class_of(module).__module__.split(".")[0] in packages


def _is_declared(module: nn.Module) -> bool:
    return is_declared(module) or is_declared(class_of(module))


def _walk(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yields the name of each module in a part, the module, and that of Hugging Face's whose code makes it."""
    waiting: list[tuple[str, nn.Module, nn.Module | None]] = [(name, root, None)]
    while waiting:
        name, module, maker = waiting.pop()
        yield name, module, maker
        maker = module if _is_of(module, *HUGGING_FACE) else maker
        children = [(f"{name}.{key}".lstrip("."), child) for key, child in module._modules.items()]
        waiting += [(place, child, maker) for place, child in reversed(children) if child is not None]


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
        functions |= _called_by(forward)
    functions |= {name: value for name, value in vars(module).items() if callable(value)}
    for name, function in functions.items():
        if not isinstance(function, nn.Module | type) and not _is_known_function(function):
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
    if isinstance(function, BuiltinFunctionType):  # such as torch.tanh
        home = getattr(function, "__module__", None) or type(function.__self__).__module__
    else:
        home = home_of(decorated(function))
    if home.split(".")[0] == "torch":
        return home.startswith(_OF_TORCHS_OWN) or getattr(function, "__name__", "") in _FUNCTIONS
    return is_known_home(home)


def _called_by(forward: Any) -> dict[str, FunctionType]:
    """Returns the global functions that a forward names, such as its rotary embedding, but not attention's, which gets
    all tokens."""
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    found = {name: forward.__globals__[name] for name in names if name in forward.__globals__}
    found.pop("eager_attention_forward", None)
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


@cache
def _made_by(cls: type) -> set[str]:
    """Returns the names of the classes that the code of a class's `__init__` uses, and what that calls."""
    names: set[str] = set()
    waiting: list[Any] = [vars(base).get("__init__") for base in cls.__mro__ if base is not nn.Module]
    while waiting:
        function = innermost(inspect.unwrap(waiting.pop()))
        if not isinstance(function, FunctionType):
            continue
        for name in names_in(function.__code__) - names:
            value = function.__globals__.get(name, getattr(cls, name, None))
            names |= {name, getattr(value, "__name__", name)}
            if isinstance(value, dict):
                names |= {getattr(each, "__name__", "") for each in value.values()}
            elif isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                waiting.append(value)
    return names
