"""The sweep over a model's variants: each made small, all its parts tiled together, beside itself untiled.

small model of the variant's config, untiled, its batch ───> loss, gradients
the same, all parts tiled by 11 tokens as by apply_seqtile ─> as near as difference.py asks, or refused by name
"""

import copy
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from seqtile.models.difference import Vectors, brief
from seqtile.models.find import head_of
from seqtile.models.parts import Part
from seqtile.models.patch import Proof, apply, refused_of
from seqtile.models.placement import Options, placement_at
from seqtile.models.proof import PROVEN_ALONE, Inputs, compare, gradients_of, some_words, unproven
from seqtile.models.small import small_model
from seqtile.models.variants import Variant, changed, variants_of
from seqtile.models.way_taken import WayTaken

RIGHT, REFUSED, DIFFERS, FAILS = "right", "refused", "different", "failing untiled too"
CHUNK_TOKENS = 11  # less than a quarter of the batch, so that experts' chunks, of up to four times as many, are several


class Row(NamedTuple):
    """What came of a variant."""

    variant: str
    how: str
    """RIGHT, REFUSED, DIFFERS or FAILS."""
    reason: str | None
    """What is refused and why, or what differs."""


def sweep(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Iterator[Row]:
    """Yields a row for each variant of a config's model, made small; the first is the model as it is. ValueError if
    that cannot be built."""
    small, known = small_model(model_class, config).config, None
    for variant in variants_of(model_class, config, small):
        row, refusals = _tried(model_class, config if variant.is_whole else small, variant, known)
        yield row
        if known is None and row.how == FAILS:
            return
        known = refusals if known is None else known


def _tried(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, variant: Variant, known: dict[str, str] | None
) -> tuple[Row, dict[str, str]]:
    """Returns what came of a variant, and all that is refused in it, of which `known` is no news; None: nothing is."""
    refusals: dict[str, str] = {}
    try:
        model = small_model(model_class, changed(config, variant.changes))
        untiled = cache(partial(_untiled, model, variant))
        untiled(0.0)
    except Exception as error:  # of the model's own code, which may raise anything
        return Row(variant.name, FAILS, brief(error)), refusals
    has_loss = head_of(model) is not None
    for asked in ({"layer": True, "head_groups": 2}, {"layer": True}, {}):
        options = Options(**asked, loss=has_loss, chunk_tokens=CHUNK_TOKENS, check=False)
        found: str | Exception | None = None
        for proof in (_trusting, unproven):  # that is slow, and not needed for what is right without
            try:
                found = _difference(model, variant, options, proof, untiled, refusals)
            except Exception as error:  # of whatever tiled code does not bear
                found = error
            if found is None or (options.head_groups and _is_refusal(found)):
                break
        if found is None:
            break
        if not _is_refusal(found) or not asked:
            how = brief(found) if isinstance(found, Exception) else found
            return Row(variant.name, DIFFERS, f"{how} (apply_seqtile with {asked})"), refusals
        if not options.head_groups:
            refusals["layers"] = str(found)
    news = [f"{name}: {reason}" for name, reason in refusals.items() if known is not None and name not in known]
    return Row(variant.name, REFUSED if news else RIGHT, "; ".join(news) or None), refusals


def _called(model: PreTrainedModel, variant: Variant) -> tuple[PreTrainedModel, Inputs]:
    """Returns a copy of a model as a variant sets it, and what it is called with."""
    model = copy.deepcopy(model)
    return model, variant.batch(model, some_words())


def _untiled(model: PreTrainedModel, variant: Variant, nudge: float, **instead: bool) -> Vectors:
    model, inputs = _called(model, variant)
    return gradients_of(model, inputs | instead, nudge)


def _difference(
    model: PreTrainedModel,
    variant: Variant,
    options: Options,
    proof: Proof,
    untiled: Callable[..., Vectors],
    refusals: dict[str, str],
) -> str | None:
    """Says what differs when the model is tiled, None if nothing does, and adds to `refusals` what is left untiled.
    Raises ValueError where that is refused."""
    tiled, inputs = _called(model, variant)
    apply(model.config.model_type, tiled, options, proof)
    placed = [module for part in PROVEN_ALONE for module in part.modules(tiled) if placement_at(module)]
    if not placed:  # not even a loss
        refusals["all"] = "it has no part that can be tiled"
        return None
    if options.layer and "use_cache" not in inputs:  # tiled layers make no cache in training
        untiled = partial(untiled, use_cache=False)
    differs = compare(tiled, inputs, WayTaken(placed, CHUNK_TOKENS), untiled)[1]
    refusals |= refused_of(tiled)
    return differs


def _trusting(model: PreTrainedModel) -> Callable[[Part, nn.Module], str | None]:
    """In the place of a proof: whatever can be tiled may be."""
    return lambda part, module: None


def _is_refusal(found: str | Exception) -> bool:
    """Says if what was found is an error that seqtile raises by intent."""
    return isinstance(found, ValueError) and "seqtile" in traceback.extract_tb(found.__traceback__)[-1].filename
