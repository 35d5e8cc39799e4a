"""Reads a module's tensors instead of calling it, if that computes the same.

A module is read if calling it does exactly what its class defines: a plain nn.Linear, PEFT's plain LoRA over one, a
plain activation. Objects are recognised by themselves: a function by the module that defines it, a class by identity,
never only by a name. Any other module runs as it is, chunk by chunk, see `chunked.py`. The functions here that end in
`_reason` say why a module is not read, or return None; `seqtile.status` shows the reason.

An active TorchDispatchMode does not prevent reading: it sees each operation here too.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules import linear as linear_module
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from transformers.activations import GELUTanh, SiLUActivation

from seqtile.declared import is_declared
from seqtile.models.functions import defining_path, is_one_of, named
from seqtile.models.hooks import each_hook, is_harmless
from seqtile.models.quantised import computing_dtype, decoding_reason, is_quantised, reader_of, seen_weight
from seqtile.ops.checks import DTYPES
from seqtile.ops.linear import Projection, QuantizedWeight

_ACTIVATIONS = {nn.SiLU: "silu", SiLUActivation: "silu", GELUTanh: "gelu_tanh"}  # by their names in `gated_mlp`
_DEEPSPEEDS = "deepspeed.runtime.zero.linear.zero3_linear_wrap"  # replaces torch's under ZeRO-3
PARAMETRIZATIONS = (parametrizations._WeightNorm, parametrizations._Orthogonal)  # keep and count nothing
WITH_DROPOUT = "has a LoRA adapter with dropout"
_SILU = F.silu if defining_path(F.silu) == "torch.nn.functional.silu" else None  # compilers know it by identity only


def module_call_reason() -> str | None:
    """Says why calling any module does more than its forward; None if it does not."""
    for function, name in ((nn.Module.__call__, "_wrapped_call_impl"), (nn.Module._call_impl, "_call_impl")):
        if defining_path(function) != f"torch.nn.modules.module.Module.{name}":
            return f"the __call__ of torch.nn.Module was replaced by {named(function)}"
    hook = _hook_that_matters(None, recording=True)
    return None if hook is None else f"there is a global module hook, {named(hook)}"


def process_unfused_reason() -> str | None:
    """Says why no module may be read at present. Called once, before any module is looked at."""
    modes = function_modes()
    return module_call_reason() or (f"the TorchFunctionMode {named(type(modes[0]))} is active" if modes else None)


def function_modes() -> list[TorchFunctionMode]:
    """Returns the active TorchFunctionModes, but for those of torch.set_default_device, which only place new
    tensors."""
    active = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return [mode for mode in active if type(mode) is not DeviceContext]


def module_unfused_reason(module: nn.Module, *, recording: bool = True) -> str | None:
    """Says what runs in a call of `module` besides its class's forward; None if nothing does. For `recording` see
    `call_unfused_reason`."""
    if "forward" in vars(module):
        return "has a forward of its own, such as Accelerate's device_map gives it"
    return call_unfused_reason(module, recording=recording)


def call_unfused_reason(module: nn.Module, *, recording: bool = True) -> str | None:
    """Says why calling `module` does more than call its forward, whoever wrote that.

    The hooks with which FSDP2 and ZeRO gather weights do not count. Unless `recording`, neither do those with which
    Hugging Face records outputs, which do nothing until recording is on.
    """
    cls = type(module)
    changed = cls.__call__ is not nn.Module.__call__ or cls._call_impl is not nn.Module._call_impl
    if changed or "_call_impl" in vars(module):
        return f"is a {named(cls)}, which has a __call__ of its own"
    return "has hooks" if _hook_that_matters(module, recording) is not None else None


def _hook_that_matters(module: nn.Module | None, recording: bool) -> Callable | None:
    """Returns a hook of a module, or without a module a global hook, that is not harmless."""
    return next((hook for hook in each_hook(module) if not is_harmless(hook, recording)), None)


def linear_unfused_reason(module: Any) -> str | None:
    """Says why calling `module` is not F.linear(x, module.weight, module.bias)."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return f"is a {named(type(module))}"
    if defining_path(nn.Linear.forward) != "torch.nn.modules.linear.Linear.forward":
        return "is a torch.nn.Linear, whose forward was replaced"
    if linear_module.F is not F or not (_is_builtin(F.linear, "linear") or defining_path(F.linear) == _DEEPSPEEDS):
        return f"calls torch.nn.functional.linear, which was replaced by {named(F.linear)}"
    return module_unfused_reason(module)


