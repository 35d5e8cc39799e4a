"""The tiled forwards of MLPs: of a gated MLP module, and of a mixture's experts.

A gated MLP has gate_proj, up_proj and down_proj, or gate_up_proj and down_proj. A mixture's experts are given the
tokens together with their routes; the router stays as it is, over the whole sequence: its logits are small, and so
every token goes where it would go untiled, and what is recorded of them for the balancing loss is what Hugging Face
records.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig
from transformers.utils import logging

from seqtile.arch import ARCHS, Arch
from seqtile.models.fallback import call_tiled
from seqtile.models.placement import Options, forward_in_place_of, stand_in_for
from seqtile.models.weights import (
    activation_fallback_reason,
    activation_name,
    check_not_zero3,
    check_untransformed,
    defining_path,
    named,
    process_fallback_reason,
    projection_fallback_reason,
    read_projection,
)
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.ops.gated_mlp import gated_mlp
from seqtile.ops.linear import Projection

logger = logging.get_logger(__name__)
_GIVEN = "given"  # the activation is the module that the MLP holds
_FORWARDS = {  # where an MLP's forward that `gated_mlp` computes was written -> its activation
    "liger_kernel.transformers.geglu.LigerGEGLUMLP.forward": "gelu_tanh",
    "liger_kernel.transformers.swiglu.LigerPhi3SwiGLUMLP.forward": "silu",
    "liger_kernel.transformers.swiglu.LigerQwen3MoeSwiGLUMLP.forward": "silu",
    "liger_kernel.transformers.swiglu.LigerSwiGLUMLP.forward": "silu",
    **{f"{arch.modeling_name}.{arch.prefix}MLP.forward": _GIVEN for arch in ARCHS.values()},
}


def tiled_mlp_forward(arch: Arch, options: Options, original: Callable) -> Callable:
    """Returns a tiled forward in place of `original`, an MLP's forward (a plain function).

    `gated_mlp` where the projections' tensors can be read, else `original` itself, chunk by chunk. Which of them is
    asked at every forward: an adapter may have come since. The tensors are read in the same order whatever the length,
    also where the sequence fits in a chunk: under ZeRO-3 each reading is a collective, and ranks may hold sequences of
    different lengths.
    """

    @stand_in_for(original)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, chunk = x.shape[:-1].numel(), resolve_chunk_tokens(options.chunk_tokens, x.shape[-1])
        if tokens > chunk:
            check_untransformed()
        elif self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            logger.warning_once(
                f"a sequence fits in one chunk of {chunk} tokens: its MLPs, and its layers with layer=True, run "
                "untiled and keep what they keep untiled; for less memory train on longer sequences, or pass a smaller "
                "chunk_tokens"
            )
        if (reason := mlp_fallback_reason(self, original)) is not None:
            check_not_zero3(self, reason)
            return call_tiled(partial(original, self), [self], x, chunk_tokens=options.chunk_tokens)
        arguments: dict[str, Any] = {"up_weight": None}
        for name, projection in zip(("gate", "up", "down"), read_mlp(self), strict=True):
            if projection is not None:
                arguments[f"{name}_weight"] = projection.weight
                arguments[f"{name}_bias"] = projection.bias
                arguments[f"{name}_lora"] = projection.adapter
        activation = _activation_name(self, original)
        return gated_mlp(x, **arguments, activation=activation, chunk_tokens=options.chunk_tokens)

    return forward


def read_mlp(mlp: nn.Module) -> tuple[Projection, Projection | None, Projection]:
    """Returns gate, up and down; up is None where gate holds it."""
    gate, *up, down = (read_projection(name, getattr(mlp, name)) for name in _projections(mlp))
    return gate, up[0] if up else None, down


def activation_of(mlp: nn.Module) -> str:
    """Returns the activation of an MLP that `gated_mlp` computes, as that names it."""
    return _activation_name(mlp, forward_in_place_of(mlp))


def is_gated_mlp(forward: Callable) -> bool:
    """Says if an MLP's forward is one that `gated_mlp` computes."""
    return defining_path(forward) in _FORWARDS


def check_mlp(arch: Arch, mlp: nn.Module, options: Options) -> str | None:
    """Raises ValueError where the tiled MLP would refuse to run; returns why it falls back."""
    if (reason := mlp_fallback_reason(mlp, forward_in_place_of(mlp))) is not None:
        check_not_zero3(mlp, reason)
    return reason


