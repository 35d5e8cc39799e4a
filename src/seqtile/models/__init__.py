"""The public functions: one line that tiles a Hugging Face model, `status`, and `restore`."""

import re
from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import nn

from seqtile.models.model_status import ModelStatus, PartStatus, PrefixStatus, status
from seqtile.models.model_types import model_types
from seqtile.models.patch import apply, restore, unwrapped
from seqtile.models.placement import Options

__all__ = ["ENTRIES", "ModelStatus", "PartStatus", "PrefixStatus", "apply_seqtile", "restore", "status", "unwrapped"]


def apply_seqtile(
    model: nn.Module,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
    check: bool | str = True,
) -> None:
    """Tiles a Hugging Face model of any architecture: it finds by structure what can be tiled, and `seqtile.status`
    names what cannot, with the reason.

    For the arguments see `apply_seqtile_to_llama`. Raises ValueError for a model without a head over a vocabulary.
    """
    model = unwrapped(model)
    apply(model.config.model_type, model, Options(mlp, loss, layer, head_groups, chunk_tokens, check))


def _apply_to_type(model_type: str, model: nn.Module | None, options: Options) -> None:
    """Tiles MODEL_TYPE models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone, also in PEFT's wrapper; None tiles Hugging Face's classes, for every
            model of this type with a head that is built from then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: given labels, no logits are computed unless they are read.
        layer: tile whole layers: everything in a layer except attention itself, and the norm behind the last layer. A
            layer then keeps its input, queries, keys, values and attention's output. Liger's norms and RoPE do not
            run; seqtile uses the norms' weights.
        head_groups: with `layer`, compute attention for this many groups of kv heads, one after the other. Queries,
            keys and values then exist for one group at a time, and are not kept. "auto" takes the largest number of
            groups, up to 8, that divides the kv heads, and refuses an attention that keeps other large tensors; with
            a number, such an attention is computed once more. Attention must treat every head alike (no slopes or
            biases by head), since it is not told which heads it gets.
        chunk_tokens: tokens of a chunk; None for max(2048, hidden size), and for more in a mixture of experts, and in
            the MLPs and layers of a checkpointed small model.
        check: the first training step compares the tiled model with the untiled one on 28 tokens of its own batch. It
            raises ValueError if the loss or a gradient differs by more than rounding. It compares the gradients of
            the embeddings' output and of every parameter of up to 4M numbers; "full": of every parameter. False: none.

    Applying again adds parts, and gives those that it names the new options; a part that it leaves out stays as it is.
    Apply after Liger, whose RMSNorm and RoPE stay without `layer`. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are fused: computed from their weights. Everything else (experts,
    quantised layers, other adapters, dropout, unusual activations, hooks) runs chunk by chunk, which costs the loss
    one more product; `seqtile.status` tells which.

    Raises ValueError, and changes nothing, if it cannot do what is asked, such as under another loss function.
    """
    model = None if model is None else unwrapped(model)
    if model is not None and model.config.model_type != model_type:
        got = model.config.model_type
        raise ValueError(f"expected a {model_type} model, got {got!r}; use seqtile.apply_seqtile(model)")
    apply(model_type, model, options)


def _entry(model_type: str) -> Callable[..., None]:
    def apply_to(model: nn.Module | None = None, **options: Any) -> None:
        _apply_to_type(model_type, model, Options(**options))

    model, *options = signature(apply_seqtile).parameters.values()
    model = model.replace(default=None, annotation=nn.Module | None)
    apply_to.__signature__ = signature(apply_seqtile).replace(parameters=[model, *options])
    apply_to.__name__ = apply_to.__qualname__ = _entry_name(model_type)
    apply_to.__doc__ = (_apply_to_type.__doc__ or "").replace("MODEL_TYPE", model_type)
    return apply_to


def _entry_name(model_type: str) -> str:
    return "apply_seqtile_to_" + re.sub(r"\W", "_", model_type)


ENTRIES = {_entry_name(model_type): _entry(model_type) for model_type in model_types()}
