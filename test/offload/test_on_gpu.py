"""On a GPU: bitwise equal results, exact pinned memory, flat peaks, and no wait of the host."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqtile import apply_seqtile, offload
from seqtile.renamed import enable_checkpointing
from support.tiny import batch_of, build, loss_and_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
TOKENS, WIDTH = 4000, 1024
INPUT = TOKENS * WIDTH * 4  # bytes of a layer's input, above the threshold for offloading


def wide(layers: int) -> nn.Module:
    return build("llama", "cuda", num_hidden_layers=layers, hidden_size=WIDTH, max_position_embeddings=TOKENS)


@pytest.fixture(autouse=True)
def same_bits_every_time() -> Iterator[None]:
    """FlashAttention's backward adds in any order; an earlier test's model may be in a reference cycle."""
    gc.collect()
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.parametrize("tiled", [False, True], ids=["untiled", "tiled"])
@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_the_same_bits(keep_last: int, tiled: bool) -> None:
    """Three steps, with each block pinned once."""
    model, batch = wide(6), batch_of(1, TOKENS, "cuda")
    if tiled:
        apply_seqtile(model)
    enable_checkpointing(model)
    expected = loss_and_gradients(model, **batch)
    offload.enable(model, keep_last=keep_last)
    pool = model._seqtile_offload.store.pool
    for _ in range(3):
        ours = loss_and_gradients(model, **batch)
        assert ours[0].equal(expected[0])
        assert all(gradient.equal(expected[1][name]) for name, gradient in ours[1].items())
    payload = (6 - keep_last) * INPUT
    assert payload <= pool.total <= 1.05 * payload
    offload.disable(model)
    assert pool.total == 0


def test_flat_in_the_number_of_layers() -> None:
    """Bytes in addition to weights and gradients, of 4 and 12 layers, agree within two layer inputs."""
    peaks = []
    for layers in (4, 12):
        model, batch = wide(layers), batch_of(1, TOKENS, "cuda")
        apply_seqtile(model)
        for parameter in model.model.layers.parameters():
            parameter.requires_grad_(False)
        offload.enable(model, tokens=TOKENS)
        model(**batch).loss.backward()  # workspaces are allocated once
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**batch).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        offload.disable(model)
        del model
    assert abs(peaks[1] - peaks[0]) <= 2 * INPUT, peaks


def test_the_host_never_waits() -> None:
    """For plain regions; Hugging Face's models wait for the device to find packed documents."""
    model = wide(4)
    offload.enable(model, tokens=TOKENS)
    embedded = torch.randn(1, TOKENS, WIDTH, device="cuda", requires_grad=True)
    positions = model.model.rotary_emb(embedded, torch.arange(TOKENS, device="cuda")[None])

    def step() -> None:
        hidden = embedded
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=positions)
        hidden.sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    offload.disable(model)


def test_an_exception_leaks_nothing() -> None:
    model, batch = wide(4), batch_of(1, TOKENS, "cuda")
    offload.enable(model)
    loss_and_gradients(model, **batch)
    model.zero_grad(set_to_none=True)
    gc.collect()
    pool = model._seqtile_offload.store.pool
    pinned, before = pool.total, torch.cuda.memory_allocated()
    hook = model.model.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch).loss.backward()
    hook.remove()
    model.zero_grad(set_to_none=True)
    gc.collect()
    loss_and_gradients(model, **batch)
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert pool.total == pinned and torch.cuda.memory_allocated() <= before
    offload.disable(model)
