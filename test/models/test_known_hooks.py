"""Hooks of listed libraries leave the parts around them tiled, which compute the same; a user's hook is found."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import dispatch_model
from peft import PeftModel
from peft.mixed_model import _prepare_model_for_gradient_checkpointing
from peft.utils.other import prepare_model_for_kbit_training
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules import module as module_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune, spectral_norm
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker
from transformers.utils.output_capturing import install_output_capuring_hook

import seqtile
from models.layered import tiled_copy
from seqtile import tokenwise
from seqtile.models.hooks import hooks_of, is_harmless, is_known, unknown_hook
from seqtile.offload.checkpointing import _warn_if_replaced
from seqtile.sp.sharding_hooks import ShardingHooks
from support.assertions import relative_error
from support.choice import every_value
from support.tiny import batch_of, build
from support.training import with_lora

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE_MAP = "Accelerate's device_map"
Installed = AbstractContextManager[nn.Module]


def on_each_mlp(install: Callable[[nn.Module], object]) -> Callable[[nn.Module], Installed]:
    def hooked(model: nn.Module) -> Installed:
        for layer in model.model.layers:
            install(layer.mlp)
        return nullcontext(model)

    return hooked


def fsdp1(model: nn.Module) -> Installed:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    options = {"device_id": torch.device("cpu"), "use_orig_params": True, "auto_wrap_policy": policy}
    return nullcontext(FullyShardedDataParallel(model, **options))


def fsdp2(model: nn.Module) -> Installed:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
    return nullcontext(fully_shard(model, mesh=mesh))


def ddp(model: nn.Module) -> Installed:
    return nullcontext(DistributedDataParallel(model))


def requires_grad(model: nn.Module) -> Installed:
    model.enable_input_require_grads()
    return nullcontext(model)


def watched(mode: Callable[[], AbstractContextManager]) -> Callable[[nn.Module], Installed]:
    @contextmanager
    def entered(model: nn.Module) -> Iterator[nn.Module]:
        with mode():
            yield model

    return entered


@contextmanager
def profiled(model: nn.Module) -> Iterator[nn.Module]:
    profiler = pytest.importorskip("deepspeed.profiling.flops_profiler").FlopsProfiler(model)
    profiler.start_profile(ignore_list=[type(model.model.layers[0].self_attn)])  # a tiled layer skips its forward
    try:
        yield model
    finally:
        profiler.end_profile()


WANDB = """
class TorchGraph:
    def create_forward_hook(self, name, graph_idx):
        def after_forward_hook(module, input, output):
            seen.append(name)
        return after_forward_hook

class TorchHistory:
    def add_log_parameters_hook(self, module, name=""):
        module.register_forward_hook(lambda mod, inp, outp: seen.append(name))

seen = []
"""


@contextmanager
def wandb_watches(model: nn.Module) -> Iterator[nn.Module]:
    """Puts on modules what wandb.watch puts there, written in the Python module in which wandb writes it."""
    name = "wandb.integration.torch.wandb_torch"
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, name, module := ModuleType(name))
        exec(WANDB, vars(module))
        module.TorchHistory().add_log_parameters_hook(model.model.layers[0].mlp.up_proj)
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(module.TorchGraph().create_forward_hook("down_proj", 0))
        yield model


def offloaded_by_trl(model: nn.Module) -> Installed:
    offloading = pytest.importorskip("trl.models.activation_offloading")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offloading, "OffloadActivations", MagicMock())  # needs a GPU
        offloading.get_act_offloading_ctx_manager(model)
    return nullcontext(model)


def by_accelerate(model: nn.Module) -> Installed:
    return nullcontext(dispatch_model(model, {"": "cpu"}, force_hooks=True))


def recorded(mlp: nn.Module) -> None:
    install_output_capuring_hook(mlp.down_proj, "hidden_states", 0)


def in_4_bits(mlp: nn.Module) -> None:
    pytest.importorskip("bitsandbytes.nn.parametrize").replace_parameter_4bit(mlp.up_proj, "weight")


FUSED = {  # only watch, or gather weights
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "enable_input_require_grads": requires_grad,
    "ModuleTracker": watched(ModuleTracker),
    "ModTracker": watched(ModTracker),
    "FlopCounterMode": watched(partial(FlopCounterMode, display=False)),
    "CommDebugMode": watched(CommDebugMode),
}
CHUNKED = {
    "checkpoint, composable": on_each_mlp(lambda mlp: checkpoint(mlp.down_proj)),
    "recorder": on_each_mlp(recorded),
    "bitsandbytes' cache": on_each_mlp(in_4_bits),
    "DeepSpeed's flops profiler": profiled,
    "wandb.watch": wandb_watches,
    DEVICE_MAP: by_accelerate,
    "TRL's offloading, of the head": offloaded_by_trl,
}


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in found]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.full("a quarter of a second each", but=every_value)
@pytest.mark.parametrize(
    ("name", "layer"),
    [(name, layer) for name in (*FUSED, *CHUNKED) for layer in (False, True) if (name, layer) != (DEVICE_MAP, True)],
)
def test_a_known_hook(name: str, layer: bool) -> None:
    """The part around it stays tiled, and computes the same."""
    plain = build("llama", hidden_size=64, intermediate_size=128)
    tiled = tiled_copy(plain, layer=layer, check=name == "CommDebugMode")
    batch, steps = batch_of(2, 131), []
    for model in (plain, tiled):
        with (FUSED | CHUNKED)[name](model) as hooked:
            if name not in ("DDP", "FSDP1", DEVICE_MAP):  # on parameters; in place of forwards
                assert any(hooks for module in (None, *hooked.modules()) for hooks in hooks_of(module))
            assert all(unknown_hook(module) is None for module in (None, *hooked.modules()))
            loss = hooked(**batch).loss
            loss.backward()
            parts = seqtile.status(model)
            steps.append((loss.detach(), gradients(hooked)))
    part = parts.loss if "head" in name else parts.layer if layer else parts.mlp
    assert part.tiled == part.total == (part.fused if name in FUSED else part.chunked)
    (loss, found), (other, expected) = steps
    assert relative_error(loss, other) < 1e-6
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or relative_error(ours, theirs) < 1e-5)


class Embeds(nn.Module):
    """A model that PEFT makes require a gradient by a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(5, 8)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def gradient_checkpointing_enable(self) -> None:
        pass


