"""Chooses the attention without masks for a model, `seqtile.attention.varlen`, and puts its former attention back.

The choice stands in the configs of the text model, as `model.set_attn_implementation` writes it there. Hugging Face
never saves it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.attention.layout import VARLEN
from seqtile.attention.varlen import register
from seqtile.models.find import layers_of, text_model_of
from seqtile.models.functions import package_of
from seqtile.models.placement import placement_at
from seqtile.ops.chunks import is_trial
from seqtile.ops.state import exchanged
from seqtile.protocols import SHARDED


def attention_of(model: nn.Module) -> str:
    """Returns the name of a model's attention; if the model is sharded over ranks, of that which computes heads."""
    text = _text_model_of(model)
    if (sharded := vars(text).get(SHARDED)) is not None:
        return sharded.implementation
    return text.config._attn_implementation or "eager"


def is_varlen(model: nn.Module) -> bool:
    return attention_of(model).startswith(VARLEN)


def kind_refusal(model: PreTrainedModel) -> str | None:
    """Says why the attention of a model, by its kind, cannot be computed without masks."""
    text, attention = _text_model_of(model), attention_of(model)
    causal = {getattr(module, "is_causal", None) for layer in layers_of(model) for module in layer.modules()} - {None}
    function = ALL_ATTENTION_FUNCTIONS.get(attention)
    home = package_of(getattr(function, "function", function)) if function is not None else ""
    is_known = attention == "eager" or home in ("transformers", "seqtile")
    wants_weights = getattr(text.config, "output_attentions", False)
    for reason, is_so in (
        ("it has an encoder", model.config.is_encoder_decoder),
        ("it does not take its attention from AttentionInterface", not text._can_set_attn_implementation()),
        ("it is not causal", causal == {False}),
        (f"it is {attention!r}, which is not Hugging Face's", attention.startswith("paged|") or not is_known),
        ("its config asks for the weights of attention", wants_weights),
    ):
        if is_so:
            return reason
    return None


def choose_varlen(model: nn.Module) -> None:
    """Chooses the attention without masks in a model, unless it has it."""
    if not is_varlen(model):
        _set(model, register(attention_of(model)))


def choose_varlen_by_class(model: nn.Module) -> None:
    """Chooses it for a model whose class asks for it, once: an attention that is chosen later stays."""
    chosen = placement_at(model).chosen_for
    if model in chosen:
        return
    choose_varlen(model)
    if not is_trial():  # after which the configs are as they were
        chosen.add(model)


def keep_chosen(model: nn.Module) -> None:
    """Keeps a model's attention where its class would choose one in its first forward."""
    for module in model.modules():
        if (placement := placement_at(module)) is not None:
            placement.chosen_for.add(module)


def put_back(model: nn.Module) -> None:
    """Puts the attention back in whose place `choose_varlen` put its own. One that was chosen since stays."""
    if is_varlen(model):
        _set(model, attention_of(model).removeprefix(VARLEN))


@contextmanager
def former_attention(model: nn.Module) -> Iterator[None]:
    """Inside, a model that has the attention without masks computes by its former attention."""
    if not is_varlen(model):
        yield
        return
    former, sharded = attention_of(model).removeprefix(VARLEN), vars(_text_model_of(model)).get(SHARDED)
    owners = [vars(config) for config in _configs_of(model)] if sharded is None else [vars(sharded)]
    name = "_attn_implementation_internal" if sharded is None else "implementation"
    with exchanged([(own, name, former) for own in owners]):
        yield


def _text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a model that makes the masks of its layers."""
    found = text_model_of(model)  # in ModernBERT a projection has the name of a decoder
    return found if isinstance(found, PreTrainedModel) else model.base_model


def _set(model: nn.Module, attention: str) -> None:
    if (sharded := vars(_text_model_of(model)).get(SHARDED)) is not None:
        sharded.choose(attention)
        return
    for config in _configs_of(model):
        config._attn_implementation = attention


def _configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Returns the configs that the text model and its layers read their attention's name from."""
    text = _text_model_of(model)
    modules = [text, *(module for layer in layers_of(model) for module in layer.modules())]
    configs = [module.config for module in modules if isinstance(getattr(module, "config", None), PreTrainedConfig)]
    return list({id(config): config for config in configs}.values())
