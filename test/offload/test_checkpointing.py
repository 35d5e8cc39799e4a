"""Checkpointed models with layer inputs in a store: bitwise equal results, and memory that does not grow with
layers."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from seqtile import apply_seqtile, offload
from seqtile.arch import ARCHS
from seqtile.offload.checkpointing import Checkpoints, install
from seqtile.offload.store import Copies, HostMemoryFull, Pool, Store
from support.measure import LiveBytes
from support.plain_store import CPU, offloaded
from support.tiny import batch_of, build, checkpointing, loss_and_gradients

TOKENS = 40
INPUT = TOKENS * 48 * 4  # bytes of one layer's input


class Noted(Copies):
    """Records every copy back."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.order: list[str] = []

    def back(self, block: Tensor) -> tuple[Tensor, None]:
        self.order.append("back")
        return super().back(block)


def four_layers() -> tuple[nn.Module, dict]:
    return build("llama", num_hidden_layers=4), batch_of(1, TOKENS)


def same_bits(model: nn.Module, batch: dict, expected: tuple[Tensor, dict[str, Tensor]], steps: int = 1) -> None:
    for _ in range(steps):
        loss, gradients = loss_and_gradients(model, **batch)
        assert loss.equal(expected[0]) and all(x.equal(expected[1][name]) for name, x in gradients.items())


def are_checkpointed(model: nn.Module) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.model.layers]


@pytest.mark.full("an architecture changes little of it", but=("llama-*",))
@pytest.mark.parametrize("tiled", [False, True], ids=["untiled", "tiled"])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_bits(arch: str, tiled: bool) -> None:
    model, batch = build(arch, num_hidden_layers=4), batch_of(2, 70)
    if tiled:
        apply_seqtile(model, chunk_tokens=50)
    checkpointing(model, False)
    expected = loss_and_gradients(model, **batch)
    pool = offloaded(model)
    same_bits(model, batch, expected, steps=2)
    assert pool.total == 3 * 2 * 70 * 48 * 4, "one input for each layer but the last"


def test_flat_in_the_number_of_layers() -> None:
    """Live bytes without weights and their gradients, of 2 and 16 layers, agree within two layer inputs."""
    tokens, peaks = 300, {}
    for layers in (2, 16):
        model = build("llama", num_hidden_layers=layers).requires_grad_(False)
        offloaded(model)
        embedded = torch.randn(1, tokens, 48, requires_grad=True)
        gc.collect()
        with LiveBytes() as memory:
            model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
        peaks[layers] = memory.peak
    assert max(peaks.values()) - min(peaks.values()) <= 2 * tokens * 48 * 4, peaks


@pytest.mark.parametrize("keep_last", [0, 1, 3, 9])
def test_the_last_layers_are_kept(keep_last: int) -> None:
    model, batch = four_layers()
    pool = offloaded(model, keep_last)
    loss_and_gradients(model, **batch)
    assert pool.total == max(0, 4 - keep_last) * INPUT


def test_accumulation_and_several_models() -> None:
    """Two models and two batches: all forwards, then all backwards."""
    models, batches, expected = [build("llama"), build("qwen3")], [batch_of(1, 40), batch_of(2, 70)], []
    for model in models:
        checkpointing(model, False)
        each = [loss_and_gradients(model, **batch)[1] for batch in batches]
        expected.append([sum(gradients) for gradients in zip(*(found.values() for found in each), strict=True)])
        offloaded(model, keep_last=0)
        model.zero_grad()
    losses = [model(**batch).loss for batch in batches for model in models]
    for loss in losses:
        loss.backward()
    for model, gradients in zip(models, expected, strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_host_memory_that_is_full() -> None:
    """The other layers' inputs stay on the device, with one warning, in every step alike; or an error is raised."""
    model, batch = four_layers()
    checkpointing(model, False)
    expected = loss_and_gradients(model, **batch)
    pool = offloaded(model, limit=2 * INPUT)
    with pytest.warns(UserWarning, match="inputs of the other layers stay on the GPU") as warned:
        same_bits(model, batch, expected, steps=3)
    assert len(warned) == 1 and pool.total == 2 * INPUT
    offloaded(model, limit=2 * INPUT, strict=True)
    with pytest.raises(HostMemoryFull, match="would exceed the limit"):
        model(**batch)


def test_an_exception_leaks_nothing() -> None:
    model, batch = four_layers()
    pool = offloaded(model)
    store = weakref.ref(model._seqtile_offload.store)
    handle = model.model.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch).loss.backward()
    handle.remove()
    gc.collect()
    assert len(pool._free) * INPUT == pool.total > 0, "every block is back"
    offload.disable(model)
    gc.collect()
    assert pool.total == 0 and store() is None and not any(are_checkpointed(model))


