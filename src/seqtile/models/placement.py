"""Puts a tiled forward on a class and removes it.

A tiled forward is always the forward of a class. To tile a single module, seqtile changes the module's class to a new
subclass of the old one. All modules of one class that are tiled this way share the subclass:

    a class    LlamaMLP.forward = tiled                            tiled.seqtile_placement: what it replaces
    a module   mlp.__class__ = a class derived from type(mlp), whose forward is tiled

A copy of a module has the same class. It is therefore tiled too, uses its own weights, and can be restored by itself.
seqtile keeps no list of models.
"""

import copy
import copyreg
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from itertools import pairwise, takewhile
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule

from seqtile.models.functions import behind_renaming, decorated, home_of, package_of, unbound
from seqtile.ops.chunks import resolve_chunk_tokens

Owner = type | nn.Module
KNOWN_PACKAGES = ("transformers", "liger_kernel")  # a tiled forward may replace forwards from these packages
_DECIDING = {
    "mlp": ("chunk_tokens",),
    "layer": ("chunk_tokens", "head_groups"),
    "attention": ("attention",),
}  # options that decide a forward
_OWN = "_seqtile_placement"  # on classes made for single modules: the Placement, or None if the class undoes one


@dataclass(frozen=True)
class Options:
    """The options of a call such as `apply_seqtile_to_llama`: what to tile, and how."""

    mlp: bool = True
    loss: bool = True
    layer: bool = False
    head_groups: int | str | None = None
    chunk_tokens: int | None = None
    attention: str | None = None
    check: bool | str = True
    """Whether the first training step compares itself with the untiled model; "full" compares every gradient."""

    @property
    def parts(self) -> frozenset[str]:
        """The names of the parts to tile."""
        return frozenset(name for name in ("mlp", "loss", "layer", "attention") if getattr(self, name))

    def validate(self) -> None:
        """Raises TypeError or ValueError for options that are invalid for every architecture."""
        groups = self.head_groups
        resolve_chunk_tokens(self.chunk_tokens, 1)
        if not isinstance(self.check, bool) and self.check != "full":
            raise ValueError(f'check: expected True, False or "full", got {self.check!r}')
        if self.attention not in (None, "varlen"):
            raise ValueError(f'attention: expected "varlen" or None, got {self.attention!r}')
        if not self.parts:
            raise ValueError("mlp=False and loss=False leave nothing to tile; use seqtile.restore to take seqtile off")
        if groups is not None and groups != "auto" and (isinstance(groups, bool) or not isinstance(groups, int)):
            raise TypeError(f'head_groups: expected an int, "auto" or None, got {groups!r}')
        if isinstance(groups, int) and groups < 1:
            raise ValueError(f"head_groups: expected at least 1 group, got {groups}")
        if groups is not None and not self.layer:
            raise ValueError(
                "head_groups: expected None, since layer=False leaves attention as it is; pass layer=True too"
            )
        if self.layer and not self.mlp:
            raise ValueError("mlp=False: expected True, since layer=True tiles the MLP with the layer that it is in")


@dataclass
class Placement:
    """A tiled forward and the forward that it replaces."""

    forward: Callable
    replaced: Callable
    previous: Callable | None
    """The owner's own forward (in its namespace) before; None if there was none."""
    beneath: tuple[type, Callable] | None
    """The class from which `replaced` was inherited, and its forward; None if the owner had its own."""
    options: Options
    part: str = ""
    """The part that it tiles, as `apply_seqtile` names it; "" if it only runs the first step's check."""
    chosen_for: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """On a class: its models whose attention was chosen in their first forward."""

    @property
    def original(self) -> Callable:
        """The forward that runs when the tiled forward does not tile a call. Raises RuntimeError, see `check`."""
        self.check()
        return self.replaced

    def check(self) -> None:
        """Raises RuntimeError if the class has been given another forward since, which would not run."""
        if self.beneath is not None and (now := self.beneath[0].forward) is not self.beneath[1]:
            if (package := package_of(now)) not in (*KNOWN_PACKAGES, "seqtile"):
                raise RuntimeError(
                    f"{self.beneath[0].__name__}.forward was replaced, by one from {package}, after seqtile was "
                    "applied, and would not run; put the former one back, or call seqtile.restore"
                )

    def is_of(self, options: Options) -> bool:
        """Returns whether `options` would produce the same forward."""
        names = _DECIDING.get(self.part, ("chunk_tokens", "check"))
        return all(getattr(self.options, name) == getattr(options, name) for name in names)


def _type_of(owner: Owner) -> type:
    return owner if isinstance(owner, type) else type(owner)


def is_own_class(cls: type) -> bool:
    """Returns whether a class was made here for modules that are tiled by themselves."""
    return _OWN in vars(cls)


def _pickled(cls: type) -> Any:
    """Pickles a module's derived class as its base, so that unpickling gives an untiled module and does not need
    seqtile."""
    return (copy.copy, (cls.__base__,)) if is_own_class(cls) else cls.__qualname__  # copy.copy returns a class itself


