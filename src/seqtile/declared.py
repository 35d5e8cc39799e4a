"""Marks modules, functions and hooks that users declare to treat each token by itself. seqtile may run these on a part
of the tokens at a time."""

from functools import partial
from types import FunctionType, MethodType
from typing import Any

MARK = "_seqtile_tokenwise"
latest: Any = None
"""Each declaration sets this to a new object. Kept verdicts compare it by identity, and are made anew."""


def tokenwise(thing: Any) -> Any:
    """Declares that something treats each token by itself, and keeps and counts nothing.

    seqtile then runs it once for each chunk of the tokens, and again in the backward. seqtile leaves a part of the
    model untiled if it holds something that is neither known (docs/compatibility.md) nor declared. The first training
    step compares the loss and gradients of what is declared with the untiled model's.

    Args:
        thing: a class of modules (not its subclasses), a module with the modules inside it (not the hooks on them), a
            function that stands in a module's place or, inside a part, as a module's forward, or a hook.

    Returns `thing`, so that it can be used as a decorator. A partial, a bound method or a builtin takes no attribute:
    for these it returns a wrapper, which you have to use instead. The mark is an attribute: it survives copy.deepcopy
    and pickle.

    Raises TypeError for what cannot be called, and for a class that takes no attributes.
    """
    global latest
    if not callable(thing):
        raise TypeError(f"tokenwise: expected a class, a module, a function or a hook, got {thing!r}")
    mark = thing.__code__ if type(thing) is FunctionType else True  # functools.wraps copies a function's attributes
    try:
        if isinstance(thing, partial) or thing.__class__ is not type(thing):  # a proxy would mark what it wraps
            raise AttributeError
        setattr(thing, MARK, mark)
    except (AttributeError, TypeError):
        if isinstance(thing, type):
            raise TypeError(f"tokenwise: {thing!r} takes no attributes; declare a subclass of it") from None
        thing = _Declared(thing)
    latest = object()
    return thing


def is_declared(thing: Any) -> bool:
    """Returns whether something, or its class, was declared by `tokenwise`."""
    thing = thing.__func__ if type(thing) is MethodType else thing
    if type(thing) is FunctionType:
        return getattr(thing, MARK, None) is thing.__code__
    if isinstance(thing, partial):  # takes no mark, and a compiler does not know its __dict__
        return False
    if getattr(thing, "__class__", None) is not type(thing):  # a proxy shows what it wraps
        return False
    own = () if isinstance(thing, type) else (type(thing),)
    return any(MARK in getattr(each, "__dict__", ()) for each in (thing, *own))


class _Declared:
    """A declared function that takes no attributes."""

    _seqtile_tokenwise = True

    def __init__(self, function: Any):
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