def test_without_a_gpu_it_says_so() -> None:
    model, batch = four_layers()
    expected = loss_and_gradients(model, **batch)
    with pytest.warns(UserWarning, match="the model is on cpu"):
        offload.enable(model)
    assert all(are_checkpointed(model))
    same_bits(model, batch, expected)
    x = torch.randn(3, requires_grad=True)
    offload.checkpoint(torch.sin, x).sum().backward()
    assert x.grad.equal(torch.cos(x))
    offload.disable(model)
    assert not any(are_checkpointed(model))


def test_in_pefts_wrapper() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match="what its checkpoints save stays there"):
        offload.enable(adapted)
    assert all(are_checkpointed(model))
    offload.disable(nn.ModuleList([nn.Linear(2, 2), adapted]))  # whatever is around it
    assert not any(are_checkpointed(model))


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused; the previous state, enabled or not, remains."""
    model = build("llama")
    for arguments in ({"keep_last": -1}, {"tokens": 0}, {"host_memory_limit": -1}):
        [(name, value)] = arguments.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            offload.enable(model, **arguments)
    with pytest.raises(TypeError, match=r"got a Linear; .* for a model of another kind there is offload\.checkpoint"):
        offload.enable(nn.Linear(2, 2))
    unsupported = build("llama")
    unsupported.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match=r"has no layers that can be checkpointed so; use offload\.checkpoint"):
        offload.enable(unsupported)
    assert not any(are_checkpointed(model))
    offloaded(model)
    enabled = model._seqtile_offload
    for gpus, device in ((0, "cuda"), (0, "cuda:0"), (2, "cuda:2")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ValueError, match=f"device is {device}, but torch finds {gpus} GPUs here"):
            offload.enable(model, device=device)
    assert model._seqtile_offload is enabled and all(are_checkpointed(model))


def test_the_way_back_begins_while_the_kept_layers_are_computed() -> None:
    """One layer before it is needed, starting with the first."""
    (model, batch), copies = four_layers(), Noted()
    checkpointing(model, False)
    install(Checkpoints(Store(Pool(), copies), small=0), model, 1)
    loss = model(**batch).loss
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: copies.order.append("layer"))
    loss.backward()
    assert copies.order == ["back", "layer", "back", "layer", "back", "layer", "layer"]


@pytest.mark.parametrize("kept", [False, True])
def test_an_input_that_is_changed_is_an_error(kept: bool) -> None:
    """As under plain checkpointing."""
    h = torch.randn(5, requires_grad=True) * 2
    out = Checkpoints(Store(Pool(), Copies(CPU)), small=0)(torch.sin, h, kept=kept)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        out.sum().backward()


def test_several_inputs_of_a_region_come_back_once() -> None:
    copies = Noted()
    checkpoints = Checkpoints(Store(Pool(), copies), small=0)
    xs = [torch.randn(5, requires_grad=True) for _ in range(3)]
    shared, total = torch.randn(5), 0
    for x in xs:
        total = total + checkpoints(lambda a, b, c: torch.sin(a) * b * c, x * 1, shared, x * 2).sum()
    checkpoints.store.settle()
    total.backward()
    assert len(copies.order) == 3 * 3, "the shared one is gone again after each"
    for x in xs:
        torch.testing.assert_close(x.grad, 2 * shared * (torch.cos(x) * x + torch.sin(x)).detach())


class OnSecond(Tensor):
    """Says that it is on a second GPU."""

    device, is_cuda = torch.device("cpu:1"), True


def test_layers_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `device_map` places them. All inputs are offloaded, each by the copies of its device, and start to come back
    one layer before they are needed, over devices too."""
    order: list[str] = []

    class By(Copies):
        def back(self, block: Tensor) -> tuple[Tensor, None]:
            order.append(f"back to {self.device}")
            return super().back(block)

    monkeypatch.setattr("seqtile.offload.store.Copies", By)
    checkpoints, held = Checkpoints(Store(Pool(), By(CPU)), small=0), []
    inputs = [torch.randn(5) for _ in range(4)]
    for tensor, device in zip(inputs, (Tensor, Tensor, OnSecond, OnSecond), strict=True):
        checkpoints.store.begin_region()
        held.append(checkpoints._put(tensor.as_subclass(device)))
    checkpoints.store.settle()
    for i in reversed(range(4)):
        order.append(f"layer {i}")
        assert checkpoints.store.take(held[i]).equal(inputs[i])
    first, second = "back to cpu", "back to cpu:1"
    assert order == ["layer 3", second, second, "layer 2", first, "layer 1", first, "layer 0"]


