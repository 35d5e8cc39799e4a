"""The public functions: one line that tiles Hugging Face's classes or one model, and `restore`.

A forward on a class is assigned where earlier imports of the class see it.
The classes of MLPs and norms, which after Liger are shared by many architectures, are swapped for subclasses of the
same name.
"""

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from seqtile.models.forward.attention_masks import watch_masks
from seqtile.models.forward.loss import place_of_head
from seqtile.models.model_types import model_classes, model_types
from seqtile.models.parts import ATTENTION, CHECK, LAYER, MLP, PARTS, Part
from seqtile.models.placement import Options, check_place, check_unplace, place, placement_at, unplace
from seqtile.models.recognise import gated_form
from seqtile.models.sharded import unmark_leaves
from seqtile.models.stand_in import take_off
from seqtile.models.varlen import choose_varlen, kind_refusal, put_back
from seqtile.proof.difference import brief
from seqtile.proof.first_step import checked_forward
from seqtile.proof.proven import unproven
from seqtile.proof.small import config_for, unfilled
from seqtile.protocols import FIRST_STEP, SHARDED
from seqtile.sdpa import watch_sdpa
from seqtile.unwrapped import unwrapped


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


def apply_seqtile(
    model: nn.Module,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
    attention: str | None = None,
    check: bool | str = True,
) -> None:
    """Tiles a Hugging Face model of any architecture: it finds by structure what can be tiled, and `seqtile.status`
    names what cannot, with the reason.

    For the arguments see `apply_seqtile_to_llama`. Raises ValueError for a model without a head over a vocabulary.
    """
    model = unwrapped(model)
    apply(model.config.model_type, model, Options(mlp, loss, layer, head_groups, chunk_tokens, attention, check))


def _apply_to_type(model_type: str, model: nn.Module | None, options: Options) -> None:
    """Tiles MODEL_TYPE models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone, also in PEFT's wrapper; None tiles Hugging Face's classes, for every
            model of this type with a head that is built from then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: given labels, no logits are computed unless they are read.
        layer: tile whole layers: everything in a layer except attention itself, and the norm behind the last layer. A
            layer then keeps its input, queries, keys, values and attention's output. Liger's norms and RoPE do not
            run; seqtile uses the norms' weights.
        head_groups: with `layer`, compute attention in this many head chunks (some kv heads with their query heads),
            one after the other. Queries, keys and values then exist for one at a time, and are not kept. "auto" takes
            the largest number up to 8 that divides the kv heads, and refuses attention that keeps large tensors; with
            a number, such an attention is computed once more. Attention must treat every head alike (no slopes or
            biases by head), since it is not told which heads it gets.
        chunk_tokens: tokens of a chunk; None for max(2048, hidden size), and for more in a mixture of experts, and in
            the MLPs and layers of a checkpointed small model.
        attention: "varlen" computes attention without masks of length x length, where rows are packed, padded or have
            windows, on any device: see `seqtile.attention`. None leaves attention as it is.
        check: the first training step compares the tiled model with the untiled one on 28 tokens of its own batch. It
            raises ValueError if the loss or a gradient differs by more than rounding. It compares the gradients of
            the embeddings' output and of every parameter of up to 4M numbers; "full": of every parameter. False: none.

    Applying again adds parts, and gives those that it names the new options; a part that it leaves out stays as it is.
    Apply after Liger, whose RMSNorm and RoPE stay without `layer`. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are fused: computed from their weights. Everything else (experts,
    quantised layers, other adapters, dropout, unusual activations, hooks) runs chunk by chunk, which costs the loss
    one more product; `seqtile.status` tells which.

    Raises ValueError, and changes nothing, if it cannot do what is asked, such as under another loss function; for the
    classes also if their default config builds no model.
    """
    model = None if model is None else unwrapped(model)
    if model is not None and model.config.model_type != model_type:
        got = model.config.model_type
        raise ValueError(f"expected a {model_type} model, got {got!r}; use seqtile.apply_seqtile(model)")
    apply(model_type, model, options)


def _entry(model_type: str) -> Callable[..., None]:
    def apply_to(model: nn.Module | None = None, **options: Any) -> None:
        _apply_to_type(model_type, model, Options(**options))

    model, *options = signature(apply_seqtile).parameters.values()
    model = model.replace(default=None, annotation=nn.Module | None)
    apply_to.__signature__ = signature(apply_seqtile).replace(parameters=[model, *options])
    apply_to.__name__ = apply_to.__qualname__ = _entry_name(model_type)
    apply_to.__doc__ = (_apply_to_type.__doc__ or "").replace("MODEL_TYPE", model_type)
    return apply_to


def _entry_name(model_type: str) -> str:
    return "apply_seqtile_to_" + re.sub(r"\W", "_", model_type)


