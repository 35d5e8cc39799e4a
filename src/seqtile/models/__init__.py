"""The public faces: one line that tiles a Hugging Face model."""

from collections.abc import Callable

from torch import nn

from seqtile.models.arch import ARCHS, Arch, find_arch
from seqtile.models.patch import apply, model_type_of, restore, unwrapped
from seqtile.models.status import status

__all__ = [
    "ENTRIES",
    "apply_seqtile",
    "restore",
    "status",
]


def apply_seqtile(model: nn.Module, *, mlp: bool = True, loss: bool = True, chunk_tokens: int | None = None) -> None:
    """Tiles one model, whatever its architecture: looked up from `model.config.model_type`.

    See `apply_seqtile_to_llama` for the arguments. ValueError for a model type that is not supported.
    """
    model = unwrapped(model)
    apply(find_arch(model_type_of(model)), model, mlp=mlp, loss=loss, chunk_tokens=chunk_tokens)


def _entry(arch: Arch) -> Callable[..., None]:
    def apply_to(
        model: nn.Module | None = None, *, mlp: bool = True, loss: bool = True, chunk_tokens: int | None = None
    ) -> None:
        model = unwrapped(model)
        if model is not None and model_type_of(model) != arch.model_type:
            raise ValueError(
                f"expected a {arch.model_type} model, got {model_type_of(model)!r}; use seqtile.apply_seqtile(model)"
            )
        apply(arch, model, mlp=mlp, loss=loss, chunk_tokens=chunk_tokens)

    apply_to.__name__ = apply_to.__qualname__ = f"apply_seqtile_to_{arch.model_type}"
    apply_to.__doc__ = f"""Tiles {arch.prefix} models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone, also in PEFT's wrapper; None tiles Hugging Face's classes, for every
            {arch.causal_lm_name} built from then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: in training, with labels, no logits are computed and none are returned.
        chunk_tokens: tokens a tile; None for the rule of `seqtile.ops.tiles`.

    Applying twice changes nothing. Apply after Liger, whose RMSNorm and RoPE stay. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are read directly. What cannot be (experts, quantised layers, other
    adapters, dropout, unusual activations, hooks) is called as it is, tile by tile, which costs one product more of the
    loss; `seqtile.status` tells which.

    Raises ValueError, and changes nothing, for what it cannot honour, such as another loss function.
    """
    return apply_to


ENTRIES = {f"apply_seqtile_to_{model_type}": _entry(arch) for model_type, arch in ARCHS.items()}
