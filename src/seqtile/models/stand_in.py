"""Replaces a model's head and loss function during one forward, only for the thread that runs it.

    self.lm_head          a descriptor of the class, which comes before nn.Module's look-up of children
    self.loss_function    a property around that of PreTrainedModel

Any other thread, or another forward inside, finds the head and the loss themselves: no attribute of the model changes.
A compiler cannot follow a ContextVar; what it traces sets attributes of the model, which hide these. So does a forward
that it gives up, for example at a graph break inside `with`: it still compiles what that forward calls.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # None if nothing that is called here is compiled

from seqtile.models.placement import class_of
from seqtile.ops.state import having

_now: ContextVar[dict[tuple[nn.Module, str], Any] | None] = ContextVar("stand_ins", default=None)


def _stand_in(owner: nn.Module, name: str) -> Any:
    now = None if torch.compiler.is_compiling() else _now.get()
    return None if now is None else now.get((owner, name))


class _Child:
    """A descriptor that returns a child of a module, or its stand-in."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, owner: nn.Module | None, cls: type | None = None) -> Any:
        if owner is None:
            return self
        if (found := _stand_in(owner, self._name)) is not None:
            return found
        if self._name not in owner._modules:
            raise AttributeError(self._name)  # then nn.Module looks for it
        return owner._modules[self._name]


class _LossFunction(property):
    """The `loss_function` of a model, or its stand-in."""

    def __get__(self, model: nn.Module | None, cls: type | None = None) -> Any:
        found = None if model is None else _stand_in(model, "loss_function")
        return super().__get__(model, cls) if found is None else found


def standing_in(model: nn.Module, loss: Any, owner: nn.Module, name: str, head: Any) -> AbstractContextManager[None]:
    """Lets a forward that runs inside find `loss` as the model's `loss_function`, and `head` as `owner`'s child of this
    name."""
    if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
        return _as_attributes(model, loss, owner, name, head)
    if not isinstance(getattr(type(owner), name, None), _Child):
        if not class_of(owner).__module__.startswith("torch."):  # such as a Sequential, which looks up no attribute
            setattr(type(owner), name, _Child(name))
    if not isinstance(usual := type(model).loss_function, _LossFunction):
        type(model).loss_function = _LossFunction(usual.fget, usual.fset)
    return having(_now, {(model, "loss_function"): loss, (owner, name): head})


def take_off(cls: type) -> None:
    """Takes off a class what `standing_in` puts there. A forward that needs it puts it there again."""
    for name, value in [*vars(cls).items()]:
        if isinstance(value, _Child | _LossFunction):
            delattr(cls, name)


@contextmanager
def _as_attributes(model: nn.Module, loss: Any, owner: nn.Module, name: str, head: Any) -> Iterator[None]:
    own = vars(model).get("_loss_function")
    object.__setattr__(owner, name, head)
    object.__setattr__(model, "_loss_function", loss)
    try:
        yield
    finally:
        object.__delattr__(owner, name)
        object.__delattr__(model, "_loss_function")
        if own is not None:
            object.__setattr__(model, "_loss_function", own)


def without_stand_ins(function: Callable) -> Callable:
    """Wraps `function` so that it sees the real head and loss, also if it is called in a forward with stand-ins."""

    @wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _now.get() is None:
            return function(*args, **kwargs)
        with having(_now, None):
            return function(*args, **kwargs)

    return alone
