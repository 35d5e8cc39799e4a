"""Puts the tiled forwards on Hugging Face's classes or on one model, takes them off again, and tells where they are.

On one model, a forward is bound on the instance. On classes, the causal LM's forward is assigned on its own class, so
that code which imported the class earlier sees it; the MLP class, which may be another library's and shared by many
architectures, is swapped for a subclass of the same name. Every tiled forward carries a `Placement`, which says what
it stands in for, so that restoring needs no list of models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from seqtile.models.arch import ARCHS, Arch, find_arch
from seqtile.models.causal_lm import check_loss, tiled_loss_forward
from seqtile.models.mlp import check_mlp, tiled_mlp_forward
from seqtile.ops.tiles import resolve_chunk_tokens

Wrap = Callable[[Callable, int | None], Callable]


@dataclass
class Placement:
    """What a tiled forward knows of the place where it stands."""

    forward: Callable
    original: Callable
    """What it calls for everything that it does not tile."""
    before: Callable | None
    """What stood in the owner's own namespace; None if nothing did."""
    chunk_tokens: int | None


@dataclass
class ClassPatch:
    """What was applied to the classes of one architecture."""

    parts: set[str]
    mlp: type | None = None
    """The subclass that stands in for the MLP class."""


KNOWN_PACKAGES = ("transformers", "liger_kernel")  # whose forwards a tiled forward may stand in for
_CLASSES: dict[str, ClassPatch] = {}  # the one registry: model_type -> what was applied to its classes
_PARTS = "_seqtile_parts"  # on a model: the parts that were applied to it


def placement_of(forward: Callable | None) -> Placement | None:
    """The Placement of a tiled forward, also behind another library's wrapper; None for any other function."""
    while forward is not None:
        placement = vars(forward).get("seqtile_placement") if hasattr(forward, "__dict__") else None
        if placement is not None:
            return placement
        forward = getattr(forward, "__wrapped__", None)
    return None


def apply(arch: Arch, model: nn.Module | None, *, mlp: bool, loss: bool, chunk_tokens: int | None) -> None:
    """See `apply_seqtile_to_llama`. Everything is checked before anything is changed."""
    resolve_chunk_tokens(chunk_tokens, 1)
    if not (mlp or loss):
        raise ValueError("mlp=False and loss=False leave nothing to tile; use seqtile.restore to take seqtile off")
    if model is None:
        apply_to_classes(arch, mlp=mlp, loss=loss, chunk_tokens=chunk_tokens)
    else:
        apply_to_model(arch, model, mlp=mlp, loss=loss, chunk_tokens=chunk_tokens)


def apply_to_classes(arch: Arch, *, mlp: bool, loss: bool, chunk_tokens: int | None) -> None:
    for owner in [arch.causal_lm] * loss + [getattr(arch.modeling, arch.mlp_name)] * mlp:
        check_place(owner, chunk_tokens)
    patch = _CLASSES.setdefault(arch.model_type, ClassPatch(parts=set()))
    if loss:
        place(arch.causal_lm, tiled_loss_forward, chunk_tokens)
        patch.parts.add("loss")
    if mlp:
        current = getattr(arch.modeling, arch.mlp_name)
        if current is not patch.mlp:
            patch.mlp = checked_subclass(current, arch)
            setattr(arch.modeling, arch.mlp_name, patch.mlp)
        place(patch.mlp, tiled_mlp_forward, chunk_tokens)
        patch.parts.add("mlp")


