"""Putting one tiled forward in one place and taking it off again.

On a model the forward is bound on the instance, on a class it is assigned. Every tiled forward carries a `Placement`,
which says what it stands in for, so that a copy of a model can be restored as well as the model, and no list of models
is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def placement_of(forward: Callable | None) -> Placement | None:
    """The Placement of a tiled forward, also behind other libraries' wrappers; None for any other function."""
    return next((placement for function in inwards(forward) if (placement := _carried(function))), None)


def wrappers_of(forward: Callable | None) -> list[Callable]:
    """Other libraries' wrappers around a tiled forward, the outermost first."""
    placement = placement_of(forward)
    return list(takewhile(lambda function: function is not placement.forward, inwards(forward))) if placement else []


def inwards(forward: Callable | None) -> Iterator[Callable]:
    """`forward`, then what it wraps: its `__wrapped__`, or a forward that it keeps in its closure, as TRL's does."""
    seen: set[int] = set()
    waiting = [forward]
    while waiting:
        function = waiting.pop()
        function = function.__func__ if isinstance(function, MethodType) else function
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        cells = getattr(function, "__closure__", None) or ()
        kept = (cell.cell_contents for cell in cells if cell != CellType())  # an empty cell has no contents
        waiting += [getattr(function, "__wrapped__", None), *(value for value in kept if isinstance(value, MethodType))]


def _carried(function: Callable) -> Placement | None:
    return vars(function).get("seqtile_placement") if hasattr(function, "__dict__") else None


def own_forward(owner: Owner) -> Any:
    """What stands under `forward` in the owner's own namespace, unbound if it is a method of it; None if nothing."""
    forward = vars(owner).get("forward")
    return forward.__func__ if isinstance(forward, MethodType) else forward


def current_forward(owner: Owner) -> Any:
    """The function that runs as the owner's forward."""
    if isinstance(owner, type):
        return owner.forward
    return own_forward(owner) or type(owner).forward


def check_place(owner: Owner, chunk_tokens: int | None) -> None:
    """Raises ValueError if a tiled forward at `owner` would skip what stands there, or could not be put back."""
    forward = current_forward(owner)
    placement = placement_of(forward)
    if placement is None and (not isinstance(forward, FunctionType) or package_of(forward) not in KNOWN_PACKAGES):
        kind = f"from {package_of(forward)}" if isinstance(forward, FunctionType) else f"a {type(forward).__name__}"
        raise ValueError(
            f"the forward of {name_of(owner)} is {kind}, expected Hugging Face's or Liger's: a tiled forward would "
            "skip what this one does; apply seqtile before it is put there, or to the classes"
        )
    if placement is not None and placement.forward is not forward and placement.chunk_tokens != chunk_tokens:
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off before applying "
            "seqtile with another chunk_tokens"
        )


def place(owner: Owner, wrap: Wrap, chunk_tokens: int | None) -> None:
    """Makes `wrap`'s tiled forward the forward of `owner`, unless the same one is there already."""
    current = current_forward(owner)
    there = placement_of(current)
    if there is not None and there.chunk_tokens == chunk_tokens:
        return
    original = current if there is None else there.original
    before = own_forward(owner)
    if there is not None and before is there.forward:
        before = there.before  # a tiled forward with other options gives way to this one
    forward = wrap(original, chunk_tokens)
    forward.seqtile_placement = Placement(forward, original, before, chunk_tokens)
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
    placement = placement_of(own_forward(owner))
    return None if placement is placement_of(getattr(type(owner), "forward", None)) else placement


def _put(owner: Owner, forward: Callable | None) -> None:
    """Sets the owner's own `forward`, bound if the owner is a model; None takes it out of its namespace."""
    if forward is None:
        delattr(owner, "forward")
    else:
        owner.forward = forward if isinstance(owner, type) else MethodType(forward, owner)


def package_of(forward: Callable) -> str:
    """The package whose code a forward is; a wrapper is its own author's, whatever name functools.wraps gave it."""
    namespace = getattr(forward, "__globals__", None) or {"__name__": type(forward).__module__}
    return namespace["__name__"].split(".")[0]


def name_of(owner: Owner) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
