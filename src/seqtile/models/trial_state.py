"""What a model keeps, put back after each run of the comparison, which calls its modules a few times more.

put back   attributes and buffers of modules; of what they and users' functions hold or name the contents of lists,
           dicts, sets and deques, the values of tensors, and generators of random numbers; variables of users'
           functions, their closures' and global ones
lost       any other object that a user's undeclared module or function holds or names, such as a file or an
           iterator: the step is not compared
"""

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from gc import get_referents
from itertools import chain
from operator import is_
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import PretrainedConfig

from seqtile.declared import is_declared
from seqtile.models.hooks import hooks_of
from seqtile.models.known import is_known_home
from seqtile.models.placement import class_of, computed_forward, home_of
from seqtile.ops.state import default_generators, generator_of, is_kept, named_by, names_in

SMALL = 2**22  # largest parameter whose gradient is compared, and largest buffer that is put back, in elements
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)  # these types, no subclasses
_HOLDING = (tuple, frozenset, partial, MethodType, BuiltinMethodType, property, staticmethod, classmethod)
_CONSTANT = (int, float, complex, str, bytes, range, slice, enum.Enum, type(None), type(...), type, ModuleType, ref)
_CONSTANT += (PretrainedConfig,)
_KEEPING_NOTHING = ("_abc", "functools", "inspect", "logging", "pathlib", "re", "typing")
_LEFT_OUT = vars(nn.Module()).keys() - {"_buffers", "_modules"}  # such as hooks, which are not called
_Found = tuple[str, Any, bool]
"""A name, the object of that name, and whether a user's undeclared module or function holds or names it."""


class State:
    """What a model keeps, as it is now."""

    def __init__(self, model: nn.Module):
        configs = {id(module.config): vars(module.config) for module in model.modules() if hasattr(module, "config")}
        self.attributes: list[dict[str, Any]] = [*map(vars, model.modules()), *configs.values()]
        self._put_back: list[Callable[[], None]] = []
        main_grads = [own for own in map(vars, model.parameters()) if "main_grad" in own]
        buffers = [module._buffers for module in model.modules()]
        hooks = chain(*map(hooks_of, (None, *model.modules())))
        for own in (*self.attributes, *main_grads, *buffers, *hooks):
            self._put_back.append(partial(_refill, own, copy(own)))
        of_process = [sys.modules[name].random.__self__ for name in ("random", "numpy.random") if name in sys.modules]
        for kept in (*model.buffers(), *of_process):
            self._keep("", kept, False)
        for device in {parameter.device for parameter in model.parameters()}:
            self._put_back += [generator.put_back for generator in default_generators(device)]
        self.lost = list(dict.fromkeys(self._lost_in(model)))
        """What cannot be put back: modules, and the names in which each may keep state."""

    def put_back(self) -> None:
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()

    def _lost_in(self, model: nn.Module) -> Iterator[str]:
        """Notes what the model keeps; yields what cannot be put back."""
        places = {module: place for place, module in model.named_modules()}
        seen: dict[tuple[int, bool], Any] = {}  # keeps the objects alive, so that their ids stay unique
        pending: list[tuple[str, _Found]] = [("", ("", model, False))]
        while pending:
            owner, (name, thing, is_users) = pending.pop()
            if (id(thing), is_users) in seen or is_declared(thing):
                continue
            seen[id(thing), is_users], held = thing, ()
            if isinstance(thing, nn.Module):
                if thing in places:
                    owner, name = f"{places[thing] or 'it'} is a {type(thing).__name__}", "self"
                else:  # such as a teacher in a list
                    self._put_back.append(partial(_refill, vars(thing), copy(vars(thing))))
                held = _held_by(name, thing)
            elif is_kept(thing):
                self._keep(name, thing, is_users)
            elif isinstance(thing, FunctionType):
                held = self._named_by(name, thing, is_users)
            elif type(thing) in _CONTAINERS:
                self._put_back.append(partial(_refill, thing, copy(thing)))
                held = [(name, part, is_users) for part in _parts(thing)]
            elif isinstance(thing, _HOLDING):
                held = [(name, part, is_users) for part in get_referents(thing)]
            elif is_users and not isinstance(thing, _CONSTANT) and not _keeps_nothing(type(thing).__module__):
                yield f"{owner} that may keep state in {name} ({type(thing).__name__})"
            pending += [(owner, each) for each in held]

    def _keep(self, name: str, thing: Any, is_users: bool) -> None:
        """Notes the value of a tensor or the state of a generator."""
        if not isinstance(thing, torch.Tensor):
            self._put_back.append(generator_of(name, thing).put_back)
        elif thing.layout is torch.strided and not (thing.is_meta or isinstance(thing, nn.Parameter)):
            if is_users or thing.numel() <= SMALL:
                self._put_back.append(partial(_rewrite, thing, thing.detach().clone()))

    def _named_by(self, name: str, function: FunctionType, is_users: bool) -> Iterator[_Found]:
        """Yields what a function wraps, and if it is a user's, what it names."""
        yield name, vars(function), is_users
        if not is_known_home(home_of(function)):
            shared, names = function.__globals__, names_in(function.__code__)
            self._put_back.append(partial(shared.update, {each: shared[each] for each in names & shared.keys()}))
            for cell in function.__closure__ or ():
                self._put_back += [partial(setattr, cell, "cell_contents", value) for value in get_referents(cell)]
            yield from ((inner, thing, is_users) for inner, thing in named_by(function).items())


def _held_by(name: str, module: nn.Module) -> Iterator[_Found]:
    """Yields what a module holds, and of a user's what its class does, unless that is declared."""
    if is_declared(cls := class_of(module)):
        return
    is_users = not is_known_home(cls.__module__)
    yield "forward", computed_forward(module), True
    for inner, thing in vars(module).items():
        if inner not in _LEFT_OUT:
            yield f"{name}.{inner}", thing, is_users or callable(thing)
    for cls in type(module).__mro__ if is_users else ():
        if not is_known_home(cls.__module__):
            yield from ((inner, thing, True) for inner, thing in vars(cls).items() if not inner.startswith("__"))


def _keeps_nothing(home: str) -> bool:
    """Returns whether objects of the classes of a Python module keep nothing of a forward."""
    return home in _KEEPING_NOTHING or (is_known_home(home) and not home.startswith("torch.utils.tensorboard"))


def _parts(container: Any) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container


def _refill(container: Any, before: Any) -> None:
    if len(container) != len(before) or not all(map(is_, _parts(container), _parts(before))):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)


def _rewrite(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if not torch.equal(tensor, before):  # writing equal values would still count as a change
        tensor.copy_(before)