def activation_name(activation: Any) -> str | None:
    """Returns the name of an activation in `gated_mlp`; None if it has none."""
    return _ACTIVATIONS.get(type(activation))


def activation_unfused_reason(activation: Any) -> str | None:
    """Says why calling `activation` does not compute what its class defines, or that its class is unknown."""
    cls = type(activation)
    if cls not in _ACTIVATIONS:
        known = cls.__module__.split(".")[0] in ("torch", "transformers")
        return f"its activation is {cls.__name__ if known else named(activation)}"
    if defining_path(cls.forward) != f"{named(cls)}.forward":
        return f"its activation is a {named(cls)}, whose forward was replaced"
    if (reason := module_unfused_reason(activation)) is not None:
        return f"its activation {reason}"
    if cls is not GELUTanh:
        return silu_unfused_reason()
    function = activation.act
    is_tanh = type(function) is partial and function.keywords == {"approximate": "tanh"} and not function.args
    return None if is_tanh and _is_builtin(function.func, "gelu") else f"its activation calls {named(function)}"


def silu_unfused_reason() -> str | None:
    """Says by what torch.nn.functional.silu was replaced; None if it was not."""
    if F.silu is _SILU or defining_path(F.silu) == "torch.nn.functional.silu":
        return None
    return f"torch.nn.functional.silu was replaced by {named(F.silu)}"


def _is_builtin(function: Any, name: str) -> bool:
    """Returns whether a function is torch's built-in one of this name."""
    return function is getattr(torch._C._nn, name) and type(function) is BuiltinFunctionType


_LORAS = {f"peft.tuners.lora.{name}" for name in ("layer.Linear", "bnb.Linear4bit", "torchao.TorchaoLoraLinear")}
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)  # FakeTensor: a simulation of the other two


class LoraLinear(NamedTuple):
    """A linear layer, and its LoRA adapter if it has one."""

    base: nn.Linear
    a: nn.Linear | None = None
    b: nn.Linear | None = None
    scale: float = 1.0
    read_quantised: Callable[[nn.Linear], QuantizedWeight] | None = None
    """Reads the base layer's weight, if it is stored in fewer bits."""
    name: str = ""
    """Its name in errors."""

    def read(self) -> Projection:
        """Returns the whole tensors; looks at nothing else. Raises ValueError if they are sharded at present. Under
        ZeRO-3 each call is a collective."""
        base, a, b, scale, read_quantised, name = self
        quantized = None if read_quantised is None else read_quantised(base)
        weight = _whole(name, base.weight) if quantized is None else None
        adapter = () if a is None else (_whole(name, a.weight), _whole(name, b.weight), scale)
        return Projection(weight, base.bias, *adapter, quantized=quantized)


def linears_of(module: nn.Module, names: Iterable[str]) -> tuple[LoraLinear, ...]:
    """Returns the projections of a module that is fused, by their names there."""
    return tuple(split_lora(getattr(module, name), name) for name in names)


def projection_unfused_reason(name: str, module: nn.Module | None, dtype: torch.dtype | None = None) -> str | None:
    """Says why a projection cannot be fused, given the dtype of its products if known. See also
    `process_unfused_reason`."""
    layers = split_lora(module)
    if isinstance(layers, str):
        return f"{name} {layers}"
    computes_in = computing_dtype(layers.base) if is_quantised(layers.base) else None
    if computes_in is not None and dtype not in (None, computes_in):
        return f"{name} computes in {computes_in}, where its input is in {dtype}"
    if not is_plain(bias := layers.base._parameters.get("bias")):
        return f"{name}.bias is a {named(type(bias))}"
    plain = layers[is_quantised(layers.base) : 3]
    for weight in (seen_weight(layer) for layer in plain if layer is not None):
        if not is_plain(weight):
            return f"{name}.weight is a {named(type(weight))}"
        if weight.dtype not in DTYPES:
            return f"{name}.weight is {weight.dtype}"
        if 0 in getattr(weight, "ds_shape", weight.shape):  # such as the weight of no shared expert
            return f"{name}.weight has no elements"
    return None


def is_plain(tensor: torch.Tensor | None) -> bool:
    """Returns whether a tensor is of no class but PyTorch's, or there is none."""
    return tensor is None or type(tensor) in _PLAIN or isinstance(tensor, DTensor)


def own_weights(module: nn.Module) -> list[torch.Tensor]:
    """Returns the parameters of a module without its children's, but with those of its parametrizations."""
    made_of = module.parametrizations.values() if is_parametrized(module) else ()
    return [*module.parameters(recurse=False), *(weight for one in made_of for weight in one.parameters())]


