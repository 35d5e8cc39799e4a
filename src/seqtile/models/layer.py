"""The tiled forward of a decoder layer of Llama's shape: norm, attention, norm, gated MLP, one after the other."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from seqtile.arch import Arch
from seqtile.models.called_layer import called_layer
from seqtile.models.mlp import activation_of, is_gated_mlp, read_mlp, why_generic
from seqtile.models.norm import read_norm, why_no_norm
from seqtile.models.own_class import is_own_class
from seqtile.models.placement import computed_forward
from seqtile.models.plain import named, origin, why_call_changed, why_calls_matter, why_changed, why_none_is_plain
from seqtile.models.projections import check_not_zero3, check_untransformed, read_projection, unreadable
from seqtile.models.stand_in import stand_in_for
from seqtile.models.uncached import is_unfilled
from seqtile.ops.decoder_layer.function import decoder_layer
from seqtile.ops.decoder_layer.params import AttentionParams, LayerParams, MLPParams
from seqtile.ops.projection import Projection
from seqtile.ops.tiles import resolve_chunk_tokens
from seqtile.protocols import SequenceParallelAttention, SequenceParallelFunction

logger = logging.get_logger(__name__)
HeadGroups = int | str | None
_FORWARD_CHECKPOINTS = "__init_subclass__" in vars(GradientCheckpointingLayer)  # since transformers 5.2x; else __call__
AUTO = 8  # groups at most: what exists of one group only is an eighth then, and its products are wide still


def tiled_layer_forward(
    arch: Arch, original: Callable, chunk_tokens: int | None, head_groups: HeadGroups, on_model: bool
) -> Callable:
    """A tiled forward in place of `original`, a decoder layer's forward (a plain function); `on_model` says that it is
    to stand on a layer rather than on its class.

    `original` itself where the sequence fits in a tile, and where attentions are asked for. With a cache, which holds
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
        fits = tokens <= resolve_chunk_tokens(chunk_tokens, hidden_states.shape[-1])
        asked = kwargs.get("output_attentions", getattr(self.self_attn.config, "output_attentions", False))
        cached = {"past_key_values": past_key_values, "position_embeddings": position_embeddings}
        untiled = partial(inner, self, hidden_states, attention_mask=attention_mask, **cached, **kwargs)
        if (fits and not _is_zero3(self)) or asked:
            return untiled()
        past_key_values = None if is_unfilled(past_key_values) else past_key_values
        grouped = None if past_key_values is not None else head_groups
        reason = check_layer(arch, self, grouped)
        if reason is not None and why_calls_matter() is not None:  # that of the attention, too, which no tile can make
            return untiled()
        if reason is None and past_key_values is not None and torch.is_grad_enabled():
            reason = "gradients may flow through the cache"
            check_not_zero3(self, reason)
        attend, over_ranks, given = _attention(arch, self.self_attn, attention_mask, past_key_values, kwargs)
        rotary = position_embeddings if getattr(self.self_attn, "use_rope", True) else None
        scale = getattr(self, arch.residual_scale) if arch.residual_scale else 1.0
        if reason is not None:
            return called_layer(arch, self, hidden_states, rotary, attend, scale, chunk_tokens)
        groups = groups_of(self.self_attn, grouped, 1 if over_ranks is None else over_ranks.ranks)
        return decoder_layer(
            hidden_states,
            _params_of(self),
            rotary,
            attend,
            head_dim=self.self_attn.head_dim,
            head_groups=groups,
            exchange=None if over_ranks is None else over_ranks.in_groups(groups or 1),
            may_repeat=grouped != "auto",
            given=given,
            activation=activation_of(self.mlp),
            scale=scale,
            chunk_tokens=chunk_tokens,
        )

    @stand_in_for(original)
    def forward(self, *args, **kwargs):
        outermost = is_own_class(type(self)) if on_model else type(self).forward is forward
        if _FORWARD_CHECKPOINTS and outermost and self.gradient_checkpointing and self.training:
            if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
                logger.warning_once("checkpointed layers have no cache, which a replay would fill once more")
                kwargs |= {"use_cache": False, "past_key_values": None}
            return self._gradient_checkpointing_func(partial(tiled, self, **kwargs), *args)
        return tiled(self, *args, **kwargs)

    return forward


def _is_zero3(layer: nn.Module) -> bool:
    """Whether reading a weight is a collective, which ranks of different lengths must do alike."""
    return hasattr(layer.input_layernorm.weight, "ds_id")


