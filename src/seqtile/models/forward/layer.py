"""The tiled forward of a decoder layer.

A layer of Llama's shape runs a norm, attention, a norm and a gated MLP in sequence. If its modules compute only what
their classes define, the layer is fused: `seqtile.ops.decoder_layer` computes it from its weights. Otherwise the layer
runs in chunks around its attention, as a layer of any other shape does, see around_attention.py; the backward also
recomputes the q, k, v and down projections. `_verdict` decides, and says why: `seqtile.status` prints it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from seqtile.models.chunked import InChunks, records_attentions
from seqtile.models.find import are_experts, mlps_in, positional_of
from seqtile.models.forward.around_attention import any_layer_refusal, call_layer_in_chunks
from seqtile.models.forward.attention_masks import check_attention
from seqtile.models.forward.mlp import fused_form, mlp_size_of, mlp_unfused_reason, sparsity_of
from seqtile.models.forward.norm import norm_unfused_reason, read_norm
from seqtile.models.known import unknown_in
from seqtile.models.placement import Options, computed_forward, original_forward
from seqtile.models.read import (
    call_unfused_reason,
    check_untransformed,
    linears_of,
    module_call_reason,
    module_unfused_reason,
    process_unfused_reason,
    projection_unfused_reason,
)
from seqtile.models.recognise import LayerForm, gated_form, is_llamas_rotary, layer_form_of
from seqtile.models.sharded import gathered, is_sharded
from seqtile.models.verdict import Verdict, Verdicts, left_untiled
from seqtile.ops.checks import autocast_dtype
from seqtile.ops.chunks import is_trial, keeps_nothing, mlp_chunk_tokens, resolve_chunk_tokens
from seqtile.ops.decoder_layer import decoder_layer
from seqtile.ops.decoder_layer.params import AttentionParams, LayerParams, MLPParams
from seqtile.protocols import CHOICE, SequenceParallelAttention, SequenceParallelFunction
from seqtile.renamed import cache_in, without_cache
from seqtile.rules import number_of_groups

logger = logging.get_logger(__name__)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_FORWARD_CHECKPOINTS = "__init_subclass__" in vars(GradientCheckpointingLayer)  # since transformers 5.2x; else __call__


def tiled_layer_forward(options: Options, original: Callable) -> Callable:
    """Returns a tiled forward that replaces `original`, a decoder layer's forward (a plain function).

    The tiled forward calls `original` if the sequence fits in a chunk or the caller asks for attentions. A fused layer
    does so up to max(2048, D) tokens only, in a checkpoint too, since its kernels write a fraction of what the untiled
    layer's norms and rotary embedding do: at 0.6B's shape half the time is predicted on a GPU. With a cache,
    it computes all heads at once; if gradients may flow through the cache, it runs the modules of a Llama-shaped layer
    in chunks. Training makes no cache, see without_cache.py.
    """
    inner = original.__wrapped__ if _FORWARD_CHECKPOINTS else original
    parameters = positional_of(inner)
    names = [each.name for each in parameters]
    defaults = without_cache({each.name: each.default for each in parameters[1:] if each.default is not each.empty})

    verdicts, choices = Verdicts(layer_verdict), Verdicts(layer_verdict)  # choices: of no dtype, so kept apart
    uncompiled_verdict = torch.compiler.disable(
        verdicts.kept, reason="seqtile looks at what the modules of a layer are"
    )

    def tiled(records_attentions: bool, self, *args, **kwargs):
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        hidden = given.pop(names[0])
        verdict_of = uncompiled_verdict if torch.compiler.is_compiling() else verdicts.kept
        verdict = verdict_of(self, autocast_dtype(hidden) or hidden.dtype)
        if records_attentions or _asks_for_attentions(self, given):
            if records_attentions and not _FORWARD_CHECKPOINTS:
                _check_not_checkpointed(self)
            if verdict.sharded and verdict.how == "fused":
                _params_of(
                    verdict, self
                )  # in this order, as when tiled: ZeRO-3 records in the first forward what a layer reads
            return inner(self, hidden, **given)
        has_cache = cache_in(given) is not None
        if has_cache and verdict.form is None and torch.is_grad_enabled():
            return inner(self, hidden, **given)  # gradients may flow through the cache
        if not verdict.sharded or verdict.how == "untiled":
            return _compute(verdict, inner, options, self, hidden, given)

        def compute(hidden: torch.Tensor) -> Any:  # decides again, from the gathered weights
            return _compute(
                verdict_of(self, autocast_dtype(hidden) or hidden.dtype), inner, options, self, hidden, given
            )

        chunked = verdict.how == "chunked" or (has_cache and torch.is_grad_enabled())
        return gathered(self, compute, hidden, chunked=chunked)

    def forward(self, *args, **kwargs):
        # Decide here: a recomputation inside a checkpoint does not see whether attentions are recorded.
        checkpoints = _FORWARD_CHECKPOINTS and self.gradient_checkpointing and self.training
        if not names:  # a wrapper's, whose arguments are not known
            return original(self, *args, **kwargs)
        whole = _fits(verdicts, options, self, args[0] if args else kwargs[names[0]], checkpoints or keeps_nothing())
        function = inner if whole else partial(tiled, records_attentions())
        if checkpoints and torch.is_grad_enabled() and type(self).forward is forward:
            if kwargs.get("use_cache") or cache_in(kwargs) is not None:
                logger.warning_once("checkpointed layers have no cache, which recomputation would fill once more")
                kwargs = without_cache(kwargs) | {"use_cache": False}
            return self._gradient_checkpointing_func(partial(function, self, **kwargs), *args)
        return function(self, *args, **kwargs)

    if options.head_groups is not None:
        setattr(forward, CHOICE, lambda layer: choices.of(layer).how)
    return forward


def _fits(verdicts: Verdicts, options: Options, layer: nn.Module, hidden: torch.Tensor, nothing_is_kept: bool) -> bool:
    """Returns whether a layer runs untiled because `hidden` fits in a chunk."""
    tokens, mlp_size, dtype = hidden.shape[:-1].numel(), 0, autocast_dtype(hidden) or hidden.dtype
    if torch.compiler.is_compiling():
        is_whole = not is_sharded(layer)
    else:
        verdict = verdicts.kept(layer, dtype)
        is_whole = not verdict.sharded
        if nothing_is_kept and verdict.how == "chunked" and verdict.sparsity == 1:
            mlp_size = verdict.mlp_size
    chunk = resolve_chunk_tokens(options.chunk_tokens, hidden.shape[-1], 1, mlp_size, dtype.itemsize)
    return is_whole and tokens <= chunk


def _check_not_checkpointed(layer: nn.Module) -> None:
    """Raises ValueError if a layer would run untiled in the forward and tiled in its recomputation."""
    if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
        raise ValueError(
            "output_attentions=True reaches a tiled layer under checkpointing, but not its recomputation: "
            "leave output_attentions out, or apply with layer=False"
        )


def _compute(
    verdict: Verdict, inner: Callable, options: Options, layer: nn.Module, hidden: torch.Tensor, given: dict[str, Any]
) -> Any:
    """Returns a layer's output for `hidden` and the other arguments in `given`, computed as the verdict says. `inner`
    is the original forward. Raises ValueError if attention cannot be computed in head chunks."""
    cache = cache_in(given)
    if verdict.how == "untiled":
        return inner(layer, hidden, **given)
    check_untransformed()
    if options.head_groups is not None and cache is None:
        check_head_groups(layer, verdict, options)
    if not layer.gradient_checkpointing:
        _note_that_all_is_kept(layer, verdict, options, hidden)
    if verdict.how == "fused" and (cache is None or not torch.is_grad_enabled()):  # gradients may flow through a cache
        return _llama_layer(verdict, options, layer, hidden, cache, **without_cache(given))
    chunk_tokens = mlp_chunk_tokens(options.chunk_tokens, hidden, verdict.mlp_size, verdict.sparsity)
    modules = verdict.in_chunks[0] if verdict.in_chunks else _in_chunks(layer, verdict.form)
    return call_layer_in_chunks(layer, modules, inner, hidden, given, chunk_tokens, is_llamas=verdict.form is not None)


def _note_that_all_is_kept(layer: nn.Module, verdict: Verdict, options: Options, hidden: torch.Tensor) -> None:
    """Warns once if a layer trains without checkpointing and saves more for its backward than its weights take."""
    config, head_dim = (getattr(getattr(layer, "self_attn", None), name, None) for name in ("config", "head_dim"))
    in_training = layer.training and torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_trial()
    if not in_training or config is None or not isinstance(head_dim, int):
        return
    query_heads = getattr(config, "num_attention_heads", 0)
    heads, kv = query_heads * head_dim, getattr(config, "num_key_value_heads", query_heads) * head_dim
    kept = hidden.shape[-1] + heads + (heads + 2 * kv if options.head_groups is None else 0)
    if hidden.shape[:-1].numel() * kept > verdict.weights:
        logger.warning_once(
            "whole layers are tiled, but activation checkpointing is off: at this length every layer keeps more for "
            "its backward than its weights take; after model.gradient_checkpointing_enable() it keeps only its input"
        )


def _asks_for_attentions(layer: nn.Module, given: dict[str, Any]) -> bool:
    config = getattr(getattr(layer, "self_attn", None), "config", None)
    return bool(given.get("output_attentions", getattr(config, "output_attentions", False)))


def _llama_layer(
    verdict: Verdict,
    options: Options,
    layer: nn.Module,
    hidden: torch.Tensor,
    cache: Any,
    attention_mask: Any = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Computes the output [B, S, D] of a layer of Llama's shape."""
    attention, form = layer.self_attn, verdict.form
    attend, sp_attention, extra_tensors = _attention(form, attention, attention_mask, cache, kwargs)
    switch = form.attention.rotary_switch
    rotary = position_embeddings if switch is None or getattr(attention, switch) else None
    scale = getattr(layer, form.residual_scale) if form.residual_scale else 1.0
    grouped = None if cache is not None else options.head_groups
    groups = groups_of(attention, grouped, 1 if sp_attention is None else sp_attention.ranks)
    return decoder_layer(
        hidden,
        _params_of(verdict, layer),
        rotary,
        attend,
        head_dim=attention.head_dim,
        head_groups=groups,
        sp_attention=None if sp_attention is None else sp_attention.in_groups(groups or 1),
        allow_recompute=grouped != "auto" or is_trial(),  # for a few tokens a mask is larger than the heads
        extra_tensors=extra_tensors,
        activation=form.mlp.activation,
        scale=scale,
        chunk_tokens=options.chunk_tokens,
    )


