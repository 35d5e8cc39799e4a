"""Checkpointed models whose layer inputs are in a store: the same bits, in memory that does not grow with layers."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from seqtile import apply_seqtile, offload
from seqtile.arch import ARCHS
from seqtile.offload.checkpointing import Checkpoints, install
from seqtile.offload.store import Copies, HostMemoryFull, Pool, Store
from support.measure import LiveBytes
from support.tiny import batch_of, build, checkpointing, loss_and_gradients

CPU = torch.device("cpu")


def spread(model: nn.Module, keep_last: int = 1, limit: int | None = None, **options: bool) -> Pool:
    """`offload.enable` on a store that needs no GPU."""
    checkpointing(model, False)
    pool = Pool(limit)
    install(Checkpoints(Store(pool, Copies(CPU)), small=0, **options), model, keep_last)
    return pool


@pytest.mark.parametrize("tiled", [False, True], ids=["untiled", "tiled"])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_bits(arch: str, tiled: bool) -> None:
    model, batch = build(arch, num_hidden_layers=4), batch_of(2, 70)
    if tiled:
        apply_seqtile(model, chunk_tokens=50)
    checkpointing(model, False)
    expected = loss_and_gradients(model, **batch)
    pool = spread(model)
    for _ in range(2):
        ours = loss_and_gradients(model, **batch)
        assert ours[0].equal(expected[0])
        assert all(gradient.equal(expected[1][name]) for name, gradient in ours[1].items())
    assert pool.total == 3 * 2 * 70 * 48 * 4, "one input for each layer but the last"


def test_flat_in_the_number_of_layers() -> None:
    """Live bytes but for weights and their gradients, of 2 to 32 layers, within two layer inputs."""
    tokens, peaks = 300, {}
    for layers in (2, 8, 32):
        model = build("llama", num_hidden_layers=layers)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        spread(model)
        embedded = torch.randn(1, tokens, 48, requires_grad=True)
        gc.collect()
        with LiveBytes() as memory:
            model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
        peaks[layers] = memory.peak
    one = tokens * 48 * 4
    assert max(peaks.values()) - min(peaks.values()) <= 2 * one, peaks


@pytest.mark.parametrize("keep_last", [0, 1, 3, 9])
def test_the_last_layers_are_kept(keep_last: int) -> None:
    model, batch = build("llama", num_hidden_layers=4), batch_of(1, 40)
    pool = spread(model, keep_last)
    loss_and_gradients(model, **batch)
    assert pool.total == max(0, 4 - keep_last) * 40 * 48 * 4


def test_accumulation_and_several_models() -> None:
    """Two models and two batches, forward by forward, then backward by backward."""
    models, batches = [build("llama"), build("qwen3")], [batch_of(1, 40), batch_of(2, 70)]
    expected = []
    for model in models:
        checkpointing(model, False)
        model.zero_grad()
        for batch in batches:
            model(**batch).loss.backward()
        expected.append([parameter.grad.clone() for parameter in model.parameters()])
    for model in models:
        spread(model, keep_last=0)
        model.zero_grad()
    losses = [model(**batch).loss for batch in batches for model in models]
    for loss in losses:
        loss.backward()
    for model, gradients in zip(models, expected, strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_host_memory_that_is_full() -> None:
    """The other layers' inputs stay, with one warning, in every step alike; or it is an error."""
    model, batch = build("llama", num_hidden_layers=4), batch_of(1, 40)
    checkpointing(model, False)
    expected = loss_and_gradients(model, **batch)
    pool = spread(model, limit=2 * 40 * 48 * 4)
    with pytest.warns(UserWarning, match="inputs of the other layers stay on the GPU") as warned:
        for _ in range(3):
            ours = loss_and_gradients(model, **batch)
            assert all(gradient.equal(expected[1][name]) for name, gradient in ours[1].items())
    assert len(warned) == 1 and pool.total == 2 * 40 * 48 * 4
    spread(model, limit=2 * 40 * 48 * 4, strict=True)
    with pytest.raises(HostMemoryFull, match="would exceed the limit"):
        model(**batch)


