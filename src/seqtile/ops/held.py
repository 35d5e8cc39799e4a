"""What a function holds on to between its calls: tensors, and generators of random numbers.

They are looked for in its closure, its defaults, the arguments that were bound to it and the globals that its code
names, and among the buffers and attributes of modules found there. `ops` sees no class of torch.nn: a module is what
has `named_modules`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from seqtile.ops.random_state import is_generator

_GLOBAL_GENERATORS = {  # of a module of Python -> its generator
    "random": lambda module: module._inst,
    "numpy": lambda module: module.random.mtrand._rand,
    "numpy.random": lambda module: module.mtrand._rand,
}
_PLAIN = {type(None), bool, int, float, str, dict, OrderedDict, set}  # what most attributes of a module are


class Held(NamedTuple):
    name: str
    value: Any
    """A tensor or a generator."""
    owner: Any = None
    """The module whose attribute it is, None if it is none's."""

    @property
    def attribute(self) -> str:
        return self.name.rsplit(".", 1)[-1]


def held_by(function: Any) -> Iterator[Held]:
    """Every tensor and generator that `function` holds, each once; of a module's parameters none."""
    seen: dict[int, Any] = {}  # holds what it has seen, so that no other object gets its id

    def is_new(thing: Any) -> bool:
        if id(thing) in seen:
            return False
        seen[id(thing)] = thing
        return True

    pending = [("", function)]
    while pending:
        name, thing = pending.pop()
        if not is_new(thing):
            continue
        if _is_kept(thing):
            yield Held(name, thing)
        elif not _is_module(thing):
            pending += reversed([*_inside(name, thing)])  # the first is looked into first, and gives the name
        else:
            for path, part in thing.named_modules(prefix=name or type(thing).__name__):
                for attribute, value in (*part._buffers.items(), *vars(part).items()):
                    if type(value) not in _PLAIN and _is_kept(value) and is_new(value):
                        yield Held(f"{path}.{attribute}", value, part)
                pending.append((path, vars(part).get("forward", getattr(type(part), "forward", None))))


def _is_kept(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) or is_generator(thing)


def _is_module(thing: Any) -> bool:
    return callable(getattr(type(thing), "named_modules", None))


def _inside(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a bound one, or a container is made of; of any other object its attributes, but no further."""
    if isinstance(thing, partial):
        yield from ((name, part) for part in (thing.func, *thing.args))
        yield from thing.keywords.items()
    elif isinstance(thing, MethodType):
        yield from ((name, thing.__func__), (name, thing.__self__))
    elif isinstance(thing, BuiltinMethodType):
        yield name or thing.__name__, thing.__self__
    elif isinstance(thing, FunctionType):
        yield from _named_by(thing)
    elif isinstance(thing, ModuleType) and thing.__name__ in _GLOBAL_GENERATORS:
        yield f"{thing.__name__.split('.')[0]}'s global generator", _GLOBAL_GENERATORS[thing.__name__](thing)
    elif isinstance(thing, list | tuple):
        yield from ((f"{name}[{i}]", element) for i, element in enumerate(thing))
    elif isinstance(thing, dict):
        yield from ((f"{name}[{key!r}]", element) for key, element in thing.items())
    elif hasattr(thing, "__dict__") and not isinstance(thing, type | ModuleType):
        for attribute, value in vars(thing).items():
            if _is_kept(value) or _is_module(value):
                yield f"{name}.{attribute}" if name else attribute, value


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's closure and defaults hold, and the globals that its code names."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = _names_in(code)
    found = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    found = {name: value for name, value in found.items() if _is_of(function, value)}
    found |= zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
    found |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for name, value in found.items():
        if getattr(value, "__name__", None) != "numpy" or "random" in names:  # else it draws nothing from numpy
            yield name, value


def _is_of(function: FunctionType, value: Any) -> bool:
    """Whether a global may hold what the function's author keeps: functions of other files, such as torch's, do not."""
    return not isinstance(value, FunctionType) or value.__globals__ is function.__globals__


def _names_in(code: CodeType) -> set[str]:
    """The names that code uses, that of functions and comprehensions within it included."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