def _params_of(verdict: Verdict, layer: nn.Module) -> LayerParams:
    """Reads the parameters in the order in which an untiled layer uses them, because each read is a collective under
    ZeRO-3."""
    attention, has_head_norms = layer.self_attn, verdict.form.attention.head_norms
    q, k, v, o, *mlp = verdict.linears
    return LayerParams(
        AttentionParams(
            read_norm(layer.input_layernorm),
            q.read(),
            read_norm(attention.q_norm) if has_head_norms else None,
            k.read(),
            read_norm(attention.k_norm) if has_head_norms else None,
            v.read(),
            o.read(),
        ),
        MLPParams(read_norm(layer.post_attention_layernorm), *[linear.read() for linear in mlp]),
    )


def _attention(
    form: LayerForm, attention: nn.Module, mask: Any, cache: Any, kwargs: dict[str, Any]
) -> tuple[Callable[..., torch.Tensor], SequenceParallelAttention | None, list[torch.Tensor]]:
    """Returns the model's attention function, called as Hugging Face's code calls it; its steps if ranks share the
    sequence, else None; and the other tensors that it gets."""
    options = {"dropout": attention.attention_dropout if attention.training else 0.0, "scaling": attention.scaling}
    if form.attention.windows:
        of_model = getattr(attention.config, "sliding_window", None)
        options["sliding_window"] = getattr(attention, "sliding_window", of_model)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, form.attention.eager)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        check_attention(attention, q, mask)
        return function(attention, q, k, v, mask, **options, **kwargs)[0]

    sp_attention = None
    if isinstance(function, SequenceParallelFunction):
        kv_heads = attention.config.num_key_value_heads
        heads = (kv_heads * attention.num_key_value_groups, kv_heads)
        sp_attention = function.steps(attention, mask, heads, **options, **kwargs)
    others = (mask, *kwargs.values(), *attention._parameters.values())  # the last are parameters such as sinks
    extra_tensors = [tensor for tensor in others if isinstance(tensor, torch.Tensor)]
    return attend, sp_attention, extra_tensors


