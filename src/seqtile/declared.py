"""What users declare to treat each token by itself, so that it may run on a part of the tokens at a time."""

from functools import partial
from types import FunctionType
from typing import Any, TypeVar

MARK = "_seqtile_tokenwise"
_Thing = TypeVar("_Thing")
latest: Any = None
"""Replaced by a new object at each declaration, so that what was decided before it is decided again."""


def tokenwise(thing: _Thing) -> _Thing:
    """Declares that something treats each token by itself, and keeps and counts nothing.

    seqtile then runs it once for each chunk of the tokens, and again in the backward. What is neither declared nor
    Hugging Face's, PyTorch's or of another known library leaves the part of the model around it untiled. The first
    training step compares the loss and gradients of what is declared with the untiled model's.

    Args:
        thing: a class of modules (not its subclasses), a module with all that is inside it, a function that stands in
            a module's place or as its forward, or a hook.

    Returns `thing`, so that this is a decorator, too; a partial, a bound method or a builtin wrapped in an object that
    calls it. The mark is an attribute: it survives copy.deepcopy and pickle.

    Raises TypeError for what cannot be called.
    """
    global latest
    if not callable(thing):
        raise TypeError(f"tokenwise: expected a class, a module, a function or a hook, got {thing!r}")
    mark = thing.__code__ if isinstance(thing, FunctionType) else True  # functools.wraps copies a function's attributes
    try:
        if isinstance(thing, partial):
            raise AttributeError
        setattr(thing, MARK, mark)
    except (AttributeError, TypeError):
        thing = _Declared(thing)
    latest = object()
    return thing


def is_declared(thing: Any) -> bool:
    """Returns whether something, or its class, was declared by `tokenwise`."""
    thing = getattr(thing, "__func__", thing)
    if isinstance(thing, FunctionType):
        return getattr(thing, MARK, None) is thing.__code__
    if isinstance(thing, partial):  # takes no mark, and a compiler does not know its __dict__
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