def test_an_exception_leaks_nothing() -> None:
    model, batch = build("llama", num_hidden_layers=4), batch_of(1, 40)
    pool = spread(model)
    store = weakref.ref(model._seqtile_offload.store)
    loss = model(**batch).loss
    handle = model.model.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch).loss.backward()
    handle.remove()
    del loss
    gc.collect()
    assert len(pool._free) * 40 * 48 * 4 == pool.total, "every block is back"
    offload.disable(model)
    gc.collect()
    assert pool.total == 0 and store() is None
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("llama"), batch_of(1, 40)
    expected = loss_and_gradients(model, **batch)
    with pytest.warns(UserWarning, match="the model is on cpu"):
        offload.enable(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    ours = loss_and_gradients(model, **batch)
    assert all(gradient.equal(expected[1][name]) for name, gradient in ours[1].items())
    x = torch.randn(3, requires_grad=True)
    offload.checkpoint(torch.sin, x).sum().backward()
    assert x.grad.equal(torch.cos(x))
    offload.disable(model)
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
def test_a_gpu_that_is_not_there(gpus: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, and what was enabled before stays."""
    model = build("llama")
    spread(model)
    enabled = model._seqtile_offload
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=f"device is {device}, but torch finds {gpus} GPUs here"):
        offload.enable(model, device=device)
    assert model._seqtile_offload is enabled and all(layer.gradient_checkpointing for layer in model.model.layers)


def test_bad_input() -> None:
    model = build("llama")
    for arguments, message in (
        ({"keep_last": -1}, "keep_last is -1"),
        ({"tokens": 0}, "tokens is 0"),
        ({"host_memory_limit": -1}, "host_memory_limit is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            offload.enable(model, **arguments)
    with pytest.raises(ValueError, match=r"Linear has no layers that can be checkpointed so; use offload\.checkpoint"):
        offload.enable(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="NoneType has no layers that can be checkpointed so"):
        offload.enable(None)
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_the_way_back_begins_while_the_kept_layers_are_computed() -> None:
    """One layer ahead of need, from the first on."""
    model, batch = build("llama", num_hidden_layers=4), batch_of(1, 40)
    checkpointing(model, False)
    order: list[str] = []

    class Counted(Copies):
        def back(self, block: torch.Tensor) -> tuple[torch.Tensor, None]:
            order.append("back")
            return super().back(block)

    install(Checkpoints(Store(Pool(), Counted(CPU)), small=0), model, 1)
    loss = model(**batch).loss
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: order.append("layer"))
    loss.backward()
    assert order == ["back", "layer", "back", "layer", "back", "layer", "layer"]


@pytest.mark.parametrize("kept", [False, True])
def test_an_input_that_is_changed_is_an_error(kept: bool) -> None:
    """As it is under plain checkpointing."""
    checkpoints = Checkpoints(Store(Pool(), Copies(CPU)), small=0)
    x = torch.randn(5, requires_grad=True)
    h = x * 2
    out = checkpoints(torch.sin, h, kept=kept)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        out.sum().backward()


def test_several_inputs_of_a_region_come_back_once() -> None:
    class Counted(Copies):
        backs = 0

        def back(self, block: torch.Tensor) -> tuple[torch.Tensor, None]:
            Counted.backs += 1
            return super().back(block)

    checkpoints = Checkpoints(Store(Pool(), Counted(CPU)), small=0)
    xs = [torch.randn(5, requires_grad=True) for _ in range(3)]
    shared, total = torch.randn(5), 0
    for x in xs:
        total = total + checkpoints(lambda a, b, c: torch.sin(a) * b * c, x * 1, shared, x * 2).sum()
    checkpoints.store.settle()
    total.backward()
    assert Counted.backs == 3 * 3, "the shared one is gone again after each"
    for x in xs:
        y = x.detach().requires_grad_()
        (torch.sin(y) * shared * 2 * y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_what_is_on_another_device_stays_there() -> None:
    pool, copies = Pool(), Copies(CPU)
    copies.device = torch.device("meta")
    checkpoints = Checkpoints(Store(pool, copies), small=0)
    x = torch.randn(5, requires_grad=True)
    checkpoints(torch.sin, x * 1).sum().backward()
    assert x.grad.equal(torch.cos(x)) and pool.total == 0


def test_a_copy_has_a_store_of_its_own() -> None:
    """Both are offloaded; `disable` of one of them leaves the other as it was, its pinned blocks and its hook."""
    model, batch = build("llama", num_hidden_layers=4), batch_of(1, 40)
    pool = spread(model, limit=10**6)
    expected = loss_and_gradients(model, **batch)
    other = copy.deepcopy(model)
    its_pool = other._seqtile_offload.store.pool
    assert its_pool is not pool and its_pool.limit == pool.limit
    for _ in range(2):
        ours = loss_and_gradients(other, **batch)
        assert all(gradient.equal(expected[1][name]) for name, gradient in ours[1].items())
    assert pool.total == its_pool.total == 3 * 40 * 48 * 4
    pinned = {block.data_ptr() for block in pool._free}
    offload.disable(other)
    assert its_pool.total == 0 and not other._forward_pre_hooks and len(model._forward_pre_hooks) == 1
    assert not any(layer.gradient_checkpointing for layer in other.model.layers)
    for _ in range(2):
        ours = loss_and_gradients(model, **batch)
        assert all(gradient.equal(expected[1][name]) for name, gradient in ours[1].items())
    assert {block.data_ptr() for block in pool._free} == pinned and not pool.closed, "none is pinned anew"
    third = copy.deepcopy(model)
    offload.disable(model)
    assert pool.total == 0 and not third._seqtile_offload.store.pool.closed


def test_hidden_states_by_keyword() -> None:
    """They are offloaded as those by position are; what no gradient flows to stays."""
    model = build("llama", num_hidden_layers=4)
    embedded = torch.randn(1, 41, 48, requires_grad=True)
    positions = model.model.rotary_emb(embedded, torch.arange(41)[None])
    mask = torch.randn(1, 1, 41, 41)

    def step(by_keyword: bool) -> list[torch.Tensor]:
        hidden = embedded * 1
        for layer in model.model.layers:
            first, named = ([], {"hidden_states": hidden}) if by_keyword else ([hidden], {})
            hidden = layer(*first, attention_mask=mask, position_embeddings=positions, **named)
            del first, named
        alive.append(memory.live)
        return torch.autograd.grad(hidden.square().sum(), [embedded, *model.model.layers.parameters()])

    checkpointing(model, False)
    alive: list[int] = []
    with LiveBytes() as memory:
        expected = step(by_keyword=False)
    for by_keyword in (False, True):
        pool = spread(model)
        with LiveBytes() as memory:
            ours = step(by_keyword)
        assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))
        assert pool.total == 3 * 41 * 48 * 4, by_keyword
    assert alive[2] == alive[1] == alive[0] - 3 * 41 * 48 * 4, "between forward and backward"


def test_checkpointing_switched_on_again_is_said() -> None:
    """Trainers do so: then nothing would be offloaded, and the host memory kept."""
    model, batch = build("llama", num_hidden_layers=4), batch_of(1, 40)
    pool = spread(model)
    loss_and_gradients(model, **batch)
    checkpointing(model, False)
    with pytest.warns(UserWarning, match=r"switched again after offload\.enable"):
        loss_and_gradients(model, **batch)
    assert pool.total == 0 and not model._forward_pre_hooks
