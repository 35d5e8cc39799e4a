"""Copies of tiled models and of their modules use their own weights, and can be restored by themselves."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter_gather
from transformers.models.llama.modeling_llama import LlamaMLP

import seqtile
from models.layered import MODES, assert_equal, gradients_of, on_model_or_classes, tiled_copy, tiled_model, whole
from seqtile.models.forward import layer as layers
from seqtile.models.placement import placement_at
from seqtile.protocols import FIRST_STEP
from support.assertions import relative_error, unread
from support.tiny import CHUNK, build, checkpointing, counting, loss_and_gradients

pytestmark = pytest.mark.usefixtures("pristine")
of_parts_or_layers = pytest.mark.parametrize("layer", [False, True])


def shallow(module: nn.Module) -> nn.Module:
    """A copy whose children can be replaced without replacing those of the module."""
    copied = copy.copy(module)
    copied._modules, copied._parameters = dict(module._modules), dict(module._parameters)
    return copied


def doubled(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.mul_(2)
    return copied


def with_module(path: str) -> Callable[[nn.Module], nn.Module]:
    """A copy of the model in which every module on the path to one module is a shallow copy, and that module's weight
    is doubled."""
    *way, last = path.split(".")

    def change(model: nn.Module) -> nn.Module:
        copied = module = shallow(model)
        for name in way:
            module._modules[name] = module = shallow(module._modules[name])
        module._modules[last] = doubled(module._modules[last])
        return copied

    return change


def replica(model: nn.Module) -> nn.Module:
    """A replica as DataParallel makes it, which sets the parameters and children of its replicas by itself."""
    source = with_module("lm_head")(model)
    copied = source._replicate_for_data_parallel()
    copied._parameters, copied._modules = source._parameters, source._modules
    return copied


COPIES = {
    "head": with_module("lm_head"),
    "deep": copy.deepcopy,
    "mlp": with_module("model.layers.1.mlp.down_proj"),
    "attention": with_module("model.layers.1.self_attn.q_proj"),
    "norm": with_module("model.norm"),
    "replica": replica,
}
DAILY = ("head-mlp-called", "deep-layer-*", "mlp-layer-called", "attention-groups-forward", "norm-*-called")


@pytest.mark.full("of 36 copies", but=(*DAILY, "replica-groups-called"))
@pytest.mark.parametrize("how", ["called", "forward"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_uses_what_is_its_own(name: str, mode: str, how: str) -> None:
    untiled = build("llama", tie_word_embeddings=False)
    batch, found = whole(101), []
    for model in (untiled, tiled_copy(untiled, **{"layer": False} | MODES[mode])):
        copied = COPIES[name](model)
        output = copied(**batch) if how == "called" else copied.forward(**batch)
        output.loss.backward()
        found.append((output.loss.detach(), gradients_of(copied)))
        if name != "deep":
            of_embeddings = torch.autograd.grad(model(**batch).loss, model.model.embed_tokens.weight)[0]
            assert relative_error(found[-1][1]["model.embed_tokens.weight"], of_embeddings) > 1e-4, "nothing is its own"
    assert_equal(found[1], found[0])
    assert output.logits is None if name == "replica" else unread(output.logits)


@pytest.mark.parametrize("return_dict", [True, False])
def test_data_parallel_collects_losses_without_logits(return_dict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training it would compute all logits on each GPU, and collect them on one. An evaluation may want them."""
    gather = SimpleNamespace(apply=lambda device, dim, *tensors: torch.stack([tensor + 0 for tensor in tensors]))
    monkeypatch.setattr(scatter_gather, "Gather", gather)
    model, batch = tiled_copy(build("llama"), layer=False), whole(40) | {"return_dict": return_dict}
    outputs = [replica(model)(**batch) for _ in range(2)]
    collected = scatter_gather.gather(outputs, 0)
    loss, logits = (collected.loss, collected.logits) if return_dict else collected[:2]
    assert loss.shape == (2,) and logits is None
    assert unread(replica(model)(**batch | {"labels": None, "return_dict": True}).logits)
    with torch.no_grad():
        collected = scatter_gather.gather([replica(model)(**batch) for _ in range(2)], 0)
    assert collected[1].shape == (2, 1, 40, 211)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_copies_are_tiled_and_restored_by_themselves(how: Callable[[nn.Module], nn.Module]) -> None:
    model, batch = build("llama"), whole(101)
    before = type(model), sorted(vars(model))
    seqtile.apply_seqtile(model, mlp=False, chunk_tokens=CHUNK)
    copied = how(model)
    seqtile.apply_seqtile(copied, mlp=False, chunk_tokens=7)
    assert [seqtile.status(each).loss.chunk_tokens for each in (model, copied)] == [(CHUNK,), (7,)]
    seqtile.restore(copied)
    assert not unread(copied(**batch).logits) and unread(model(**batch).logits)
    assert (type(copied), sorted(vars(copied))) == before
    copied = how(model)
    seqtile.restore(model)
    assert unread(copied(**batch).logits) and not unread(model(**batch).logits)
    assert (type(model), sorted(vars(model))) == before


