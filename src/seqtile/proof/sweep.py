"""Tests a model's variants: config values, batches and settings that change which code runs. Each variant is built
small and runs twice, untiled and with all parts tiled together.

small model of the variant's config, untiled, its batch ───> loss, gradients
the same, all parts tiled by apply_seqtile in chunks of 11  ─> within what difference.py allows, or refused by name
"""

import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from seqtile.models.apply import Proof, apply, refused_of
from seqtile.models.find import head_of
from seqtile.models.placement import Options, placement_at
from seqtile.proof.difference import Vectors, brief
from seqtile.proof.findings import CHUNK, PROVEN_ALONE, Inputs, compare, gradients_of, some_words
from seqtile.proof.proven import unproven
from seqtile.proof.small import HEADS, configs_in, count_of, set_field, small_model
from seqtile.renamed import enable_checkpointing

RIGHT, REFUSED, DIFFERS, FAILS = "right", "refused", "different", "failing untiled too"
CHUNK_TOKENS = 11  # small enough for several chunks of experts, whose chunks are up to four times as long
Batch = Callable[[PreTrainedModel, Inputs], Inputs]
"""Changes a model's settings and returns changed inputs."""
_UNSAID = ("output_hidden_states", "return_dict", "use_cache", "is_encoder_decoder", "add_cross_attention")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
_OTHER_VALUES: dict[str, tuple[Any, ...]] = {  # other values of fields that are not booleans
    **dict.fromkeys(_ACTIVATIONS, ("gelu", "gelu_pytorch_tanh")),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), (None, 5)),
    **dict.fromkeys(("partial_rotary_factor", "logit_scale", "residual_multiplier", "embedding_multiplier"), (0.5,)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap"), (None, 3.0)),
    **dict.fromkeys(("logits_scaling", "routed_scaling_factor", "clip_qkv", "attention_multiplier"), (2.5,)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), (0, 2)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, HEADS)),
    **dict.fromkeys(("num_local_experts", "num_experts", "shared_intermediate_size"), (0,)),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "decoder_sparse_step"), (1,)),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers"), (0, 1)),
    **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input"), (0,)),
    "q_lora_rank": (None, 8),
    "mlp_only_layers": ([], [0]),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "noaux_tc", "group_limited_greedy"),
    "position_embedding_type": ("absolute", "alibi", "rope", "nope", None),
}
_WITH_IT = {"enable_moe_block": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 72}}
"""The fields that a switch needs when it is on."""
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers", "attention_layers")


