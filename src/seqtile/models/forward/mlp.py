"""The tiled forwards of MLPs: of a gated MLP module, and of a mixture's experts.

A gated MLP is recognised by its forward's source, see recognise.py. Any other module that treats each token alone runs
in chunks. A mixture's experts get each token with its route. The router stays untiled, over the whole sequence: its
logits are small, every token takes the route that it would take untiled, and the balancing loss gets the same logits.
"""

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.utils import logging

from seqtile.models.chunked import InChunks, call_in_chunks, inside_chunk
from seqtile.models.functions import named
from seqtile.models.known import unknown_in
from seqtile.models.placement import Options, original_forward
from seqtile.models.read import (
    activation_name,
    activation_unfused_reason,
    check_untransformed,
    linears_of,
    own_weights,
    process_unfused_reason,
    projection_unfused_reason,
    silu_unfused_reason,
)
from seqtile.models.recognise import Gated, gated_form
from seqtile.models.sharded import gathered, is_sharded
from seqtile.models.verdict import Verdict, Verdicts, left_untiled
from seqtile.ops.checks import autocast_dtype
from seqtile.ops.chunks import is_trial, keeps_nothing, mlp_chunk_tokens, resolve_chunk_tokens
from seqtile.ops.gated_mlp import gated_mlp_of
from seqtile.ops.state import Overridden

logger = logging.get_logger(__name__)