def groups_of(attention: nn.Module, head_groups: int | str | None, ranks: int = 1) -> int | None:
    """Returns how many head chunks attend one after the other, see `seqtile.rules`."""
    return number_of_groups(attention.config.num_key_value_heads, head_groups, ranks)


def layer_verdict(layer: nn.Module, dtype: torch.dtype | None = None) -> Verdict:
    """Decides how a layer is computed. `dtype` is the dtype of its matmuls, if known."""
    weights = sum(getattr(weight, "ds_numel", weight.numel()) for weight in layer.parameters())
    sizes = {"weights": weights, "mlp_size": mlp_size_of(*mlps_in(layer))}
    return _verdict(layer, dtype)._replace(sharded=is_sharded(layer), **sizes)


def _verdict(layer: nn.Module, dtype: torch.dtype | None) -> Verdict:
    form = layer_form_of(layer)
    if isinstance(form, LayerForm):  # whose attention's own forward is skipped, so nothing may watch that
        changed = module_unfused_reason(layer.self_attn, recording=False)
        form = module_call_reason() or (f"its attention {changed}" if changed else form)
    reason = form if isinstance(form, str) else next(filter(None, _reasons(form, layer, dtype)), None)
    if reason is None:
        mlp = fused_form(layer.mlp, gated_form(original_forward(layer.mlp)))
        linears = linears_of(layer.self_attn, _PROJECTIONS) + linears_of(layer.mlp, mlp.projections)
        return Verdict("fused", form=form._replace(mlp=mlp), linears=linears)
    if (unknown := unknown_in(layer)) is not None:
        return left_untiled(layer, unknown)
    of_llama = form if isinstance(form, LayerForm) else None
    if of_llama is None and (refusal := any_layer_refusal(layer)) is not None:
        return Verdict("untiled", f"{reason}, and {refusal}", tileable=False)
    config = next((module.config for module in layer.modules() if hasattr(module, "config")), None)
    sparsity = max((sparsity_of(module, config) for module in layer.modules() if are_experts(module)), default=1)
    return Verdict("chunked", reason, form=of_llama, sparsity=sparsity, in_chunks=(_in_chunks(layer, of_llama),))


