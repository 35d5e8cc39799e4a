"""The tiled forwards of a decoder layer of Llama's shape, of the norm behind the last, and of the model around them.

A layer is norm, attention, norm, gated MLP, one after the other. Where its weights can be read it is
`seqtile.ops.decoder_layer`; where they cannot, its modules are called chunk by chunk, which costs the projections to
queries, keys and values, and down, once more.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from seqtile.arch import ARCHS, Arch
from seqtile.models.fallback import call_tiled
from seqtile.models.mlp import activation_of, is_gated_mlp, mlp_fallback_reason, read_mlp
from seqtile.models.placement import (
    Options,
    computed_forward,
    forward_in_place_of,
    is_patched_subclass,
    placement_at,
    stand_in_for,
)
from seqtile.models.weights import (
    call_fallback_reason,
    check_not_zero3,
    check_untransformed,
    defining_path,
    module_call_reason,
    module_fallback_reason,
    named,
    process_fallback_reason,
    projection_fallback_reason,
    read_projection,
)
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.ops.decoder_layer import decoder_layer
from seqtile.ops.decoder_layer.params import AttentionParams, LayerParams, MLPParams, Norm
from seqtile.ops.rms_norm import rms_norm
from seqtile.protocols import SequenceParallelAttention, SequenceParallelFunction

logger = logging.get_logger(__name__)
_FORWARD_CHECKPOINTS = "__init_subclass__" in vars(GradientCheckpointingLayer)  # since transformers 5.2x; else __call__
AUTO = 8  # groups at most: what exists of one group only is an eighth then, and its products are wide still
_NORM_FORWARDS = {  # where a norm's forward that `rms_norm` computes was written
    "liger_kernel.transformers.rms_norm.LigerRMSNorm.forward",
    *(f"{arch.modeling_name}.{arch.prefix}RMSNorm.forward" for arch in ARCHS.values() if arch.layer),
}
_UNFILLED = "_seqtile_unfilled"  # on a cache that only tells how masks are to be made


def tiled_layer_forward(arch: Arch, options: Options, original: Callable) -> Callable:
    """Returns a tiled forward in place of `original`, a decoder layer's forward (a plain function).

    `original` itself where the sequence fits in a chunk, and where attentions are asked for. With a cache, which holds
    all keys and values, heads are not computed in groups; where gradients may flow through it, modules are called. None
    is made in training, see `uncached_forward`.
    """
    inner = original.__wrapped__ if _FORWARD_CHECKPOINTS else original

    def tiled(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        kwargs = {"position_ids": position_ids, "use_cache": use_cache, **kwargs}
        tokens = hidden_states.shape[:-1].numel()
        fits = tokens <= resolve_chunk_tokens(options.chunk_tokens, hidden_states.shape[-1])
        asked = kwargs.get("output_attentions", getattr(self.self_attn.config, "output_attentions", False))
        cached = {"past_key_values": past_key_values, "position_embeddings": position_embeddings}
        untiled = partial(inner, self, hidden_states, attention_mask=attention_mask, **cached, **kwargs)
        if (fits and not _is_zero3(self)) or asked:
            return untiled()
        past_key_values = None if hasattr(past_key_values, _UNFILLED) else past_key_values
        grouped = None if past_key_values is not None else options.head_groups
        reason = check_layer(arch, self, replace(options, head_groups=grouped))
        if reason and module_call_reason():  # every call matters, that of the attention, too, which no chunk can make
            return untiled()
        if reason is None and past_key_values is not None and torch.is_grad_enabled():
            reason = "gradients may flow through the cache"
            check_not_zero3(self, reason)
        attend, sp_attention, extra_tensors = _attention(arch, self.self_attn, attention_mask, past_key_values, kwargs)
        rotary = position_embeddings if getattr(self.self_attn, "use_rope", True) else None
        scale = getattr(self, arch.residual_scale) if arch.residual_scale else 1.0
        if reason is not None:
            return _fallback_layer(arch, self, hidden_states, rotary, attend, scale, options.chunk_tokens)
        groups = groups_of(self.self_attn, grouped, 1 if sp_attention is None else sp_attention.ranks)
        return decoder_layer(
            hidden_states,
            _params_of(self),
            rotary,
            attend,
            head_dim=self.self_attn.head_dim,
            head_groups=groups,
            sp_attention=None if sp_attention is None else sp_attention.in_groups(groups or 1),
            allow_recompute=grouped != "auto",
            extra_tensors=extra_tensors,
            activation=activation_of(self.mlp),
            scale=scale,
            chunk_tokens=options.chunk_tokens,
        )

    @stand_in_for(original)
    def forward(self, *args, **kwargs):
        outermost = is_patched_subclass(type(self)) or type(self).forward is forward
        if _FORWARD_CHECKPOINTS and outermost and self.gradient_checkpointing and self.training:
            if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
                logger.warning_once("checkpointed layers have no cache, which recomputation would fill once more")
                kwargs |= {"use_cache": False, "past_key_values": None}
            return self._gradient_checkpointing_func(partial(tiled, self, **kwargs), *args)
        return tiled(self, *args, **kwargs)

    return forward


def _is_zero3(layer: nn.Module) -> bool:
    """Says if reading a weight is a collective, which ranks of different lengths must do alike."""
    return hasattr(layer.input_layernorm.weight, "ds_id")


def _params_of(layer: nn.Module) -> LayerParams:
    """Reads the parameters, in the order in which an untiled layer uses them: under ZeRO-3 each reading is a
    collective."""
    attention = layer.self_attn
    return LayerParams(
        AttentionParams(
            read_norm(layer.input_layernorm),
            read_projection("q_proj", attention.q_proj),
            read_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            read_projection("k_proj", attention.k_proj),
            read_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            read_projection("v_proj", attention.v_proj),
            read_projection("o_proj", attention.o_proj),
        ),
        MLPParams(read_norm(layer.post_attention_layernorm), *read_mlp(layer.mlp)),
    )


def _attention(
    arch: Arch, attention: nn.Module, mask: Any, cache: Any, kwargs: dict[str, Any]
) -> tuple[Callable[..., torch.Tensor], SequenceParallelAttention | None, list[torch.Tensor]]:
    """Returns the attention that the model has, asked as Hugging Face's code asks it; its steps, if ranks hold parts of
    the sequence; and the tensors it is given besides."""
    options = {"dropout": attention.attention_dropout if attention.training else 0.0, "scaling": attention.scaling}
    if arch.windows:
        of_model = getattr(attention.config, "sliding_window", None)
        options["sliding_window"] = getattr(attention, "sliding_window", of_model)
    eager = arch.modeling.eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        return function(attention, q, k, v, mask, **options, **kwargs)[0]

    sp_attention = None
    if isinstance(function, SequenceParallelFunction):
        kv_heads = attention.config.num_key_value_heads
        heads = (kv_heads * attention.num_key_value_groups, kv_heads)
        sp_attention = function.steps(attention, mask, heads, **options, **kwargs)
    extra_tensors = [tensor for tensor in (mask, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
    return attend, sp_attention, extra_tensors


def groups_of(attention: nn.Module, head_groups: int | str | None, ranks: int = 1) -> int | None:
    """Returns how many groups of heads attend one after the other, None for all heads at once.

    "auto" is as many as divide the kv heads, up to `AUTO`, and give each rank a kv head of its own in every group; None
    if that is one. ValueError if the number asked for cannot be."""
    kv_heads = attention.config.num_key_value_heads
    if head_groups == "auto":
        many = [groups for groups in range(2, AUTO + 1) if kv_heads % groups == 0 and kv_heads // groups >= ranks]
        return max(many, default=None)
    if head_groups is not None and kv_heads % head_groups:
        raise ValueError(f"head_groups: expected a divisor of the {kv_heads} kv heads, got {head_groups}")
    return head_groups


@torch.compiler.disable(reason="seqtile looks at what the modules of a layer are")
def check_layer(arch: Arch, layer: nn.Module, options: Options) -> str | None:
    """Raises ValueError where a tiled layer would refuse to run, or not compute what `layer` computes; returns why its
    modules are called rather than read, None if they are read."""
    check_untransformed()
    attention = layer.self_attn
    forward = computed_forward(attention)
    if defining_path(forward) != f"{arch.modeling_name}.{arch.prefix}Attention.forward" or "forward" in vars(attention):
        raise ValueError(
            f"a tiled layer skips its attention's forward, which is not Hugging Face's but {named(forward)}; apply "
            "layer=False"
        )
    if (changed := module_fallback_reason(attention, recording=False)) is not None:
        raise ValueError(f"a tiled layer skips its attention's forward, which {changed}; apply with layer=False")
    if (reason := layer_fallback_reason(arch, layer)) is not None:
        check_not_zero3(layer, reason)
        if options.head_groups is not None:
            raise ValueError(f"attention by groups of heads reads its weights, and {reason}; apply head_groups=None")
    groups_of(attention, options.head_groups)
    return reason


def layer_fallback_reason(arch: Arch, layer: nn.Module) -> str | None:
    """Says why a layer's modules are called rather than read."""
    return process_fallback_reason() or next((reason for reason in _reasons(arch, layer) if reason is not None), None)


