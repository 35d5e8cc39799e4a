"""Saves a model's state before the first step's comparison, and restores it after each run, since the runs call the
modules a few more times.

put back   attributes, buffers, tensors and generators of random numbers of modules; of users' undeclared modules also
           their own parameters, plain attributes of their classes, and the contents of lists, dicts, sets and deques
lost       objects that cannot be restored: any other that a user's undeclared module or function holds or uses, such
           as a file, an iterator or a Python module of the user's, and variables that a function of the user's sets
           outside of itself. Then the step is not compared
"""

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dis import get_instructions
from functools import partial
from gc import get_referents
from itertools import chain
from operator import is_
from types import BuiltinMethodType, CodeType, FunctionType, GenericAlias, MethodType, ModuleType, UnionType
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from seqtile.declared import is_declared
from seqtile.models.functions import home_of
from seqtile.models.hooks import hooks_of
from seqtile.models.known import is_known_home
from seqtile.models.placement import class_of, computed_forward
from seqtile.ops.state import default_generators, generator_of, is_kept, names_in

SMALL = 2**22  # largest parameter whose gradient is compared, and largest buffer that is put back, in elements
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)  # these types, no subclasses
_HOLDING = (tuple, frozenset, partial, MethodType, BuiltinMethodType, property, staticmethod, classmethod)
_CONSTANT = (int, float, complex, str, bytes, range, slice, enum.Enum, type(None), type(...), ref)
_CONSTANT += (PretrainedConfig, GenericAlias, UnionType)
_RECORDS = (PretrainedConfig, ModelOutput, enum.Enum, tuple)  # classes whose values are only read
_KEEPING_NOTHING = tuple("_abc builtins functools inspect logging math numpy pathlib random re time typing".split())
_LEFT_OUT = vars(nn.Module()).keys() - {"_buffers", "_modules"}  # such as hooks, which are not called


