"""Modules that only look plain: they are called unchanged, `status` says why, and all results are right."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.module_tracker import ModuleTracker
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import seqtile
import seqtile.models.chunked
import seqtile.models.forward.mlp
from models.layered import MODES, assert_equal, gradients_of, tiled_copy, whole
from models.test_paths import PROJECTIONS, lora
from seqtile.models.forward.loss import head_unfused_reason
from seqtile.models.forward.mlp import mlp_unfused_reason
from seqtile.models.placement import original_forward
from seqtile.models.recognise import gated_form
from support.assertions import relative_error
from support.choice import every_value
from support.measure import FlopCount
from support.tiny import CHUNK, build, loss_and_gradients

LINEAR, SILU = F.linear, F.silu
Change = Callable[[nn.Module], nn.Module]
Around = Callable[[], AbstractContextManager]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Like a fake quantizer: coarse in the forward, the identity in the backward."""
    return weight + ((weight * 4).round() / 4 - weight).detach()


def rounded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return LINEAR(x, rounded(weight), bias)


def rounded_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return rounded_linear(x, self.weight, self.bias)


def doubled_silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return SILU(2 * x)


@contextmanager
def registered(register: Callable, hook: Callable) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def peft_forward_replaced() -> AbstractContextManager:
    lora_layer = pytest.importorskip("peft.tuners.lora.layer")
    forward = lora_layer.Linear.forward
    return replaced(lora_layer.Linear, "forward", lambda self, x, *args: 1.5 * forward(self, x, *args))