class Odd(type):
    pass


class OddMLP(LlamaMLP, metaclass=Odd):
    pass


@of_parts_or_layers
def test_pickles(layer: bool) -> None:
    """After pickle or torch.save, a model is untiled and has its original classes."""
    model = build("llama")
    model.model.layers[0].mlp.__class__ = OddMLP
    truth = loss_and_gradients(model, **(batch := whole(101)))
    seqtile.apply_seqtile(model, layer=layer, chunk_tokens=CHUNK)
    loaded = pickle.loads(pickle.dumps(model))
    assert not any(placement_at(module) for module in loaded.modules())
    assert {type(module).__module__ for module in loaded.modules()}.isdisjoint({"seqtile.models.placement"})
    assert type(loaded.model.layers[0].mlp) is OddMLP
    assert_equal(loss_and_gradients(loaded, **batch), truth)
    seqtile.apply_seqtile(loaded, layer=layer, chunk_tokens=CHUNK)
    assert unread(loaded(**batch).logits)
    assert_equal(loss_and_gradients(loaded, **batch), truth)


@of_parts_or_layers
def test_a_tiled_module_holds_nothing_more(layer: bool) -> None:
    """Except what the first step said, on the models. And nothing keeps a reference to the classes that modules had
    while they were tiled."""
    model = build("llama")
    batch, before = whole(101), [sorted(vars(module)) for module in model.modules() if module is not model]
    model(**batch).loss.backward()
    model.zero_grad()
    gc.collect()
    classes = {cls: len(cls.__subclasses__()) for cls in map(type, model.modules())}
    seqtile.apply_seqtile(model, layer=layer, chunk_tokens=CHUNK)
    model(**batch).loss.backward()
    assert [sorted({*vars(module)} - {FIRST_STEP}) for module in model.modules() if module is not model] == before
    assert str(seqtile.status(model)).count("seqtile, 50 tokens a chunk") == 2 + layer
    seqtile.restore(model)
    gc.collect()
    assert {cls: len(cls.__subclasses__()) for cls in classes} == classes


class Hook:
    def __call__(self, *args: object) -> None: ...

    def method(self, *args: object) -> None: ...


class Slots:
    """What cannot be referred to weakly."""

    __slots__ = ()

    def __call__(self, *args: object) -> None: ...


@pytest.mark.parametrize("made", [Hook, lambda: Hook().method, lambda: partial(print, Hook(), file=io.StringIO())])
@pytest.mark.parametrize("place", ["", "mlp", "mlp.up_proj"])
def test_a_hook_is_freed_when_it_is_removed(made: Callable, place: str) -> None:
    """With all that it holds, at once."""
    model, batch = tiled_model("llama", layer=True), whole(101)
    module = model.model.layers[0].get_submodule(place)
    for _ in range(2):
        handle = module.register_forward_hook(hook := made())
        held = weakref.ref(hook)
        del hook
        model(**batch).loss.backward()
        handle.remove()
        assert held() is None
    handle = module.register_forward_hook(Slots())
    assert bool(place) == ("Slots" in str(seqtile.status(model)))
    handle.remove()
    assert "Slots" not in str(seqtile.status(model))


