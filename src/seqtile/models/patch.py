"""Applies seqtile to Hugging Face's classes or to one model, and takes it off again.

A forward on a class is assigned where earlier imports of the class see it.
The classes of MLPs and norms, which after Liger are shared by many architectures, are swapped for subclasses of the
same name.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from seqtile.models.first_step import OUTCOME
from seqtile.models.loss import place_of_head
from seqtile.models.mlp import gated_form
from seqtile.models.model_types import model_classes, unfilled_model
from seqtile.models.parts import CHECK, LAYER, LOSS, MLP, PARTS, Part
from seqtile.models.placement import Options, check_place, check_unplace, place, placement_at, unplace
from seqtile.models.proof import unproven


@dataclass
class ClassPatch:
    """A record of what was applied to the classes of one architecture."""

    parts: set[str] = field(default_factory=set)
    owners: dict[type, None] = field(default_factory=dict)
    """The classes that have a tiled forward."""
    subclasses: dict[type, tuple[str, str]] = field(default_factory=dict)
    """Those of them that stand in for others, and where, a module and a name: more than one in a place if another
    library replaced the first."""


_CLASSES: dict[str, ClassPatch] = {}  # the one registry: model_type -> what was applied to its classes
_ASKED = "_seqtile_parts"  # on a model: the parts that were applied to it
_REFUSED = "_seqtile_refused"  # on a model: why modules, by the names of their classes, are left untiled
Found = tuple[nn.Module, Part, Options]
Proof = Callable[[Any], Callable[[Part, nn.Module], str | None]]


def apply(model_type: str, model: nn.Module | None, options: Options, proof: Proof = unproven) -> None:
    """See `apply_seqtile_to_llama`. Everything is checked before anything is changed.

    `proof` is given the model, and returns what says why a module of it is not to be tiled as a part."""
    options.validate()
    parts = [(part, _options_of(part, options)) for part in PARTS if part.option in options.parts]
    if model is None:
        _apply_to_classes(model_type, parts, options)
        _CLASSES[model_type].parts |= options.parts
    else:
        _apply_to_model(model, parts, options, proof)
        setattr(model, _ASKED, getattr(model, _ASKED, frozenset()) | options.parts)


def _options_of(part: Part, options: Options) -> Options:
    options = options if part in (LOSS, CHECK) else replace(options, check=True)
    return options if part is LAYER else replace(options, head_groups=None)


def _tiles(part: Part) -> str:
    return "" if part is CHECK else part.option


def _check_part(owner: Any, options: Options) -> list[tuple[Part, Options]]:
    """Returns the part that compares the first step where no tiled loss of this model, or class, does."""
    options = _options_of(CHECK, options)
    if not options.check or placement_at(owner) is not None:
        return []
    try:
        check_place(owner, options)
    except ValueError:  # a forward that another library has put there
        return []
    return [(CHECK, options)]


def _found(
    model: nn.Module, parts: list[tuple[Part, Options]], proof: Proof = unproven
) -> tuple[list[Found], dict[str, str]]:
    """Returns the modules of a model that can be tiled, and why others, by the names of their classes, are not.
    ValueError if no layer can, and they are asked for."""
    found, refused = [], {}
    differing = proof(model)
    for part, options in parts:
        modules = {module: part.refusal(module) for module in part.modules(model)}
        for module in [module for module, refusal in modules.items() if refusal is None]:
            check_place(module, options)
            modules[module] = differing(part, module)
        found += [(module, part, options) for module, refusal in modules.items() if refusal is None]
        refused |= {type(module).__name__: refusal for module, refusal in modules.items() if refusal is not None}
        if part is LAYER and (not modules or None not in modules.values()):
            reason = next(iter(modules.values()), "it has none that Hugging Face can checkpoint")
            raise ValueError(
                f"layer=True: the layers of {type(model).__name__} cannot be tiled: {reason}; apply with layer=False"
            )
    return found, refused


def _apply_to_classes(model_type: str, parts: list[tuple[Part, Options]], options: Options) -> None:
    found: dict[tuple[str, str], tuple[Part, Options]] = {}  # where a class is to be found -> how it is tiled
    for cls in model_classes(model_type):
        model = unfilled_model(cls, model_type)
        if mlp := [(part, options) for part, options in parts if part is MLP]:  # also such as its default config lacks
            for name, value in vars(sys.modules[cls.__module__]).items():
                if isinstance(value, type) and issubclass(value, nn.Module) and gated_form(value.forward):
                    found[cls.__module__, name] = mlp[0]
        parts_of_cls = _found(model, parts)[0]
        if all(part is not LOSS for _, part, _ in parts_of_cls):
            parts_of_cls += [(model, *check) for check in _check_part(cls, options)]
        for module, part, own in parts_of_cls:
            found |= dict.fromkeys(_names_of(type(module), cls), (part, own))
    for (module_name, name), (_, own) in found.items():
        check_place(getattr(sys.modules[module_name], name), own)
    patch = _CLASSES.setdefault(model_type, ClassPatch())
    for (module_name, name), (part, own) in found.items():
        module = sys.modules[module_name]
        owner = getattr(module, name)
        if part.swapped and owner not in patch.subclasses:
            # To be found, by pickle too, where its base was, under `name`.
            owner = type(owner.__name__, (owner,), {"__module__": module_name, "__qualname__": name})
            patch.subclasses[owner] = module_name, name
            setattr(module, name, owner)
        patch.owners[owner] = None
        place(owner, partial(part.tiled_forward, own), own, {}, _tiles(part))


def _names_of(cls: type, model_class: type) -> list[tuple[str, str]]:
    """Returns where the code of a model finds a class: in its own module, else where the class is at home."""
    for module_name in (model_class.__module__, cls.__module__):
        names = [name for name, value in vars(sys.modules[module_name]).items() if value is cls]
        if names:
            return [(module_name, names[0])]
    return []


def _apply_to_model(model: nn.Module, parts: list[tuple[Part, Options]], options: Options, proof: Proof) -> None:
    if LOSS in (part for part, _ in parts):
        place_of_head(model)
    found, refused = _found(model, parts, proof)
    for module, part, own in found:
        part.check(module, own)
    if all(part is not LOSS for _, part, _ in found):
        found += [(model, *check) for check in _check_part(model, options)]
    classes: dict[type, type] = {}
    for module, part, own in found:
        place(module, partial(part.tiled_forward, own), own, classes, _tiles(part))
    setattr(model, _REFUSED, refused)


def restore(target: nn.Module | str | None = None) -> None:
    """Takes seqtile off again and puts back exactly what was there.

    Args:
        target: a model (what was applied to this instance), a model type such as "llama" (what was applied to its
            classes; models built meanwhile are untiled too), or None (the classes of every model type).

    What `sp.apply_ulysses` did stays, see `sp.restore`. Raises ValueError if another library has wrapped a tiled
    forward since: nothing is changed then.
    """
    if target is None:
        for model_type in list(_CLASSES):
            restore(model_type)
    elif isinstance(target, str):
        model_classes(target)
        if (patch := _CLASSES.get(target)) is None:
            return
        _unplace_all(list(patch.owners))
        for subclass, (module_name, name) in patch.subclasses.items():
            if getattr(sys.modules[module_name], name) is subclass:
                setattr(sys.modules[module_name], name, subclass.__base__)
        del _CLASSES[target]
    else:
        model = unwrapped(target)
        model_type_of(model)
        modules = list(dict.fromkeys(module for part in PARTS for module in part.modules(model)))
        _unplace_all(modules)
        vars(model).pop(_ASKED, None)
        vars(model).pop(_REFUSED, None)
        vars(model).pop(OUTCOME, None)
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


def unwrapped(model: Any) -> Any:
    """Returns the model in PEFT's wrapper; anything else itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def parts_applied_to(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parts that were applied to this model or to its classes."""
    classes = _CLASSES.get(model.config.model_type)
    return getattr(model, _ASKED, frozenset()) | (frozenset(classes.parts) if classes else frozenset())


def refused_of(model: nn.Module) -> dict[str, str]:
    """Returns why modules of this model, by the names of their classes, were left untiled."""
    return vars(model).get(_REFUSED, {})


def model_type_of(model: Any) -> str:
    """Returns the model's `config.model_type`; a TypeError if it is no Hugging Face model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a Hugging Face model, got a {type(model).__name__}; pass the model itself, not a wrapper around "
            "it (.module of DDP and DeepSpeed)"
        )
    return model.config.model_type
