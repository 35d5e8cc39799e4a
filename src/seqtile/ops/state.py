"""The state that a repeated function must find and leave unchanged: random numbers, autocast, tensors, generators.

A tiled function runs once per chunk, and again in the backward. What modules hold (adapters, hooks, weights) is
restored by models/snapshot.py.

- `ForwardState` is the state that it must find in the backward: autocast and torch's default generators as they were in
  the forward.
- `WatchedState` is the state that it must not change: tensors that it gets or holds, and its own generators. A function
  that changes its input or a buffer in place would compute something else each time. Every tensor counts its in-place
  changes (its version), so a check costs one int per tensor and does not wait for the device. Small tensors are copied,
  so that they can be restored.

    WatchedState(holds, given, error)  ->  fn(chunk)  ->  check()  ->  fn(chunk)  ->  check()  -> ...
    versions, copies                    unchanged? else restore the copies, and raise

What a function holds is found in its closure, its defaults, its bound arguments, the globals that its code names, and
the buffers and attributes of modules found there. `ops` knows no class of torch.nn: any object with `named_modules`
counts as a module.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from gc import get_referents
from math import inf
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

Tensors = Sequence[torch.Tensor]
Found = tuple[str, Any, Any]
"""A name, the object of that name, and the module whose attribute it is, or None."""
_KEPT = {torch.Tensor, torch.Generator, random.Random}
_PLAIN = (int, float, str, dict, set, type(None))  # the types of most attributes of a module


class Generator:
    """A generator of random numbers, and its state when it was found."""

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]):
        self.name, self._read, self._write, self._state = name, read, write, read()

    @property
    def drawn(self) -> bool:
        states = (self._state, self._read())  # torch's are on the CPU; tolist works in simulations
        then, now = (state.tolist() if isinstance(state, torch.Tensor) else pickle.dumps(state) for state in states)
        return then != now

    def put_back(self) -> None:
        self._write(self._state)


def default_generators(device: torch.device) -> list[Generator]:
    """Returns torch's default generators: the CPU's, and the device's if it has its own."""
    found = [Generator("torch's default generator", torch.get_rng_state, torch.set_rng_state)]
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        read, write = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
        found.append(Generator(f"torch's default generator of {device}", read, write))
    return found


def generator_of(name: str, thing: Any) -> Generator:
    """Wraps a generator of torch, Python or numpy, with its current state."""
    if isinstance(thing, torch.Generator):
        return Generator(name, thing.get_state, thing.set_state)
    source = getattr(thing, "_bit_generator", thing)  # numpy's, or Python's own
    return Generator(name, source.__getstate__, source.__setstate__)


def autocast_on(device: torch.device) -> tuple[str, torch.dtype, bool]:
    """Returns the arguments that make `torch.autocast` reproduce the current autocast."""
    kind = "cpu" if device.type == "meta" else device.type  # nothing is cast on the meta device
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@contextmanager
def having(variable: Any, value: Any) -> Iterator[None]:
    """Gives a ContextVar, or what is set like one, a value for the time of the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def exchanged(items: Sequence[tuple[dict[Any, Any], Any, Any]]) -> Iterator[None]:
    """Gives dicts other values for the time of the context: each a dict, a key and the value."""
    before = [(own, key, own.get(key)) for own, key, _ in items]
    for own, key, value in items:
        own[key] = value
    try:
        yield
    finally:
        for own, key, value in before:
            own[key] = value


class Overridden:
    """An object with some attributes replaced."""

    def __init__(self, original: object, **attributes: object):
        vars(self).update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class ForwardState(NamedTuple):
    """Autocast and torch's default generators of the CPU and of the computing device, as they are in a forward."""

    device: torch.device
    autocast: tuple[str, torch.dtype, bool]
    """The device type, the dtype, and whether autocast is enabled."""
    random: list[Generator]

    @classmethod
    def now(cls, device: torch.device) -> "ForwardState":
        return cls(device, autocast_on(device), default_generators(device))

    def forward_autocast(self) -> torch.autocast:
        """Returns a context without a cache for casts: the graph of a cached cast would serve one run only."""
        return torch.autocast(*self.autocast, cache_enabled=False)

    @contextmanager
    def forward_random(self) -> Iterator[None]:
        """Draws the forward's random numbers again; on exit, restores the current generator states."""
        devices = [self.device] if len(self.random) > 1 else []
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cpu"):
            for generator in self.random:
                generator.put_back()
            yield


