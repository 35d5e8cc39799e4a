"""Finds what in a part of a model is neither known nor declared: such a part is left untiled, see `seqtile.tokenwise`.

....layers.#.mlp            LlamaMLP      Hugging Face's, which proof/ compares on a small model
....layers.#.mlp.act_fn     user.Act      neither known nor declared: this MLP is left untiled
....layers.#.mlp.up_proj    Linear4bit    of a library whose layers are listed in known_layers.txt
....layers.#.mlp.down_proj  nn.Linear     of PyTorch, treats each token by itself

Nothing is called or copied: classes, functions and hooks are recognised by where they are written.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dis import get_instructions
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from seqtile.declared import MARK, is_declared
from seqtile.models.functions import decorated, defining_path, home_of, innermost, is_one_of, named
from seqtile.models.hooks import unknown_hook
from seqtile.models.placement import class_of, computed_forward
from seqtile.models.read import PARAMETRIZATIONS, function_modes
from seqtile.ops.state import names_in

_NORMS = (nn.LayerNorm, nn.RMSNorm)
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_OF_TORCHS_OWN = ("torch.nn.modules.", "torch.nn.utils.", "torch._dynamo.", "torch.distributed.", "torch.utils.")
_OF_TORCHS_OWN += ("torch._compile",)  # in which torch.utils.checkpoint's functions are wrapped
HUGGING_FACE = ("transformers", "transformers_modules")  # the latter: code that from_pretrained loads from the hub
_OTHERS = ("seqtile", "accelerate", "deepspeed")
UNKNOWN = "which is neither known nor declared to treat each token by itself"
_LIBRARIES = ("peft", "bitsandbytes", "torchao", "liger_kernel")
_CLASSES = frozenset(Path(__file__).with_name("known_layers.txt").read_text().split())
"""Modules, LoRA variants, classes of weights, and ways to scale an input, of PyTorch, of these libraries and of
transformers' quantisation, by their full names. The forward of each was read: it treats each token by itself. Classes
of these libraries that are not listed may mix tokens; some do."""
_ACTIVATIONS = {name.rpartition(".")[2] for name in _CLASSES if name.startswith("torch.nn.modules.activation.")}
_FUNCTIONS = {name.lower() for name in _ACTIVATIONS} | {"leaky_relu"}
CALLED = (  # by PyTorch's modules, by Hugging Face's code, or by a call of any module
    *((F, name) for name in "linear silu gelu relu dropout layer_norm rms_norm softmax".split()),
    *((torch, name) for name in ("sigmoid", "tanh")),
    *((nn.Module, name) for name in ("__call__", "_call_impl")),
)
_ONE_SCALE = "takes one scale over all its tokens"
_DRAWS = "draws once for all its tokens"
_GENERATOR = "draws from a generator that it keeps"
_WEIGHS = "weighs its experts by their mean over all its tokens"
_BEGINS = "begins at a position, counted from the end of the sequence (aLoRA)"
_PVERA = ("bnb.Linear4bit", "bnb.Linear8bitLt", "layer.Linear")
_NEEDS_TASKS = "needs the task of each sequence"


@torch.compiler.disable(reason="seqtile looks at what a part is made of")
def unknown_in(root: nn.Module, name: str = "") -> str | None:
    """Says which module, function or hook in a part of a model is neither known nor declared; None if none is.

    With `name`, such as "head", `root` is called once a chunk, so its own hooks count. Without, `root` is the part: it
    is called once, with all tokens, and its hooks run once. A compiler cannot trace it. The answer is the same in
    compiled code, which may hand it to code that the compiler left eager, such as past its recompile limit.
    """
    if (hook := unknown_hook(None)) is not None:
        return f"every module has a hook, {named(hook)}, {UNKNOWN}"
    for mode in function_modes():
        return f"the TorchFunctionMode {named(type(mode))} is active"
    for function in (getattr(*each) for each in CALLED):
        if not (is_known_home(_home_of(function)) or is_declared(function)):
            return f"PyTorch calls {named(function)}, {UNKNOWN}"
    for place, module, maker, is_inside_declared in _walk(root, name):
        its = f"its {place}" if place else "it"
        if place and (hook := unknown_hook(module)) is not None:
            return f"{its} has a hook, {named(hook)}, {UNKNOWN}"
        if not is_inside_declared and (reason := _unknown(module, maker)) is not None:
            return f"{its} {reason}"
    return None


def is_known_home(home: str) -> bool:
    return home.split(".")[0] in ("torch", *HUGGING_FACE, *_OTHERS) or is_of_library(home)


def _is_of(module: nn.Module, *packages: str) -> bool:
    return class_of(module).__module__.split(".")[0] in packages


def _walk(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, nn.Module | None, bool]]:
    """Yields the name of each module in a part, the module, the nearest module of Hugging Face's around it, and whether
    a module around it is declared."""
    waiting: list[tuple[str, nn.Module, nn.Module | None, bool]] = [(name, root, None, False)]
    while waiting:
        name, module, maker, is_inside_declared = waiting.pop()
        yield name, module, maker, is_inside_declared
        is_inside_declared |= is_declared(module) or is_declared(class_of(module))
        around = module if _is_of(module, *HUGGING_FACE) else maker, is_inside_declared
        children = [(f"{name}.{key}".lstrip("."), child, *around) for key, child in module._modules.items()]
        waiting += [each for each in reversed(children) if each[1] is not None]


def _unknown(module: nn.Module, maker: nn.Module | None) -> str | None:
    """Says what a module is, or which function it calls, that is neither known nor declared; None if all is."""
    if MARK in vars(module):
        return None
    cls, functions = class_of(module), {}
    if not is_declared(cls):
        if (refusal := refusal_of(module)) is not None:
            return refusal
        if not _is_known_class(cls, module, maker):
            return f"is a {named(cls)}, {UNKNOWN}"
        if _is_of(module, *HUGGING_FACE):
            for base in reversed(cls.__mro__):
                functions |= {name: each for name, each in vars(base).items() if type(each) is FunctionType}
            functions |= _called_by(computed_forward(module)) | _experts_function(module)
        functions |= {name: getattr(type(module), name) for name in ("__call__", "_call_impl")}
        functions["forward"] = computed_forward(module)
        functions |= {name: value for name, value in vars(module).items() if callable(value)}
        functions.pop("_torchdynamo_orig_callable", None)  # the forward of the module that a compiled one holds
    elif "forward" in vars(module):  # which a declaration of the class does not cover
        functions = {"forward": vars(module)["forward"]}
    for name, function in functions.items():
        if not isinstance(function, type) and not _is_known_function(function, module):
            return f"has {named(function)} as its {name}, {UNKNOWN}"
    hooks = [vars(module).get("_hf_hook")]  # Accelerate's, which calls it from a forward of its own
    for each in hooks:
        hooks += getattr(each, "hooks", ())
        if each is not None and type(each).__module__.split(".")[0] != "accelerate":
            return f"has Accelerate call {named(type(each))}, {UNKNOWN}"
    return None


def _is_known_class(cls: type, module: nn.Module, maker: nn.Module | None) -> bool:
    package, *path = cls.__module__.split(".")
    if package == "torch":
        if is_one_of(cls, _CLASSES) or cls in PARAMETRIZATIONS or any(name in module._modules for name in _WRAPPED):
            return True
        if cls in _NORMS and len(module.normalized_shape) == 1:
            return True
        return maker is not None and _is_of(maker, "transformers") and cls.__name__ in _made_by(class_of(maker))
    if package in HUGGING_FACE:
        is_shared = package == "transformers" and "models" not in path
        return is_shared or maker is None or cls.__name__ in _made_by(class_of(maker))
    return package == "seqtile" or is_of_library(cls.__module__)


def _is_known_function(function: Any, owner: nn.Module) -> bool:
    """Returns whether what a module calls is known or declared: a function, a partial with all that it is given, a
    method of another module, a module."""
    inner, bound = innermost(function), function.__self__ if type(function) is MethodType else None
    if is_declared(function) or is_declared(inner):
        return True
    if type(function) is partial:
        given = filter(callable, (*function.args, *function.keywords.values()))
        if not all(isinstance(each, type) or each is owner or _is_known_function(each, owner) for each in given):
            return False
    for each in (inner, bound):
        if isinstance(each, nn.Module) and each is not owner and class_of(each).__module__ != "kernels.layer.layer":
            return unknown_in(each, "its") is None
    if isinstance(inner, nn.Module):  # the kernels package makes modules of functions
        return "forward" not in vars(inner)
    home = _home_of(inner)
    if home.split(".")[0] == "torch":
        return home.startswith(_OF_TORCHS_OWN) or getattr(inner, "__name__", "") in _FUNCTIONS
    return is_known_home(home)


def _home_of(function: Any) -> str:
    """Returns the name of the Python module in which a function or a class was written."""
    function = innermost(function)
    if type(function) is BuiltinFunctionType or issubclass(type(function), type):  # such as torch.tanh
        return function.__module__ or type(function.__self__).__module__
    if type(function).__module__ == "functools":  # a cache
        function = function.__wrapped__
    return home_of(decorated(function))


def _called_by(forward: Any) -> dict[str, Any]:
    """Returns what a forward, and the functions of its file that it calls, call by a global name, such as the rotary
    embedding, but not attention's function, which gets all tokens."""
    found: dict[str, Any] = {}
    waiting = [forward]
    while waiting:
        function = decorated(waiting.pop())
        code = getattr(function, "__code__", None)
        read = () if code is None else (each.argval for each in get_instructions(code) if each.opname == "LOAD_GLOBAL")
        for name in {*read} - {*found, "eager_attention_forward"}:
            if callable(value := function.__globals__.get(name)):
                found[name] = value
                waiting += [value] if getattr(value, "__globals__", None) is function.__globals__ else []
    return found