def apply(model_type: str, model: nn.Module | None, options: Options, proof: Proof = unproven) -> None:
    """See `apply_seqtile_to_llama`. Everything is checked before anything is changed.

    `proof` is given the model, and returns what says why a module of it is not to be tiled as a part."""
    options.validate()
    if model is None:
        _apply_to_classes(model_type, options)
        return
    asked, (found, refused) = options.parts, _found(model, options, proof)
    for module, part in found:
        part.check(module, options)
    watch_masks()
    watch_sdpa()
    classes: dict[tuple, type] = {}
    if options.attention:
        choose_varlen(model)
        for owner in (owner for patch in _CLASSES.values() for owner in patch.classes):
            for inside in model.modules() if (at := placement_at(owner)) else ():
                at.chosen_for.discard(inside)  # from now on it is the model's own choice
        options = replace(options, attention=None)  # chosen here, not in the first forward
    for module, part in found:
        place(module, partial(_forward_in_place_of, part, options), options, classes, part.option)
    setattr(model, _ASKED, getattr(model, _ASKED, frozenset()) | asked)
    setattr(model, _REFUSED, refused)


def attention_refusal(model: nn.Module, proof: Proof = unproven) -> str | None:
    """Says why a model cannot have attention="varlen"; None if it can."""
    if (reason := kind_refusal(model) or proof(model)(ATTENTION, model)) is None:
        return None
    return f'attention="varlen": the attention of {type(model).__name__} needs masks: {reason}; leave attention out'


def _forward_in_place_of(part: Part, options: Options, original: Callable) -> Callable:
    tiled = part.tiled_forward(options, original)
    return checked_forward(options, original, tiled) if part.is_model else tiled


def _found(model: nn.Module, options: Options, proof: Proof) -> tuple[list[tuple[nn.Module, Part]], dict[str, str]]:
    """Returns (module, part) pairs to tile, and for the rest {class name: reason}.
    ValueError if no layer can, if there is no head, or if attention needs masks, and they are asked for."""
    if options.loss:
        place_of_head(model)
    if options.attention and (refusal := attention_refusal(model, proof)):
        raise ValueError(refusal)
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
        for module, part in _found(_by_default(cls, model_type), options, unproven)[0]:
            if part is LAYER:  # the number of kv heads is that of a model to come, which 1 divides
                part.check(module, replace(options, head_groups=options.head_groups and 1))
            found |= dict.fromkeys(_names_of(type(module), cls), part)
    for module_name, name in found:
        check_place(getattr(sys.modules[module_name], name), options)
    watch_masks()
    watch_sdpa()
    patch = _CLASSES.setdefault(model_type, ClassPatch())
    patch.parts |= options.parts
    if "attention" in patch.parts:  # asked for here or before
        options = replace(options, attention="varlen")
    for (module_name, name), part in found.items():
        module = sys.modules[module_name]
        owner = getattr(module, name)
        if part.swapped and patch.classes.get(owner) is None:
            # To be found, by pickle too, where its base was, under `name`.
            owner = type(owner.__name__, (owner,), {"__module__": module_name, "__qualname__": name})
            setattr(module, name, owner)
        patch.classes.setdefault(owner, (module_name, name) if part.swapped else None)
        place(owner, partial(_forward_in_place_of, part, options), options, {}, part.option)


def _by_default(cls: type[PreTrainedModel], model_type: str) -> PreTrainedModel:
    """Returns the model, without weights, that a class builds from the default config of a model type."""
    try:
        return unfilled(cls, config_for(cls, CONFIG_MAPPING[model_type]()))
    except Exception as error:  # Hugging Face's own code may raise anything
        raise ValueError(
            f"model type {model_type!r}: its default config builds no model, here no {cls.__name__}, in which the "
            f"classes to tile could be found ({brief(error)}); build one from another config, and apply to that model"
        ) from error


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
        chosen = [model for cls in patch.classes if (at := placement_at(cls)) for model in at.chosen_for]
        _unplace_all(list(patch.classes))
        for model in chosen:
            put_back(model)
        for cls, at in patch.classes.items():
            take_off(cls)
            if at is not None and getattr(sys.modules[at[0]], at[1]) is cls:
                setattr(sys.modules[at[0]], at[1], cls.__base__)
        del _CLASSES[target]
    else:
        model = unwrapped(target)
        modules = list(model.modules())
        _unplace_all(modules)
        by_class = _CLASSES.get(model.config.model_type)
        if by_class is None or "attention" not in by_class.parts:
            put_back(model)
        if (sharded := vars(model).get(SHARDED)) is not None:
            sharded.stop_sharing_prefixes()
        for name in (_ASKED, _REFUSED):
            vars(model).pop(name, None)
        unmark_leaves(model)
        for module in modules:
            vars(module).pop(FIRST_STEP, None)
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


def parts_applied_to(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parts that were applied to this model or to its classes."""
    classes = _CLASSES.get(model.config.model_type)
    return getattr(model, _ASKED, frozenset()) | (frozenset(classes.parts) if classes else frozenset())


def refused_of(model: nn.Module) -> dict[str, str]:
    """Returns why modules of this model, by the names of their classes, were left untiled."""
    return vars(model).get(_REFUSED, {})


ENTRIES = {_entry_name(model_type): _entry(model_type) for model_type in model_types()}
