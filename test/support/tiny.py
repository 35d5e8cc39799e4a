"""Tiny models of every supported architecture, batches for them, and Liger applied and removed."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import numpy
import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

import seqtile
from seqtile.arch import ARCHS
from seqtile.kernels.dispatch import triton
from seqtile.ops.chunks import is_trial
from seqtile.renamed import enable_checkpointing

OLDEST = Version(transformers.__version__) < Version("5.17")  # the suite runs on it and on the pinned
VOCAB = 211
CHUNK = 50  # tokens a chunk in these tests
_SHAPE = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 130, "num_hidden_layers": 2}
_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GEMMA = {"head_dim": 12, "sliding_window": 40, "final_logit_softcapping": 3.0}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 72}
_EXTRA = {
    "cohere": {"logit_scale": 0.25},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm4": {"head_dim": 12},
    "granite": {"logits_scaling": 3.0, "mlp_bias": True},
    "mistral": {"sliding_window": 40},
    "mixtral": {"intermediate_size": 136, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 12, "mlp_only_layers": [1]} | _EXPERTS,
    "smollm3": {"mlp_bias": True},
}
_CAUSAL_LMS = {name: MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]] for name in ARCHS}
CLASSES = {name: (cls.config_class, cls, _EXTRA.get(name, {})) for name, cls in _CAUSAL_LMS.items()}


def modeling_of(arch: str) -> ModuleType:
    return sys.modules[_CAUSAL_LMS[arch].__module__]


def name_of_class(arch: str, kind: str) -> str:
    """Returns the name of an architecture's class of a kind, such as "DecoderLayer"."""
    return _CAUSAL_LMS[arch].__name__.removesuffix("ForCausalLM") + kind


MLPS = {name: [name_of_class(name, "MLP")] for name in ARCHS}
MLPS |= {"mixtral": ["MixtralExperts"], "qwen3_moe": ["Qwen3MoeMLP", "Qwen3MoeExperts"]}


def config_of(arch: str, **changes: object):
    config_class, _, extra = CLASSES[arch]
    return config_class(**_SHAPE | extra | changes)


def build(arch: str, device: str = "cpu", **changes: object) -> nn.Module:
    """Returns a model in training mode with larger random weights than usual, so that no value is tiny."""
    model = CLASSES[arch][1](config_of(arch, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(device).train()


def gentle(arch: str, device: str = "cpu", **changes: object) -> nn.Module:
    """Like `build`, with weights so small that training with a learning rate of 1 does not diverge."""
    model = build(arch, device, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def tiled_copy(model: nn.Module, **options: object) -> nn.Module:
    tiled = copy.deepcopy(model)
    seqtile.apply_seqtile(tiled, **{"chunk_tokens": CHUNK} | options)
    return tiled


def batch_of(batch_size: int, length: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns input_ids, attention_mask and labels: rows of different lengths, each with an unlabelled prompt."""
    ids = torch.randint(3, VOCAB, (batch_size, length), device=device)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    for row in range(batch_size):
        end = length - 13 * row
        mask[row, end:] = 0
        labels[row, end:] = -100
        labels[row, : 5 + row] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def checkpointing(model: nn.Module, reentrant: bool | None) -> None:
    """Turns on activation checkpointing of the given kind; None leaves it off."""
    if reentrant is not None:
        enable_checkpointing(model, reentrant)


def loss_and_gradients(model: nn.Module, **inputs: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def counting(calls: list, function: Callable) -> Callable:
    """Returns the function with its calls counted, except those of the first step's comparison."""

    def counted(*args: object, **options: object) -> object:
        if not is_trial():
            calls.append(1)
        return function(*args, **options)

    return counted


def interpreted() -> bool:
    return triton is not None and triton.knobs.runtime.interpret


def broken_interpreter() -> str | None:
    """Says why Triton's interpreter does not run here; None if it does."""
    old, new = Version("3.7"), Version("2.5")
    if triton is not None and Version(triton.__version__) < old and Version(numpy.__version__) >= new:
        return f"the interpreter of triton {triton.__version__} fails with numpy {numpy.__version__}"
    return None


def liger_or_skip(arch: str, device: str) -> None:
    liger = pytest.importorskip("liger_kernel.transformers")
    if not hasattr(liger, f"apply_liger_kernel_to_{arch}"):
        pytest.skip(f"Liger does not know {arch}")
    if device == "cpu" and not interpreted():
        pytest.skip("Liger's kernels need a GPU or the interpreter")


class InterpretedFloat(float):
    """A float with `to`, as scalars in compiled Triton kernels have."""

    def to(self, dtype: object) -> "InterpretedFloat":
        return self


def apply_liger(arch: str, model: nn.Module | None = None, mlp: bool = True, **options: object) -> None:
    """Applies Liger's patch to the classes or to `model`, and adapts its kernels to Triton's interpreter if that runs.

    `mlp=False` leaves the MLPs out. Experts are always left out: Liger's kernel for them needs a GPU.
    """
    liger = pytest.importorskip("liger_kernel.transformers")
    if not mlp or ARCHS[arch].routed:
        options["geglu" if arch.startswith("gemma") else "swiglu"] = False
    getattr(liger, f"apply_liger_kernel_to_{arch}")(model=model, **options)
    if interpreted():
        import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: triton.language.rsqrt(x)
        import_module("liger_kernel.ops.geglu").tanh = lambda x: 2 * triton.language.sigmoid(2 * x) - 1
        import_module("liger_kernel.ops.swiglu").float = InterpretedFloat  # of its multipliers
        if model is not None:
            make_interpretable(model)


def make_interpretable(model: nn.Module) -> None:
    """Lets Triton's interpreter, which passes plain floats to kernels, run Liger's norms in `model`."""
    for module in model.modules():
        for name in ("variance_epsilon", "offset"):
            if hasattr(module, name):
                setattr(module, name, InterpretedFloat(getattr(module, name)))


@contextmanager
def modeling_restored() -> Iterator[None]:
    """Restores all modeling modules, causal-LM classes and torch's cross-entropy, since Liger has no way to."""
    modules = {arch: dict(vars(modeling_of(arch))) for arch in CLASSES}
    forwards = {cls: cls.forward for _, cls, _ in CLASSES.values()}
    cross_entropy = torch.nn.functional.cross_entropy
    try:
        yield
    finally:
        for arch, before in modules.items():
            vars(modeling_of(arch)).update(before)
        for cls, forward in forwards.items():
            cls.forward = forward
        torch.nn.functional.cross_entropy = cross_entropy