def _experts_function(module: nn.Module) -> dict[str, Any]:
    """Returns the function of Hugging Face's registry that computes a mixture's experts."""
    registry = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", {})
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return {"experts_implementation": registry[name]} if name in registry else {}


@cache
def _made_by(cls: type) -> set[str]:
    """Returns the names of the classes that a class's `__init__`, and functions that it calls, use, or are given."""
    names: set[str] = set()
    waiting: list[Any] = [vars(base).get("__init__") for base in cls.__mro__ if base is not nn.Module]
    while waiting:
        function = innermost(inspect.unwrap(waiting.pop()))
        if type(function) is not FunctionType:
            continue
        names |= {getattr(each, "__name__", "") for each in function.__annotations__.values()}
        for name in names_in(function.__code__) - names:
            value = function.__globals__.get(name, getattr(cls, name, None))
            names |= {name, getattr(value, "__name__", name)}
            if isinstance(value, dict):
                names |= {getattr(each, "__name__", "") for each in value.values()}
            elif type(value) is FunctionType and value.__globals__ is function.__globals__:
                waiting.append(value)
    return names


def is_of_library(home: str) -> bool:
    """Returns whether a Python module is of one of the libraries whose layers are listed here."""
    return home.split(".")[0] in _LIBRARIES or home.startswith("transformers.integrations.")