class WatchedTensor:
    """A tensor as it was found: its version, the module whose attribute it is, if any, and optionally a copy."""

    def __init__(self, name: str, tensor: torch.Tensor, owner: Any = None, copy: torch.Tensor | None = None):
        self.name, self.tensor, self.copy = name, tensor, copy
        self._owner, self._attribute = owner, name.rsplit(".", 1)[-1]
        self._version = None if tensor.is_inference() else tensor._version  # inference tensors have no version

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place, according to its version."""
        return self._version is not None and self.tensor._version != self._version

    @property
    def differs(self) -> bool:
        """Whether the tensor, or the buffer that replaced it, differs from the copy. Waits for the device."""
        is_buffer = self._owner is not None and self._attribute in self._owner._buffers
        now = getattr(self._owner, self._attribute) if is_buffer else self.tensor
        return self.copy is not None and not (equal(self.tensor, self.copy) and equal(now, self.copy))

    def put_back(self) -> None:
        if self.differs:  # writing equal values would still count as a change, also of tensors that other graphs saved
            self.tensor.detach().copy_(self.copy)
        if self._owner is not None and getattr(self._owner, self._attribute, None) is not self.tensor:
            setattr(self._owner, self._attribute, self.tensor)


def equal(now: Any, before: torch.Tensor, rounded: bool = False) -> bool:
    """Returns whether `now` is a tensor of the same shape, dtype and values; NaN equals NaN. `rounded` values may
    differ by rounding, which depends on the number of tokens in a product."""
    if not isinstance(now, torch.Tensor) or now.shape != before.shape or now.dtype != before.dtype:
        return False
    tolerance = torch.finfo(now.dtype).eps ** 0.5 if rounded and now.is_floating_point() else 0.0
    largest = before.nan_to_num(posinf=0, neginf=0).abs().max().item() if tolerance else 0.0
    return torch.allclose(now, before, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


class WatchedState:
    """The tensors and generators that a function must not change: those `given` to it, by kind, and those it holds.

    Copies the smallest tensors, up to `room` bytes in all. If `room` is finite, copies none that requires a gradient.
    """

    def __init__(self, holds: Sequence[Found], given: dict[str, Tensors], error: type[Exception], room: float = inf):
        self.error = error
        roots = [(f"{kind} {i}", tensor, None) for kind, tensors in given.items() for i, tensor in enumerate(tensors)]
        found = [*found_in([*roots, *holds])]
        self.generators = [generator_of(name, thing) for name, thing, _ in found if not isinstance(thing, torch.Tensor)]
        self.tensors = [WatchedTensor(*each) for each in found if isinstance(each[1], torch.Tensor)]
        if any(isinstance(each.tensor, FakeTensor) for each in self.tensors):  # then real ones cannot be copied either
            return
        # Copy only what can be compared.
        comparable = [each for each in self.tensors if each.tensor.layout is torch.strided and not each.tensor.is_meta]
        for each in sorted(comparable, key=lambda each: each.tensor.nbytes):
            if each.tensor.nbytes <= room and (room == inf or not each.tensor.requires_grad):
                each.copy = each.tensor.detach().clone()
                room -= each.tensor.nbytes

    def guarded(self, pieces: Tensors) -> list[WatchedTensor]:
        """Returns a chunk's inputs as copies, so that changes do not reach the caller's tensors."""
        with torch.inference_mode(False):  # tensors made in it have no versions
            return [WatchedTensor(f"input {i}", piece.clone(), copy=piece) for i, piece in enumerate(pieces)]

    def check(self, guarded: Sequence[WatchedTensor] = ()) -> None:
        """Raises `error` if anything has changed, after restoring what was copied."""
        changed = [each for each in (*guarded, *self.tensors) if each.changed]
        drawn = ", ".join(generator.name for generator in self.generators if generator.drawn)
        if changed:
            lost = ", ".join(each.name for each in changed if each.copy is None)
            found = f"changes {', '.join(each.name for each in changed)} in place"
            remedy = "compute new tensors, put a module that keeps state in eval mode, or leave this part untiled"
            remedy += f" ({lost} could not be put back)" if lost else ""
        elif drawn:
            found = f"draws random numbers from {drawn}"
            remedy = "draw from torch's default generator, or pass the numbers as an input"
        else:
            return
        self.put_back()
        raise self.error(f"tiled: fn {found}, and it runs once a chunk and again in the backward; {remedy}")

    @torch.no_grad()
    def put_back(self) -> None:
        for each in (*self.tensors, *self.generators):
            each.put_back()


def found_in(roots: Sequence[Found]) -> Iterator[Found]:
    """Yields (name, object, owning module or None) once for each tensor or generator that is a root or is held by one.
    Skips the parameters of modules."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique
    pending = list(reversed(roots))
    while pending:
        name, thing, owner = pending.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if is_kept(thing):
            yield name, thing, owner
        else:  # reversed, so that the first name found is used
            owner = thing if _is_module(thing) else None
            pending += [(inner, part, owner) for inner, part in reversed([*_inside(name, thing)])]