@cache
def _pickled_as_its_base(metaclass: type) -> type:
    """Returns a metaclass whose classes `_pickled` pickles."""
    derived = type(metaclass.__name__, (metaclass,), {})
    copyreg.pickle(derived, _pickled)
    return derived


def _own_class(base: type, forward: Callable, placement: Placement | None) -> type:
    """Returns a subclass of `base` with another forward and the same name and module."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, _OWN: placement}
    cls = _pickled_as_its_base(type(base))(base.__name__, (base,), names)
    cls.forward = forward  # after creation: a decoder layer's class wraps the forward that it is created with
    return cls


def class_of(module: nn.Module) -> type:
    """Returns a module's original class, not one that seqtile or torch derived from it."""
    for cls, base in pairwise(classes_of(module)):
        same_name = (cls.__module__, cls.__qualname__) == (base.__module__, base.__qualname__)
        stands_in = same_name and placement_of(vars(cls).get("forward")) is not None
        derived = cls.__module__.startswith(("torch.distributed.", "torch.nn.utils.parametrize"))
        if not (stands_in or derived or cls.__bases__[0] is FSDPModule):  # FSDP2 derives PEFT's in the module abc
            return cls
    return object


def classes_of(module: nn.Module) -> list[type]:
    """Returns a module's class and its bases, without the classes that seqtile puts before them."""
    classes = list(type(module).__mro__)
    tiled = [i for i, cls in enumerate(classes) if is_own_class(cls)]
    return classes[max(tiled, default=-1) + 1 :]


def homes_of(module: nn.Module) -> set[str]:
    """Returns the Python modules that hold a module's class and its forward."""
    return {class_of(module).__module__, home_of(decorated(computed_forward(module)))}


def placement_at(owner: Owner, forward: Callable | None = None) -> Placement | None:
    """Returns the Placement of the tiled forward at `owner`, looking through other libraries' wrappers; None if there
    is none. With `forward`, starts there instead of at the owner's forward."""
    return next((found for function in inwards(owner, forward) if (found := placement_of(function))), None)


def placement_of(function: Callable | None) -> Placement | None:
    """Returns the Placement of a tiled forward; None for any other function."""
    placement = getattr(function, "seqtile_placement", None)
    return placement if placement is not None and placement.forward is function else None  # wrappers copy attributes


def original_forward(owner: Owner) -> Callable:
    """Returns the forward that the tiled forward at `owner` replaced, or the current forward if none is tiled."""
    placement = placement_of(forward := current_forward(owner)) or placement_at(owner)
    return placement.original if placement else forward


def computed_forward(owner: Owner) -> Callable:
    """Returns the original forward if our tiled forward runs. If another library wraps ours, returns that wrapper."""
    forward = current_forward(owner)
    placement = placement_of(forward)
    return behind_renaming(placement.original if placement else forward)


def wrappers_at(owner: Owner) -> list[Callable]:
    """Returns other libraries' wrappers around the tiled forward at `owner`, outermost first."""
    placement = placement_at(owner)
    return list(takewhile(lambda function: function is not placement.forward, inwards(owner))) if placement else []


def inwards(owner: Owner, forward: Callable | None = None) -> Iterator[Callable]:
    """Yields the owner's forward (or `forward`), then each function that it wraps: its `__wrapped__`, or a method of
    the owner that it keeps in its closure, as TRL's wrapper does."""
    seen: set[int] = set()
    waiting = [forward or current_forward(owner)]
    while waiting:
        function = waiting.pop(0)
        function = unbound(function)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        cells = getattr(function, "__closure__", None) or ()
        kept = (cell.cell_contents for cell in cells if cell != CellType())  # an empty cell has no contents
        methods = (value for value in kept if type(value) is MethodType and value.__self__ is owner)
        waiting += [getattr(function, "__wrapped__", None), *methods]


def own_forward(owner: Owner) -> Any:
    """Returns the `forward` that another library has put in the owner's own namespace, unbound if it is the owner's
    method; None if there is none. On a class it may be a tiled forward."""
    forward = vars(owner).get("forward")
    if isinstance(owner, type) or type(forward) is not MethodType or forward.__self__ is not owner:
        return forward
    placement = _placed_at(owner)
    return None if placement is not None and placement.forward is forward.__func__ else forward.__func__


def current_forward(owner: Owner) -> Any:
    """Returns the function that runs as the owner's forward. Hugging Face wraps the forward of every subclass of a
    decoder layer, such as FSDP2's, to checkpoint it; a tiled forward inside that wrapper is found too."""
    forward = own_forward(owner) or getattr(_type_of(owner), "forward", None)  # what torch.jit traces has none
    if placement_of(forward) is not None:
        return forward
    tiled = decorated(forward)
    return tiled if placement_of(tiled) is not None else forward