def test_a_call_with_tensors_on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is offloaded, with the store of the first one's GPU."""

    class OnThird(OnSecond):
        device = torch.device("cpu:2")

    def shared(device: torch.device) -> Callable[..., tuple[torch.device, Tensor]]:
        return lambda function, *args: (device, function(*args))

    monkeypatch.setattr("seqtile.offload.checkpointing._shared", shared)
    x, y = torch.randn(3), torch.randn(3)
    device, total = offload.checkpoint(lambda a, b: x + y, x.as_subclass(OnSecond), y.as_subclass(OnThird))
    assert device == OnSecond.device and total.equal(x + y)


def test_what_is_not_on_a_gpu_stays_there() -> None:
    pool, copies = Pool(), Copies(CPU)
    copies.device = torch.device("meta")
    x = torch.randn(5, requires_grad=True)
    Checkpoints(Store(pool, copies), small=0)(torch.sin, x * 1).sum().backward()
    assert x.grad.equal(torch.cos(x)) and pool.total == 0


def test_a_copy_has_a_store_of_its_own() -> None:
    """Both are offloaded. `disable` on one of them does not affect the other's pinned blocks and hook."""
    model, batch = four_layers()
    pool = offloaded(model, limit=10**6)
    expected = loss_and_gradients(model, **batch)
    other = copy.deepcopy(model)
    its_pool = other._seqtile_offload.store.pool
    assert its_pool is not pool and its_pool.limit == pool.limit
    same_bits(other, batch, expected, steps=2)
    assert pool.total == its_pool.total == 3 * INPUT
    pinned = {block.data_ptr() for block in pool._free}
    offload.disable(other)
    assert its_pool.total == 0 and not other._forward_pre_hooks and len(model._forward_pre_hooks) == 1
    assert not any(are_checkpointed(other))
    same_bits(model, batch, expected, steps=2)
    assert {block.data_ptr() for block in pool._free} == pinned and not pool.closed, "none is pinned anew"
    third = copy.deepcopy(model)
    offload.disable(model)
    assert pool.total == 0 and not third._seqtile_offload.store.pool.closed


def test_hidden_states_by_keyword() -> None:
    """They are offloaded like those by position; tensors without gradients are not."""
    model = build("llama", num_hidden_layers=4)
    embedded = torch.randn(1, 41, 48, requires_grad=True)
    positions, mask = model.model.rotary_emb(embedded, torch.arange(41)[None]), torch.randn(1, 1, 41, 41)

    def step(by_keyword: bool) -> tuple[list[Tensor], int]:
        """Gradients, and live bytes between forward and backward."""
        with LiveBytes() as memory:
            hidden = embedded * 1
            for layer in model.model.layers:
                first, named = ([], {"hidden_states": hidden}) if by_keyword else ([hidden], {})
                hidden = layer(*first, attention_mask=mask, position_embeddings=positions, **named)
                del first, named
            alive = memory.live
            return torch.autograd.grad(hidden.square().sum(), [embedded, *model.model.layers.parameters()]), alive

    checkpointing(model, False)
    expected, before = step(by_keyword=False)
    for by_keyword in (False, True):
        pool = offloaded(model)
        ours, alive = step(by_keyword)
        assert all(a.equal(b) for a, b in zip(ours, expected, strict=True))
        assert pool.total == 3 * 41 * 48 * 4 == before - alive, by_keyword


def test_checkpointing_switched_on_again_is_said() -> None:
    """Trainers do so: nothing would be offloaded any more, and the host memory kept."""
    model, batch = four_layers()
    pool = offloaded(model)
    loss_and_gradients(model, **batch)
    checkpointing(model, False)
    with pytest.warns(UserWarning, match=r"turned on again after offload\.enable"):
        loss_and_gradients(model, **batch)
    assert pool.total == 0 and not model._forward_pre_hooks
