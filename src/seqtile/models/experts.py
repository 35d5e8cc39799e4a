"""The tiled forward of a mixture's experts, which are given the tokens together with their routes.

The router stays as it is, over the whole sequence: its logits are small, and so every token goes where it would go
untiled, and what is recorded of them for the balancing loss is what Hugging Face records.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedConfig

from seqtile.models.called_again import called_again
from seqtile.models.projections import check_not_zero3
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.tiled import tiled
from seqtile.ops.tiles import resolve_chunk_tokens


def tiled_experts_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """`original`, the forward (a plain function) of a mixture's experts, tile by tile.

    A tile's tokens are spread over all experts, so by default it is longer than an MLP's, see `resolve_chunk_tokens`.
    Weights that are computed anew for every forward, as PEFT's adapters of experts do, are computed once for all tiles.
    """

    @stand_in_for(original)
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        check_not_zero3(self, "tokens are routed to experts")
        own = dict(self.named_parameters(recurse=False))
        given = {name: getattr(self, name) for name in self.parametrizations} if is_parametrized(self) else {}
        # What may be another tensor once this call is over: computed weights, a shard under expert parallelism.
        given |= {name: weight for name, weight in own.items() if not (weight.is_leaf and weight.requires_grad)}
        names = tuple(given)  # of_tile lives until the backward, and must keep no tensor alive

        def of_tile(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *shared: torch.Tensor):
            seen = _Instead(self, dict(zip(names, shared, strict=True))) if names else self
            return original(seen, hidden, index, weights)

        return tiled(
            called_again(of_tile),
            hidden_states,
            top_k_index,
            top_k_weights,
            params=[weight for name, weight in own.items() if name not in given],
            shared=given.values(),
            chunk_tokens=resolve_chunk_tokens(
                chunk_tokens, hidden_states.shape[-1], self.num_experts / top_k_index.shape[-1]
            ),
        )

    return forward


class _Instead:
    """A module seen with tensors in place of some that it would compute."""

    def __init__(self, module: nn.Module, tensors: dict[str, torch.Tensor]):
        self._module = module
        vars(self).update(tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def tiled_part_of(mlp: nn.Module) -> nn.Module:
    """The module in a layer's MLP whose forward is tiled: itself, or a mixture's experts; in PEFT's wrappers."""
    mlp = _inside_peft(mlp)
    return _inside_peft(mlp.experts) if hasattr(mlp, "experts") else mlp


def _inside_peft(module: nn.Module) -> nn.Module:
    """The module that runs within PEFT's adapters of parameters and its copies of modules to save."""
    while True:
        if hasattr(module, "modules_to_save"):
            saved = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
            module = saved[0] if saved and not module.disable_adapters else module.original_module
        elif hasattr(module, "base_layer"):
            module = module.base_layer
        else:
            return module


def are_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of all experts of a mixture: itself, in no layer of its own."""
    return isinstance(getattr(module, "gate_up_proj", None), torch.Tensor)


def spread_of(module: nn.Module, config: PreTrainedConfig) -> float:
    """Over how many times the weights that one token meets its tokens are spread; 1 without experts."""
    return module.num_experts / config.num_experts_per_tok if are_experts(module) else 1
