"""Modules that are not what they seem: they are called as they are, `status` says why, and everything is right."""

import copy
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
import seqtile.models.in_chunks
import seqtile.models.mlp
from models.layered import assert_equal, whole
from models.test_paths import PROJECTIONS, lora
from seqtile.models.loss import head_unfused_reason
from seqtile.models.mlp import gated_form, mlp_unfused_reason
from seqtile.models.placement import original_forward
from seqtile.models.weights import module_call_reason
from support.assertions import relative_error
from support.measure import FlopCount
from support.tiny import CHUNK, build, loss_and_gradients

MODES = {
    "mlp": {},
    "layer": {"layer": True},
    "groups": {"layer": True, "head_groups": 2},
}
LINEAR, SILU = F.linear, F.silu
Change = Callable[[nn.Module], nn.Module]
Around = Callable[[], AbstractContextManager]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """As a fake quantiser does: coarse in the forward, the identity in the backward."""
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


def in_layers(change: Callable[[nn.Module], None]) -> Change:
    def apply(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            change(layer)
        return model

    return apply


class SiLU(nn.Module):
    """Named like torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled_silu(x)


class CalledLinear(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 0.5


class RoundedLinear(nn.Linear):
    forward = rounded_forward


def named_silu(layer: nn.Module) -> None:
    layer.mlp.act_fn = SiLU()


def own_silu(layer: nn.Module) -> None:
    layer.mlp.act_fn.forward = doubled_silu


def called_up(layer: nn.Module) -> None:
    layer.mlp.up_proj.__class__ = CalledLinear


def rounded_half(layer: nn.Module) -> None:
    layer.mlp.up_proj.lora_A["default"].__class__ = RoundedLinear


class OwnDropout(nn.Module):
    """Without a `p`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def own_dropout(layer: nn.Module) -> None:
    layer.mlp.up_proj.lora_dropout["default"] = OwnDropout()


def learned_scaling(layer: nn.Module) -> None:
    layer.mlp.up_proj.learned = nn.Parameter(torch.full((layer.mlp.up_proj.out_features,), 1.7))
    layer.mlp.up_proj.scaling["default"] = layer.mlp.up_proj.learned


def wrapped_mlp(layer: nn.Module) -> None:
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) * 0.5


def function_silu(layer: nn.Module) -> None:
    del layer.mlp.act_fn
    layer.mlp.act_fn = doubled_silu


def unchanged(model: nn.Module) -> nn.Module:
    return model


of_mlp_lora = lora(*PROJECTIONS)
# name -> what is done to the model, around its steps, the reason, and whether it concerns lm_head, too
ABUSES: dict[str, tuple[Change, Around, str, bool]] = {
    "global forward hook": (
        unchanged,
        partial(registered, register_module_forward_hook, halve_linear),
        f"there is a global module hook, {__name__}.halve_linear",
        True,
    ),
    "global forward hook of attentions": (
        unchanged,
        partial(registered, register_module_forward_hook, halve_attention),
        "there is a global module hook",
        True,
    ),
    "global pre-hook": (
        unchanged,
        partial(registered, register_module_forward_pre_hook, double_inputs),
        "there is a global module hook",
        True,
    ),
    "global backward hook": (
        unchanged,
        partial(registered, register_module_full_backward_hook, halve_gradient),
        "there is a global module hook",
        True,
    ),
    "global backward pre-hook": (
        unchanged,
        partial(registered, register_module_full_backward_pre_hook, double_gradient),
        "there is a global module hook",
        True,
    ),
    "nn.Linear.forward": (
        unchanged,
        partial(replaced, nn.Linear, "forward", rounded_forward),
        "is a torch.nn.Linear, whose forward was replaced",
        True,
    ),
    "F.linear": (
        unchanged,
        partial(replaced, F, "linear", rounded_linear),
        f"calls torch.nn.functional.linear, which was replaced by {__name__}.rounded_linear",
        True,
    ),
    "F.silu": (
        unchanged,
        partial(replaced, F, "silu", doubled_silu),
        f"torch.nn.functional.silu was replaced by {__name__}.doubled_silu",
        False,
    ),
    "a function mode": (unchanged, Rounding, f"the TorchFunctionMode {__name__}.Rounding is active", True),
    "PEFT's forward": (
        of_mlp_lora,
        peft_forward_replaced,
        "peft.tuners.lora.layer.Linear, whose forward was replaced",
        False,
    ),
    "an activation named SiLU": (
        in_layers(named_silu),
        nullcontext,
        f"its activation is {__name__}.SiLU",
        False,
    ),
    "a function as activation": (
        in_layers(function_silu),
        nullcontext,
        f"its activation is {__name__}.doubled_silu",
        False,
    ),
    "an activation's forward": (in_layers(own_silu), nullcontext, "its activation has a forward of its own", False),
    "__call__": (
        in_layers(called_up),
        nullcontext,
        f"up_proj is a {__name__}.CalledLinear, which has a __call__ of its own",
        False,
    ),
    "lora_A": (
        lambda model: in_layers(rounded_half)(of_mlp_lora(model)),
        nullcontext,
        f"up_proj has a LoRA adapter whose lora_A is a {__name__}.RoundedLinear",
        False,
    ),
    "LoRA dropout": (
        lambda model: in_layers(own_dropout)(of_mlp_lora(model)),
        nullcontext,
        f"up_proj has a LoRA adapter whose dropout is a {__name__}.OwnDropout",
        False,
    ),
    "learned LoRA scaling": (
        lambda model: in_layers(learned_scaling)(of_mlp_lora(model)),
        nullcontext,
        "up_proj has a LoRA adapter whose scaling is a torch.nn.parameter.Parameter",
        False,
    ),
}


