"""Applies seqtile to Hugging Face's classes or to one model, and takes it off again.

A causal LM's forward is assigned on its own class, so that code which imported the class earlier sees it. The MLP
class, which after Liger is one class shared by many architectures, is swapped for a subclass of the same name.
"""

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from seqtile.models.arch import ARCHS, Arch, find_arch
from seqtile.models.causal_lm import check_loss, tiled_loss_forward
from seqtile.models.experts import are_experts, tiled_experts_forward, tiled_part_of
from seqtile.models.mlp import check_mlp, tiled_mlp_forward
from seqtile.models.placement import Wrap, check_place, check_unplace, place, placement_at, unplace
from seqtile.ops.tiles import resolve_chunk_tokens


@dataclass
class ClassPatch:
    """What was applied to the classes of one architecture."""

    parts: set[str] = field(default_factory=set)
    mlps: list[type] = field(default_factory=list)
    """The subclasses that stood in for the MLP class: more than one if another library replaced the first."""


_CLASSES: dict[str, ClassPatch] = {}  # the one registry: model_type -> what was applied to its classes
_PARTS = "_seqtile_parts"  # on a model: the parts that were applied to it


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
    mlps = {name: getattr(arch.modeling, name) for name in arch.mlp_names if mlp}
    for owner in [arch.causal_lm] * loss + list(mlps.values()):
        check_place(owner, chunk_tokens)
    patch = _CLASSES.setdefault(arch.model_type, ClassPatch())
    if loss:
        place(arch.causal_lm, partial(tiled_loss_forward, arch), chunk_tokens)
        patch.parts.add("loss")
    for name, current in mlps.items():
        if current not in patch.mlps:
            current = subclass_of(current, arch, name)
            patch.mlps.append(current)
            setattr(arch.modeling, name, current)
        place(current, tiled_experts_forward if name.endswith("Experts") else tiled_mlp_forward, chunk_tokens)
        patch.parts.add("mlp")


def subclass_of(base: type, arch: Arch, name: str) -> type:
    """A subclass of the MLP class `base`, to be found (by pickle, too) where `base` was, under `name`."""
    return type(base.__name__, (base,), {"__module__": arch.modeling.__name__, "__qualname__": name})


def apply_to_model(arch: Arch, model: nn.Module, *, mlp: bool, loss: bool, chunk_tokens: int | None) -> None:
    places: list[tuple[nn.Module, Wrap]] = []
    if loss:
        if not isinstance(model, arch.causal_lm):
            raise ValueError(
                f"expected a {arch.causal_lm_name}, got a {type(model).__name__}; pass the causal LM itself, not a "
                "wrapper around it, or apply with loss=False"
            )
        check_loss(model)
        places.append((model, partial(tiled_loss_forward, arch)))
    if mlp:
        for module in mlps_of(model):
            check_mlp(module)
            places.append((module, tiled_experts_forward if are_experts(module) else tiled_mlp_forward))
    for owner, _ in places:
        check_place(owner, chunk_tokens)
    for owner, wrap in places:
        place(owner, wrap, chunk_tokens)
    parts = {name for name, wanted in (("loss", loss), ("mlp", mlp)) if wanted}
    setattr(model, _PARTS, getattr(model, _PARTS, frozenset()) | parts)


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """Every module that is tiled as an MLP: a layer's MLP, or the experts of a mixture."""
    return [tiled_part_of(layer.mlp) for layer in model.base_model.layers]


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
        _unplace_all([arch.causal_lm, *patch.mlps])
        for name in arch.mlp_names:
            if (current := getattr(arch.modeling, name)) in patch.mlps:
                setattr(arch.modeling, name, current.__base__)
        del _CLASSES[target]
    else:
        model = unwrapped(target)
        find_arch(model_type_of(model))
        _unplace_all([model, *mlps_of(model)])
        vars(model).pop(_PARTS, None)
        if any(placement_at(module) for module in (model, *mlps_of(model))):
            warnings.warn(
                "this model stays tiled by its classes: "
                f"seqtile.restore({model.config.model_type!r}) takes seqtile off these",
                stacklevel=2,
            )


def _unplace_all(owners: list[Any]) -> None:
    for owner in owners:
        check_unplace(owner)
    for owner in owners:
        unplace(owner)


def unwrapped(model: Any) -> Any:
    """The model in PEFT's wrapper; anything else itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def applied_parts(model: nn.Module) -> frozenset[str]:
    """The parts that were applied to this model or to its classes."""
    classes = _CLASSES.get(model.config.model_type)
    return getattr(model, _PARTS, frozenset()) | (frozenset(classes.parts) if classes else frozenset())


def model_type_of(model: Any) -> str:
    """The model's `config.model_type`; a TypeError if it is no Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a Hugging Face model, got a {type(model).__name__}; pass the model itself, not a wrapper around "
            "it (.module of DDP and DeepSpeed); supported model types: "
            f"{', '.join(ARCHS)}"
        )
    return model.config.model_type