def _sdpa(batch: Batch, model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Runs another batch with torch's SDPA instead of eager attention."""
    model.set_attn_implementation("sdpa")
    return batch(model, inputs)


def _packed(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Packs documents of several lengths in a row, separated by their positions. The config decides `use_cache`."""
    length = inputs["labels"].shape[1]
    rows = [torch.cat([torch.arange(cut), torch.arange(length - cut)]) for cut in (CHUNK - 2, 2 * CHUNK)]
    for part in configs_in(model.config).values():
        set_field(part, "use_cache", True)
    return {name: value for name, value in inputs.items() if name != "use_cache"} | {"position_ids": torch.stack(rows)}


def _padded(padding: slice, model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Pads the second row."""
    mask = torch.ones_like(inputs["labels"])
    mask[1, padding] = 0
    return inputs | {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def _without_labels_in_a_row(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    labels = inputs["labels"].clone()
    labels[0] = -100
    return inputs | {"labels": labels}


def _embedded(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    return {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": embedded}


def _checkpointed(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    enable_checkpointing(model)
    return inputs


def _as_it_is(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    return inputs


_BATCHES: dict[str, Batch] = {
    "as it is": _as_it_is,
    "packed documents": _packed,
    "padded on the left": partial(_padded, slice(None, CHUNK + 1)),
    "padded on the right": partial(_padded, slice(-CHUNK - 1, None)),
    "a row without labels": _without_labels_in_a_row,
    "inputs_embeds": _embedded,
    "checkpointed": _checkpointed,
}


class Variant(NamedTuple):
    """A change of a model's config, settings or batch."""

    name: str
    changes: dict[str, Any]
    """Changed fields of the text model's config, by name; fields of a nested config have its prefix and a dot."""
    batch: Batch = _as_it_is
    is_whole: bool = False
    """True if the full config is changed before it is made small, because the changes need all layers."""


def variants_of(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, small: PreTrainedConfig
) -> Iterator[Variant]:
    """Yields variants: every switch of a config flipped, other values of its fields, other batches and settings.
    `small` is the config with reduced sizes."""
    for name, batch in _BATCHES.items():
        yield Variant(name, {}, batch)
    for name in ("as it is", "packed documents", "padded on the left") if model_class._supports_sdpa else ():
        yield Variant(f"{name}, sdpa", {}, partial(_sdpa, _BATCHES[name]))
    yield from _of_config(small)
    text = config.get_text_config()
    if "num_kv_shared_layers" in vars(text):
        half = (count_of(text) or 0) // 2
        yield Variant("half of the layers share keys", {"num_kv_shared_layers": half}, is_whole=True)


def _of_config(config: PreTrainedConfig) -> Iterator[Variant]:
    """Yields variants of a text config: every switch flipped, and other values of known fields."""
    text = config.get_text_config()
    for prefix, part in configs_in(text).items():
        said = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        for name, value in said.items():
            others = (not value,) if isinstance(value, bool) else _OTHER_VALUES.get(name, ())
            for other in others if name not in _UNSAID else ():
                if other != value:
                    changes = {f"{prefix}{name}": other} | (_WITH_IT.get(name, {}) if other else {})
                    yield Variant(f"{prefix}{name}={other}", changes)
    said, layers = vars(text), count_of(text) or 0
    for name in _KINDS:
        kinds = dict.fromkeys(said[name]) if isinstance(said.get(name), list | tuple) else {}
        for kind in kinds if len(kinds) > 1 else ():
            yield Variant(f"{name}: all {kind}", {name: [kind] * len(said[name])})
    if "use_sliding_window" in said or "sliding_window" in said:
        kinds = {"layer_types": ["sliding_attention"] * layers} if "layer_types" in said else {}
        switch = {"use_sliding_window": True} if "use_sliding_window" in said else {}
        yield Variant("sliding windows", {"sliding_window": 5, "max_window_layers": 0} | switch | kinds)
    if isinstance(rope := said.get("rope_parameters"), dict) and "rope_theta" in rope:
        yield Variant("half of each head rotated", {"rope_parameters": rope | {"partial_rotary_factor": 0.5}})
    if "output_router_logits" in said:
        yield Variant("output_router_logits=True, checkpointed", {"output_router_logits": True}, _checkpointed)


def changed(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """Returns a copy of a config with changed fields of its text config. Sets them as attributes, so that the class
    does not derive other fields from them."""
    changed = copy.deepcopy(config)
    inside = configs_in(changed.get_text_config())
    for path, value in changes.items():
        prefix, dot, name = path.rpartition(".")
        setattr(inside[prefix + dot], name, value)
    return changed


@dataclass(frozen=True)
class Row:
    """The result for a variant."""

    variant: str
    how: str
    """RIGHT, REFUSED, DIFFERS or FAILS."""
    reason: str | None
    """What is refused and why, or what differs or fails."""


def sweep(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Iterator[Row]:
    """Yields a row for each variant of a config's small model, starting with the unchanged model. Raises ValueError if
    the unchanged model cannot be built."""
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
    """Returns the result for a variant, and all its refusals. The result reports only refusals that are not in `known`,
    and none if `known` is None."""
    refusals: dict[str, str] = {}
    try:
        model = small_model(model_class, changed(config, variant.changes))
        untiled = cache(partial(_untiled, model, variant))
        untiled(0.0)
    except Exception as error:  # the model's own code may raise anything
        return Row(variant.name, FAILS, brief(error)), refusals
    tried = partial(_difference, model, variant, untiled, refusals)
    for asked in ({"layer": True, "head_groups": 2}, {"layer": True}, {}):
        options = Options(**asked, loss=head_of(model) is not None, chunk_tokens=CHUNK_TOKENS, check=False)
        found = tried(options, lambda model: lambda part, module: None)  # first without a proof
        if found is not None and not (options.head_groups and _is_refusal(found)):
            found = tried(options, unproven)  # slow, and not needed if nothing differs
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
    """Returns a copy of a model with a variant's settings, and its inputs."""
    model = copy.deepcopy(model)
    return model, variant.batch(model, some_words())


def _untiled(model: PreTrainedModel, variant: Variant, nudge: float, **instead: bool) -> Vectors:
    model, inputs = _called(model, variant)
    return gradients_of(model, inputs | instead, nudge)


def _difference(
    model: PreTrainedModel,
    variant: Variant,
    untiled: Callable[..., Vectors],
    refusals: dict[str, str],
    options: Options,
    proof: Proof,
) -> str | Exception | None:
    """Returns what differs when the model is tiled, or the error that tiling or running it raises; None if nothing
    differs. Adds the parts that stay untiled to `refusals`."""
    tiled, inputs = _called(model, variant)
    try:
        apply(model.config.model_type, tiled, options, proof)
        placed = [module for part in PROVEN_ALONE for module in part.modules(tiled) if placement_at(module)]
        if not placed:  # not even the loss is tiled
            refusals["all"] = "it has no part that can be tiled"
            return None
        if (options.layer or options.loss) and "use_cache" not in inputs:  # tiled parts make no cache in training
            untiled = partial(untiled, use_cache=False)
        differs = compare(tiled, inputs, placed, CHUNK_TOKENS, untiled)[1]
    except Exception as error:  # the model's own code may raise anything
        return error
    refusals |= refused_of(tiled)
    return differs


def _is_refusal(found: str | Exception) -> bool:
    """Returns whether a result is an error that seqtile raises on purpose."""
    return isinstance(found, ValueError) and "seqtile" in traceback.extract_tb(found.__traceback__)[-1].filename