def refusal_of(module: nn.Module) -> str | None:
    """Says why a module of a library may not treat each token by itself, in words that follow its name; None if it
    does. Its submodules are not looked at.

    For a module of no library it checks the forward, if a library defines that, and the classes of the weights.
    """
    cls = class_of(module)
    name, forward = named(cls), defining_path(decorated(computed_forward(module))).removesuffix(".forward")
    if is_of_library(cls.__module__) and not is_one_of(cls, _CLASSES):
        return f"is a {name}, which may not treat each token by itself"
    if is_of_library(forward) and forward not in _CLASSES:
        return f"runs the forward of {forward}, which may not treat each token by itself"
    condition = _CONDITIONS.get(name, _adapters_reason if name.startswith("peft.") else None)
    if condition is not None and (reason := condition(module)) is not None:
        return f"is a {name} {reason}"
    held = (*module._parameters.values(), *module._buffers.values())
    weights = (weight for weight in held if weight is not None)
    return next((reason for weight in weights if (reason := _weight_refusal(weight)) is not None), None)


def _weight_refusal(weight: torch.Tensor) -> str | None:
    """Says why a product with a weight, as its class computes it, may not treat each token by itself."""
    weight = weight._local_tensor if isinstance(weight, DTensor) else weight
    cls = type(weight)
    if cls.__module__.split(".")[0] == "torch":
        return None
    if not is_one_of(cls, _CLASSES):
        return f"has a {named(cls)}, whose products may not treat each token by itself"
    is_fixed = getattr(weight, "act_quant_scale", None) is not None
    if is_fixed or _is_by_token(getattr(weight, "act_quant_kwargs", None)):
        return None
    return f"has a {named(cls)}, whose product {_ONE_SCALE}"


def _is_by_token(quantisation: Any) -> bool:
    """Returns whether one of torchao's settings scales each token of an input by itself."""
    if quantisation is None:
        return True
    granularity = quantisation.granularity
    return is_one_of(type(granularity), _CLASSES) and getattr(granularity, "dim", -1) == -1


