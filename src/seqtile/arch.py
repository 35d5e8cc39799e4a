"""The table of architectures. One entry each; a field is added only when a real architecture needs it."""

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True)
class Arch:
    """Where Hugging Face keeps the classes of an architecture."""

    model_type: str
    """`config.model_type`, and unless `module` says otherwise the name of the modeling module."""
    prefix: str
    """What the names of its classes begin with."""
    module: str | None = None
    softcap: str | None = None
    """The config's name for the soft cap of its logits."""
    logit_scale: str | None = None
    """The config's name for what its logits are multiplied by."""
    logit_divisor: str | None = None
    """The config's name for what its logits are divided by."""
    mlps: tuple[str, ...] = ("MLP",)
    """What follows the prefix in the names of the classes whose forwards are tiled as MLPs."""

    layer: bool = False
    """Whether its layers have Llama's shape, norm, attention, norm, MLP one after the other, and can be tiled whole."""
    windows: bool = False
    """Whether its layers tell attention of a sliding window."""
    residual_scale: str | None = None
    """Its layers' name for what is multiplied to what attention and MLP add."""

    @property
    def modeling_name(self) -> str:
        name = self.module or self.model_type
        return f"transformers.models.{name}.modeling_{name}"

    @property
    def modeling(self) -> ModuleType:
        return sys.modules.get(self.modeling_name) or import_module(self.modeling_name)  # a compiler traces no import

    @property
    def causal_lm_name(self) -> str:
        return f"{self.prefix}ForCausalLM"

    @property
    def mlp_names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}{name}" for name in self.mlps)

    @property
    def layer_class(self) -> type:
        return getattr(self.modeling, f"{self.prefix}DecoderLayer")

    @property
    def base_class(self) -> type:
        """The model without its head."""
        return getattr(self.modeling, f"{self.prefix}Model")

    @property
    def norm_name(self) -> str:
        return f"{self.prefix}RMSNorm"

    @property
    def routed(self) -> bool:
        """Whether it is a mixture of experts, whose causal LM may add a loss that balances them."""
        return "Experts" in self.mlps

    @property
    def causal_lm(self) -> type:
        return getattr(self.modeling, self.causal_lm_name)


ARCHS = {
    arch.model_type: arch
    for arch in (
        Arch("cohere", "Cohere", logit_scale="logit_scale"),
        Arch("gemma2", "Gemma2", softcap="final_logit_softcapping"),
        Arch("gemma3_text", "Gemma3", module="gemma3", softcap="final_logit_softcapping"),
        Arch("glm4", "Glm4"),
        Arch("granite", "Granite", logit_divisor="logits_scaling", layer=True, residual_scale="residual_multiplier"),
        Arch("llama", "Llama", layer=True),
        Arch("mistral", "Mistral", layer=True, windows=True),
        Arch("mixtral", "Mixtral", mlps=("Experts",)),
        Arch("olmo2", "Olmo2"),
        Arch("phi3", "Phi3"),
        Arch("qwen2", "Qwen2", layer=True, windows=True),
        Arch("qwen3", "Qwen3", layer=True, windows=True),
        Arch("qwen3_moe", "Qwen3Moe", mlps=("MLP", "Experts")),
        Arch("smollm3", "SmolLM3", layer=True, windows=True),
    )
}


def find_arch(model_type: str) -> Arch:
    """The entry of `model_type`; a ValueError that lists the supported ones if there is none."""
    if model_type not in ARCHS:
        raise ValueError(f"model type {model_type!r} is not supported; seqtile supports {', '.join(ARCHS)}")
    return ARCHS[model_type]