def test_modules_of_a_class_stay_of_one_class() -> None:
    """Accelerate finds the layers for FSDP by their class."""
    model = tiled_model("llama", layer=True)
    assert len({(type(layer), type(layer.mlp)) for layer in model.model.layers}) == 1


def derived(model: nn.Module, **names: str) -> None:
    """Gives every layer its own class, as FSDP2 does."""
    for layer in model.model.layers:
        layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), names)


@pytest.mark.parametrize("reentrant", [None, False])
def test_restoring_below_a_class_that_another_library_derived(reentrant: bool | None) -> None:
    """FSDP2 derives such a class; its checkpointing continues."""
    model = build("llama")
    truth = loss_and_gradients(model, **(batch := whole(101)))
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK)
    derived(model)
    checkpointing(model, reentrant)
    assert_equal(loss_and_gradients(model, **batch), truth)
    seqtile.restore(model)
    assert not any(placement_at(module) for module in model.modules())
    runs: list[int] = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    assert_equal(loss_and_gradients(model, **batch), truth)
    assert len(runs) == (1 if reentrant is None else 2)
    hook.remove()
    for chunk_tokens in (7, 9):  # for the second class, and for a third above it
        seqtile.apply_seqtile(model, layer=True, chunk_tokens=chunk_tokens)
        assert seqtile.status(model).layer.chunk_tokens == (chunk_tokens,)
        assert_equal(loss_and_gradients(model, **batch), truth)
    seqtile.restore(model)
    assert not any(placement_at(module) for module in model.modules())


@on_model_or_classes
def test_other_options_below_a_class_that_another_library_derived(on_classes: bool) -> None:
    """Under checkpointing a layer runs only twice, although transformers wraps such a class's forward again."""
    batch, calls = whole(101), []
    model = tiled_model("llama", on_classes, layer=True)
    truth = loss_and_gradients(model, **batch)
    derived(model, __module__="torch.distributed.fsdp")
    checkpointing(model, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "decoder_layer", counting(calls, layers.decoder_layer))
        assert_equal(loss_and_gradients(model, **batch), truth)
    assert len(calls) == 4, "once in the forward and once in the recomputation, of two layers"
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=7)
    assert "7 tokens a chunk, 2 of 2 fused" in str(seqtile.status(model).layer)
    assert not seqtile.status(model).layer.wrappers
    assert_equal(loss_and_gradients(model, **batch), truth)
    with pytest.warns(UserWarning, match="stays tiled by its classes") if on_classes else nullcontext():
        seqtile.restore(model)
    left = {placement.options.chunk_tokens for module in model.modules() if (placement := placement_at(module))}
    assert left == ({CHUNK} if on_classes else set())
    assert_equal(loss_and_gradients(model, **batch), truth)


def test_models_in_threads() -> None:
    """Each thread tiles a copy of one model with its own options, trains it and restores it."""
    shared = build("llama")
    batch = whole(101)
    truth = loss_and_gradients(copy.deepcopy(shared), **batch)
    seqtile.apply_seqtile(shared, layer=True, chunk_tokens=CHUNK, check=False)

    def train(chunk_tokens: int) -> None:
        copied = copy.deepcopy(shared)
        seqtile.apply_seqtile(copied, layer=True, chunk_tokens=chunk_tokens)
        assert seqtile.status(copied).layer.chunk_tokens == (chunk_tokens,)
        assert_equal(loss_and_gradients(copied, **batch), truth)
        seqtile.restore(copied)
        assert not any(placement_at(module) for module in copied.modules())

    with ThreadPoolExecutor() as pool:
        list(pool.map(train, [7, 8, 9, 10]))
    assert seqtile.status(shared).layer.chunk_tokens == (CHUNK,)