def mlp_fallback_reason(mlp: nn.Module, forward: Callable) -> str | None:
    """Says why an MLP that has this forward is called rather than read."""
    if not is_gated_mlp(forward):
        return f"its forward is {named(forward)}"
    if (reason := process_fallback_reason()) is not None:
        return reason
    for name in _projections(mlp):
        if (reason := projection_fallback_reason(name, getattr(mlp, name, None))) is not None:
            return reason
    return activation_fallback_reason(_activation(mlp)) if _FORWARDS[defining_path(forward)] == _GIVEN else None


def _projections(mlp: nn.Module) -> tuple[str, ...]:
    fused = hasattr(mlp, "gate_up_proj")
    return ("gate_up_proj", "down_proj") if fused else ("gate_proj", "up_proj", "down_proj")


def _activation_name(mlp: nn.Module, forward: Callable) -> str:
    known = _FORWARDS[defining_path(forward)]
    return activation_name(_activation(mlp)) if known == _GIVEN else known


def _activation(mlp: nn.Module) -> object:
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def tiled_experts_forward(arch: Arch, options: Options, original: Callable) -> Callable:
    """Returns `original`, the forward (a plain function) of a mixture's experts, chunk by chunk.

    A chunk's tokens are shared out over all experts, so by default it is longer than an MLP's, see
    `resolve_chunk_tokens`. Weights that are computed anew for every forward, as PEFT's adapters of experts do, are
    computed once for all chunks.
    """

    @stand_in_for(original)
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        check_experts(arch, self, options)
        own = dict(self.named_parameters(recurse=False))
        given = {name: getattr(self, name) for name in self.parametrizations} if is_parametrized(self) else {}
        # What may be another tensor once this call is over: computed weights, a shard under expert parallelism.
        given |= {name: weight for name, weight in own.items() if not (weight.is_leaf and weight.requires_grad)}
        names = tuple(given)  # of_chunk lives until the backward, and must keep no tensor alive

        def of_chunk(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *shared: torch.Tensor):
            seen = _Instead(self, dict(zip(names, shared, strict=True))) if names else self
            return original(seen, hidden, index, weights)

        sparsity = self.num_experts / top_k_index.shape[-1]
        return call_tiled(
            of_chunk,
            [],
            hidden_states,
            top_k_index,
            top_k_weights,
            params=[weight for name, weight in own.items() if name not in given],
            shared=given.values(),
            chunk_tokens=resolve_chunk_tokens(options.chunk_tokens, hidden_states.shape[-1], sparsity),
        )

    return forward


class _Instead:
    """A module seen with tensors in place of some that it would compute."""

    def __init__(self, module: nn.Module, tensors: dict[str, torch.Tensor]):
        self._module = module
        vars(self).update(tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def check_experts(arch: Arch, experts: nn.Module, options: Options) -> str:
    """Raises ValueError where the tiled experts would refuse to run; returns why they fall back."""
    reason = "tokens are routed to experts"
    check_not_zero3(experts, reason)
    return reason


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """Returns every module that is tiled as an MLP: a layer's MLP, or the experts of a mixture; inside PEFT's
    wrappers."""
    mlps = [_inside_peft(layer.mlp) for layer in model.base_model.layers]
    return [_inside_peft(mlp.experts) if hasattr(mlp, "experts") else mlp for mlp in mlps]


def _inside_peft(module: nn.Module) -> nn.Module:
    """Returns the module that runs within PEFT's adapters of parameters and its copies of modules to save."""
    while True:
        if hasattr(module, "modules_to_save"):
            saved = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
            module = saved[0] if saved and not module.disable_adapters else module.original_module
        elif hasattr(module, "base_layer"):
            module = module.base_layer
        else:
            return module


def are_experts(module: nn.Module) -> bool:
    """Says if a module holds the weights of all experts of a mixture: itself, in no layer of its own."""
    return isinstance(getattr(module, "gate_up_proj", None), torch.Tensor)


def sparsity_of(module: nn.Module, config: PreTrainedConfig) -> float:
    """Returns experts / experts a token; 1 without experts."""
    return module.num_experts / config.num_experts_per_tok if are_experts(module) else 1