def check_place(owner: Owner, options: Options) -> None:
    """Raises ValueError if a tiled forward at `owner` would skip the code of another library, or could not be removed
    again."""
    forward, placement = current_forward(owner), placement_at(owner)
    # Accept known packages and the packages of the owner's class and base classes, such as code from a model on the
    # Hub.
    homes = {base.__module__.split(".")[0] for base in _type_of(owner).__mro__} - {"torch", "builtins"}
    homes |= set(KNOWN_PACKAGES)
    if placement is None and isinstance(owner, nn.Module) and isinstance(vars(owner).get("forward"), FunctionType):
        raise ValueError(
            f"the forward of {name_of(owner)} is a function from {package_of(forward)} that stands on the module, such "
            "as expert parallelism puts there; apply seqtile before it, or to the classes"
        )
    if placement is None and (type(forward) is not FunctionType or package_of(forward) not in homes):
        kind = f"from {package_of(forward)}" if type(forward) is FunctionType else f"a {type(forward).__name__}"
        raise ValueError(
            f"the forward of {name_of(owner)} is {kind}, expected Hugging Face's or Liger's: a tiled forward would "
            "skip what this one does; apply seqtile before it is put there, or to the classes"
        )
    if placement is not None and placement.forward is not forward and not placement.is_of(options):
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off before applying "
            "seqtile with other chunk_tokens or head_groups"
        )


def place(
    owner: Owner, wrap: Callable[[Callable], Callable], options: Options, classes: dict[tuple, type], part: str = ""
) -> None:
    """Replaces the owner's forward (a plain function) by the tiled forward that `wrap` makes of it, unless it is
    already tiled the same way. `part` names what is tiled. Modules of one class share one derived class, which is added
    to `classes`.

    A module gets a tiled forward of its own even if its class has one; restoring the class leaves the module tiled. A
    forward that was set on the module itself is removed, and put back by `unplace`.
    """
    there, before, mine = placement_at(owner), own_forward(owner), _placed_at(owner)
    if there is not None and there.is_of(options) and there.part == part and (there is mine or before is not None):
        return
    original = current_forward(owner) if there is None else there.original
    if there is not None and there is mine:
        before = there.previous  # replace a tiled forward that has other options
    base = _type_of(owner)
    if base is not owner and vars(base).get(_OWN) is not None:
        base = base.__base__
    if (key := (base, original, before, part)) not in classes:
        hidden = base if owner is not base else owner.__base__
        beneath = (hidden, hidden.forward) if before is None else None
        forward = update_wrapper(wrap(original), original)
        # Accelerate's unwrap_model(keep_fp32_wrapper=False) follows it to the end, and would remove seqtile together
        # with its own wrapper; Trainer reads from the signature which inputs and loss arguments a model takes.
        del forward.__wrapped__
        forward.__signature__ = inspect.signature(original)
        chosen_for = there.chosen_for if there is not None and there is mine else WeakSet()
        forward.seqtile_placement = Placement(forward, original, before, beneath, options, part, chosen_for)
        if owner is base:
            owner.forward = forward
        classes[key] = owner if owner is base else _own_class(base, forward, forward.seqtile_placement)
    if owner is not base:
        vars(owner).pop("forward", None)
        owner.__class__ = classes[key]


def check_unplace(owner: Owner) -> None:
    """Raises ValueError if another library wraps a tiled forward at `owner`."""
    placement, around = _placed_at(owner), own_forward(owner)
    if placement is None or around is None or around is placement.forward:
        return
    if placement_at(owner, around) is placement:
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off first "
            "(accelerator.unwrap_model(model, keep_fp32_wrapper=False) for Accelerate's)"
        )


def unplace(owner: Owner) -> None:
    """Restores the forward that `place` replaced. A forward that another library has put there since stays."""
    placement = _placed_at(owner)
    if placement is None:
        return
    if isinstance(owner, type):
        del owner.forward
        if placement.previous is not None:
            owner.forward = placement.previous
        return
    if own_forward(owner) is None:
        vars(owner).pop("forward", None)
        if placement.previous is not None:
            owner.forward = MethodType(placement.previous, owner)
    while _placed_at(owner) is not None:
        own, cls = next(filter(is_own_class, type(owner).__mro__)), type(owner)
        # If another library has derived a further class, as FSDP2 does, derive one more that restores the forward.
        owner.__class__ = own.__base__ if own is cls else _own_class(cls, own.__base__.forward, None)


def _placed_at(owner: Owner) -> Placement | None:
    """Returns the Placement at the owner itself; for a module, ignores its class's Placement."""
    if isinstance(owner, type):
        return placement_at(owner, vars(owner)["forward"]) if "forward" in vars(owner) else None
    return next((vars(cls)[_OWN] for cls in type(owner).__mro__ if is_own_class(cls)), None)


def name_of(owner: Owner) -> str:
    return _type_of(owner).__name__