@pytest.mark.parametrize(
    ("prepare", "in_8_bits"),
    [
        (partial(PeftModel._prepare_model_for_gradient_checkpointing, None), False),
        (_prepare_model_for_gradient_checkpointing, False),
        (prepare_model_for_kbit_training, True),
    ],
    ids=["PeftModel", "PeftMixedModel", "prepare_model_for_kbit_training"],
)
def test_hooks_of_peft_on_embeddings(prepare: Callable, in_8_bits: bool) -> None:
    model = Embeds()
    model.is_loaded_in_8bit = in_8_bits
    prepare(model)
    assert model.embeddings._forward_hooks and unknown_hook(model.embeddings) is None


def test_hooks_of_seqtile() -> None:
    assert is_known(_warn_if_replaced) and is_known(ShardingHooks.add_last_position)


@pytest.mark.parametrize("given", [{"adapter_names": ["default", "__base__"]}, {"alora_offsets": [3, 5]}], ids=str)
def test_hooks_of_peft_that_hand_over_what_rows_have(given: dict) -> None:
    """A chunk is not of whole rows: these hooks are left unknown."""
    model = with_lora(build("llama"), "down_proj").eval()
    with model.base_model._enable_peft_forward_hooks(**given):
        hooked = [module for module in model.modules() if unknown_hook(module) is not None]
    assert len(hooked) == 2 and all(type(module).__module__.startswith("peft.tuners.lora") for module in hooked)


def hook(*given: Any) -> None:
    pass


class Hook:
    def method(self, *given: Any) -> None:
        pass

    def __call__(self, *given: Any) -> None:
        pass


@functools.wraps(ModuleTracker._fw_pre_hook)
def named_as_torchs(*given: Any) -> None:
    pass


HOOKS = {
    "function": hook,
    "method": Hook().method,
    "object": Hook(),
    "class": Hook,
    "builtin": [].append,
    "partial": partial(hook, 1),
    "partial of a partial": partial(partial(Hook().method)),
    "behind torch's wrapper": torch.compiler.disable(hook),
    "named as torch's": named_as_torchs,
    "globals named as torch's": FunctionType(hook.__code__, {"__name__": ModuleTracker.__module__}),
}
KINDS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_module", [True, False], ids=["of a module", "global"])
def test_a_users_hook_is_found(kind: str, of_module: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_module, "_global_is_full_backward_hook", None)  # torch keeps which kind was first
    module = nn.Linear(8, 8)
    register = getattr(module, f"register_{kind}") if of_module else getattr(module_module, f"register_module_{kind}")
    with register(tokenwise(lambda *given: None)):
        for name, users in HOOKS.items():
            assert unknown_hook(module) is unknown_hook(None) is None
            with register(users):
                found = unknown_hook(module if of_module else None)
                assert found == users and not is_known(users) and not is_harmless(users, False), name
    assert unknown_hook(None) is None


@pytest.mark.parametrize("put", [spectral_norm, lambda module: prune.random_unstructured(module, "weight", 0.5)])
def test_torchs_hooks_that_compute_weights_are_not_listed(put: Callable) -> None:
    put(module := nn.Linear(8, 8))
    assert unknown_hook(module) is not None


def test_a_global_hook_is_not_called_while_the_first_step_is_compared() -> None:
    tiled, batch, calls = tiled_copy(build("llama")), batch_of(2, 131), []
    with module_module.register_module_forward_hook(lambda *given: calls.append(1)):
        for _ in range(2):
            tiled(**batch)
            calls.append(0)
    steps = "".join(map(str, calls)).split("0")
    assert steps[0] == steps[1] != "" and "equal" in str(seqtile.status(tiled))


def chunked(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
    return model


@pytest.mark.full("of 8", but=every_value)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("make", [nn.Module.train, chunked], ids=["fused", "chunked"])
@pytest.mark.parametrize("layer", [False, True])
def test_a_hook_on_a_parameter(make: Callable, layer: bool, kind: str) -> None:
    """It gets the whole gradient, once, and its part stays tiled."""
    plain = make(build("llama"))
    tiled, batch, seen = tiled_copy(plain, layer=layer, check=False), batch_of(2, 131), []
    for model in (plain, tiled):
        seen.append(arrived := {})

        def note(value: torch.Tensor, name: str, arrived: dict) -> None:
            gradient = value if kind == "register_hook" else value.grad
            arrived.setdefault(name, []).append(gradient.clone())

        for name, parameter in model.named_parameters():
            getattr(parameter, kind)(partial(note, name=name, arrived=arrived))
        model(**batch).loss.backward()
    theirs, ours = seen
    assert ours.keys() == theirs.keys() == dict(plain.named_parameters()).keys()
    for name, (expected,) in theirs.items():
        (found,) = ours[name]
        assert relative_error(found, expected) < 1e-5, name
    status = seqtile.status(tiled)
    part = status.layer if layer else status.mlp
    assert part.tiled == part.total == (part.fused if make is not chunked else part.chunked)
