"""Lets tensor subclasses override the functions of this package as they override torch's."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function


def dispatched(function: Callable) -> Callable:
    """Returns `function`, wrapped so that an argument with `__torch_function__` can override it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if has_torch_function(given):
            return handle_torch_function(call, given, *args, **kwargs)
        return function(*args, **kwargs)

    return call
