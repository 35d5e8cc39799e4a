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

from seqtile.memory import features
from seqtile.memory.features import longest_that_fits
from seqtile.memory.measure import LiveBytes
from seqtile.memory.setup import GIB, Setup
from seqtile.models import apply_seqtile
from seqtile.models.find import experts_in, layers_of
from seqtile.models.mlp import sparsity_of
from seqtile.models.parts import LAYER
from seqtile.models.small import config_for, with_few_layers
from seqtile.rules import default_chunk_tokens

FEATURES = {name: feature for name, feature in features.FEATURES.items() if "tiles" in feature.changes}
"""Those that are simulated."""
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
        return longest_that_fits(lambda tokens: self.bytes_of(tokens * batch_size) <= free)


class SimulatedStep(NamedTuple):
    """What a step was simulated to need, see `features.Predicted`."""

    gpu_bytes: float
    bound: str | None


class Simulated:
    """The memory of a model by running its own code, as far as is asked for, see `features.Predictor`. ValueError for a
    setup that cannot be simulated; when asked, whatever `simulations` raises."""

    def __init__(
        self,
        model_class: type[PreTrainedModel],
        config: PreTrainedConfig,
        given: Setup,
        each: Callable[[str], None] = lambda step: None,
    ):
        if (refusal := features.simulation_refusal(given)) is not None:
            raise ValueError(refusal)
        self.parameters = parameters_of(model_class, config)
        self.notes = [f"simulated with its own code, which has {self.parameters / 1e9:,.2f} billion parameters"]
        self._held = GIB + self.parameters * (given.weight_bytes + given.optimizer_bytes)
        self._running = iter(simulations(model_class, config, getattr(torch, given.dtype), each))
        self._simulations: dict[Any, Simulation] = {}

    def _simulation(self, setup: Setup) -> Simulation:
        """Simulates until what is tiled is what this setup tiles."""
        while setup.tiles not in self._simulations:
            found = next(self._running)
            self._simulations[FEATURES[found.tiled].changes["tiles"]] = found
        return self._simulations[setup.tiles]

    def refusal(self, name: str, setup: Setup) -> str | None:
        return None if name in FEATURES else "not simulated"

    def predict(self, setup: Setup, seq_len: int, batch_size: int) -> SimulatedStep:
        held = self._held + self._simulation(setup).bytes_of(seq_len * batch_size)
        return SimulatedStep(held, None if held <= setup.gpu_memory_gib * GIB else "GPU memory")

    def longest(self, setup: Setup, batch_size: int) -> int:
        return self._simulation(setup).longest(setup.gpu_memory_gib * GIB - self._held, batch_size)


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
    for name, feature in FEATURES.items():
        with _run_without_data(_meta_model(model_class, with_few_layers(config), dtype)) as model:
            if tiles := feature.changes["tiles"]:
                apply_seqtile(model, **features.apply_options(Setup(tiles=tiles)), check=False)
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
    of_mlp, of_experts = (default_chunk_tokens(config.hidden_size, each) for each in (1, sparsity))
    return max(CHUNKS * of_mlp, 2 * of_experts)


def _peak(model: PreTrainedModel, tokens: int, name: str, each: Callable[[str], None]) -> int:
    each(f"{name}: {tokens:,} tokens")
    ids = torch.zeros(1, tokens, dtype=torch.long)
    # Which tokens are labelled is not known without data: all are.
    labels = {"labels": ids} if name == "nothing" else {"shift_labels": ids, "ignore_index": None}
    with LiveBytes() as memory:
        model(input_ids=ids, use_cache=False, **labels).loss.backward()
    model.zero_grad(set_to_none=True)
    return memory.peak
