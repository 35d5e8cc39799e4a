"""Putting one tiled forward in one place and taking it off again.

On a class the forward is assigned; a module gets a class of its own and holds the forward, see `own_class.py`. Every
tiled forward carries a `Placement`, which says what it stands in for, so that a copy of a model can be restored as well
as the model, and no list of models is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from seqtile.models.own_class import HELD, is_own_class, own_class, own_class_of
from seqtile.models.plain import origin

Owner = type | nn.Module
Wrap = Callable[[Callable, int | None], Callable]

KNOWN_PACKAGES = ("transformers", "liger_kernel")  # whose forwards a tiled forward may stand in for


@dataclass
class Placement:
    """What a tiled forward knows of the place where it stands."""

    forward: Callable
    original: Callable
    """What it calls for everything that it does not tile."""
    before: Callable | None
    """What stood in the owner's own namespace; None if nothing did."""
    chunk_tokens: int | None
    head_groups: int | str | None = None
    """Of a layer."""

    def __deepcopy__(self, memo: dict) -> "Placement":
        return self  # a copied module holds the same

    def __reduce__(self) -> tuple:
        return type(None), ()  # a module comes out of a pickle untiled

    def is_of(self, chunk_tokens: int | None, head_groups: int | str | None) -> bool:
        return (self.chunk_tokens, self.head_groups) == (chunk_tokens, head_groups)


def placement_at(owner: Owner, forward: Callable | None = None) -> Placement | None:
    """The Placement of the tiled forward at `owner` (of its forward, or the one given), also behind other libraries'
    wrappers; None if there is none."""
    return next((found for function in inwards(owner, forward) if (found := placement_of(function))), None)


def placement_of(function: Callable | None) -> Placement | None:
    """The Placement of a tiled forward; None of any other function."""
    return vars(function).get("seqtile_placement") if hasattr(function, "__dict__") else None


def forward_in_place_of(owner: Owner) -> Callable:
    """What the tiled forward at `owner` stands in for, also behind other libraries' wrappers; if none, what runs."""
    placement = placement_at(owner)
    return placement.original if placement else current_forward(owner)


def computed_forward(owner: Owner) -> Callable:
    """What calling `owner` computes: what ours stands in for, if ours is what runs; another library's wrapper around
    ours is that wrapper."""
    forward = current_forward(owner)
    placement = placement_of(forward)
    return placement.original if placement else forward


def wrappers_at(owner: Owner) -> list[Callable]:
    """Other libraries' wrappers around the tiled forward at `owner`, the outermost first."""
    placement = placement_at(owner)
    return list(takewhile(lambda function: function is not placement.forward, inwards(owner))) if placement else []


def inwards(owner: Owner, forward: Callable | None = None) -> Iterator[Callable]:
    """The owner's forward, or the one given, then what it wraps: its `__wrapped__`, or a forward of the owner's that it
    keeps in its closure, as TRL's does."""
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
    """What another library has put under `forward` in the owner's own namespace, unbound if it is a method of it; None
    if nothing. On a class that may be a tiled forward."""
    forward = vars(owner).get("forward")
    forward = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is owner else forward
    return None if forward is not _held_in(owner, forward) else forward


def _held_in(owner: Owner, function: Any) -> Any:
    """What `function` runs if it is that of a module's own class; else itself."""
    cls = None if isinstance(owner, type) else own_class_of(owner)
    if cls is None or function is not vars(cls)["forward"]:
        return function
    held = vars(owner).get(HELD)
    return cls.__base__.forward if held is None else held.forward


def _class_forward(module: nn.Module) -> Any:
    """What the forward of a module's class runs; on a class derived from a module's own, such as FSDP2's, that is found
    in what Hugging Face puts around every decoder layer's forward, to checkpoint it."""
    forward = inner = type(module).forward
    while _held_in(module, inner) is inner and origin(inner).startswith("transformers.modeling_layers."):
        inner = inner.__wrapped__
    held = _held_in(module, inner)
    return forward if held is inner else held