def _adapters_reason(module: Any) -> str | None:
    """Says what an active adapter of a layer of PEFT's does with other tokens."""
    if getattr(module, "disable_adapters", True) or getattr(module, "merged_adapters", ()):
        return None
    for adapter in module.active_adapters:
        variant = getattr(module, "lora_variant", {}).get(adapter)
        kind = class_of(module) if variant is None else type(variant)
        if not is_one_of(kind, _CLASSES):
            return f"with a {named(kind)}, which may not treat each token by itself"
        looks_further, what = _ADAPTERS.get(named(kind), (None, ""))
        if looks_further is not None and looks_further(module, adapter):
            return f"with an adapter that {what}"
    return None


def _drops_ranks(layer: Any, adapter: str) -> bool:
    return layer.training and bool(layer.rank_dropout.get(adapter) or layer.module_dropout.get(adapter))


def _drops_blocks(layer: Any, adapter: str) -> bool:
    return layer.training and adapter in layer.boft_dropout and not isinstance(layer.boft_dropout[adapter], nn.Identity)


def _keeps_a_mean(layer: Any, adapter: str) -> bool:
    return layer.training and layer.lora_velora_init_type[adapter] != "random"


def _draws_alone(layer: Any, adapter: str) -> bool:
    return layer.pvera_generator.get(adapter) is not None


_ADAPTERS: dict[str, tuple[Callable[[Any, str], bool], str]] = {
    # a layer or a LoRA variant of PEFT's -> whether its adapter looks at more than one token, and what it then does
    "peft.tuners.boft.layer.Linear": (_drops_blocks, _DRAWS),
    "peft.tuners.lily.layer.Linear": (lambda layer, adapter: adapter in layer.lily_A, _WEIGHS),
    "peft.tuners.loha.layer.Linear": (_drops_ranks, _DRAWS),
    "peft.tuners.lokr.layer.Linear": (_drops_ranks, _DRAWS),
    "peft.tuners.lora.variants.ALoraLinearVariant": (lambda *_: True, _BEGINS),
    "peft.tuners.lora.variants.MontecloraLinearVariant": (lambda layer, _: layer.training, _DRAWS),
    "peft.tuners.lora.variants.VeloraLinearVariant": (_keeps_a_mean, "keeps a mean of its tokens"),
    "peft.tuners.poly.layer.Linear": (lambda layer, adapter: adapter in layer.poly_lora_A, _NEEDS_TASKS),
    **dict.fromkeys((f"peft.tuners.pvera.{name}" for name in _PVERA), (_draws_alone, _GENERATOR)),
}


def _eight_bits_reason(module: Any) -> str | None:
    if module.state.threshold > 0:
        return "with a threshold, which looks for outliers in all its tokens"
    return f"that trains its weight, whose gradient {_ONE_SCALE}" if module.state.has_fp16_weights else None


def _float8_reason(module: Any) -> str | None:
    """Says what a layer for training in float8 scales by all its tokens: its input, its gradient, or its weight's. A
    scale that is a power of two changes only the exponent of a float8 number."""
    config = module.config
    for cast in (config.cast_config_input, config.cast_config_grad_output):
        if cast.scaling_type.name != "DISABLED" and cast.scaling_granularity.name != "AXISWISE":
            return f"that {_ONE_SCALE}"
    of_weight = (config.cast_config_input_for_grad_weight, config.cast_config_grad_output_for_grad_weight)
    rounds = any(cast.scaling_type.name != "DISABLED" for cast in of_weight) and not config.round_scales_to_power_of_2
    return f"whose weight's gradient {_ONE_SCALE}" if rounds else None


def _simulated_reason(module: Any) -> str | None:
    """Says what a layer that simulates quantisation scales, or rounds, over all its tokens."""
    config = getattr(module.activation_fake_quantizer, "config", None)
    if config is not None and not (_is_by_token(config) and getattr(config, "is_dynamic", True)):
        return f"that {_ONE_SCALE}"
    rounds = type(module.weight_fake_quantizer).__name__ == "Float8FakeQuantizer"
    return "whose weight's gradient is rounded once it is summed over all its tokens" if rounds else None


_CONDITIONS: dict[str, Callable[[Any], str | None]] = {
    "bitsandbytes.nn.modules.Linear8bitLt": _eight_bits_reason,
    "torchao.float8.float8_linear.Float8Linear": _float8_reason,
    "torchao.quantization.qat.linear.FakeQuantizedLinear": _simulated_reason,
    "torchao.quantization.qat.linear.Int8DynActInt4WeightQATLinear": _simulated_reason,
}
