"""Applies seqtile to Hugging Face's classes or to one model, and takes it off again.

A forward on a class is assigned where earlier imports of the class see it.
The classes of MLPs and norms, which after Liger are shared by many architectures, are swapped for subclasses of the
same name.
"""

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from seqtile.models.attention_masks import watch_masks
from seqtile.models.first_step import OUTCOME
from seqtile.models.gathered import unmark_leaves
from seqtile.models.loss import place_of_head
from seqtile.models.mlp import gated_form
from seqtile.models.model_types import model_classes
from seqtile.models.parts import CHECK, LAYER, MLP, PARTS, Part
from seqtile.models.placement import Options, check_place, check_unplace, place, placement_at, unplace
from seqtile.models.proof import unproven
from seqtile.models.small import config_for, unfilled
from seqtile.models.stand_in import take_off
from seqtile.protocols import SHARDED
from seqtile.sdpa import watch_sdpa


@dataclass
class ClassPatch:
    """A record of what was applied to the classes of one architecture."""

    parts: set[str] = field(default_factory=set)
    classes: dict[type, tuple[str, str] | None] = field(default_factory=dict)
    """The classes with a tiled forward. For a class that replaced another: the module and name where it stands. One
    place may have several, if another library replaced the first."""


_CLASSES: dict[str, ClassPatch] = {}  # the one registry: model_type -> what was applied to its classes
_ASKED = "_seqtile_parts"  # on a model: the parts that were applied to it
_REFUSED = "_seqtile_refused"  # on a model: why modules, by the names of their classes, are left untiled
Proof = Callable[[Any], Callable[[Part, nn.Module], str | None]]


def apply(model_type: str, model: nn.Module | None, options: Options, proof: Proof = unproven) -> None:
    """See `apply_seqtile_to_llama`. Everything is checked before anything is changed.

    `proof` is given the model, and returns what says why a module of it is not to be tiled as a part."""
    options.validate()
    if model is None:
        _apply_to_classes(model_type, options)
        return
    if options.loss:
        place_of_head(model)
    found, refused = _found(model, options, proof)
    for module, part in found:
        part.check(module, options)
    watch_masks()
    watch_sdpa()
    classes: dict[tuple, type] = {}
    for module, part in found:
        place(module, partial(part.tiled_forward, options), options, classes, part.option)
    setattr(model, _ASKED, getattr(model, _ASKED, frozenset()) | options.parts)
    setattr(model, _REFUSED, refused)


def _found(model: nn.Module, options: Options, proof: Proof) -> tuple[list[tuple[nn.Module, Part]], dict[str, str]]:
    """Returns the modules of a model that can be tiled, and why others, by the names of their classes, are not.
    ValueError if no layer can, and they are asked for."""
    found, refused = [], {}
    differing = proof(model)
    for part in PARTS:
        if part.option not in options.parts:
            continue
        modules = {module: part.refusal(module) for module in part.modules(model)}
        for module in [module for module, refusal in modules.items() if refusal is None]:
            check_place(module, options)
            modules[module] = differing(part, module)
        found += [(module, part) for module, refusal in modules.items() if refusal is None]
        refused |= {type(module).__name__: refusal for module, refusal in modules.items() if refusal is not None}
        if part is LAYER and (not modules or None not in modules.values()):
            reason = next(iter(modules.values()), "it has none that Hugging Face can checkpoint")
            raise ValueError(
                f"layer=True: the layers of {type(model).__name__} cannot be tiled: {reason}; apply with layer=False"
            )
    placed = {module for module, _ in found}
    for module in CHECK.modules(model):
        there = placement_at(module)
        wanted = options.check if there is None else not there.part  # a check that is there takes the new options
        if module in placed or not wanted:
            continue
        with suppress(ValueError):  # a forward that another library has put there
            check_place(module, options)
            found.append((module, CHECK))
    return found, refused