def _reasons(arch: Arch, layer: nn.Module) -> Iterator[str | None]:
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield norm_fallback_reason(name, getattr(layer, name))
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            yield norm_fallback_reason(name, getattr(attention, name))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield projection_fallback_reason(name, getattr(attention, name))
    if not is_gated_mlp(computed_forward(mlp)):
        yield "its MLP has a forward of its own"
    if (reason := call_fallback_reason(mlp)) is not None:
        yield f"its MLP {reason}"
    if defining_path(arch.modeling.apply_rotary_pos_emb) not in (
        f"{arch.modeling_name}.apply_rotary_pos_emb",
        "liger_kernel.transformers.rope.liger_rotary_pos_emb",
    ):
        yield "its rotary embedding was replaced"
    yield mlp_fallback_reason(mlp, forward_in_place_of(mlp))


def _fallback_layer(
    arch: Arch,
    layer: nn.Module,
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    attend: Callable[..., torch.Tensor],
    scale: float,
    chunk_tokens: int | None,
) -> torch.Tensor:
    """Computes the output [B, S, D] of an input [B, S, D] by calling the layer's modules. `rotary` are cos and sin
    [B or 1, S, K]; `scale` multiplies what attention and MLP add."""
    attention = layer.self_attn

    def heads_of(x: torch.Tensor, name: str) -> torch.Tensor:
        heads = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim))
        return getattr(attention, f"{name}_norm")(heads) if hasattr(attention, f"{name}_norm") else heads

    def pre_attention(x: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed = layer.input_layernorm(x)
        q, k, v = (heads_of(normed, name) for name in "qkv")
        if angles:
            q, k = arch.modeling.apply_rotary_pos_emb(q, k, *angles, unsqueeze_dim=2)
        return q, k, v

    def post_attention(x: torch.Tensor, attn_output: torch.Tensor) -> torch.Tensor:
        h = x + attention.o_proj(attn_output) * scale
        return h + layer.mlp(layer.post_attention_layernorm(h)) * scale

    head_norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    before = (layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, *head_norms)
    behind = (attention.o_proj, layer.post_attention_layernorm, layer.mlp)
    chunks = {"chunk_tokens": chunk_tokens, "dim": 1}
    q, k, v = call_tiled(pre_attention, before, x, *(rotary or ()), **chunks)
    attn_output = attend(*(heads.transpose(1, 2) for heads in (q, k, v))).flatten(2)
    return call_tiled(post_attention, behind, x, attn_output, **chunks)


def tiled_norm_forward(arch: Arch, options: Options, original: Callable) -> Callable:
    """Returns a forward in place of `original`, an RMSNorm's forward (a plain function); rows need no chunks.

    `original` itself in evaluation, where a sequence fits in a chunk, and for heads [B, S, H, K].
    """

    @stand_in_for(original)
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fits = hidden_states.shape[:-1].numel() <= resolve_chunk_tokens(options.chunk_tokens, hidden_states.shape[-1])
        if fits or not self.training or hidden_states.dim() != 3 or process_fallback_reason() is not None:
            return original(self, hidden_states)
        return rms_norm(hidden_states, *read_norm(self))

    return forward


def read_norm(norm: nn.Module) -> Norm:
    """Reads weight and eps. Under ZeRO-3 each reading is a collective."""
    return Norm(norm.weight, norm.variance_epsilon)


def check_norm(arch: Arch, norm: nn.Module, options: Options) -> None:
    """Raises ValueError where the tiled forward would not compute what `norm` computes."""
    if (reason := norm_fallback_reason("norm", norm)) is not None:
        raise ValueError(f"a tiled norm reads its weight, and {reason}; apply with layer=False")


def norm_fallback_reason(name: str, norm: nn.Module) -> str | None:
    """Says why a norm must be called rather than read; see `process_fallback_reason`, too."""
    cls = type(norm)
    if defining_path(computed_forward(norm)) not in _NORM_FORWARDS:
        own = "forward" in vars(norm)
        return f"{name} has a forward of its own" if own else f"{name} is a {named(cls)}"
    if getattr(norm, "offset", 0) or getattr(norm, "casting_mode", "llama") != "llama":
        return f"{name} is another kind of RMSNorm than Llama's"
    reason = call_fallback_reason(norm)
    return None if reason is None else f"{name} {reason}"


def uncached_forward(arch: Arch, options: Options, original: Callable) -> Callable:
    """Returns a forward in place of `original`, that of a model without its head (a plain function), which fills no
    cache in training, unless it is given one.

    Hugging Face's config asks for a cache by default, in training too, and makes other masks where there is one: so
    there is one, which stays empty and is not returned.
    """
    names = list(inspect.signature(original).parameters)[1:]

    @stand_in_for(original)
    def forward(self, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        if not _makes_cache(self, given, options):
            return original(self, *args, **kwargs)
        logger.warning_once(
            "layers that are tiled as a whole make no cache in training; pass use_cache=False, or a cache to be filled"
        )
        cache = DynamicCache(config=self.config)
        setattr(cache, _UNFILLED, True)
        outputs = original(self, **given | {"past_key_values": cache})
        if isinstance(outputs, tuple):
            return tuple(output for output in outputs if output is not cache)
        outputs.past_key_values = None
        return outputs

    return forward


def _makes_cache(model: nn.Module, given: dict[str, Any], options: Options) -> bool:
    """Says if a model that is called so would fill a cache of its own while it is trained on more than a chunk."""
    if not (model.training and torch.is_grad_enabled()) or given.get("past_key_values") is not None:
        return False
    wanted = given.get("use_cache")
    if not (model.config.use_cache if wanted is None else wanted):
        return False
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens = ids.numel() if ids is not None else 0 if embeds is None else embeds.shape[:-1].numel()
    return tokens > resolve_chunk_tokens(options.chunk_tokens, model.config.hidden_size)


def note_that_all_is_kept(model: nn.Module, tokens: int) -> None:
    """Says so, once, where a model in training has tiled layers that are not checkpointed, and keep more each than its
    weights take."""
    if not (model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    layer = next(iter(getattr(model.base_model, "layers", ())), None)
    placement = None if layer is None else placement_at(layer)
    if placement is None or is_checkpointed(model):
        return
    config, attention = model.config, layer.self_attn
    heads, kv = config.num_attention_heads * attention.head_dim, config.num_key_value_heads * attention.head_dim
    weights = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    kept = config.hidden_size + heads + (heads + 2 * kv if placement.options.head_groups is None else 0)
    if tokens * kept > weights:
        logger.warning_once(
            "whole layers are tiled, but activation checkpointing is off: at this length every layer keeps more for "
            "its backward than its weights take; model.gradient_checkpointing_enable() has it keep its input alone"
        )


def is_checkpointed(model: nn.Module) -> bool:
    return any(getattr(layer, "gradient_checkpointing", False) for layer in model.base_model.layers)
