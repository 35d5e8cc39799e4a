"""The methods whose longest sequences are compared: what each applies to a model, and whether that is still right.

Weights and gradients are on the GPU; of the methods that end with `weights` they are in host memory, as in the recipes
of Arctic Long Sequence Training for one GPU, see `LeftOutLayers`. The methods that end with `lora` train adapters of a
frozen model, as the lines of README's picture.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import isfinite
from types import MethodType
from typing import Any

import torch
from benchmark.bench_gated_mlp import deepspeed_tiled_forward
from benchmark.comparison import worst_error
from benchmark.device import DEVICE, DTYPE
from benchmark.models import build, offloaded
from benchmark.shapes import SMALL, Shape, short_chunks
from transformers import PreTrainedModel

from seqtile import apply_seqtile
from seqtile.memory import FEATURES, apply_options
from seqtile.memory.setup import Setup
from seqtile.renamed import enable_checkpointing

Apply = Callable[[PreTrainedModel], None]


def liger(model: PreTrainedModel, **parts: bool) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, **parts)


LORA_RANK = 16


def lora(model: PreTrainedModel) -> None:
    """PEFT's adapters in float32 on every projection of a layer, random: as they usually start, half of their gradients
    are zero."""
    from peft import LoraConfig, inject_adapter_in_model

    projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=LORA_RANK, target_modules=projections, init_lora_weights=False), model)
    for adapter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        adapter.data = adapter.data.float()  # which PEFT makes in the dtype of the weights


def deepspeed_mlps(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(deepspeed_tiled_forward, layer.mlp)


@dataclass(frozen=True)
class Method:
    applied: tuple[Apply, ...]
    """To a model that is checkpointed already."""
    setup: dict[str, Any] | None = None
    """Of `seqtile.memory.longest`, where it knows the method."""
    needs: tuple[str, ...] = ()
    """Packages, and a GPU for them."""

    @property
    def frozen(self) -> bool:
        """Whether only adapters are trained."""
        return "lora_rank" in (self.setup or {})

    @property
    def offload(self) -> tuple[str, ...]:
        """What is in host memory, by the names of `seqtile.memory`."""
        return (self.setup or {}).get("offload", ())

    @property
    def in_host_memory(self) -> list[str]:
        """In words, of the layers."""
        return ["inputs"] * ("activations" in self.offload) + ["weights", "gradients"] * ("weights" in self.offload)


LIGER_BESIDE = {"swiglu": False, "fused_linear_cross_entropy": False}
IN_HOST_MEMORY = {"offload": ("activations", "optimizer", "weights")}


def features(*names: str) -> dict[str, Any]:
    """Fields of a `Setup`."""
    return {name: value for feature in names for name, value in FEATURES[feature].changes.items()}


def seqtile(setup: dict[str, Any], *before: Apply, needs: tuple[str, ...] = ()) -> Method:
    """Of what `setup` tiles and offloads, on top of what was applied before."""
    tiled = partial(apply_seqtile, **apply_options(Setup(**setup)))
    return Method((*before, tiled, offloaded) if "offload" in setup else (*before, tiled), setup, needs)


def adapters(*names: str, before: tuple[Apply, ...] = (), needs: tuple[str, ...] = ()) -> Method:
    """LoRA with these features of `seqtile.memory`; without `apply_seqtile` where something else is applied before."""
    setup = features(*names) | {"lora_rank": LORA_RANK}
    if before or not setup["tiles"]:
        return Method((lora, *before), setup, ("peft", *needs))
    return seqtile(setup, lora, needs=("peft",))


METHODS = {
    "huggingface": Method((), features("nothing")),
    "liger": Method((liger,), needs=("liger_kernel",)),
    "liger_deepspeed_mlp": Method(
        (lambda model: liger(model, swiglu=False), deepspeed_mlps), needs=("liger_kernel", "deepspeed")
    ),
    "seqtile_loss": seqtile(features("loss")),
    "seqtile_loss_mlp": seqtile(features("loss, MLP")),
    "seqtile_loss_mlp_offload": seqtile(features("loss, MLP", "host")),
    "seqtile_loss_mlp_offload_liger": seqtile(
        features("loss, MLP", "host", "Liger"), lambda model: liger(model, **LIGER_BESIDE), needs=("liger_kernel",)
    ),
    "seqtile_layer_offload": seqtile(features("loss, MLP, layer", "host")),
    "seqtile_head_groups_offload": seqtile(features("groups", "host")),
    "seqtile_layer_offload_weights": seqtile(features("loss, MLP, layer") | IN_HOST_MEMORY),
    "seqtile_head_groups_offload_weights": seqtile(features("groups") | IN_HOST_MEMORY),
    "huggingface_lora": adapters("nothing"),
    "liger_lora": adapters("loss", "Liger", before=(liger,), needs=("liger_kernel",)),
    "seqtile_lora": adapters("loss, MLP"),
    "seqtile_head_groups_lora": adapters("groups"),
    "seqtile_head_groups_offload_lora": adapters("groups", "host"),
}


def prepared(method: Method, shape: Shape, layers: int, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    model = build(shape, dtype, layers)
    enable_checkpointing(model)
    for apply in method.applied:
        apply(model)
    return model


def error(method: Method, shape: Shape) -> tuple[float, float]:
    """The largest relative error of loss and gradients of a small model, and that of Hugging Face in the same dtype."""
    ids = torch.randint(shape.vocab, (1, SMALL), device=DEVICE)
    torch.manual_seed(0)
    plain = prepared(Method((lora,) if method.frozen else ()), shape, 2)
    exact = deepcopy(plain).double()
    found = [gradients(model, ids) for model in (exact, plain)]
    torch.manual_seed(0)
    with short_chunks():
        found.append(gradients(prepared(method, shape, 2), ids))
    theirs, ours = (worst_error(of_model, found[0]) for of_model in found[1:])
    return ours, theirs


class WrongStep(Exception):
    """What is wrong with a step at full length."""


def check_step(model: PreTrainedModel, loss: torch.Tensor) -> None:
    """Raises WrongStep unless the loss and every trained parameter's gradient are there, finite, and not all zero."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = {"the loss": loss.detach()} | {f"{name}.grad": each.grad for name, each in trained.items()}
    for name, tensor in found.items():
        if tensor is None:
            raise WrongStep(f"{name} is None")
        least, most = (bound.item() for bound in tensor.aminmax())  # NaN if there is one; allocates nothing large
        if not (isfinite(least) and isfinite(most)) or least == most == 0:
            raise WrongStep(f"{name} is from {least} to {most}")


def gradients(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]
