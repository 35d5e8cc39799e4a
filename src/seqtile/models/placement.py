"""Installs a tiled forward on a class or a module, and removes it.

On a class the forward is assigned. A module gets a class of its own, derived from the one it had, whose forward runs
what the module holds:

    class    Llama.forward = tiled            tiled.seqtile_placement: what it stands in for
    module   type(mlp) = own class of LlamaMLP
             mlp._seqtile_placement.forward = tiled

A forward is looked up through the type and given the module that is called, so a copy's forward runs on the copy, also
on a shallow one, as torch's DataParallel makes them; a forward bound on a module would go on to run on that module.
Every tiled forward carries a `Placement`, so that a copy of a model can be restored as well as the model, and no list
of models is kept.
"""

import copy
import copyreg
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import takewhile
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from seqtile.models.weights import defining_path
from seqtile.ops.chunks import resolve_chunk_tokens

Owner = type | nn.Module
Wrap = Callable[[Callable], Callable]
"""A forward (a plain function) to the tiled one that stands in for it."""
KNOWN_PACKAGES = ("transformers", "liger_kernel")  # whose forwards a tiled forward may stand in for
HELD = "_seqtile_placement"  # what a module holds, None on its own class


@dataclass(frozen=True)
class Options:
    """The options of a call: what is to be tiled and how, as `apply_seqtile_to_llama` is asked for it."""

    mlp: bool = True
    loss: bool = True
    layer: bool = False
    head_groups: int | str | None = None
    chunk_tokens: int | None = None
    check: bool | str = True
    """Whether the first training step compares itself with the untiled model; "full" for every gradient."""

    @property
    def parts(self) -> frozenset[str]:
        """The names of the parts."""
        return frozenset(name for name in ("mlp", "loss", "layer") if getattr(self, name))

    def validate(self) -> None:
        """Raises TypeError or ValueError for what no architecture can have."""
        groups = self.head_groups
        resolve_chunk_tokens(self.chunk_tokens, 1)
        if not isinstance(self.check, bool) and self.check != "full":
            raise ValueError(f'check: expected True, False or "full", got {self.check!r}')
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


def stand_in_for(original: Callable) -> Callable[[Callable], Callable]:
    """Returns a decorator much like functools.wraps, but without the `__wrapped__` that it leaves.

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


@dataclass
class Placement:
    """A tiled forward, and the place where it stands."""

    forward: Callable
    original: Callable
    """Called for everything that the tiled forward does not tile."""
    previous: Callable | None
    """The forward that stood in the owner's own namespace; None if none did."""
    options: Options
    part: str = ""
    """What it tiles, as `apply_seqtile` names it; "" for what stands there for its check alone."""

    def __deepcopy__(self, memo: dict) -> "Placement":
        return self  # a copied module holds the same

    def __reduce__(self) -> tuple:
        return type(None), ()  # a module comes out of a pickle untiled

    def is_of(self, options: Options) -> bool:
        """Says if the same options would make the same forward."""
        mine = self.options
        same_chunks = (mine.chunk_tokens, mine.head_groups) == (options.chunk_tokens, options.head_groups)
        return same_chunks and mine.check == options.check


class _PatchedSubclass(type):
    """The metaclass, by which pickle knows such a class. It is pickled as the one beneath: a module comes back untiled,
    and seqtile need not be there to load it."""


def _pickled(cls: type) -> Any:
    return (copy.copy, (cls.__base__,)) if is_patched_subclass(cls) else cls.__qualname__  # copying a class returns it


copyreg.pickle(_PatchedSubclass, _pickled)


def is_patched_subclass(cls: type) -> bool:
    return HELD in vars(cls)


def patched_subclass_of(module: nn.Module) -> type | None:
    """Returns the class that a module got here, which another library may have derived one more from, as FSDP2 does;
    None if it got none."""
    return next((cls for cls in type(module).__mro__ if is_patched_subclass(cls)), None)


def patched_subclass(base: type) -> type:
    """Returns a subclass of `base`, to be found where that was."""
    metaclass = _PatchedSubclass
    if type(base) is not type:
        metaclass = type("_PatchedSubclass", (_PatchedSubclass, type(base)), {})
        copyreg.pickle(metaclass, _pickled)

    @stand_in_for(base.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = self._seqtile_placement
        return (base.forward if held is None else held.forward)(self, *args, **kwargs)

    vars(forward).pop("seqtile_placement", None)  # that of a tiled `base`
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, HELD: None}
    cls = metaclass(base.__name__, (base,), names)
    cls.forward = forward  # now, since a decoder layer's class wraps the forward that it finds when it is made
    return cls


