"""The layers of PEFT, bitsandbytes, torchao, Liger and transformers' quantisation that treat each token by itself.

known_layers.txt names them; each was found by reading its forward. Whatever else these libraries have may look at other
tokens, as some of it does.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from seqtile.models.hooks import defining_path
from seqtile.models.placement import class_of, computed_forward, decorated

_CLASSES = frozenset(Path(__file__).with_name("known_layers.txt").read_text().split())
"""Modules, LoRA variants, classes of weights, and ways to scale an input, by their full names."""
_ONE_SCALE = "takes one scale over all its tokens"
_DRAWS = "draws once for all its tokens"
_GENERATOR = "draws from a generator that it keeps"


def is_of_library(home: str) -> bool:
    """Returns whether a Python module is of one of the libraries whose layers are listed here."""
    packages = ("peft", "bitsandbytes", "torchao", "liger_kernel")
    return home.split(".")[0] in packages or home.startswith("transformers.integrations.")


def refusal_of(module: nn.Module) -> str | None:
    """Says why a module of a library may not treat each token by itself, in words that follow its name; None if it
    does. Its submodules are not looked at.

    Of any other module it looks at the forward, if that is of a library, and at the classes of its weights.
    """
    cls = class_of(module)
    name, forward = _name(cls), defining_path(decorated(computed_forward(module))).removesuffix(".forward")
    if is_of_library(cls.__module__) and not _is_listed(cls):
        return f"is a {name}, which may not treat each token by itself"
    if is_of_library(forward) and forward not in _CLASSES:
        return f"runs the forward of {forward}, which may not treat each token by itself"
    condition = _CONDITIONS.get(name, _adapters_reason if name.startswith("peft.") else None)
    if condition is not None and (reason := condition(module)) is not None:
        return f"is a {name} {reason}"
    weights = (weight for weight in module._parameters.values() if weight is not None)
    return next((reason for weight in weights if (reason := _weight_refusal(weight)) is not None), None)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_listed(cls: type) -> bool:
    return _name(cls) in _CLASSES and getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _weight_refusal(weight: torch.Tensor) -> str | None:
    """Says why a product with a weight, as its class computes it, may not treat each token by itself."""
    weight = weight._local_tensor if isinstance(weight, DTensor) else weight
    cls = type(weight)
    if cls.__module__.split(".")[0] == "torch":
        return None
    if not _is_listed(cls):
        return f"has a {_name(cls)}, whose products may not treat each token by itself"
    is_fixed = getattr(weight, "act_quant_scale", None) is not None
    if is_fixed or _is_by_token(getattr(weight, "act_quant_kwargs", None)):
        return None
    return f"has a {_name(cls)}, whose product {_ONE_SCALE}"


def _is_by_token(quantisation: Any) -> bool:
    """Returns whether one of torchao's settings scales each token of an input by itself."""
    if quantisation is None:
        return True
    granularity = quantisation.granularity
    return _is_listed(type(granularity)) and getattr(granularity, "dim", -1) == -1


def _adapters_reason(module: Any) -> str | None:
    """Says what an active adapter of a layer of PEFT's does with other tokens."""
    if getattr(module, "disable_adapters", True) or getattr(module, "merged_adapters", ()):
        return None
    for adapter in module.active_adapters:
        variant = getattr(module, "lora_variant", {}).get(adapter)
        kind = class_of(module) if variant is None else type(variant)
        if not _is_listed(kind):
            return f"with a {_name(kind)}, which may not treat each token by itself"
        looks_further, what = _ADAPTERS.get(_name(kind), (None, ""))
        if looks_further is not None and looks_further(module, adapter):
            return f"with an adapter that {what}"
    return None


def _drops_ranks(layer: Any, adapter: str) -> bool:
    return layer.training and bool(layer.rank_dropout.get(adapter) or layer.module_dropout.get(adapter))


def _drops_blocks(layer: Any, adapter: str) -> bool:
    return layer.training and adapter in layer.boft_dropout and not isinstance(layer.boft_dropout[adapter], nn.Identity)


def _draws_alone(layer: Any, adapter: str) -> bool:
    return layer.pvera_generator.get(adapter) is not None


_ADAPTERS: dict[str, tuple[Callable[[Any, str], bool], str]] = {
    # a layer or a LoRA variant of PEFT's -> whether its adapter looks at more than one token, and what it then does
    "peft.tuners.boft.layer.Linear": (_drops_blocks, _DRAWS),
    "peft.tuners.lily.layer.Linear": (
        lambda layer, adapter: adapter in layer.lily_A,
        "weighs its experts by their mean over all its tokens",
    ),
    "peft.tuners.loha.layer.Linear": (_drops_ranks, _DRAWS),
    "peft.tuners.lokr.layer.Linear": (_drops_ranks, _DRAWS),
    "peft.tuners.lora.variants.ALoraLinearVariant": (
        lambda *_: True,
        "begins at a position, counted from the end of the sequence (aLoRA)",
    ),
    "peft.tuners.lora.variants.MontecloraLinearVariant": (lambda layer, _: layer.training, _DRAWS),
    "peft.tuners.lora.variants.VeloraLinearVariant": (
        lambda layer, adapter: layer.training and layer.lora_velora_init_type[adapter] != "random",
        "keeps a mean of its tokens",
    ),
    "peft.tuners.poly.layer.Linear": (
        lambda layer, adapter: adapter in layer.poly_lora_A,
        "needs the task of each sequence",
    ),
    "peft.tuners.pvera.bnb.Linear4bit": (_draws_alone, _GENERATOR),
    "peft.tuners.pvera.bnb.Linear8bitLt": (_draws_alone, _GENERATOR),
    "peft.tuners.pvera.layer.Linear": (_draws_alone, _GENERATOR),
}


def _eight_bits_reason(module: Any) -> str | None:
    if module.state.threshold > 0:
        return "with a threshold, which looks for outliers in all its tokens"
    return f"that trains its weight, whose gradient {_ONE_SCALE}" if module.state.has_fp16_weights else None


def _float8_reason(module: Any) -> str | None:
    """Says what a layer for training in float8 scales by all its tokens: its input, its gradient, or its weight's. Of a
    float8 number a scale that is a power of two changes nothing but the exponent."""
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
