"""Recognises decoder layers of Llama's shape, which `seqtile.ops.decoder_layer` computes, whosever class they are of.

The source of a layer, of its attention, of the rotary embedding and of its norms is compared with that of the few
models that the tests hold `decoder_layer` against. Nothing is known by its name.
"""

from functools import cache
from typing import Any, NamedTuple

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.models.forms import behind_renaming, source_in_file, source_of
from seqtile.models.hooks import defining_path
from seqtile.models.placement import computed_forward, original_forward
from seqtile.models.weights import named


class AttentionForm(NamedTuple):
    """What an attention of Llama's shape does besides projections, rotary embedding and attention."""

    windows: bool = False
    """It passes a sliding window to the attention function."""
    head_norms: bool = False
    """It has norms of queries and keys, shared by all heads."""
    rotary_switch: str | None = None
    """Its attribute that says whether it has a rotary embedding."""


class LayerForm(NamedTuple):
    """A layer of Llama's shape, and its differences from Llama's."""

    attention: AttentionForm
    residual_scale: str | None
    """The layer's attribute that multiplies the outputs of attention and MLP before they are added."""
    mlp: Any = None
    """The names of its MLP's parts, if the layer is fused."""


_ATTENTIONS = {
    "llama.modeling_llama.LlamaAttention": AttentionForm(),
    "mistral.modeling_mistral.MistralAttention": AttentionForm(windows=True),
    "qwen2.modeling_qwen2.Qwen2Attention": AttentionForm(windows=True),
    "qwen3.modeling_qwen3.Qwen3Attention": AttentionForm(windows=True, head_norms=True),
    "smollm3.modeling_smollm3.SmolLM3Attention": AttentionForm(windows=True, rotary_switch="use_rope"),
}
_LAYERS = {
    "llama.modeling_llama.LlamaDecoderLayer": None,
    "granite.modeling_granite.GraniteDecoderLayer": "residual_multiplier",
}


def layer_form_of(layer: nn.Module) -> LayerForm | str:
    """Returns the form of a layer of Llama's shape; for any other layer says what differs."""
    layers, attentions = _known()
    source = source_of(_unwrapped(original_forward(layer)))
    if source not in layers:
        return "its forward is not that of Llama's layers"
    attention = layer.self_attn
    forward = computed_forward(attention)
    if (attention_source := source_of(forward)) not in attentions:
        return f"its attention's forward, {named(forward)}, is not Llama's"
    names = forward.__globals__
    if names.get("ALL_ATTENTION_FUNCTIONS") is not ALL_ATTENTION_FUNCTIONS:
        return "its attention looks its function up in a table of its own"
    return LayerForm(attentions[attention_source], layers[source])


def is_llamas_rotary(function: Any) -> bool:
    """Returns whether a rotary embedding is Llama's, or Liger's kernel of it."""
    if defining_path(function) == "liger_kernel.transformers.rope.liger_rotary_pos_emb":
        return True
    if source_of(function) != _in_llama("apply_rotary_pos_emb"):
        return False
    return source_of(function.__globals__.get("rotate_half")) == _in_llama("rotate_half")


def is_llamas_norm(forward: Any) -> bool:
    """Returns whether a norm's forward is that of Llama's RMSNorm."""
    return source_of(forward) == _in_llama("LlamaRMSNorm.forward")


def _unwrapped(forward: Any) -> Any:
    """Returns a layer's forward inside Hugging Face's wrappers for checkpointing; each subclass (FSDP2's) adds one."""
    while defining_path(forward).startswith("transformers.modeling_layers.") and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return behind_renaming(forward)


@cache
def _in_llama(name: str) -> str:
    return source_in_file("transformers.models.llama.modeling_llama", name)


@cache
def _known() -> tuple[dict[str, str | None], dict[str, AttentionForm]]:
    """Returns the layers and the attentions by their source."""

    def source(name: str) -> str:
        module, _, cls = name.rpartition(".")
        return source_in_file(f"transformers.models.{module}", f"{cls}.forward")

    layers = {source(name): scale for name, scale in _LAYERS.items()}
    return layers, {source(name): form for name, form in _ATTENTIONS.items()}