class State:
    """What a model keeps, as it is now."""

    def __init__(self, model: nn.Module):
        held = (getattr(module, "config", None) for module in model.modules())
        configs = {id(config): vars(config) for config in held if isinstance(config, PretrainedConfig)}
        self.attributes: list[dict[str, Any]] = [*map(vars, model.modules()), *configs.values()]
        self._put_back: list[Callable[[], None]] = []
        main_grads = [own for own in map(vars, model.parameters()) if "main_grad" in own]
        buffers = [module._buffers for module in model.modules() if isinstance(module._buffers, dict)]
        hooks = chain(*map(hooks_of, (None, *model.modules())))
        for own in (*self.attributes, *main_grads, *buffers, *hooks):
            self._put_back.append(partial(_refill, own, copy(own)))
        of_process = [sys.modules[name].random.__self__ for name in ("random", "numpy.random") if name in sys.modules]
        held = chain.from_iterable(map(dict.values, map(vars, model.modules())))
        held = [each for one in held for each in (one.values() if type(one) is dict else (one,)) if is_kept(each)]
        for kept in (*model.buffers(), *held, *of_process):
            if not isinstance(kept, nn.Parameter):
                self._keep(kept)
        for device in {parameter.device for parameter in model.parameters()}:
            self._put_back += [generator.put_back for generator in default_generators(device)]
        kinds = chain.from_iterable(type(module).__mro__ for module in model.modules())
        self._seen: dict[int, Any] = {id(each): each for each in (*model.modules(), *kinds)}
        self.lost = list(self._lost_in(model))
        """What cannot be put back: modules, and the names in which each may keep state."""

    def put_back(self) -> None:
        with torch.no_grad():
            for put_back in self._put_back:
                put_back()

    def _lost_in(self, model: nn.Module) -> Iterator[str]:
        """Records how to restore what users' undeclared modules and functions hold and use; yields what cannot be."""
        declared = [each for each in model.modules() if is_declared(each) or is_declared(class_of(each))]
        declared = {inside for each in declared for inside in each.modules()}
        for place, module in model.named_modules():
            if module in declared:
                continue
            classes = [cls for cls in type(module).__mro__[:-1] if not is_known_home(cls.__module__)]
            held = {}
            for cls in reversed(classes):
                of_class = {name: each for name, each in vars(cls).items() if not name.startswith("__")}
                plain = [(name, each) for name, each in of_class.items() if isinstance(each, _CONSTANT)]
                self._put_back += [partial(setattr, cls, name, each) for name, each in plain]
                held |= of_class
            held["forward"] = computed_forward(module)
            own = [*vars(module).items(), *(module._parameters.items() if classes else ())]
            held |= {name: each for name, each in own if name not in _LEFT_OUT and (classes or callable(each))}
            for name, each in held.items():
                if not self._is_put_back(each):
                    what = f"{place or 'it'} is a {type(module).__name__}"
                    yield f"{what} that may keep state in {name} ({type(each).__name__}), which seqtile cannot restore"

    def _is_put_back(self, thing: Any) -> bool:
        """Records how to restore what an object holds or uses. Returns whether all of that can be restored."""
        if id(thing) in self._seen or is_declared(thing):
            return True
        self._seen[id(thing)] = thing  # kept alive, so that its id stays unique
        if is_kept(thing):
            return self._keep(thing)
        if isinstance(thing, type | ModuleType):
            is_record = isinstance(thing, type) and issubclass(thing, _RECORDS)
            return is_record or _keeps_nothing(thing.__name__ if isinstance(thing, ModuleType) else thing.__module__)
        if isinstance(thing, FunctionType):
            home = home_of(thing)
            if is_known_home(home) or home.startswith("trl."):  # such as the forward that TRL puts around a model's
                return True
            if _sets_others_variables(thing.__code__):
                return False
            named = (thing.__globals__.get(name) for name in names_in(thing.__code__))
            inside = [*named, thing.__defaults__, thing.__kwdefaults__, *map(get_referents, thing.__closure__ or ())]
        elif type(thing) in _CONTAINERS:
            self._put_back.append(partial(_refill, thing, copy(thing)))
            inside = _parts(thing)
        elif isinstance(thing, _HOLDING):
            inside = get_referents(thing)
        elif isinstance(thing, nn.Module) and is_known_home(class_of(thing).__module__):  # outside the model
            inside = thing.children()
            for buffer in thing.buffers():
                self._keep(buffer)
        else:
            keeps_nothing = _keeps_nothing(type(thing).__module__) and not isinstance(thing, nn.Module)
            return isinstance(thing, _CONSTANT) or keeps_nothing
        return all([self._is_put_back(each) for each in inside])

    def _keep(self, thing: Any) -> bool:
        """Records the value of a tensor or the state of a generator. Returns whether it can be restored."""
        if isinstance(thing, torch.Tensor):
            is_plain = thing.layout is torch.strided and not thing.is_meta and 0 not in thing.stride()
            if is_plain := is_plain and thing.numel() <= SMALL:
                self._put_back.append(partial(_rewrite, thing, thing.detach().clone()))
            return is_plain
        try:
            self._put_back.append(generator_of("", thing).put_back)
        except NotImplementedError:  # the system's
            return False
        return True


def _sets_others_variables(code: CodeType) -> bool:
    """Returns whether code sets global variables, or those of a function around it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    sets = (each for each in get_instructions(code) if each.opname in ("STORE_GLOBAL", "STORE_DEREF"))
    own = any(each.opname == "STORE_GLOBAL" or each.argval in code.co_freevars for each in sets)
    return own or any(map(_sets_others_variables, inner))


def _keeps_nothing(home: str) -> bool:
    """Returns whether a Python module, or objects of its classes, keep nothing of a forward."""
    is_known = is_known_home(home) and not home.startswith("torch.utils.tensorboard")
    return is_known or home.split(".")[0] in _KEEPING_NOTHING


def _parts(container: Any) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container


def _refill(container: Any, before: Any) -> None:
    if len(container) != len(before) or not all(map(is_, _parts(container), _parts(before))):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)


def _rewrite(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if tensor.shape != before.shape:
        tensor.data = before.clone()
    elif not torch.equal(tensor, before):  # writing equal values would still count as a change
        tensor.copy_(before)
