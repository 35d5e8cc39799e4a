"""The rungs of the ladder: what is applied to a model, and whether it is still right then."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from benchmark.bench_gated_mlp import deepspeed_tiled_forward
from benchmark.contest import worst_error
from benchmark.device import DEVICE, DTYPE
from benchmark.models import build, offloaded
from benchmark.shapes import SMALL, Shape
from transformers import PreTrainedModel

from seqtile import apply_seqtile
from seqtile.offload.checkpointing import enable_checkpointing

Apply = Callable[[PreTrainedModel], None]


def liger(model: PreTrainedModel, **parts: bool) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, **parts)


def deepspeed_mlps(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(deepspeed_tiled_forward, layer.mlp)


@dataclass(frozen=True)
class Rung:
    applied: tuple[Apply, ...]
    """To a model that is checkpointed already."""
    setup: dict[str, Any] | None = None
    """Of `seqtile.memory.longest`, where it knows the rung."""
    needs: tuple[str, ...] = ()
    """Packages, and a GPU for them."""

    @property
    def offloads(self) -> bool:
        return "offload" in (self.setup or {})


LIGER_BESIDE = {"swiglu": False, "fused_linear_cross_entropy": False}
TILED = {"tiles": ("loss", "mlp")}
OFFLOADED = TILED | {"offload": ("activations",)}
RUNGS = {
    "huggingface": Rung((), {"tiles": ()}),
    "liger": Rung((liger,), needs=("liger_kernel",)),
    "liger_deepspeed_mlp": Rung(
        (lambda model: liger(model, swiglu=False), deepspeed_mlps), needs=("liger_kernel", "deepspeed")
    ),
    "seqtile_loss": Rung((lambda model: apply_seqtile(model, mlp=False),), {"tiles": ("loss",)}),
    "seqtile_loss_mlp": Rung((apply_seqtile,), TILED),
    "seqtile_loss_mlp_offload": Rung((apply_seqtile, offloaded), OFFLOADED),
    "seqtile_loss_mlp_offload_liger": Rung(
        (lambda model: liger(model, **LIGER_BESIDE), apply_seqtile, offloaded),
        OFFLOADED | {"liger": True},
        needs=("liger_kernel",),
    ),
}


def prepared(rung: Rung, shape: Shape, layers: int, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    model = build(shape, dtype, layers)
    enable_checkpointing(model)
    for apply in rung.applied:
        apply(model)
    return model


def error(rung: Rung, shape: Shape) -> tuple[float, float]:
    """The largest relative error of loss and gradients of a small model, and that of Hugging Face in the same dtype."""
    ids = torch.randint(shape.vocab, (1, SMALL), device=DEVICE)
    torch.manual_seed(0)
    plain = prepared(Rung(()), shape, 2)
    exact = deepcopy(plain).double()
    found = [gradients(model, ids) for model in (exact, plain)]
    torch.manual_seed(0)
    found.append(gradients(prepared(rung, shape, 2), ids))
    theirs, ours = (worst_error(of_model, found[0]) for of_model in found[1:])
    return ours, theirs


def gradients(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]
