"""The public faces: one line that tiles a Hugging Face model."""

from collections.abc import Callable

from torch import nn

from seqtile.arch import ARCHS, Arch, find_arch
from seqtile.models.patch import apply, model_type_of, restore, unwrapped
from seqtile.models.placement import Options
from seqtile.models.status import status

__all__ = [
    "ENTRIES",
    "apply_seqtile",
    "restore",
    "status",
]


def apply_seqtile(
    model: nn.Module,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Tiles one model, whatever its architecture: looked up from `model.config.model_type`.

    See `apply_seqtile_to_llama` for the arguments. ValueError for a model type that is not supported.
    """
    model = unwrapped(model)
    apply(find_arch(model_type_of(model)), model, Options(mlp, loss, layer, head_groups, chunk_tokens))


def _entry(arch: Arch) -> Callable[..., None]:
    def apply_to(
        model: nn.Module | None = None,
        *,
        mlp: bool = True,
        loss: bool = True,
        layer: bool = False,
        head_groups: int | str | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        model = unwrapped(model)
        if model is not None and model_type_of(model) != arch.model_type:
            raise ValueError(
                f"expected a {arch.model_type} model, got {model_type_of(model)!r}; use seqtile.apply_seqtile(model)"
            )
        apply(arch, model, Options(mlp, loss, layer, head_groups, chunk_tokens))

    apply_to.__name__ = apply_to.__qualname__ = f"apply_seqtile_to_{arch.model_type}"
    apply_to.__doc__ = f"""Tiles {arch.prefix} models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone, also in PEFT's wrapper; None tiles Hugging Face's classes, for every
            {arch.causal_lm_name} built from then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: in training, with labels, no logits are computed and none are returned.
        layer: tile everything else of a layer too, but attention itself, and keep of a layer its input, queries, keys,
            values, and what attention returned; the norm behind the last layer as well. Of Liger's norms and RoPE the
            weights are read then, and no kernel is called.
        head_groups: then compute attention for so many groups of kv heads one after the other, so that queries, keys
            and values exist for one group at a time, and are not kept; "auto": as many as divide the kv heads, up to
            8. An attention that keeps other large tensors is refused, or, given a number, computed once more. It must
            treat every head alike (no slopes or biases by head), since it is not told which heads it is given.
        chunk_tokens: tokens a chunk; None for the rule of `seqtile.ops.chunks`.

    Applying twice changes nothing. Apply after Liger, whose RMSNorm and RoPE stay. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are read directly. What cannot be (experts, quantised layers, other
    adapters, dropout, unusual activations, hooks) is called as it is, chunk by chunk, which costs one product more of
    the loss; `seqtile.status` tells which.

    Raises ValueError, and changes nothing, for what it cannot honour, such as another loss function.
    """
    return apply_to


ENTRIES = {f"apply_seqtile_to_{model_type}": _entry(arch) for model_type, arch in ARCHS.items()}
