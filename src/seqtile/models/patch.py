"""Applies seqtile to Hugging Face's classes or to one model, and takes it off again.

`PARTS` is the one table of what is tiled. A forward on a class is assigned where earlier imports of the class see it.
The classes of MLPs and norms, which after Liger are shared by many architectures, are swapped for subclasses of the
same name.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from seqtile.arch import ARCHS, Arch, find_arch
from seqtile.models.layer import check_layer, check_norm, tiled_layer_forward, tiled_norm_forward, uncached_forward
from seqtile.models.loss import check_loss, tiled_loss_forward
from seqtile.models.mlp import (
    are_experts,
    check_experts,
    check_mlp,
    mlps_of,
    tiled_experts_forward,
    tiled_mlp_forward,
)
from seqtile.models.placement import Options, check_place, check_unplace, place, placement_at, unplace


class Part(NamedTuple):
    """A kind of module that has a tiled forward."""

    option: str
    """The option of `apply_seqtile_to_llama` that asks for it."""
    class_names: Callable[[Arch], tuple[str, ...]]
    """The names of its classes, in Hugging Face's module of an architecture."""
    modules: Callable[[nn.Module], list[nn.Module]]
    """All such modules of a model."""
    tiled_forward: Callable[[Arch, Options, Callable], Callable]
    """Returns the tiled forward that stands in for one (a plain function)."""
    check: Callable[[Arch, nn.Module, Options], str | None] = lambda *_: None
    """Raises ValueError where the tiled forward would refuse a module; returns why it falls back, if it does."""
    swapped: bool = False
    """Its class is swapped for a subclass, rather than changed."""


LOSS = Part("loss", lambda arch: (arch.causal_lm_name,), lambda model: [model], tiled_loss_forward, check_loss)
MLP = Part(
    "mlp",
    lambda arch: tuple(name for name in arch.mlp_names if not name.endswith("Experts")),
    lambda model: [mlp for mlp in mlps_of(model) if not are_experts(mlp)],
    tiled_mlp_forward,
    check_mlp,
    swapped=True,
)
EXPERTS = Part(
    "mlp",
    lambda arch: tuple(name for name in arch.mlp_names if name.endswith("Experts")),
    lambda model: [mlp for mlp in mlps_of(model) if are_experts(mlp)],
    tiled_experts_forward,
    check_experts,
    swapped=True,
)
LAYER = Part(
    "layer",
    lambda arch: (f"{arch.prefix}DecoderLayer",),
    lambda model: list(model.base_model.layers),
    tiled_layer_forward,
    check_layer,
)
NORM = Part(
    "layer",
    lambda arch: (arch.norm_name,),
    lambda model: [model.base_model.norm],
    tiled_norm_forward,
    check_norm,
    swapped=True,
)
BASE = Part("layer", lambda arch: (f"{arch.prefix}Model",), lambda model: [model.base_model], uncached_forward)
PARTS = (LOSS, MLP, EXPERTS, LAYER, NORM, BASE)


@dataclass
class ClassPatch:
    """A record of what was applied to the classes of one architecture."""

    parts: set[str] = field(default_factory=set)
    owners: dict[type, None] = field(default_factory=dict)
    """The classes that have a tiled forward."""
    subclasses: dict[type, str] = field(default_factory=dict)
    """Those of them that stand in for others, by whose names: more than one if another library replaced the first."""


_CLASSES: dict[str, ClassPatch] = {}  # the one registry: model_type -> what was applied to its classes
_ASKED = "_seqtile_parts"  # on a model: the parts that were applied to it


def apply(arch: Arch, model: nn.Module | None, options: Options) -> None:
    """See `apply_seqtile_to_llama`. Everything is checked before anything is changed."""
    options.check()
    if options.layer and not arch.layer:
        known = ", ".join(name for name, other in ARCHS.items() if other.layer)
        raise ValueError(
            f"layer=True: the layers of {arch.model_type} are not of Llama's shape; expected one of {known}; apply "
            "with layer=False"
        )
    parts = [(part, _options_of(part, options)) for part in PARTS if part.option in options.parts]
    if model is None:
        _apply_to_classes(arch, parts)
        _CLASSES[arch.model_type].parts |= options.parts
    else:
        _apply_to_model(arch, model, parts)
        setattr(model, _ASKED, getattr(model, _ASKED, frozenset()) | options.parts)


def _options_of(part: Part, options: Options) -> Options:
    return options if part is LAYER else replace(options, head_groups=None)


def _apply_to_classes(arch: Arch, parts: list[tuple[Part, Options]]) -> None:
    found = [(name, part, options) for part, options in parts for name in part.class_names(arch)]
    for name, _, options in found:
        check_place(getattr(arch.modeling, name), options)
    patch = _CLASSES.setdefault(arch.model_type, ClassPatch())
    for name, part, options in found:
        owner = getattr(arch.modeling, name)
        if part.swapped and owner not in patch.subclasses:
            # To be found, by pickle too, where its base was, under `name`.
            namespace = {"__module__": arch.modeling.__name__, "__qualname__": name}
            owner = type(owner.__name__, (owner,), namespace)
            patch.subclasses[owner] = name
            setattr(arch.modeling, name, owner)
        patch.owners[owner] = None
        place(owner, partial(part.tiled_forward, arch, options), options, {})


def _apply_to_model(arch: Arch, model: nn.Module, parts: list[tuple[Part, Options]]) -> None:
    if LOSS in (part for part, _ in parts) and not isinstance(model, arch.causal_lm):
        raise ValueError(
            f"expected a {arch.causal_lm_name}, got a {type(model).__name__}; pass the causal LM itself, not a wrapper "
            "around it, or apply with loss=False"
        )
    found = [(module, part, options) for part, options in parts for module in part.modules(model)]
    for module, part, options in found:
        part.check(arch, module, options)
    for module, _, options in found:
        check_place(module, options)
    classes: dict[type, type] = {}
    for module, part, options in found:
        place(module, partial(part.tiled_forward, arch, options), options, classes)


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
        _unplace_all(list(patch.owners))
        for subclass, name in patch.subclasses.items():
            if getattr(arch.modeling, name) is subclass:
                setattr(arch.modeling, name, subclass.__base__)
        del _CLASSES[target]
    else:
        model = unwrapped(target)
        find_arch(model_type_of(model))
        modules = list(dict.fromkeys(module for part in PARTS for module in part.modules(model)))
        _unplace_all(modules)
        vars(model).pop(_ASKED, None)
        if any(placement_at(module) for module in modules):
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
    """Returns the model in PEFT's wrapper; anything else itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def parts_applied_to(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parts that were applied to this model or to its classes."""
    classes = _CLASSES.get(model.config.model_type)
    return getattr(model, _ASKED, frozenset()) | (frozenset(classes.parts) if classes else frozenset())


def model_type_of(model: Any) -> str:
    """Returns the model's `config.model_type`; a TypeError if it is no Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a Hugging Face model, got a {type(model).__name__}; pass the model itself, not a wrapper around "
            "it (.module of DDP and DeepSpeed); supported model types: "
            f"{', '.join(ARCHS)}"
        )
    return model.config.model_type
