"""Decoder layers under activation checkpointing, forward and backward, with their inputs on the GPU or in host memory.

`huggingface` is plain checkpointing. `save_on_cpu` is torch's pinned copies on the computing stream, which is what
Hugging Face's `activation_checkpointing_enable(offload=True)` does. On a GPU a profiler's trace of seqtile's step is
left among the results, to be opened in chrome://tracing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from benchmark.bench_decoder_layer import Work, copied
from benchmark.bench_decoder_layer import flops as flops_of_layer
from benchmark.comparison import step
from benchmark.conftest import DEADLINE, directory
from benchmark.device import DEVICE, DTYPE, free_memory, synchronize
from benchmark.models import build, offloaded
from benchmark.shapes import SHAPES, Case, K, Lengths, Shape, cases
from benchmark.subject import Forward, Subject, activations
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from seqtile import apply_seqtile
from seqtile.offload.checkpointing import layers_of
from seqtile.renamed import enable_checkpointing

LAYERS = 6
LENGTHS: Lengths = {
    "small": {"tiny": (300, 5000)},
    "cpu": {"smollm2_135m": (4 * K, 8 * K)},
    "quick": {"llama3_8b": (16 * K,)},
    "full": {"llama3_8b": (16 * K, 64 * K)},
}


@dataclass
class Layers(Work):
    """Of a model whose MLPs are tiled."""

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return *super().leaves, *self.model.model.norm.parameters()


def operands(shape: Shape, tokens: int, dtype: torch.dtype) -> Layers:
    model = build(shape, dtype, layers=LAYERS, vocab=8)
    apply_seqtile(model, loss=False)
    return Layers(*activations(shape, tokens, dtype), model)


def checkpointed(work: Layers, how: Callable[[PreTrainedModel], None]) -> Forward:
    model = copied(work.model)
    how(model)
    return Forward(lambda: model.model(inputs_embeds=work.x).last_hidden_state)


def copies_that_wait(model: PreTrainedModel) -> None:
    enable_checkpointing(model)

    def saved(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda"):
            return checkpoint(function, *args, use_reentrant=False)

    for layer in layers_of(model):
        layer._gradient_checkpointing_func = saved


CONTESTANTS: dict[str, Callable[[Layers], Forward]] = {
    "huggingface": partial(checkpointed, how=enable_checkpointing),
    "save_on_cpu": partial(checkpointed, how=copies_that_wait),
    "seqtile": partial(checkpointed, how=offloaded),
}


def flops(shape: Shape, tokens: int) -> float:
    return LAYERS * flops_of_layer(shape, tokens)


SUBJECT = Subject("offload", operands, CONTESTANTS, flops, lengths=LENGTHS)


def test_offload(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_trace(request: pytest.FixtureRequest) -> None:
    """Of the copies beside the computing stream."""
    if time.time() > request.config.stash[DEADLINE]:
        pytest.skip("no time left")
    case = cases(request.config.getoption("--size"), LENGTHS)[0]
    free_memory()
    work = operands(SHAPES[case.shape], case.tokens, DTYPE)
    ready = CONTESTANTS["seqtile"](work)
    for _ in range(2):  # the first registers what is kept
        step(work, ready)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step(work, ready)
        synchronize()
    profiler.export_chrome_trace(str(directory(request.config) / f"offload-{case}.json.gz"))
