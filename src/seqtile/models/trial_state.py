"""Puts back what a user's own code inside a model may keep: a comparison runs that code a few times more.

put back   attributes of modules (trial_pass.py) and their buffers; of what these and their functions hold or name the
           contents of lists, dicts, sets and deques, values of tensors, generators of random numbers; variables of
           closures, and globals
lost       any other object, such as a file or an iterator: the step is not compared
"""

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from copy import copy
from functools import partial
from gc import get_referents
from inspect import getattr_static
from operator import is_
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from seqtile.declared import is_declared
from seqtile.models.known import is_known_home, users_modules
from seqtile.models.placement import class_of, computed_forward, home_of
from seqtile.ops.state import WatchedTensor, generator_of, is_kept, named_by, names_in

_CONTAINERS = (list, dict, set, deque, bytearray, OrderedDict, defaultdict, Counter)  # these types, no subclasses
_CONSTANT = (int, float, complex, str, bytes, range, slice, enum.Enum, type(None), type(...), type, ModuleType, ref)
_CONSTANT += (GenerationConfig, PretrainedConfig)  # trial_pass.py puts back a config's attributes
_KEEPING_NOTHING = ("functools", "logging", "pathlib", "re", "typing")
_MISSING = object()
_OF_MODULES = vars(nn.Module()).keys()
_Found = tuple[str, Any, type | None]
"""A name, the object of that name, and the class whose method it is."""


class UsersState:
    """What a user's undeclared modules and functions inside a model hold and name, as it is now."""

    def __init__(self, model: nn.Module):
        self.lost: list[str] = []
        """What cannot be put back: a module, and the names in which it may keep state."""
        self._seen: dict[tuple[int, type | None], Any] = {}  # keeps the objects alive, so that their ids stay unique
        self._kept: list[Any] = []
        self._contents: list[tuple[Any, Any]] = []
        self._variables: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        places = {module: place for place, module in model.named_modules()}
        self._seen |= {(id(module), None): module for module in places}
        for module, roots in _roots_in(model):
            lost = {name: type(thing).__name__ for name, thing in self._lost_in(roots)}
            if lost:
                names = ", ".join(f"{name} ({kind})" for name, kind in lost.items())
                self.lost.append(
                    f"{places[module] or 'it'} is a {type(module).__name__} that may keep state in {names}"
                )

    @torch.no_grad()
    def put_back(self) -> None:
        for container, before in self._contents:
            if len(container) == len(before) and all(map(is_, _parts(container), _parts(before))):
                continue
            if isinstance(container, list | bytearray):
                container[:] = before
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(before)
        for variables, name, value in self._variables:
            if variables.get(name, _MISSING) is not value:
                variables.pop(name) if value is _MISSING else variables.update({name: value})
        for cell, value in self._cells:
            cell.cell_contents = value
        for each in self._kept:
            each.put_back()

    def _lost_in(self, roots: Iterable[_Found]) -> Iterator[tuple[str, Any]]:
        """Notes what roots and what they hold are now; yields what cannot be put back, with its name."""
        pending = list(roots)
        while pending:
            name, thing, cls = pending.pop()
            key = id(thing), cls if isinstance(thing, FunctionType) else None
            if key in self._seen or is_declared(thing):
                continue
            self._seen[key] = thing
            if is_kept(thing):
                self._keep(name, thing)
            elif type(thing) in _CONTAINERS:
                self._contents.append((thing, copy(thing)))
                pending += [(name, part, None) for part in _parts(thing)]
            elif isinstance(thing, tuple | frozenset):
                pending += [(name, part, None) for part in thing]
            elif isinstance(thing, partial):
                pending += [(name, part, None) for part in (thing.func, thing.args, thing.keywords)]
            elif isinstance(thing, MethodType | BuiltinMethodType):
                pending += [(name, getattr(thing, "__func__", None), None), (name, thing.__self__, None)]
            elif isinstance(thing, property | staticmethod | classmethod):
                pending.append((name, thing.fget if isinstance(thing, property) else thing.__func__, cls))
            elif isinstance(thing, FunctionType):
                pending += self._named_in(name, thing, cls)
            elif isinstance(thing, nn.Module):  # outside of the model, such as a teacher in a list
                pending += self._outside(name, thing)
            elif not isinstance(thing, _CONSTANT) and not _keeps_nothing(type(thing).__module__):
                yield name, thing

    def _keep(self, name: str, thing: Any) -> None:
        if not isinstance(thing, torch.Tensor):
            self._kept.append(generator_of(name, thing))
        elif thing.layout is torch.strided and not thing.is_meta and not isinstance(thing, nn.Parameter):
            self._kept.append(WatchedTensor(name, thing, copy=thing.detach().clone()))

    def _named_in(self, name: str, function: FunctionType, cls: type | None) -> Iterator[_Found]:
        """Yields what a function wraps and names: of its variables if it is a user's, and of the class whose method it
        is."""
        home, names = home_of(function), names_in(function.__code__)
        if not is_known_home(home):
            self._cells += [(cell, value) for cell in function.__closure__ or () for value in get_referents(cell)]
            shared = function.__globals__
            self._variables += [(shared, name, shared.get(name, _MISSING)) for name in names]
            yield from ((name, thing, None) for name, thing in named_by(function).items())
        yield name, vars(function).get("__wrapped__"), cls
        if cls is not None and home.split(".")[0] != "torch":
            yield from ((name, getattr_static(cls, name, None), cls) for name in names)

    def _outside(self, name: str, module: nn.Module) -> Iterator[_Found]:
        for each in module.modules():
            self._seen[id(each), None] = each
            self._variables += [(vars(each), name, value) for name, value in vars(each).items()]
            self._variables += [(each._buffers, name, value) for name, value in each._buffers.items()]
            yield from ((name, buffer, None) for buffer in each._buffers.values())
        yield from ((f"{name}: {inner}", *rest) for _, roots in _roots_in(module) for inner, *rest in roots)


def _roots_in(model: nn.Module) -> Iterator[tuple[nn.Module, list[_Found]]]:
    """Yields, of each module that is not declared, or inside one that is: what a user's module holds and runs; of
    another the functions that were put into it."""
    modules, users = [*model.modules()], set(users_modules(model))
    declared = [module for module in modules if is_declared(module) or is_declared(class_of(module))]
    inside = {inner for module in declared for inner in module.modules()}
    for module in modules:
        if module not in inside:
            is_users = module in users
            own = [(f"self.{name}", thing, None) for name, thing in vars(module).items() if name not in _OF_MODULES]
            if is_users:
                own += [(f"self.{name}", buffer, None) for name, buffer in module._buffers.items()]
            else:
                own = [each for each in own if callable(each[1]) and not isinstance(each[1], nn.Module)]
            yield module, [*own, ("forward", computed_forward(module), type(module) if is_users else None)]


def _keeps_nothing(home: str) -> bool:
    """Returns whether objects of the classes of a Python module keep nothing of a forward."""
    return home in _KEEPING_NOTHING or (is_known_home(home) and not home.startswith("torch.utils.tensorboard"))


def _parts(container: Any) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container