def placement_at(owner: Owner, forward: Callable | None = None) -> Placement | None:
    """Returns the Placement of the tiled forward at `owner` (of its forward, or the one given), also behind other
    libraries' wrappers; None if there is none."""
    return next((found for function in inwards(owner, forward) if (found := placement_of(function))), None)


def placement_of(function: Callable | None) -> Placement | None:
    """Returns the Placement of a tiled forward; None of any other function."""
    return vars(function).get("seqtile_placement") if hasattr(function, "__dict__") else None


def forward_in_place_of(owner: Owner) -> Callable:
    """Returns what the tiled forward at `owner` stands in for, also behind other libraries' wrappers; else what
    runs."""
    placement = placement_at(owner)
    return placement.original if placement else current_forward(owner)


def computed_forward(owner: Owner) -> Callable:
    """Returns the forward that calling `owner` computes: what ours stands in for, if ours is what runs; another
    library's wrapper around ours is that wrapper."""
    forward = current_forward(owner)
    placement = placement_of(forward)
    return placement.original if placement else forward


def wrappers_at(owner: Owner) -> list[Callable]:
    """Returns other libraries' wrappers around the tiled forward at `owner`, the outermost first."""
    placement = placement_at(owner)
    return list(takewhile(lambda function: function is not placement.forward, inwards(owner))) if placement else []


def inwards(owner: Owner, forward: Callable | None = None) -> Iterator[Callable]:
    """Yields the owner's forward, or the one given, then what it wraps: its `__wrapped__`, or a forward of the owner's
    that it keeps in its closure, as TRL's does."""
    seen: set[int] = set()
    waiting = [forward or current_forward(owner)]
    while waiting:
        function = waiting.pop(0)
        function = function.__func__ if isinstance(function, MethodType) else function
        function = _held_in(owner, function)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        cells = getattr(function, "__closure__", None) or ()
        kept = (cell.cell_contents for cell in cells if cell != CellType())  # an empty cell has no contents
        methods = (value for value in kept if isinstance(value, MethodType) and value.__self__ is owner)
        waiting += [getattr(function, "__wrapped__", None), *methods]


def own_forward(owner: Owner) -> Any:
    """Returns what another library has put under `forward` in the owner's own namespace, unbound if it is a method of
    it; None if nothing. On a class that may be a tiled forward."""
    forward = vars(owner).get("forward")
    forward = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is owner else forward
    return None if forward is not _held_in(owner, forward) else forward


def _held_in(owner: Owner, function: Any) -> Any:
    """Returns what `function` runs if it is that of a module's own class; else itself."""
    cls = None if isinstance(owner, type) else patched_subclass_of(owner)
    if cls is None or function is not vars(cls)["forward"]:
        return function
    held = vars(owner).get(HELD)
    return cls.__base__.forward if held is None else held.forward


def _class_forward(module: nn.Module) -> Any:
    """Returns what the forward of a module's class runs; on a class derived from a module's own, such as FSDP2's, that
    is found in what Hugging Face puts around every decoder layer's forward, to checkpoint it."""
    forward = inner = type(module).forward
    while _held_in(module, inner) is inner and defining_path(inner).startswith("transformers.modeling_layers."):
        inner = inner.__wrapped__
    held = _held_in(module, inner)
    return forward if held is inner else held


def current_forward(owner: Owner) -> Any:
    """Returns the function that runs as the owner's forward."""
    if isinstance(owner, type):
        return owner.forward
    return own_forward(owner) or _class_forward(owner)


