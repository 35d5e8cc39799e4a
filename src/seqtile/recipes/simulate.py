"""The memory of a model that `seqtile.memory` has no formula for: its own code, run on tensors without data.

Every allocation of a step is counted, at full widths, with one layer of every kind, at two lengths of many chunks; from
there on each token takes as much as the one before. Every other layer keeps its input, or its weights' gradient. One
GPU, all parameters trained, every layer checkpointed, FlashAttention-2.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

import seqtile
from seqtile.models.find import experts_in, layers_of
from seqtile.models.mlp import sparsity_of
from seqtile.models.parts import LAYER
from seqtile.models.small import config_for, with_few_layers
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.recipes.measure import LiveBytes

FEATURES = {"nothing": None, "loss": {"mlp": False}, "loss, MLP": {}, "loss, MLP, layer": {"layer": True}}
"""What is tiled -> the options of `apply_seqtile`."""


CHUNKS = 24
"""Chunks of the shorter length, of an MLP; 2 at least of experts, which are longer. The other is a third longer."""


class Simulation(NamedTuple):
    """The bytes that a step allocates besides weights and optimizer."""

    tiled: str
    """One of `FEATURES`."""
    fixed: float
    token: float
    """Bytes for each token of a batch, of the layers that were run."""
    others: int
    """Layers that were not run."""
    input_token: int
    """Bytes that each keeps of a token."""
    gradients: float
    """Bytes of the gradients of the weights of each."""

    def bytes_of(self, tokens: int) -> float:
        return self.fixed + tokens * self.token + self.others * max(tokens * self.input_token, self.gradients)

    def longest(self, free: float, batch_size: int) -> int:
        """Returns the tokens of the longest sequence whose step fits in `free` bytes."""
        fits, too_long = 0, 2**40
        while too_long - fits > 1:
            tokens = (fits + too_long) // 2
            fits, too_long = (tokens, too_long) if self.bytes_of(tokens * batch_size) <= free else (fits, tokens)
        return fits


class FlashFunction(torch.autograd.Function):
    """FlashAttention-2's allocations: in the backward dq in float32, and dk and dv for every query head."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        workspace = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse)]
        if q.shape[2] != k.shape[2]:
            workspace += [x.new_empty(*x.shape[:2], q.shape[2], x.shape[3]) for x in (k, v)]
        return tuple(x.transpose(1, 2) for x in gradients)


def simulations(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, each: Callable[[str], None]
) -> Iterator[Simulation]:
    """Yields what a step takes with more and more tiled; calls `each` with the name of every step before it is run.
    Raises ValueError for layers without Hugging Face's attention, and whatever the model's own code raises on tensors
    without data."""
    whole, few = (_meta_model(model_class, one, dtype) for one in (config, with_few_layers(config)))
    weights = [sum(weight.numel() for weight in model.parameters()) for model in (whole, few)]
    others = len(layers_of(whole)) - len(layers_of(few))
    gradients = (weights[0] - weights[1]) * dtype.itemsize / max(others, 1)
    input_token = whole.config.get_text_config().hidden_size * dtype.itemsize
    if any(LAYER.refusal(layer) for layer in layers_of(few)):
        raise ValueError("some of its layers have no attention of Hugging Face's, and their code for GPUs needs one")
    for name, options in FEATURES.items():
        with _run_without_data(_meta_model(model_class, with_few_layers(config), dtype)) as model:
            if options is not None:
                seqtile.apply_seqtile(model, **options, check=False)
            lengths = (tokens := _tokens(model), tokens + tokens // 3)
            short, long = (_peak(model, length, name, each) for length in lengths)
        token = (long - short) / (lengths[1] - lengths[0])
        yield Simulation(name, short - lengths[0] * token, token, others, input_token, gradients)


def parameters_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> int:
    """Returns the number of a model's parameters."""
    return sum(weight.numel() for weight in _meta_model(model_class, config, torch.float32).parameters())


def _meta_model(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(config_for(model_class, config))
    AttentionInterface.register("seqtile_simulated", _attention)
    config._attn_implementation = "seqtile_simulated"
    with torch.device("meta"):
        return model_class(config).to(dtype)


def _attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return FlashFunction.apply(q, k, v), None


@contextmanager
def _run_without_data(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Gives a model of the meta device on tensors without data, in training, its layers checkpointed."""
    level = logging.get_verbosity()
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        _materialise(model.train())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield model
        finally:
            logging.set_verbosity(level)


def _materialise(model: nn.Module) -> None:
    """Puts tensors without data in the place of those of the meta device."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and id(old) not in made:
                    new: Any = torch.empty(old.shape, dtype=old.dtype)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                if old is not None:
                    tensors[name] = made[id(old)]


def _tokens(model: PreTrainedModel) -> int:
    """Returns the shorter length."""
    config = model.config.get_text_config()
    sparsity = max((sparsity_of(module, config) for module in experts_in(model)), default=1)
    of_mlp, of_experts = (resolve_chunk_tokens(None, config.hidden_size, each) for each in (1, sparsity))
    return max(CHUNKS * of_mlp, 2 * of_experts)


def _peak(model: PreTrainedModel, tokens: int, name: str, each: Callable[[str], None]) -> int:
    each(f"{name}: {tokens:,} tokens")
    ids = torch.zeros(1, tokens, dtype=torch.long)
    # Which tokens are labelled is not known without data: all are.
    labels = {"labels": ids} if FEATURES[name] is None else {"shift_labels": ids, "ignore_index": None}
    with LiveBytes() as memory:
        model(input_ids=ids, use_cache=False, **labels).loss.backward()
    model.zero_grad(set_to_none=True)
    return memory.peak