class Rounding(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        function = rounded_linear if func is LINEAR else func
        return function(*args, **(kwargs or {}))


def halve_linear(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
    return output * 0.5 if isinstance(module, nn.Linear) else None


def halve_attention(module: nn.Module, inputs: object, output: tuple) -> tuple | None:
    return (output[0] * 0.5, *output[1:]) if isinstance(module, LlamaAttention) else None


def double_inputs(module: nn.Module, inputs: tuple) -> tuple | None:
    return (inputs[0] * 2,) if isinstance(module, nn.Linear | LlamaMLP) else None


def halve_gradient(module: nn.Module, d_inputs: tuple, d_outputs: tuple) -> tuple | None:
    return (d_inputs[0] * 0.5,) if isinstance(module, nn.Linear | nn.SiLU) and d_inputs[0] is not None else None


def double_gradient(module: nn.Module, d_outputs: tuple) -> tuple | None:
    return (d_outputs[0] * 2,) if isinstance(module, nn.Linear) else None


def of_mlps(change: Callable[[nn.Module], None]) -> Change:
    def apply(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            change(layer.mlp)
        return model

    return apply


def hooked(register: Callable, hook: Callable, name: str = "") -> tuple:
    return unchanged, partial(registered, register, hook), f"there is a global module hook{name}", True


def patched(owner: object, name: str, value: object, reason: str, of_head: bool = True) -> tuple:
    return unchanged, partial(replaced, owner, name, value), reason, of_head


def adapted(change: Callable[[nn.Module], None], reason: str) -> tuple:
    return (
        lambda model: of_mlps(lambda mlp: change(mlp.up_proj))(of_mlp_lora(model)),
        nullcontext,
        f"up_proj has a LoRA adapter whose {reason}",
        False,
    )


def activated(change: Callable[[nn.Module], None], reason: str) -> tuple:
    return of_mlps(change), nullcontext, f"its activation {reason}", False


class SiLU(nn.Module):
    """Has the name of torch's SiLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled_silu(x)


class CalledLinear(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 0.5


class RoundedLinear(nn.Linear):
    forward = rounded_forward


class OwnDropout(nn.Module):
    """Without a `p`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def named_silu(mlp: nn.Module) -> None:
    mlp.act_fn = SiLU()


def function_silu(mlp: nn.Module) -> None:
    del mlp.act_fn
    mlp.act_fn = doubled_silu


def learned_scaling(up_proj: nn.Module) -> None:
    up_proj.learned = nn.Parameter(torch.full((up_proj.out_features,), 1.7))
    up_proj.scaling["default"] = up_proj.learned


def unchanged(model: nn.Module) -> nn.Module:
    return model


REPLACED, BY, OWN_CALL = "forward was replaced", f"was replaced by {__name__}", "a __call__ of its own"
of_mlp_lora = lora(*PROJECTIONS)
# name -> the change to the model, the context of its steps, the reason, and whether it also affects lm_head.
ABUSES: dict[str, tuple[Change, Around, str, bool]] = {
    "global forward hook": hooked(register_module_forward_hook, halve_linear, f", {__name__}.halve_linear"),
    "global forward hook of attentions": hooked(register_module_forward_hook, halve_attention),
    "global pre-hook": hooked(register_module_forward_pre_hook, double_inputs),
    "global backward hook": hooked(register_module_full_backward_hook, halve_gradient),
    "global backward pre-hook": hooked(register_module_full_backward_pre_hook, double_gradient),
    "nn.Linear.forward": patched(nn.Linear, "forward", rounded_forward, f"is a torch.nn.Linear, whose {REPLACED}"),
    "F.linear": patched(F, "linear", rounded_linear, f"calls torch.nn.functional.linear, which {BY}.rounded_linear"),
    "F.silu": patched(F, "silu", doubled_silu, f"torch.nn.functional.silu {BY}.doubled_silu", of_head=False),
    "a function mode": (unchanged, Rounding, f"the TorchFunctionMode {__name__}.Rounding is active", True),
    "PEFT's forward": (of_mlp_lora, peft_forward_replaced, f"peft.tuners.lora.layer.Linear, whose {REPLACED}", False),
    "an activation named SiLU": activated(named_silu, f"is {__name__}.SiLU"),
    "a function as activation": activated(function_silu, f"is {__name__}.doubled_silu"),
    "an activation's forward": activated(
        lambda mlp: setattr(mlp.act_fn, "forward", doubled_silu), "has a forward of its own"
    ),
    "__call__": (
        of_mlps(lambda mlp: setattr(mlp.up_proj, "__class__", CalledLinear)),
        nullcontext,
        f"up_proj is a {__name__}.CalledLinear, which has {OWN_CALL}",
        False,
    ),
    "lora_A": adapted(
        lambda one: setattr(one.lora_A["default"], "__class__", RoundedLinear), f"lora_A is a {__name__}.RoundedLinear"
    ),
    "LoRA dropout": adapted(
        lambda one: one.lora_dropout.update({"default": OwnDropout()}), f"dropout is a {__name__}.OwnDropout"
    ),
    "learned LoRA scaling": adapted(learned_scaling, "scaling is a torch.nn.parameter.Parameter"),
}


def pair(change: Change, **options: object) -> tuple[nn.Module, nn.Module]:
    """A model and its tiled copy, both changed after tiling."""
    untiled, models = build("llama", tie_word_embeddings=False), []
    tiled = tiled_copy(untiled, **{"layer": False} | options)
    for model in (untiled, tiled):
        torch.manual_seed(0)
        models.append(change(model))
    return models[0], models[1]


@pytest.mark.full("of 51 models", but=("*-layer", "*forward hook-groups", "F.*-mlp", "LoRA dropout-groups"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ABUSES)
def test_called_as_it_is(name: str, mode: str) -> None:
    change, around, reason, of_head = ABUSES[name]
    untiled, tiled = pair(change, **MODES[mode])
    batch = whole(101)
    with around():
        status = seqtile.status(tiled)
        mlp = tiled.model.layers[0].mlp
        assert reason in mlp_unfused_reason(mlp, gated_form(original_forward(mlp)) or original_forward(mlp))
        is_known = name == "learned LoRA scaling"
        reasons = [part and (part.reason if is_known else part.untiled_reason) for part in (status.mlp, status.layer)]
        assert reasons[0] and (is_known or __name__ in reasons[0] or "torch" in reasons[0])
        assert ((status.loss.reason or status.loss.untiled_reason) is not None) == of_head
        if mode == "groups" and is_known:
            with pytest.raises(ValueError, match=r"attention in head chunks reads its weights, and"):
                tiled(**batch)
            assert status.layer.problem.startswith("attention in head chunks reads its weights, and ")
            return
        assert mode == "mlp" or reasons[1]
        truth = loss_and_gradients(untiled, **batch)
        assert_equal(loss_and_gradients(tiled, **batch), truth)
    if around is not nullcontext:
        after = loss_and_gradients(untiled, **batch)
        assert any(g is not None and relative_error(truth[1][name], g) > 1e-3 for name, g in after[1].items())
        status = seqtile.status(tiled)
        assert status.mlp.reason is None and status.mlp.untiled_reason is None
        assert_equal(loss_and_gradients(tiled, **batch), after)


def zero3_linear() -> AbstractContextManager:
    return replaced(F, "linear", pytest.importorskip("deepspeed.runtime.zero.linear").zero3_linear_wrap)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        assert torch._C._len_torch_function_stack() > 0
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.full("of nine models", but=every_value)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around", [default_device, ModuleTracker, zero3_linear])
def test_read_all_the_same(around: Around, mode: str) -> None:
    """Modes that torch and DeepSpeed leave active change nothing, and no module is called because of them."""
    untiled, tiled = pair(unchanged, **MODES[mode])
    batch = whole(101)
    truth = loss_and_gradients(untiled, **batch)
    with around(), replaced(seqtile.models.chunked, "tiled_part", None):
        status = seqtile.status(tiled)
        parts = [part for part in (status.loss, status.mlp, status.layer) if part is not None]
        assert [(part.reason, part.problem) for part in parts] == [(None, None)] * len(parts)
        with FlopCount() as flops:
            assert_equal(loss_and_gradients(tiled, **batch), truth)
    with FlopCount() as usual:
        loss_and_gradients(tiled, **batch)
    assert flops.total == usual.total


@pytest.mark.parametrize("mode", ["mlp", "layer"])
def test_a_function_mode_left_before_the_backward(mode: str) -> None:
    """Untiled, the backward knows what ran under the mode; tiled, it runs the same again."""
    untiled, tiled = pair(unchanged, **MODES[mode])
    batch, found = whole(101), []
    for model in (tiled, untiled):
        with Rounding():
            loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), gradients_of(model)))
    assert_equal(*found)


def linear_replaced(model: nn.Module) -> AbstractContextManager:
    return replaced(F, "linear", rounded_linear)


def global_hook(model: nn.Module) -> AbstractContextManager:
    return registered(register_module_forward_hook, halve_linear)


@pytest.mark.parametrize(
    ("around", "said"),
    [(linear_replaced, r"torch\.nn\.functional\.linear"), (global_hook, "the global module hooks")],
)
def test_what_is_changed_back_before_the_backward(
    around: Callable[[nn.Module], AbstractContextManager], said: str
) -> None:
    """The backward cannot run the forward's code again: it raises an error instead of running something else."""
    _, tiled = pair(ABUSES["learned LoRA scaling"][0])
    loss = tiled(**whole(101)).loss
    with around(tiled), pytest.raises(RuntimeError, match=f"what it computes has changed in between: {said}"):
        loss.backward()


@pytest.mark.full("of 6 models", but=every_value)
@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@pytest.mark.parametrize("change", [unchanged, of_mlp_lora, of_mlps(named_silu)], ids=["plain", "lora", "named SiLU"])
def test_asked_inside_a_compiled_graph(change: Change, arch: str) -> None:
    """A compiler traces the checks without a graph break, and gets the same answers."""
    model = change(build(arch))
    seqtile.apply_seqtile(model, layer=arch == "llama", chunk_tokens=CHUNK)
    forward = original_forward(model.model.layers[0].mlp)
    form = gated_form(forward) or forward

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[str | None]]:
            mlp, head = self.model.model.layers[0].mlp, self.model.lm_head
            return x + 1, [mlp_unfused_reason(mlp, form), head_unfused_reason(head)]

    torch._dynamo.reset()
    asking, x = Asking(), torch.ones(2)
    assert torch.compile(asking, backend="eager", fullgraph=True)(x)[1] == asking(x)[1]