def check_place(owner: Owner, options: Options) -> None:
    """Raises ValueError if a tiled forward at `owner` would skip what stands there, or could not be put back."""
    forward, placement = current_forward(owner), placement_at(owner)
    if placement is None and isinstance(owner, nn.Module) and isinstance(vars(owner).get("forward"), FunctionType):
        raise ValueError(
            f"the forward of {name_of(owner)} is a function from {package_of(forward)} that stands on the module, such "
            "as expert parallelism puts there; apply seqtile before it, or to the classes"
        )
    if placement is None and (not isinstance(forward, FunctionType) or package_of(forward) not in packages_of(owner)):
        kind = f"from {package_of(forward)}" if isinstance(forward, FunctionType) else f"a {type(forward).__name__}"
        raise ValueError(
            f"the forward of {name_of(owner)} is {kind}, expected Hugging Face's or Liger's: a tiled forward would "
            "skip what this one does; apply seqtile before it is put there, or to the classes"
        )
    if placement is not None and placement.forward is not forward and not placement.is_of(options):
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off before applying "
            "seqtile with other chunk_tokens or head_groups"
        )


def place(owner: Owner, wrap: Wrap, options: Options, classes: dict[type, type], part: str = "") -> None:
    """Makes `wrap`'s tiled forward the forward of `owner`, unless the same one is there already. Modules of one class
    get the same own class of the `classes`, which is extended. `part` is what the forward tiles.

    The same one of its class does not count: what was applied to a model stays when the classes are restored.
    """
    there, before = placement_at(owner), own_forward(owner)
    mine = _placed_at(owner)
    if there is not None and there.is_of(options) and there.part == part and (there is mine or before is not None):
        return
    original = current_forward(owner) if there is None else there.original
    if there is not None and there is mine:
        before = there.previous  # a tiled forward with other options gives way to this one
    forward = wrap(original)
    forward.seqtile_placement = Placement(forward, original, before, options, part)
    if isinstance(owner, type):
        owner.forward = forward
        return
    if patched_subclass_of(owner) is None:
        base = type(owner)
        owner.__class__ = classes.get(base) or classes.setdefault(base, patched_subclass(base))
    vars(owner).pop("forward", None)
    vars(owner)[HELD] = forward.seqtile_placement


def check_unplace(owner: Owner) -> None:
    """Raises ValueError if another library's wrapper stands around a tiled forward at `owner`."""
    placement, around = _placed_at(owner), own_forward(owner)
    if placement is None or around is None or around is placement.forward:
        return
    if placement_at(owner, around) is placement:
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off first "
            "(accelerator.unwrap_model(model, keep_fp32_wrapper=False) for Accelerate's)"
        )


def unplace(owner: Owner) -> None:
    """Puts back what `place` found. What another library has put there since stays."""
    placement = _placed_at(owner)
    if isinstance(owner, type):
        if placement is None:
            return
        if placement.previous is None:
            del owner.forward
        else:
            owner.forward = placement.previous
        return
    taken = own_forward(owner) is not None
    vars(owner).pop(HELD, None)
    if placement is not None and not taken:
        vars(owner).pop("forward", None)
        if placement.previous is not None:
            owner.forward = MethodType(placement.previous, owner)
    if is_patched_subclass(type(owner)):
        owner.__class__ = type(owner).__base__


def _placed_at(owner: Owner) -> Placement | None:
    """Returns the Placement at the owner itself, not that of its class."""
    if not isinstance(owner, type):
        return vars(owner).get(HELD)
    own = own_forward(owner)
    return None if own is None else placement_at(owner, own)


def package_of(forward: Callable) -> str:
    """Returns the package whose code a forward is.

    A wrapper is its own author's, whatever name functools.wraps gave it. Only those that Hugging Face's decorators
    make, and which stand around anyone's forwards, are those of what they wrap.
    """
    forward = decorated(forward)
    return package_of(forward.func) if isinstance(forward, partial) else home_of(forward).split(".")[0]


def decorated(forward: Callable) -> Callable:
    """Returns the forward that Hugging Face's decorators stand around; else itself."""
    while home_of(forward).startswith("transformers.") and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def home_of(function: Callable) -> str:
    """Returns the name of the module in which a function was written."""
    namespace = getattr(function, "__globals__", None) or {"__name__": type(function).__module__}
    return namespace["__name__"]


def packages_of(owner: Owner) -> set[str]:
    """Returns the packages whose code a forward of `owner` may be: those that are known, and those of its class and
    what this is derived from, such as the module that comes with a model on the hub."""
    cls = owner if isinstance(owner, type) else type(owner)
    return {*KNOWN_PACKAGES, *(base.__module__.split(".")[0] for base in cls.__mro__)} - {"torch", "builtins"}


def name_of(owner: Owner) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
