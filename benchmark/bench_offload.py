"""Decoder layers under activation checkpointing, forward and backward, with their inputs on the GPU or in host memory.

`on_gpu` is plain checkpointing. `save_on_cpu` is torch's pinned copies on the computing stream, which is what Hugging
Face's `activation_checkpointing_enable(offload=True)` does. On a GPU a profiler's trace of seqtile's step is left in
benchmark/results, to be opened in chrome://tracing.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmark.contestants import DEVICE, DTYPE, run, shape_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

from seqtile import apply_seqtile_to_llama, offload, restore
from seqtile.offload.checkpointing import Checkpoints, enable_checkpointing, hand_out, layers_of
from seqtile.offload.copies import AtOnce
from seqtile.offload.host import Pool
from seqtile.offload.store import Store

LAYERS = 6
LENGTHS = {"cuda": (16384, 65536, 131072)}
RESULTS = Path(__file__).parent / "results"


def built(hidden: int, mlp: int, dtype: torch.dtype) -> nn.Module:
    """Layers of the size of Llama-3's, their MLPs tiled."""
    heads = max(1, hidden // 128)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=2**20,
        use_cache=False,
    )
    torch.manual_seed(0)
    apply_seqtile_to_llama(loss=False)
    try:
        return LlamaModel(config).to(DEVICE, dtype).train()
    finally:
        restore("llama")


def on_gpu(model: nn.Module) -> None:
    enable_checkpointing(model)


def save_on_cpu(model: nn.Module) -> None:
    on_gpu(model)

    def copied(function: Callable, *args: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=DEVICE == "cuda"):
            return checkpoint(function, *args, use_reentrant=False)

    for layer in layers_of(model):
        layer._gradient_checkpointing_func = copied


def seqtile(model: nn.Module) -> None:
    if DEVICE == "cuda":
        offload.enable(model)
    else:  # what the store costs without a GPU
        on_gpu(model)
        hand_out(Checkpoints(Store(Pool(), AtOnce())), model, keep_last=1)


CONTESTANTS: dict[str, Callable[[nn.Module], None]] = {
    "on_gpu": on_gpu,
    "save_on_cpu": save_on_cpu,
    "seqtile": seqtile,
}


def gradients(model: nn.Module, embedded: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    embedded.grad = None
    out = model(inputs_embeds=embedded).last_hidden_state
    out.backward(torch.ones_like(out))
    return [out.detach(), embedded.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def error(contestant: str) -> float:
    """Largest difference from plain checkpointing; none is allowed, since the same is computed."""
    model = built(256, 300, DTYPE)
    embedded = torch.randn(1, 3000, 256, device=DEVICE, dtype=DTYPE, requires_grad=True)
    on_gpu(model)
    with sdpa_kernel(SDPBackend.MATH):  # FlashAttention's backward adds in any order
        expected = gradients(model, embedded)
        CONTESTANTS[contestant](model)
        worst = max((a - b).abs().max().item() for a, b in zip(gradients(model, embedded), expected, strict=True))
    offload.disable(model)
    assert worst == 0, f"wrong: {worst:.1e} off"
    return worst


def trace(step: Callable[[], object], name: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    RESULTS.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(RESULTS / f"{name}.json.gz"))


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_offload(benchmark, contestant: str, shape: str, tokens: int) -> None:
    size = shape_of(shape)
    model = built(size.hidden, size.mlp, DTYPE)
    embedded = torch.randn(1, tokens, size.hidden, device=DEVICE, dtype=DTYPE, requires_grad=True)
    CONTESTANTS[contestant](model)
    step = partial(gradients, model, embedded)
    step()  # registers what is kept
    run(benchmark, contestant, shape, tokens, step, lambda: error(contestant))
    if contestant == "seqtile":
        payload = (LAYERS - 1) * embedded.numel() * embedded.element_size()
        pinned = model._seqtile_offload.store.pool.total
        benchmark.extra_info |= {"pinned_x_payload": pinned / payload}
        if DEVICE == "cuda":
            trace(step, f"offload-{shape}-{tokens}")
    offload.disable(model)