def leaves_of(*modules: nn.Module) -> list[torch.Tensor]:
    """Returns all tensors of the modules that may be trained: parameters, and learned scalings of LoRA adapters, which
    PEFT keeps in a plain dict."""
    found = [parameter for module in modules for parameter in module.parameters()]
    for part in (part for module in modules for part in module.modules()):
        if _is_lora(part):
            found += [scale for scale in part.scaling.values() if isinstance(scale, torch.Tensor)]
    return list({id(leaf): leaf for leaf in found}.values())


def split_lora(module: Any, name: str = "") -> LoraLinear | str:
    """Returns the layers of a plain linear layer, or of a plain LoRA over one. For another module says what it is."""
    if _is_lora(module):
        return _lora_layers(module, name)
    for each in (one for parts in module.parametrizations.values() for one in parts) if is_parametrized(module) else ():
        if type(each) not in PARAMETRIZATIONS and not is_declared(each):  # reading the weight would call it
            return f"has a weight that {named(each)} computes"
    if not is_quantised(module):
        return linear_unfused_reason(module) or LoraLinear(module, name=name)
    calls_linear = type(module).forward is nn.Linear.forward  # torchao's: the weight's class does the rest
    reason = decoding_reason(module) or (linear_unfused_reason if calls_linear else module_unfused_reason)(module)
    return reason or LoraLinear(module, read_quantised=reader_of(module), name=name)


def _is_lora(module: Any) -> bool:
    """Returns whether a module is PEFT's LoRA of a linear layer, plain or quantised, and not of a subclass."""
    return is_one_of(type(module), _LORAS)


def _lora_layers(module: Any, name: str) -> LoraLinear | str:
    """Returns the layers of a plain LoRA of PEFT's: no dropout, at most one active adapter, not merged and disabled."""
    if defining_path(type(module).forward) not in (
        "peft.tuners.lora.layer.Linear.forward",
        "peft.tuners.lora.bnb.Linear4bit.forward",
    ):
        return f"is a {named(type(module))}, whose forward was replaced"
    if (reason := module_unfused_reason(module)) is not None:
        return reason
    base = split_lora(module.base_layer, name)
    if isinstance(base, str):
        return f"is a LoRA adapter whose base layer {base}"
    if base.a is not None:
        return "is a LoRA adapter over another"
    if module.merged and module.disable_adapters:
        return "is a LoRA adapter that is merged and disabled"
    active = [name for name in module.active_adapters if name in module.lora_A]
    if module.merged or module.disable_adapters or not active:
        return base
    if len(active) > 1:
        return f"has {len(active)} active LoRA adapters"
    return _adapted(base, module, active[0])


def _adapted(base: LoraLinear, module: Any, name: str) -> LoraLinear | str:
    """Returns `base` with the adapter `name`, or says why it is not plain."""
    a, b, dropout, scale = (part[name] for part in (module.lora_A, module.lora_B, module.lora_dropout, module.scaling))
    if name in module.lora_variant:
        return f"has a LoRA adapter of another kind, {type(module.lora_variant[name]).__name__}"
    for half, part in (("lora_A", a), ("lora_B", b)):
        if (reason := linear_unfused_reason(part)) is not None:
            return f"has a LoRA adapter whose {half} {reason}"
    if a.bias is not None or b.bias is not None:
        return "has a LoRA adapter with a bias"
    if not isinstance(scale, int | float):
        return f"has a LoRA adapter whose scaling is a {named(type(scale))}"
    if type(dropout) is nn.Dropout and dropout.training and dropout.p > 0:
        return f"{WITH_DROPOUT} {dropout.p}"
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"has a LoRA adapter whose dropout is a {named(type(dropout))}"
    if (reason := module_unfused_reason(dropout)) is not None:
        return f"has a LoRA adapter whose dropout {reason}"
    return base._replace(a=a, b=b, scale=scale)


def _whole(name: str, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, DTensor):
        raise ValueError(
            f"{name}.weight is sharded while its parent runs; with FSDP2 shard {name} together with its parent "
            "(fully_shard(model) alone, or in one group), and leave it out of a tensor-parallel plan"
        )
    return weight


def is_transformed() -> bool:
    """Returns whether a transform of torch.func is active."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()  # else a graph node


def check_untransformed() -> None:
    """Raises ValueError inside a transform of torch.func."""
    if is_transformed():
        raise ValueError(
            "expected no transform of torch.func (grad, vmap, jvp, ...) around a tiled model, whose chunks they cannot "
            "follow: use torch.autograd, or take seqtile off first with seqtile.restore(model)"
        )
