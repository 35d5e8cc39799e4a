"""How a tiled forward presents itself: with the name, docstring and signature of the forward it stands in for."""

import inspect
from collections.abc import Callable
from functools import update_wrapper


def stand_in_for(original: Callable) -> Callable[[Callable], Callable]:
    """A decorator much like functools.wraps, but without the `__wrapped__` that it leaves.

    The signature is kept because Trainer reads from it which inputs and loss arguments a model takes. `__wrapped__` is
    not, because Accelerate's unwrap_model(keep_fp32_wrapper=False) follows it to the end: it would take seqtile off
    together with its own wrapper.
    """

    def decorate(forward: Callable) -> Callable:
        update_wrapper(forward, original)
        del forward.__wrapped__
        forward.__signature__ = inspect.signature(original)
        return forward

    return decorate