def is_kept(thing: Any) -> bool:
    """Returns whether an object is a tensor or a generator of torch, Python or numpy."""
    kind = type(thing)  # isinstance is slow with torch.Generator
    return not _KEPT.isdisjoint(kind.__mro__) or hasattr(kind, "_bit_generator")


def _is_module(thing: Any) -> bool:
    return hasattr(type(thing), "named_modules")


def _inside(name: str, thing: Any) -> Iterable[tuple[str, Any]]:
    """Returns the contents of a function, bound method, container or module; for any other object, its attributes that
    are tensors, generators or modules."""
    if isinstance(thing, partial):
        return (name, thing.func), ("args", thing.args), ("keywords", thing.keywords)
    if isinstance(thing, MethodType | BuiltinMethodType):
        return (name, getattr(thing, "__func__", None)), (name or type(thing.__self__).__name__, thing.__self__)
    if isinstance(thing, FunctionType):
        return named_by(thing).items()
    if isinstance(thing, list | tuple | dict):
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        return [(f"{name}[{key!r}]", element) for key, element in items]
    if isinstance(thing, ModuleType):  # its `random` is a method of the generator, or numpy's module that has it
        is_random = thing.__name__ in ("random", "numpy", "numpy.random")
        return [(f"{thing.__name__}'s global generator", thing.random)] if is_random else []
    if isinstance(thing, type) or not hasattr(thing, "__dict__"):
        return []
    name = name or type(thing).__name__
    own = {key: part for key, part in vars(thing).items() if not isinstance(part, _PLAIN)}
    inner = [*thing._buffers.items(), *thing._modules.items()] if _is_module(thing) else []
    kept = [(f"{name}.{key}", part) for key, part in (*inner, *own.items()) if is_kept(part) or _is_module(part)]
    return [*kept, (name, own.get("forward", getattr(type(thing), "forward", None)))]


def named_by(function: FunctionType) -> dict[str, Any]:
    """Returns the contents of a function's closure and defaults, and the globals that its code names. Skips functions
    of other files, such as torch's, which hold none of its author's state."""
    code, shared, defaults = function.__code__, function.__globals__, function.__defaults__ or ()
    found = dict(zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False))
    found |= function.__kwdefaults__ or {}
    for name in names_in(code) & shared.keys():
        if not isinstance(shared[name], FunctionType) or shared[name].__globals__ is shared:
            found[name] = shared[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        found |= ((name, value) for value in get_referents(cell))  # empty if the variable has no value yet
    return found


def names_in(code: CodeType) -> set[str]:
    """Returns the names that code uses, including functions and comprehensions inside it."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