def pair(change: Change, **options: object) -> tuple[nn.Module, nn.Module]:
    """A model and its tiled copy, both changed after tiling."""
    untiled = build("llama", tie_word_embeddings=False)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK, **options)
    models = []
    for model in (untiled, tiled):
        torch.manual_seed(0)
        models.append(change(model))
    return models[0], models[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ABUSES)
def test_called_as_it_is(name: str, mode: str) -> None:
    change, around, reason, of_head = ABUSES[name]
    untiled, tiled = pair(change, **MODES[mode])
    batch = whole(101)
    with around():
        status = seqtile.status(tiled)
        assert reason in status.mlp.reason
        assert (status.loss.reason is not None) == of_head
        if mode == "groups":
            with pytest.raises(ValueError, match=r"attention by groups of heads reads its weights, and"):
                tiled(**batch)
            assert status.layer.problem.startswith("attention by groups of heads reads its weights, and ")
            return
        assert mode == "mlp" or status.layer.reason is not None
        if mode == "layer":  # whose attention's own call no chunk can make
            assert ("in chunks" in str(status.layer)) == (module_call_reason() is None), status
        truth = loss_and_gradients(untiled, **batch)
        assert_equal(loss_and_gradients(tiled, **batch), truth)
    if around is not nullcontext:
        after = loss_and_gradients(untiled, **batch)
        assert any(
            relative_error(truth[1][name], gradient) > 1e-3
            for name, gradient in after[1].items()
            if gradient is not None
        )
        assert seqtile.status(tiled).mlp.reason is None
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around", [default_device, ModuleTracker, zero3_linear])
def test_read_all_the_same(around: Around, mode: str) -> None:
    """What torch and DeepSpeed leave active changes nothing, and no weight is called for it."""
    untiled, tiled = pair(unchanged, **MODES[mode])
    batch = whole(101)
    truth = loss_and_gradients(untiled, **batch)
    with around(), replaced(seqtile.models.in_chunks, "tiled", None):
        status = seqtile.status(tiled)
        parts = [part for part in (status.loss, status.mlp, status.layer) if part is not None]
        assert [(part.reason, part.problem) for part in parts] == [(None, None)] * len(parts)
        with FlopCount() as flops:
            assert_equal(loss_and_gradients(tiled, **batch), truth)
    with FlopCount() as usual:
        loss_and_gradients(tiled, **batch)
    assert flops.total == usual.total


@pytest.mark.parametrize("head_groups", [None, 2])
def test_a_wrapper_around_a_tiled_mlp(head_groups: int | None) -> None:
    """A tiled layer reads the weights of its MLP, and would skip the wrapper."""
    untiled, tiled = pair(in_layers(wrapped_mlp), layer=True, head_groups=head_groups)
    batch = whole(101)
    if head_groups is None:
        assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))
    else:
        with pytest.raises(ValueError, match="its MLP has a forward of its own"):
            tiled(**batch)


@pytest.mark.parametrize("mode", ["mlp", "layer"])
def test_a_function_mode_left_before_the_backward(mode: str) -> None:
    """Untiled, the backward knows what ran under the mode; tiled, it runs that again."""
    untiled, tiled = pair(unchanged, **MODES[mode])
    batch, found = whole(101), []
    for model in (tiled, untiled):
        with Rounding():
            loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    assert_equal(*found)


def hooked_head(model: nn.Module) -> Callable[[], None]:
    return model.lm_head.register_forward_hook(halve_linear).remove


def linear_replaced(model: nn.Module) -> Callable[[], None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(F, "linear", rounded_linear)
    return patch.undo


def global_hook(model: nn.Module) -> Callable[[], None]:
    return register_module_forward_hook(halve_linear).remove


@pytest.mark.parametrize("change", [hooked_head, linear_replaced, global_hook])
def test_what_is_changed_back_before_the_backward(change: Callable[[nn.Module], Callable[[], None]]) -> None:
    """What ran in the forward cannot be run again: said, rather than something else run."""
    _, tiled = pair(unchanged)
    change_back = change(tiled)
    try:
        loss = tiled(**whole(101)).loss
    finally:
        change_back()
    with pytest.raises(RuntimeError, match="what it computes has changed in between"):
        loss.backward()


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@pytest.mark.parametrize("change", [unchanged, of_mlp_lora, in_layers(named_silu)], ids=["plain", "lora", "named SiLU"])
def test_asked_inside_a_compiled_graph(change: Change, arch: str) -> None:
    """A compiler traces the questions, without a break, and has the same answers."""
    model = change(build(arch))
    seqtile.apply_seqtile(model, layer=arch == "llama", chunk_tokens=CHUNK)

    forward = original_forward(model.model.layers[0].mlp)
    form = gated_form(forward) or forward

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[str | None]]:
            layer = self.model.model.layers[0]
            reasons = [mlp_unfused_reason(layer.mlp, form), head_unfused_reason(self.model.lm_head)]
            return x + 1, reasons

    torch._dynamo.reset()
    asking, x = Asking(), torch.ones(2)
    assert torch.compile(asking, backend="eager", fullgraph=True)(x)[1] == asking(x)[1]