def current_forward(owner: Owner) -> Any:
    """The function that runs as the owner's forward."""
    if isinstance(owner, type):
        return owner.forward
    return own_forward(owner) or _class_forward(owner)


def check_place(owner: Owner, chunk_tokens: int | None, head_groups: int | str | None = None) -> None:
    """Raises ValueError if a tiled forward at `owner` would skip what stands there, or could not be put back."""
    forward, placement = current_forward(owner), placement_at(owner)
    if placement is None and isinstance(owner, nn.Module) and isinstance(vars(owner).get("forward"), FunctionType):
        raise ValueError(
            f"the forward of {name_of(owner)} is a function from {package_of(forward)} that stands on the module, such "
            "as expert parallelism puts there; apply seqtile before it, or to the classes"
        )
    if placement is None and (not isinstance(forward, FunctionType) or package_of(forward) not in KNOWN_PACKAGES):
        kind = f"from {package_of(forward)}" if isinstance(forward, FunctionType) else f"a {type(forward).__name__}"
        raise ValueError(
            f"the forward of {name_of(owner)} is {kind}, expected Hugging Face's or Liger's: a tiled forward would "
            "skip what this one does; apply seqtile before it is put there, or to the classes"
        )
    if placement is not None and placement.forward is not forward and not placement.is_of(chunk_tokens, head_groups):
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off before applying "
            "seqtile with other chunk_tokens or head_groups"
        )


def place(
    owner: Owner,
    wrap: Wrap,
    chunk_tokens: int | None,
    head_groups: int | str | None = None,
    classes: dict[type, type] | None = None,
) -> None:
    """Makes `wrap`'s tiled forward the forward of `owner`, unless the same one is there already. Modules of one class
    get the same one of the `classes`, which is extended.

    The same one of its class does not count: what was applied to a model stays when the classes are restored.
    """
    there, before = placement_at(owner), own_forward(owner)
    mine = _placed_at(owner)
    if there is not None and there.is_of(chunk_tokens, head_groups) and (there is mine or before is not None):
        return
    original = current_forward(owner) if there is None else there.original
    if there is not None and there is mine:
        before = there.before  # a tiled forward with other options gives way to this one
    forward = wrap(original, chunk_tokens)
    forward.seqtile_placement = Placement(forward, original, before, chunk_tokens, head_groups)
    if isinstance(owner, type):
        owner.forward = forward
        return
    if own_class_of(owner) is None:
        classes = {} if classes is None else classes
        base = type(owner)
        owner.__class__ = classes.get(base) or classes.setdefault(base, own_class(base))
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
        if placement.before is None:
            del owner.forward
        else:
            owner.forward = placement.before
        return
    taken = own_forward(owner) is not None
    vars(owner).pop(HELD, None)
    if placement is not None and not taken:
        vars(owner).pop("forward", None)
        if placement.before is not None:
            owner.forward = MethodType(placement.before, owner)
    if is_own_class(type(owner)):
        owner.__class__ = type(owner).__base__


def _placed_at(owner: Owner) -> Placement | None:
    """The Placement at the owner itself, not that of its class."""
    if not isinstance(owner, type):
        return vars(owner).get(HELD)
    own = own_forward(owner)
    return None if own is None else placement_at(owner, own)


def package_of(forward: Callable) -> str:
    """The package whose code a forward is; a wrapper is its own author's, whatever name functools.wraps gave it. Only
    those that Hugging Face's decorators make, and which stand around anyone's forwards, are those of what they wrap."""
    while True:
        namespace = getattr(forward, "__globals__", None) or {"__name__": type(forward).__module__}
        package = namespace["__name__"].split(".")[0]
        if isinstance(forward, partial):
            forward = forward.func
        elif package == "transformers" and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        else:
            return package


def name_of(owner: Owner) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
