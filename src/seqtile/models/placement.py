"""Putting one tiled forward in one place and taking it off again.

On a model the forward is bound on the instance, on a class it is assigned. Every tiled forward carries a `Placement`,
which says what it stands in for, so that a copy of a model can be restored as well as the model, and no list of models
is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

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

    def is_of(self, chunk_tokens: int | None, head_groups: int | str | None) -> bool:
        return (self.chunk_tokens, self.head_groups) == (chunk_tokens, head_groups)


def placement_at(owner: Owner, forward: Callable | None = None) -> Placement | None:
    """The Placement of the tiled forward at `owner` (of its forward, or the one given), also behind other libraries'
    wrappers; None if there is none."""
    return next((found for function in inwards(owner, forward) if (found := placement_of(function))), None)


def placement_of(function: Callable | None) -> Placement | None:
    """The Placement of a tiled forward; None of any other function."""
    return vars(function).get("seqtile_placement") if hasattr(function, "__dict__") else None


def is_known(owner: Owner) -> bool:
    """Whether a tiled forward may stand in for what runs as the owner's forward: ours, Hugging Face's or Liger's."""
    return placement_at(owner) is not None or package_of(current_forward(owner)) in KNOWN_PACKAGES


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
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        cells = getattr(function, "__closure__", None) or ()
        kept = (cell.cell_contents for cell in cells if cell != CellType())  # an empty cell has no contents
        methods = (value for value in kept if isinstance(value, MethodType) and value.__self__ is owner)
        waiting += [getattr(function, "__wrapped__", None), *methods]


def own_forward(owner: Owner) -> Any:
    """What stands under `forward` in the owner's own namespace, unbound if it is a method of it; None if nothing."""
    forward = vars(owner).get("forward")
    return forward.__func__ if isinstance(forward, MethodType) else forward


def current_forward(owner: Owner) -> Any:
    """The function that runs as the owner's forward."""
    if isinstance(owner, type):
        return owner.forward
    return own_forward(owner) or type(owner).forward


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


def place(owner: Owner, wrap: Wrap, chunk_tokens: int | None, head_groups: int | str | None = None) -> None:
    """Makes `wrap`'s tiled forward the forward of `owner`, unless the same one is there already.

    The same one of its class does not count: what was applied to a model stays when the classes are restored.
    """
    current, before = current_forward(owner), own_forward(owner)
    there = placement_at(owner)
    if there is not None and there.is_of(chunk_tokens, head_groups) and before is not None:
        return
    original = current if there is None else there.original
    if there is not None and before is there.forward:
        before = there.before  # a tiled forward with other options gives way to this one
    forward = wrap(original, chunk_tokens)
    forward.seqtile_placement = Placement(forward, original, before, chunk_tokens, head_groups)
    _put(owner, forward)


def check_unplace(owner: Owner) -> None:
    """Raises ValueError if another library's wrapper stands around a tiled forward at `owner`."""
    placement = _placed_at(owner)
    if placement is not None and placement.forward is not own_forward(owner):
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off first "
            "(accelerator.unwrap_model(model, keep_fp32_wrapper=False) for Accelerate's)"
        )


def unplace(owner: Owner) -> None:
    """Puts back what `place` found. What another library has put there since stays."""
    placement = _placed_at(owner)
    if placement is not None:
        _put(owner, placement.before)


def _placed_at(owner: Owner) -> Placement | None:
    """The Placement at the owner itself, not that of its class behind a wrapper on the model."""
    own = own_forward(owner)
    placement = None if own is None else placement_at(owner, own)
    if isinstance(owner, type) or placement is None:
        return placement
    return None if placement is placement_at(type(owner)) else placement


def _put(owner: Owner, forward: Callable | None) -> None:
    """Sets the owner's own `forward`, bound if the owner is a model; None takes it out of its namespace."""
    if forward is None:
        delattr(owner, "forward")
    else:
        owner.forward = forward if isinstance(owner, type) else MethodType(forward, owner)


def package_of(forward: Callable) -> str:
    """The package whose code a forward is; a wrapper is its own author's, whatever name functools.wraps gave it."""
    while isinstance(forward, partial):
        forward = forward.func
    namespace = getattr(forward, "__globals__", None) or {"__name__": type(forward).__module__}
    return namespace["__name__"].split(".")[0]


def name_of(owner: Owner) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