def checked_subclass(base: type, arch: Arch) -> type:
    """A subclass of the MLP class `base`, to be found (by pickle, too) where `base` was, that refuses when it is built
    what cannot be tiled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        if placement_of(type(self).forward) is not None:
            check_mlp(self)

    namespace = {"__init__": __init__, "__module__": arch.modeling.__name__, "__qualname__": arch.mlp_name}
    return type(base.__name__, (base,), namespace)


def apply_to_model(arch: Arch, model: nn.Module, *, mlp: bool, loss: bool, chunk_tokens: int | None) -> None:
    places: list[tuple[nn.Module, Wrap]] = []
    if loss:
        if not isinstance(model, arch.causal_lm):
            raise ValueError(
                f"expected a {arch.causal_lm_name}, got a {type(model).__name__}; pass the causal LM itself, not a "
                "wrapper around it, or apply with loss=False"
            )
        check_loss(model)
        places.append((model, tiled_loss_forward))
    if mlp:
        for module in mlps_of(model):
            check_mlp(module)
            places.append((module, tiled_mlp_forward))
    for owner, _ in places:
        check_place(owner, chunk_tokens)
    for owner, wrap in places:
        place(owner, wrap, chunk_tokens)
    parts = {name for name, wanted in (("loss", loss), ("mlp", mlp)) if wanted}
    setattr(model, _PARTS, getattr(model, _PARTS, frozenset()) | parts)


def mlps_of(model: nn.Module) -> list[nn.Module]:
    return [layer.mlp for layer in model.base_model.layers]


def own_forward(owner: type | nn.Module) -> Any:
    """What stands under `forward` in the owner's own namespace, unbound if it is a method of it; None if nothing."""
    forward = vars(owner).get("forward")
    return forward.__func__ if isinstance(forward, MethodType) else forward


def current_forward(owner: type | nn.Module) -> Any:
    """The function that runs as the owner's forward."""
    if isinstance(owner, type):
        return owner.forward
    return own_forward(owner) or type(owner).forward


def check_place(owner: type | nn.Module, chunk_tokens: int | None) -> None:
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


def place(owner: type | nn.Module, wrap: Wrap, chunk_tokens: int | None) -> None:
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
    put(owner, forward)


def put(owner: type | nn.Module, forward: Callable | None) -> None:
    """Sets the owner's own `forward`, bound if the owner is a model; None takes it out of its namespace."""
    if forward is None:
        delattr(owner, "forward")
    else:
        owner.forward = forward if isinstance(owner, type) else MethodType(forward, owner)


def check_unplace(owner: type | nn.Module) -> None:
    forward = own_forward(owner)
    placement = placement_of(forward)
    if placement is not None and placement.forward is not forward:
        raise ValueError(
            f"seqtile's forward of {name_of(owner)} is wrapped by another library's; take that off first "
            "(accelerator.unwrap_model(model, keep_fp32_wrapper=False) for Accelerate's)"
        )


def unplace(owner: type | nn.Module) -> None:
    """Puts back what `place` found. What another library has put there since stays."""
    placement = placement_of(own_forward(owner))
    if placement is not None:
        put(owner, placement.before)


def restore(target: nn.Module | str | None = None) -> None:
    """Takes seqtile off again and puts back exactly what was there.

    Args:
        target: a model (what was applied to this instance), a model type such as "llama" (what was applied to its
            classes; models built meanwhile are untiled too), or None (the classes of every model type).

    Raises ValueError if another library has wrapped a tiled forward since: nothing is changed then.
    """
    if target is None:
        for model_type in list(_CLASSES):
            restore(model_type)
    elif isinstance(target, str):
        arch = find_arch(target)
        if (patch := _CLASSES.get(target)) is None:
            return
        owners = [arch.causal_lm, *([patch.mlp] if patch.mlp else [])]
        _unplace_all(owners)
        if patch.mlp is not None and getattr(arch.modeling, arch.mlp_name) is patch.mlp:
            setattr(arch.modeling, arch.mlp_name, patch.mlp.__base__)
        del _CLASSES[target]
    else:
        find_arch(model_type_of(target))
        _unplace_all([target, *mlps_of(target)])
        vars(target).pop(_PARTS, None)


def _unplace_all(owners: list[Any]) -> None:
    for owner in owners:
        check_unplace(owner)
    for owner in owners:
        unplace(owner)


def applied_parts(model: nn.Module) -> frozenset[str]:
    """The parts that were applied to this model or to its classes."""
    classes = _CLASSES.get(model.config.model_type)
    return getattr(model, _PARTS, frozenset()) | (frozenset(classes.parts) if classes else frozenset())


def model_type_of(model: Any) -> str:
    """The model's `config.model_type`; a TypeError if it has none."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, nn.Module) or model_type is None:
        raise TypeError(
            f"expected a Hugging Face model, got a {type(model).__name__}; supported model types: {', '.join(ARCHS)}"
        )
    return model_type


def package_of(forward: Callable) -> str:
    """The package that a forward comes from."""
    return (getattr(forward, "__module__", None) or type(forward).__module__).split(".")[0]


def name_of(owner: type | nn.Module) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