def tiled_mlp_forward(options: Options, original: Callable) -> Callable:
    """Returns a tiled forward in place of `original`, an MLP's forward (a plain function) of a token's hidden states,
    or of several tensors that are as long.

    A sequence that fits in a chunk is `original`'s, unless weights have a `main_grad`, or are sharded: then short
    sequences run tiled too, so that all ranks call the collectives in the same order whatever their lengths.
    """
    form = gated_form(original)
    verdict_of, has_noted = Verdicts(partial(_verdict, form or original)).of, False

    def forward(self, x: torch.Tensor, *others: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        nonlocal has_noted
        if kwargs or (others and not all(isinstance(other, torch.Tensor) for other in others)):
            return original(self, x, *others, **kwargs)
        verdict = found(self, x)
        if verdict.how == "untiled":
            return original(self, x, *others)
        if verdict.sharded and not inside_chunk():
            return gathered(self, partial(tiled, self, None), x, *others, chunked=verdict.how == "chunked")
        chunk = mlp_chunk_tokens(options.chunk_tokens, x, verdict.mlp_size)
        if x.shape[:-1].numel() <= chunk and not any(map(hasattr, verdict.parameters, repeat("main_grad"))):
            if not (has_noted or torch.compiler.is_compiling()):
                has_noted = _note_that_it_fits(self, chunk)
            return original(self, x, *others)
        if not (has_noted or torch.compiler.is_compiling() or is_trial()):
            has_noted = _is_training(self)  # batches are longer than a chunk, so one that fits is the exception
        return tiled(self, verdict, x, *others)

    def found(self, x: torch.Tensor) -> Verdict:
        return verdict_of(self, autocast_dtype(x) or x.dtype)

    def tiled(self, verdict: Verdict | None, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        verdict = verdict or found(self, x)  # of weights that were gathered
        chunk = mlp_chunk_tokens(options.chunk_tokens, x, verdict.mlp_size)
        if x.shape[:-1].numel() > chunk:
            check_untransformed()
        if verdict.how == "fused":
            params = tuple([linear.read() for linear in verdict.linears])
            return gated_mlp_of(x, params, verdict.form.activation, chunk_tokens=chunk)

        def of_chunk(*pieces: torch.Tensor) -> torch.Tensor:
            return original(self, *(piece.contiguous() for piece in pieces))  # some call view

        return call_in_chunks(of_chunk, verdict.in_chunks[0], x, *others, chunk_tokens=chunk)

    return forward


def _is_training(mlp: nn.Module) -> bool:
    """Returns whether this is the forward of an MLP in a training step, not in a chunk of a layer."""
    return mlp.training and torch.is_grad_enabled() and not inside_chunk()


def _note_that_it_fits(mlp: nn.Module, chunk: int) -> bool:
    """Warns once if every MLP keeps what it computes until the backward, unless MLPs were cut in a training step before
    (those of tiled layers are not called then). Returns whether this was a training step."""
    if not _is_training(mlp):
        return False
    if not keeps_nothing():
        logger.warning_once(
            f"seqtile: a batch fits in one chunk of {chunk} tokens, so its MLPs run untiled, and without activation "
            "checkpointing all keep what they compute; if memory is short, call model.gradient_checkpointing_enable(), "
            "or pass a smaller chunk_tokens"
        )
    return True


def fused_form(mlp: nn.Module, form: Gated) -> Gated:
    """Returns the form of an MLP that is fused, with its activation."""
    return form if form.module is None else form._replace(activation=activation_name(getattr(mlp, form.module)))


def mlp_verdict(mlp: nn.Module) -> Verdict:
    """Finds how an MLP is computed."""
    forward = original_forward(mlp)
    return _verdict(gated_form(forward) or forward, mlp, None)


def _verdict(form: Gated | Callable, mlp: nn.Module, dtype: torch.dtype | None) -> Verdict:
    """Decides whether an MLP is fused, runs in chunks for the reason that `mlp_unfused_reason` gives, or untiled for
    that of `unknown_in`."""
    reason = mlp_unfused_reason(mlp, form, dtype)
    if reason is not None and (unknown := unknown_in(mlp)) is not None:
        return left_untiled(mlp, unknown)
    about = {"sharded": is_sharded(mlp), "parameters": tuple(mlp.parameters()), "mlp_size": mlp_size_of(mlp)}
    if reason is not None:
        return Verdict("chunked", reason, in_chunks=(InChunks(mlp=mlp),), **about)
    return Verdict("fused", form=fused_form(mlp, form), linears=linears_of(mlp, form.projections), **about)


def mlp_size_of(*mlps: nn.Module) -> int:
    """Returns the inner width of MLPs: the most features that a projection takes; 0 if none says. Reads no weight."""
    parts, names = [part for mlp in mlps for part in mlp.modules()], ("in_features", "nx")  # nx: GPT-2's
    sizes = [getattr(part, name, 0) for part in parts for name in names]
    return max(size for size in (0, *sizes) if isinstance(size, int))  # a user's module may answer to any name


def mlp_unfused_reason(mlp: nn.Module, form: Gated | Callable, dtype: torch.dtype | None = None) -> str | None:
    """Says why an MLP is not fused; None if it is. `form`: its form, or its forward if the form is unknown. `dtype`: of
    its matmuls, None if unknown."""
    if not isinstance(form, Gated):
        return f"its forward is {named(form)}"
    projections = (projection_unfused_reason(name, getattr(mlp, name, None), dtype) for name in form.projections)
    if (reason := process_unfused_reason() or next(filter(None, projections), None)) is not None:
        return reason
    if form.module is not None:
        return activation_unfused_reason(getattr(mlp, form.module))
    return silu_unfused_reason()


def tiled_experts_forward(options: Options, original: Callable) -> Callable:
    """Returns `original`, the forward (a plain function) of a mixture's experts, chunk by chunk.

    A chunk's tokens are shared out over all experts, so by default it is longer than an MLP's, see
    `resolve_chunk_tokens`. Weights that are computed anew for every forward, as PEFT's adapters of experts do, are
    computed once for all chunks.
    """
    of_experts = Verdicts(experts_verdict).of

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        is_by_token = top_k_index.shape[:-1] == hidden_states.shape[:-1] == top_k_weights.shape[:-1]
        verdict = of_experts(self)
        if not is_by_token or verdict.how == "untiled":
            return original(self, hidden_states, top_k_index, top_k_weights)
        if verdict.sharded and not inside_chunk():
            return gathered(self, partial(tiled, self), hidden_states, top_k_index, top_k_weights)
        return tiled(self, hidden_states, top_k_index, top_k_weights)

    def tiled(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        given = {name: getattr(self, name) for name in self.parametrizations} if is_parametrized(self) else {}
        names = tuple(given)  # of_chunk lives until the backward, and must keep no tensor alive

        def of_chunk(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *shared: torch.Tensor):
            seen = Overridden(self, **dict(zip(names, shared, strict=True))) if names else self
            return original(seen, hidden, index, weights)

        sparsity = num_experts(self) / top_k_index.shape[-1]
        return call_in_chunks(
            of_chunk,
            of_experts(self).in_chunks[0],
            hidden_states,
            top_k_index,
            top_k_weights,
            shared=given.values(),
            chunk_tokens=resolve_chunk_tokens(options.chunk_tokens, hidden_states.shape[-1], sparsity),
        )

    return forward


def experts_verdict(experts: nn.Module, dtype: torch.dtype | None = None) -> Verdict:
    """Finds how a mixture's experts are computed."""
    if is_mxfp4(experts):
        return Verdict("untiled", _NOT_TRAINED, tileable=False)
    if (unknown := unknown_in(experts)) is not None:
        return left_untiled(experts, unknown)
    in_chunks, sharded = (InChunks(once=experts, experts=experts),), is_sharded(experts)
    return Verdict("chunked", "tokens are routed to experts", sharded=sharded, in_chunks=in_chunks)


_NOT_TRAINED = (
    "weights of MXFP4, whose kernels have no backward; to train, load the model with "
    "quantization_config=transformers.Mxfp4Config(dequantize=True)"
)


def is_mxfp4(module: nn.Module) -> bool:
    """Returns whether a module holds experts in MXFP4. Its forward's arguments differ between versions."""
    cls = type(module)
    return f"{cls.__module__}.{cls.__name__}" == "transformers.integrations.mxfp4.Mxfp4GptOssExperts"


def num_experts(module: nn.Module) -> int:
    """Returns the number of experts whose weights are parameters of the module itself, not of its children; else 0."""
    shapes = [getattr(weight, "ds_shape", weight.shape) for weight in own_weights(module)]  # ZeRO-3's shards differ
    made = (part for parts in module.parametrizations.values() for part in parts) if is_parametrized(module) else ()
    states = (getattr(part, "quant_state", None) for part in made)  # of bitsandbytes' 4 bits, which are packed
    shapes += [state.shape for state in states if state is not None]
    return max((shape[0] for shape in shapes if len(shape) == 3), default=0)


_EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


def sparsity_of(module: nn.Module, config: Any) -> float:
    """Returns experts over experts per token; 1 without experts, or if the config does not say."""
    a_token = next((getattr(config, name) for name in _EXPERTS_A_TOKEN if getattr(config, name, None)), None)
    return (num_experts(module) / a_token if a_token else 1) or 1
