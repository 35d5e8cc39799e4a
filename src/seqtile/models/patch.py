"""Applies seqtile to Hugging Face's classes or to one model, and takes it off again.

A causal LM's forward is assigned on its own class, so that code which imported the class earlier sees it. The MLP
class, which after Liger is one class shared by many architectures, is swapped for a subclass of the same name.
"""

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from seqtile.arch import ARCHS, Arch, find_arch
from seqtile.models.causal_lm import check_loss, tiled_loss_forward
from seqtile.models.experts import are_experts, tiled_experts_forward, tiled_part_of
from seqtile.models.layer import HeadGroups, check_layer, tiled_layer_forward
from seqtile.models.mlp import check_mlp, tiled_mlp_forward
from seqtile.models.norm import check_norm, tiled_norm_forward
from seqtile.models.placement import Wrap, check_place, check_unplace, place, placement_at, unplace
from seqtile.models.uncached import uncached_forward
from seqtile.ops.tiles import resolve_chunk_tokens


class Wanted(NamedTuple):
    """What is to be applied, as `apply_seqtile_to_llama` is asked for it."""

    mlp: bool = True
    loss: bool = True
    layer: bool = False
    head_groups: HeadGroups = None
    chunk_tokens: int | None = None

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(name for name in ("mlp", "loss", "layer") if getattr(self, name))


@dataclass
class ClassPatch:
    """What was applied to the classes of one architecture."""

    parts: set[str] = field(default_factory=set)
    swapped: list[type] = field(default_factory=list)
    """The subclasses that stood in for MLP and norm: more than one of each if another library replaced the first."""


_CLASSES: dict[str, ClassPatch] = {}  # the one registry: model_type -> what was applied to its classes
_PARTS = "_seqtile_parts"  # on a model: the parts that were applied to it


class Place(NamedTuple):
    """A tiled forward and where it goes."""

    owner: Any
    wrap: Wrap
    head_groups: HeadGroups = None


def apply(arch: Arch, model: nn.Module | None, wanted: Wanted) -> None:
    """See `apply_seqtile_to_llama`. Everything is checked before anything is changed."""
    resolve_chunk_tokens(wanted.chunk_tokens, 1)
    check_wanted(arch, wanted)
    if model is None:
        apply_to_classes(arch, wanted)
    else:
        apply_to_model(arch, model, wanted)


def check_wanted(arch: Arch, wanted: Wanted) -> None:
    groups = wanted.head_groups
    if not wanted.parts:
        raise ValueError("mlp=False and loss=False leave nothing to tile; use seqtile.restore to take seqtile off")
    if groups is not None and groups != "auto" and (isinstance(groups, bool) or not isinstance(groups, int)):
        raise TypeError(f'head_groups: expected an int, "auto" or None, got {groups!r}')
    if isinstance(groups, int) and groups < 1:
        raise ValueError(f"head_groups: expected at least 1 group, got {groups}")
    if groups is not None and not wanted.layer:
        raise ValueError("head_groups: expected None, since layer=False leaves attention as it is; pass layer=True too")
    if wanted.layer and not wanted.mlp:
        raise ValueError("mlp=False: expected True, since layer=True tiles the MLP with the layer that it is in")
    if wanted.layer and not arch.layer:
        known = ", ".join(name for name, other in ARCHS.items() if other.layer)
        raise ValueError(
            f"layer=True: the layers of {arch.model_type} are not of Llama's shape; expected one of {known}; apply "
            "with layer=False"
        )


def apply_to_classes(arch: Arch, wanted: Wanted) -> None:
    named = dict.fromkeys(arch.mlp_names, tiled_mlp_forward) if wanted.mlp else {}
    named |= {name: tiled_experts_forward for name in named if name.endswith("Experts")}
    if wanted.layer:
        named[arch.norm_name] = tiled_norm_forward
    places = [Place(arch.causal_lm, partial(tiled_loss_forward, arch))] * wanted.loss
    if wanted.layer:
        wrap = partial(tiled_layer_forward, arch, head_groups=wanted.head_groups, on_model=False)
        places += [Place(arch.layer_class, wrap, wanted.head_groups), Place(arch.base_class, uncached_forward)]
    for owner, _, head_groups in [
        *places,
        *(Place(getattr(arch.modeling, name), wrap) for name, wrap in named.items()),
    ]:
        check_place(owner, wanted.chunk_tokens, head_groups)
    patch = _CLASSES.setdefault(arch.model_type, ClassPatch())
    for name, wrap in named.items():
        current = getattr(arch.modeling, name)
        if current not in patch.swapped:
            current = subclass_of(current, arch, name)
            patch.swapped.append(current)
            setattr(arch.modeling, name, current)
        places.append(Place(current, wrap))
    for owner, wrap, head_groups in places:
        place(owner, wrap, wanted.chunk_tokens, head_groups)
    patch.parts |= wanted.parts


def subclass_of(base: type, arch: Arch, name: str) -> type:
    """A subclass of the MLP or norm class `base`, to be found (by pickle, too) where `base` was, under `name`."""
    return type(base.__name__, (base,), {"__module__": arch.modeling.__name__, "__qualname__": name})


def apply_to_model(arch: Arch, model: nn.Module, wanted: Wanted) -> None:
    places: list[Place] = []
    if wanted.loss:
        if not isinstance(model, arch.causal_lm):
            raise ValueError(
                f"expected a {arch.causal_lm_name}, got a {type(model).__name__}; pass the causal LM itself, not a "
                "wrapper around it, or apply with loss=False"
            )
        check_loss(model)
        places.append(Place(model, partial(tiled_loss_forward, arch)))
    if wanted.mlp:
        for module in mlps_of(model):
            check_mlp(module)
            places.append(Place(module, tiled_experts_forward if are_experts(module) else tiled_mlp_forward))
    if wanted.layer:
        wrap = partial(tiled_layer_forward, arch, head_groups=wanted.head_groups, on_model=True)
        for layer in model.base_model.layers:
            check_layer(arch, layer, wanted.head_groups)
            places.append(Place(layer, wrap, wanted.head_groups))
        check_norm(model.base_model.norm)
        places.append(Place(model.base_model.norm, tiled_norm_forward))
        places.append(Place(model.base_model, uncached_forward))
    for owner, _, head_groups in places:
        check_place(owner, wanted.chunk_tokens, head_groups)
    classes: dict[type, type] = {}
    for owner, wrap, head_groups in places:
        place(owner, wrap, wanted.chunk_tokens, head_groups, classes)
    setattr(model, _PARTS, getattr(model, _PARTS, frozenset()) | wanted.parts)


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """Every module that is tiled as an MLP: a layer's MLP, or the experts of a mixture."""
    return [tiled_part_of(layer.mlp) for layer in model.base_model.layers]


def places_of(model: nn.Module) -> list[nn.Module]:
    """Every module whose forward may be tiled."""
    base = model.base_model
    return [*dict.fromkeys((model, base)), *mlps_of(model), *base.layers, base.norm]


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
        of_layers = [arch.layer_class, arch.base_class] if arch.layer else []
        _unplace_all([arch.causal_lm, *of_layers, *patch.swapped])
        for name in (*arch.mlp_names, arch.norm_name):
            if (current := getattr(arch.modeling, name, None)) in patch.swapped:
                setattr(arch.modeling, name, current.__base__)
        del _CLASSES[target]
    else:
        model = unwrapped(target)
        find_arch(model_type_of(model))
        _unplace_all(places_of(model))
        vars(model).pop(_PARTS, None)
        if any(placement_at(module) for module in places_of(model)):
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
