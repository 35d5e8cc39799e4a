"""What a model keeps, put back after each run of the comparison, which calls its modules a few times more.

put back   attributes, buffers, tensors and generators of random numbers of modules; of what users' undeclared modules
           and functions hold or name also the contents of lists, dicts, sets and deques; variables of these functions,
           their closures' and global ones
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
from math import inf
from operator import is_
from types import BuiltinMethodType, FunctionType, GenericAlias, MethodType, ModuleType, UnionType
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
_CONSTANT += (PretrainedConfig, GenericAlias, UnionType)
_KEEPING_NOTHING = ("_abc", "functools", "inspect", "logging", "pathlib", "re", "typing")
_LEFT_OUT = vars(nn.Module()).keys() - {"_buffers", "_modules"}  # such as hooks, which are not called


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
        held = chain.from_iterable(map(dict.values, map(vars, model.modules())))
        held = [each for one in held for each in (one.values() if type(one) is dict else (one,)) if is_kept(each)]
        for kept in (*model.buffers(), *held, *of_process):
            self._keep(kept, SMALL)
        for device in {parameter.device for parameter in model.parameters()}:
            self._put_back += [generator.put_back for generator in default_generators(device)]
        self._seen: dict[int, Any] = {id(module): module for module in model.modules()}
        self.lost = list(self._lost_in(model))
        """What cannot be put back: modules, and the names in which each may keep state."""

    def put_back(self) -> None:
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()

    def _lost_in(self, model: nn.Module) -> Iterator[str]:
        """Notes what users' undeclared modules and functions hold and name; yields what cannot be put back."""
        declared = [each for each in model.modules() if is_declared(each) or is_declared(class_of(each))]
        declared = {inside for each in declared for inside in each.modules()}
        for place, module in model.named_modules():
            if module in declared:
                continue
            classes = [cls for cls in type(module).__mro__ if not is_known_home(cls.__module__)]
            held = {
                name: each for cls in reversed(classes) for name, each in vars(cls).items() if not name.startswith("__")
            }
            held["forward"] = computed_forward(module)
            own = vars(module).items()
            held |= {name: each for name, each in own if name not in _LEFT_OUT and (classes or callable(each))}
            for name, each in held.items():
                if not self._is_put_back(each):
                    what = f"{place or 'it'} is a {type(module).__name__}"
                    yield f"{what} that may keep state in {name} ({type(each).__name__})"

    def _is_put_back(self, thing: Any) -> bool:
        """Notes what an object holds or names. Returns whether all of that can be put back."""
        if id(thing) in self._seen or is_declared(thing):
            return True
        self._seen[id(thing)] = thing  # kept alive, so that its id stays unique
        if is_kept(thing):
            self._keep(thing)
            return True
        if isinstance(thing, FunctionType):
            if is_known_home(home_of(thing)):
                return True
            inside, shared = named_by(thing).values(), thing.__globals__
            names = names_in(thing.__code__) & shared.keys()
            self._put_back.append(partial(shared.update, {name: shared[name] for name in names}))
            for cell in thing.__closure__ or ():
                self._put_back += [partial(setattr, cell, "cell_contents", value) for value in get_referents(cell)]
        elif type(thing) in _CONTAINERS:
            self._put_back.append(partial(_refill, thing, copy(thing)))
            inside = _parts(thing)
        elif isinstance(thing, _HOLDING):
            inside = get_referents(thing)
        else:
            keeps_nothing = _keeps_nothing(type(thing).__module__) and not isinstance(thing, nn.Module)
            return isinstance(thing, _CONSTANT) or keeps_nothing
        return all([self._is_put_back(each) for each in inside])

    def _keep(self, thing: Any, most: float = inf) -> None:
        """Notes the value of a tensor of at most so many elements, or the state of a generator."""
        if not isinstance(thing, torch.Tensor):
            self._put_back.append(generator_of("", thing).put_back)
        elif thing.layout is torch.strided and not (thing.is_meta or isinstance(thing, nn.Parameter)):
            if thing.numel() <= most:
                self._put_back.append(partial(_rewrite, thing, thing.detach().clone()))


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