def _apply_to_classes(model_type: str, options: Options) -> None:
    found: dict[tuple[str, str], Part] = {}  # where a class is to be found -> how it is tiled
    for cls in model_classes(model_type):
        for name, value in vars(sys.modules[cls.__module__]).items() if options.mlp else ():
            if isinstance(value, type) and issubclass(value, nn.Module) and gated_form(value.forward):
                found[cls.__module__, name] = MLP  # also such as its default config lacks
        for module, part in _found(unfilled(cls, config_for(cls, CONFIG_MAPPING[model_type]())), options, unproven)[0]:
            if part is LAYER:  # the number of kv heads is that of a model to come, which 1 divides
                part.check(module, replace(options, head_groups=options.head_groups and 1))
            found |= dict.fromkeys(_names_of(type(module), cls), part)
    for module_name, name in found:
        check_place(getattr(sys.modules[module_name], name), options)
    watch_masks()
    watch_sdpa()
    patch = _CLASSES.setdefault(model_type, ClassPatch())
    patch.parts |= options.parts
    for (module_name, name), part in found.items():
        module = sys.modules[module_name]
        owner = getattr(module, name)
        if part.swapped and patch.classes.get(owner) is None:
            # To be found, by pickle too, where its base was, under `name`.
            owner = type(owner.__name__, (owner,), {"__module__": module_name, "__qualname__": name})
            setattr(module, name, owner)
        patch.classes.setdefault(owner, (module_name, name) if part.swapped else None)
        place(owner, partial(part.tiled_forward, options), options, {}, part.option)


def _names_of(cls: type, model_class: type) -> list[tuple[str, str]]:
    """Returns the module where a model's code finds a class: its own, else the one that defines the class."""
    homes = (model_class.__module__, cls.__module__)
    return [(home, name) for home in homes for name, value in vars(sys.modules[home]).items() if value is cls][:1]


def restore(target: nn.Module | str | None = None) -> None:
    """Takes seqtile off again and puts back exactly what was there.

    Args:
        target: a model (undoes what was applied to this instance), a model type such as "llama" (to its classes, also
            for models built meanwhile), or None (to the classes of every model type).

    Also undoes `share_prefixes`. What `sp.apply_ulysses` did stays, see `sp.restore`. Raises ValueError, and changes
    nothing, if another library has wrapped a tiled forward since.
    """
    if target is None:
        for model_type in list(_CLASSES):
            restore(model_type)
    elif isinstance(target, str):
        model_classes(target)
        if (patch := _CLASSES.get(target)) is None:
            return
        _unplace_all(list(patch.classes))
        for cls, at in patch.classes.items():
            take_off(cls)
            if at is not None and getattr(sys.modules[at[0]], at[1]) is cls:
                setattr(sys.modules[at[0]], at[1], cls.__base__)
        del _CLASSES[target]
    else:
        model = unwrapped(target)
        modules = list(model.modules())
        _unplace_all(modules)
        if (sharded := vars(model).get(SHARDED)) is not None:
            sharded.stop_sharing_prefixes()
        for name in (_ASKED, _REFUSED):
            vars(model).pop(name, None)
        unmark_leaves(model)
        for module in modules:
            vars(module).pop(OUTCOME, None)
        if any(placement.part for module in modules if (placement := placement_at(module))):
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


def unwrapped(model: Any) -> PreTrainedModel:
    """Returns a Hugging Face model itself, without PEFT's wrapper; a TypeError if it is none."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"expected a Hugging Face model, got a {type(inner).__name__}; pass the model itself, not a wrapper around "
            "it (.module of DDP and DeepSpeed, ._orig_mod of torch.compile)"
        )
    return inner


def parts_applied_to(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parts that were applied to this model or to its classes."""
    classes = _CLASSES.get(model.config.model_type)
    return getattr(model, _ASKED, frozenset()) | (frozenset(classes.parts) if classes else frozenset())


def refused_of(model: nn.Module) -> dict[str, str]:
    """Returns why modules of this model, by the names of their classes, were left untiled."""
    return vars(model).get(_REFUSED, {})