def _in_chunks(layer: nn.Module, form: LayerForm | None) -> InChunks:
    """Returns a layer, to run in chunks around its attention. In one of Llama's shape no chunk reads the tensors that
    the attention module itself holds; the attention function may change them."""
    own = () if form is None else (layer.self_attn._parameters, layer.self_attn._buffers)
    return InChunks(layer=layer, unread=[each for held in own for each in held.values() if each is not None])


def check_head_groups(layer: nn.Module, verdict: Verdict, options: Options) -> None:
    """Raises ValueError if attention cannot be computed in the requested head chunks."""
    if verdict.how == "chunked":
        reads = "attention in head chunks reads its weights"
        remedy = "pass lora_dropout=0 to LoraConfig, or " if "LoRA adapter with dropout" in verdict.reason else ""
        raise ValueError(f"{reads}, and {verdict.reason}; {remedy}apply head_groups=None")
    groups_of(layer.self_attn, options.head_groups)


def _reasons(form: LayerForm, layer: nn.Module, dtype: torch.dtype | None) -> Iterator[str | None]:
    """Yields, for each part of a layer of Llama's shape, why it cannot be fused, or None."""
    attention, mlp = layer.self_attn, layer.mlp
    yield process_unfused_reason()
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield norm_unfused_reason(name, getattr(layer, name), dtype)
    for name in ("q_norm", "k_norm") if form.attention.head_norms else ():
        yield norm_unfused_reason(name, getattr(attention, name), dtype)
    for name in _PROJECTIONS:
        yield projection_unfused_reason(name, getattr(attention, name), dtype)
    if (reason := call_unfused_reason(mlp)) is not None:
        yield f"its MLP {reason}"
    if not is_llamas_rotary(_rotary_of(attention)):
        yield "its rotary embedding is not Llama's"
    forward = computed_forward(mlp)
    form = gated_form(forward)
    yield mlp_unfused_reason(mlp, form or forward, dtype)
    if form.up is None:
        yield "its MLP has gate and up in one projection"


def _rotary_of(attention: nn.Module) -> Callable:
    return computed_forward(attention).__globals__["apply_rotary_pos_emb"]
