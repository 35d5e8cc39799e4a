"""The public faces: one line that tiles a Hugging Face model."""

from collections.abc import Callable

from torch import nn

from seqtile.models.arch import Arch, find_arch
from seqtile.models.patch import apply, model_type_of, restore
from seqtile.models.status import status

__all__ = [
    "apply_seqtile",
    "apply_seqtile_to_cohere",
    "apply_seqtile_to_gemma2",
    "apply_seqtile_to_gemma3_text",
    "apply_seqtile_to_glm4",
    "apply_seqtile_to_granite",
    "apply_seqtile_to_llama",
    "apply_seqtile_to_mistral",
    "apply_seqtile_to_olmo2",
    "apply_seqtile_to_phi3",
    "apply_seqtile_to_qwen2",
    "apply_seqtile_to_qwen3",
    "apply_seqtile_to_smollm3",
    "restore",
    "status",
]


def apply_seqtile(model: nn.Module, *, mlp: bool = True, loss: bool = True, chunk_tokens: int | None = None) -> None:
    """Tiles one model, whatever its architecture: looked up from `model.config.model_type`.

    See `apply_seqtile_to_llama` for the arguments. ValueError for a model type that is not supported.
    """
    apply(find_arch(model_type_of(model)), model, mlp=mlp, loss=loss, chunk_tokens=chunk_tokens)


def _entry(arch: Arch) -> Callable[..., None]:
    def apply_to(
        model: nn.Module | None = None, *, mlp: bool = True, loss: bool = True, chunk_tokens: int | None = None
    ) -> None:
        if model is not None and model_type_of(model) != arch.model_type:
            raise ValueError(
                f"expected a {arch.model_type} model, got {model_type_of(model)!r}; use seqtile.apply_seqtile(model)"
            )
        apply(arch, model, mlp=mlp, loss=loss, chunk_tokens=chunk_tokens)

    apply_to.__name__ = apply_to.__qualname__ = f"apply_seqtile_to_{arch.model_type}"
    apply_to.__doc__ = f"""Tiles {arch.prefix} models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone; None tiles Hugging Face's classes, for every {arch.causal_lm_name} built from
            then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: in training, with labels, no logits are computed and none are returned.
        chunk_tokens: tokens a tile; None for the rule of `seqtile.ops.tiles`.

    Applying twice changes nothing. Apply after Liger, whose RMSNorm and RoPE stay. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are read directly. What cannot be (quantised layers, other adapters,
    dropout, unusual activations, hooks) is called as it is, tile by tile, which costs one product more of the loss;
    `seqtile.status` tells which.

    Raises ValueError, and changes nothing, for what it cannot honour, such as another loss function.
    """
    return apply_to


apply_seqtile_to_cohere = _entry(find_arch("cohere"))
apply_seqtile_to_gemma2 = _entry(find_arch("gemma2"))
apply_seqtile_to_gemma3_text = _entry(find_arch("gemma3_text"))
apply_seqtile_to_glm4 = _entry(find_arch("glm4"))
apply_seqtile_to_granite = _entry(find_arch("granite"))
apply_seqtile_to_llama = _entry(find_arch("llama"))
apply_seqtile_to_mistral = _entry(find_arch("mistral"))
apply_seqtile_to_olmo2 = _entry(find_arch("olmo2"))
apply_seqtile_to_phi3 = _entry(find_arch("phi3"))
apply_seqtile_to_qwen2 = _entry(find_arch("qwen2"))
apply_seqtile_to_qwen3 = _entry(find_arch("qwen3"))
apply_seqtile_to_smollm3 = _entry(find_arch("smollm3"))