def _params_of(layer: nn.Module) -> LayerParams:
    """In the order in which an untiled layer uses them: under ZeRO-3 each reading is a collective."""

    def read(module: nn.Module, name: str) -> Projection:
        return Projection.of(*read_projection(name, getattr(module, name)))

    attention = layer.self_attn
    norm, q = read_norm(layer.input_layernorm), read(attention, "q_proj")
    q_norm = read_norm(attention.q_norm) if hasattr(attention, "q_norm") else None
    k = read(attention, "k_proj")
    k_norm = read_norm(attention.k_norm) if hasattr(attention, "k_norm") else None
    v, o = read(attention, "v_proj"), read(attention, "o_proj")
    mlp_norm = read_norm(layer.post_attention_layernorm)
    mlp = MLPParams(mlp_norm, *(Projection.of(*part) for part in read_mlp(layer.mlp)))
    return LayerParams(AttentionParams(norm, q, k, v, q_norm, k_norm, o), mlp)


def _attention(
    arch: Arch, attention: nn.Module, mask: Any, cache: Any, kwargs: dict[str, Any]
) -> tuple[Callable[..., torch.Tensor], SequenceParallelAttention | None, list[torch.Tensor]]:
    """The attention that the model has, asked as Hugging Face's code asks it; its steps, if ranks hold parts of the
    sequence; and the tensors it is given besides."""
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

    over_ranks = None
    if isinstance(function, SequenceParallelFunction):
        kv_heads = attention.config.num_key_value_heads
        heads = (kv_heads * attention.num_key_value_groups, kv_heads)
        over_ranks = function.steps(attention, mask, heads, **options, **kwargs)
    given = [tensor for tensor in (mask, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
    return attend, over_ranks, given


def groups_of(attention: nn.Module, head_groups: HeadGroups, ranks: int = 1) -> int | None:
    """How many groups; "auto": as many as divide the kv heads, up to `AUTO`, and give each rank a kv head of its own in
    every group, None if that is one. ValueError if that cannot be."""
    kv_heads = attention.config.num_key_value_heads
    if head_groups == "auto":
        many = [groups for groups in range(2, AUTO + 1) if kv_heads % groups == 0 and kv_heads // groups >= ranks]
        return max(many, default=None)
    if head_groups is not None and kv_heads % head_groups:
        raise ValueError(f"head_groups: expected a divisor of the {kv_heads} kv heads, got {head_groups}")
    return head_groups


@torch.compiler.disable(reason="seqtile looks at what the modules of a layer are")
def check_layer(arch: Arch, layer: nn.Module, head_groups: HeadGroups = None) -> str | None:
    """Raises ValueError where a tiled layer would refuse to run, or not compute what `layer` computes; returns why its
    modules are called, see `why_called`."""
    check_untransformed()
    attention = layer.self_attn
    forward = computed_forward(attention)
    if origin(forward) != f"{arch.modeling_name}.{arch.prefix}Attention.forward" or "forward" in vars(attention):
        raise ValueError(
            f"a tiled layer skips its attention's forward, which is not Hugging Face's but {named(forward)}; apply "
            "layer=False"
        )
    if (changed := why_changed(attention, recording=False)) is not None:
        raise ValueError(f"a tiled layer skips its attention's forward, which {changed}; apply with layer=False")
    if (reason := why_called(arch, layer)) is not None:
        check_not_zero3(layer, reason)
        if head_groups is not None:
            raise ValueError(f"attention by groups of heads reads its weights, and {reason}; apply head_groups=None")
    groups_of(attention, head_groups)
    return reason


def why_called(arch: Arch, layer: nn.Module) -> str | None:
    """Why a layer's modules are called tile by tile rather than read; None if they are read."""
    return why_none_is_plain() or next((reason for reason in _reasons(arch, layer) if reason is not None), None)


def _reasons(arch: Arch, layer: nn.Module) -> Iterator[str | None]:
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield why_no_norm(name, getattr(layer, name))
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            yield why_no_norm(name, getattr(attention, name))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield unreadable(name, getattr(attention, name))
    if not is_gated_mlp(computed_forward(mlp)):
        yield "its MLP has a forward of its own"
    if (reason := why_call_changed(mlp)) is not None:
        yield f"its MLP {reason}"
    if origin(arch.modeling.apply_rotary_pos_emb) not in (
        f"{arch.modeling_name}.apply_rotary_pos_emb",
        "liger_kernel.transformers.rope.liger_rotary_pos_emb",
    ):
        yield "its rotary embedding was replaced"
    yield why_generic(mlp)
