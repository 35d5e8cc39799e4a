"""The tiled forward of a decoder layer of Llama's shape: norm, attention, norm, gated MLP, one after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from seqtile.models.arch import Arch
from seqtile.models.called_layer import called_layer
from seqtile.models.mlp import activation_of, read_mlp, why_generic
from seqtile.models.norm import read_norm, why_no_norm
from seqtile.models.placement import KNOWN_PACKAGES, is_known, package_of
from seqtile.models.projections import check_not_zero3, has_hooks, read_projection, unreadable
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.layer import decoder_layer
from seqtile.ops.layer_parts import LayerWeights
from seqtile.ops.projection import Projection
from seqtile.ops.tiles import resolve_chunk_tokens

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
    all keys and values, heads are not computed in groups.
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
        if (fits and not _is_zero3(self)) or asked:
            named = {"past_key_values": past_key_values, "position_embeddings": position_embeddings}
            return inner(self, hidden_states, attention_mask=attention_mask, **named, **kwargs)
        grouped = None if past_key_values is not None else head_groups
        check_layer(arch, self, grouped)
        attend, stages, given = _attention(arch, self.self_attn, attention_mask, past_key_values, kwargs)
        rotary = position_embeddings if getattr(self.self_attn, "use_rope", True) else None
        scale = getattr(self, arch.residual_scale) if arch.residual_scale else 1.0
        if why_called(arch, self) is not None:
            return called_layer(arch, self, hidden_states, rotary, attend, scale, chunk_tokens)
        groups = groups_of(self.self_attn, grouped, 1 if stages is None else stages.ranks)
        return decoder_layer(
            hidden_states,
            _weights_of(self),
            rotary,
            attend,
            head_dim=self.self_attn.head_dim,
            head_groups=groups,
            travel=_travel(self.self_attn, stages, groups),
            may_repeat=grouped != "auto",
            given=given,
            activation=activation_of(self.mlp),
            scale=scale,
            chunk_tokens=chunk_tokens,
        )

    @stand_in_for(original)
    def forward(self, *args, **kwargs):
        outermost = on_model or type(self).forward is forward
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


def _weights_of(layer: nn.Module) -> LayerWeights:
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
    return LayerWeights(
        norm, q, k, v, q_norm, k_norm, o, mlp_norm, *(Projection.of(*part) for part in read_mlp(layer.mlp))
    )


def _attention(
    arch: Arch, attention: nn.Module, mask: Any, cache: Any, kwargs: dict[str, Any]
) -> tuple[Callable[..., torch.Tensor], Any, list[torch.Tensor]]:
    """The attention that the model has, asked as Hugging Face's code asks it; its steps, if it has `stages` as
    `seqtile.sp` does; and the tensors it is given besides."""
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

    stages = getattr(function, "stages", None)
    given = [tensor for tensor in (mask, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
    return attend, stages and stages(attention, mask, **options, **kwargs), given


def _travel(attention: nn.Module, stages: Any, groups: int | None) -> Any:
    """The steps of a group's attention over ranks; None on one rank, or without groups."""
    if stages is None or groups is None:
        return None
    kv_heads = attention.config.num_key_value_heads // groups
    return stages.of(kv_heads * attention.num_key_value_groups, kv_heads)


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


def check_layer(arch: Arch, layer: nn.Module, head_groups: HeadGroups = None) -> None:
    """Raises ValueError where a tiled layer would refuse to run, or not compute what `layer` computes."""
    attention = layer.self_attn
    of_this_model = isinstance(attention, getattr(arch.modeling, f"{arch.prefix}Attention"))
    if not of_this_model or "forward" in vars(attention) or not is_known(attention):
        raise ValueError("a tiled layer skips its attention's forward, which is not Hugging Face's; apply layer=False")
    if _has_foreign_hooks(attention, _base_of(layer)):
        raise ValueError("a tiled layer skips its attention's forward, which has hooks; apply with layer=False")
    if (reason := why_called(arch, layer)) is not None:
        check_not_zero3(layer, reason)
        if head_groups is not None:
            raise ValueError(f"attention by groups of heads reads its weights, and {reason}; apply head_groups=None")
    groups_of(attention, head_groups)


def why_called(arch: Arch, layer: nn.Module) -> str | None:
    """Why a layer's modules are called tile by tile rather than read; None if they are read."""
    attention = layer.self_attn
    norms = [(name, getattr(layer, name)) for name in ("input_layernorm", "post_attention_layernorm")]
    norms += [(name, getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    projections = [(name, getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    reasons = [why_no_norm(*norm) for norm in norms] + [unreadable(*projection) for projection in projections]
    if has_hooks(layer.mlp, _base_of(layer)):
        reasons.append("its MLP has hooks")
    if not is_known(layer.mlp):
        reasons.append("its MLP has a forward of its own")
    if package_of(arch.modeling.apply_rotary_pos_emb) not in KNOWN_PACKAGES:
        reasons.append("its rotary embedding was replaced")
    return next((reason for reason in (*reasons, why_generic(layer.mlp)) if reason is not None), None)


def _base_of(layer: nn.Module) -> nn.Module:
    down = layer.mlp.down_proj
    return getattr(down, "base_layer", down)


def _has_foreign_hooks(attention: nn.Module, sharded: nn.Module) -> bool:
    """Hooks but those by which Hugging Face records attentions, which do nothing unless these are asked for."""
    own = [hook for hook in attention._forward_hooks.values() if "output_capturing" in getattr(hook, "__module__", "")]
    return has_hooks(attention, sharded) and len(own) < sum(
        len(hooks)
        for hooks in (
            attention._forward_hooks,
            attention._forward_pre_hooks,
            attention._backward_hooks,
            attention._backward_pre_hooks,
        )
    )
