"""What a function or a class is: where it was written, and its code, whatever name it gives itself."""

import sys
from collections.abc import Callable, Collection
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

# Where torch writes the wrappers of its own decorators, such as no_grad and autocast.
_WRAPPING = ("torch._dynamo.eval_frame", "torch.utils._contextlib", "torch.amp.autocast_mode")


def unbound(function: Any) -> Any:
    """Returns the function of a bound method. An object that only looks like a method, such as a proxy, stays."""
    return function.__func__ if type(function) is MethodType else function


def code_of(function: Any) -> CodeType | None:
    """Returns the code that a plain function or a method runs; None of anything else."""
    function = unbound(function)
    return function.__code__ if type(function) is FunctionType else None


def behind_renaming(function: Any) -> Any:
    """Returns the function behind Hugging Face's decorator that renames an argument, which computes the same."""
    while type(function) is FunctionType and function.__globals__.get("__name__") == "transformers.utils.deprecation":
        function = function.__wrapped__
    return function


def innermost(function: Any) -> Any:
    """Returns the function inside partials, bound methods, and torch's and DeepSpeed's wrappers around their hooks."""
    while True:
        while type(function) is MethodType or type(function) is partial:
            function = function.__func__ if type(function) is MethodType else function.func
        if type(function) is not FunctionType:  # an object may pass on the attributes of what it wraps
            return function
        package = function.__globals__.get("__name__")
        if package in _WRAPPING and hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif package == "deepspeed.utils.nvtx" and function.__closure__:
            function = function.__closure__[0].cell_contents
        else:
            return function


def defining_path(function: Any) -> str:
    """Returns where a function is defined, such as "torch.nn.modules.linear.Linear.forward"; "" for other objects.

    A wrapper keeps the globals of its own module, so it is found there whatever name functools.wraps gave it.
    """
    function = unbound(function)
    if type(function) is not FunctionType:
        return ""
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    if module is None or vars(module) is not function.__globals__:
        return ""
    # torch.compile knows no __qualname__ of functions; code objects have theirs since Python 3.11.
    return f"{name}.{getattr(function.__code__, 'co_qualname', None) or function.__qualname__}"


def home_of(function: Callable) -> str:
    """Returns the name of the Python module in which a function was written; of code made by `exec` its file, such as
    "<string>"."""
    function = unbound(function)
    if type(function) is not FunctionType:  # an object may pass on the attributes of what it wraps
        return type(function).__module__
    home, file = function.__globals__.get("__name__", ""), function.__code__.co_filename
    return file if file.startswith("<") and home != "__main__" else home


def decorated(forward: Callable) -> Callable:
    """Returns the function inside Hugging Face's decorators, or `forward` itself if it has none."""
    while home_of(forward).startswith("transformers.") and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def package_of(forward: Callable) -> str:
    """Returns the package whose code a forward runs.

    A wrapper belongs to its own author, whatever name functools.wraps gave it. Only a wrapper made by a Hugging Face
    decorator belongs to the package of the function that it wraps.
    """
    forward = decorated(forward)
    return package_of(forward.func) if type(forward) is partial else home_of(forward).split(".")[0]


def named(thing: Any) -> str:
    """Returns the full name of a function or class, or of another object's class."""
    thing = innermost(thing)
    if not issubclass(type(thing), type | FunctionType | BuiltinFunctionType):
        thing = type(thing)
    file = thing.__code__.co_filename if type(thing) is FunctionType else ""
    return f"{file if file == '<string>' else thing.__module__}.{thing.__qualname__}"


def is_one_of(cls: type, names: Collection[str]) -> bool:
    """Returns whether a class is one of these, given by full name, and not another of that name."""
    return named(cls) in names and getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls
