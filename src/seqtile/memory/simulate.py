"""Predicts the memory of models without a formula by running their own code on tensors without data.

A simulation counts every allocation of a step at full widths, with one layer of every kind, at two lengths of many
chunks. Between these lengths it measures the bytes per token, which it extrapolates. Each other layer adds its saved
input or its weights' gradient. One GPU, all parameters trained, every layer checkpointed, FlashAttention-2.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from seqtile.memory import FEATURES, Predicted, Predictor, apply_options, simulation_refusal
from seqtile.memory.measure import LiveBytes
from seqtile.memory.setup import GIB, Setup
from seqtile.models.apply import apply_seqtile
from seqtile.models.find import experts_in, layers_of, mlps_of
from seqtile.models.forward.mlp import mlp_size_of, sparsity_of
from seqtile.models.parts import LAYER
from seqtile.proof.small import config_for, with_few_layers
from seqtile.renamed import enable_checkpointing
from seqtile.rules import default_chunk_tokens

CHUNKS = 24
"""Chunks of an MLP in the shorter length; at least 2 chunks of experts, which are longer. The other length is a third
longer."""


class Simulation(Predictor):
    """Predicts a model's memory by running its own code, once per choice of tiled parts, when first requested.

    Calls `each` with the name of a run before it starts. Raises ValueError for a setup that cannot be simulated and for
    layers without Hugging Face's attention; also raises whatever the model's own code raises on tensors without data.
    """

    def __init__(
        self,
        model_class: type[PreTrainedModel],
        config: PreTrainedConfig,
        setup: Setup,
        each: Callable[[str], None] = lambda step: None,
    ):
        if (refusal := simulation_refusal(setup)) is not None:
            raise ValueError(refusal)
        self.model_class, self.few_layers, self.each = model_class, with_few_layers(config), each
        self.dtype = getattr(torch, setup.dtype)
        whole, few = self._model(config), self._model(self.few_layers)
        if any(LAYER.refusal(layer) for layer in layers_of(few)):
            raise ValueError(
                "some of its layers have no attention of Hugging Face's, and their code for GPUs needs one"
            )
        parameters, run = (sum(weight.numel() for weight in model.parameters()) for model in (whole, few))
        self.notes = [f"simulated with its own code, which has {parameters / 1e9:,.2f} billion parameters"]
        self.held = GIB + parameters * (setup.weight_bytes + setup.optimizer_bytes)
        """Bytes of CUDA, weights and optimizer."""
        self.others = len(layers_of(whole)) - len(layers_of(few))
        """Layers that do not run. Each keeps its input and has gradients of its weights."""
        self.input_token = whole.config.get_text_config().hidden_size * self.dtype.itemsize
        self.gradients = (parameters - run) * self.dtype.itemsize / max(self.others, 1)
        self._measured: dict[Any, tuple[float, float]] = {}

    def refusal(self, name: str, setup: Setup, before: Setup) -> str | None:
        return None if FEATURES[name].changes.keys() == {"tiles"} else "not simulated"

    def predict(self, setup: Setup, seq_len: int, batch_size: int) -> Predicted:
        tokens = seq_len * batch_size
        if setup.tiles not in self._measured:
            self._measured[setup.tiles] = self.run(setup)
        fixed, token = self._measured[setup.tiles]
        others = self.others * max(tokens * self.input_token, self.gradients)
        held = self.held + fixed + tokens * token + others
        return Predicted(held, None if held <= setup.gpu_memory_gib * GIB else "GPU memory")

    def run(self, setup: Setup) -> tuple[float, float]:
        """Returns the bytes of a step of the simulated layers, without weights and optimizer: a constant, and the bytes
        per token."""
        model = self._model(self.few_layers)
        with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            model.train().to_empty(device="cpu")  # tensors without data, of this mode
            model.tie_weights()
            enable_checkpointing(model)
            if setup.tiles:
                apply_seqtile(model, **apply_options(replace(setup, attention="flash")), check=False)
            config = model.config.get_text_config()
            sparsity = max((sparsity_of(module, config) for module in experts_in(model)), default=1)
            mlp_chunk = default_chunk_tokens(config.hidden_size, 1, mlp_size_of(*mlps_of(model)), model.dtype.itemsize)
            tokens = max(CHUNKS * mlp_chunk, 2 * default_chunk_tokens(config.hidden_size, sparsity))
            more = tokens + tokens // 3
            short, long = self._peak(model, tokens, setup), self._peak(model, more, setup)
        token = (long - short) / (more - tokens)
        return short - tokens * token, token

    def _model(self, config: PreTrainedConfig) -> PreTrainedModel:
        config = copy.deepcopy(config_for(self.model_class, config))
        AttentionInterface.register("seqtile_simulated", _attention)
        config._attn_implementation = "seqtile_simulated"
        with torch.device("meta"):
            return self.model_class(config).to(self.dtype)

    def _peak(self, model: PreTrainedModel, tokens: int, setup: Setup) -> int:
        self.each(f"tiled: {', '.join(setup.tiles) or 'nothing'}, {tokens:,} tokens")
        ids = torch.zeros(1, tokens, dtype=torch.long)
        # Without data it is unknown which tokens are labelled, so all are.
        labels = {"shift_labels": ids, "ignore_index": None} if setup.tiles else {"labels": ids}
        with LiveBytes() as memory:
            model(input_ids=ids, use_cache=False, **labels).loss.backward()
        model.zero_grad(set_to_none=True)
        return memory.peak


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings, which would be about models that the user has not made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


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


def _attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return FlashFunction.apply(q, k, v), None
