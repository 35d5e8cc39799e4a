"""Plans against a GPU's measured allocations: within 10 %."""

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from seqtile import apply_seqtile, memory, offload
from seqtile.renamed import enable_checkpointing
from support.choice import every_pair

EVERY_PAIR = pytest.mark.on_gpu("4 s each of one process", only=every_pair)
pytestmark = [pytest.mark.gpu, pytest.mark.alone, EVERY_PAIR]
K = 1024


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize("tiles", [(), ("loss",), ("loss", "mlp")], ids="-".join)
@pytest.mark.parametrize("tokens", [16 * K, 64 * K])
def test_measured_peaks(tokens: int, tiles: tuple[str, ...], offloaded: bool) -> None:
    """Four layers of Llama-8B in bfloat16, without gradients of an earlier step."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32768,
        max_position_embeddings=tokens,
    )
    gc.collect()  # a tiled model is in a reference cycle
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if tiles:
        apply_seqtile(model, mlp="mlp" in tiles, loss="loss" in tiles)
    offload.enable(model, tokens=tokens) if offloaded else enable_checkpointing(model)
    ids = torch.randint(config.vocab_size, (1, tokens), device="cuda")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    measured = torch.cuda.max_memory_allocated() - before
    offload.disable(model)
    planned = memory.plan(config, seq_len=tokens, tiles=tiles, offload=("activations",) if offloaded else ())
    ours = planned.gpu_bytes - planned.peak.parts["optimizer"] - planned.peak.parts["reserved"]
    assert abs(ours / measured - 1) <= 0.1, f"{ours / 2**30:.2f} GiB, measured {measured / 2**30:.2f}, {planned.peak}"
