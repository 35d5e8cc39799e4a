"""Activation checkpointing that keeps the saved inputs in host memory.

Non-reentrant checkpointing saves a region's inputs through autograd's saved-tensor hooks. The hooks here move the
inputs to a `Store` and take them back. A region's inputs are copied out while the region computes, and copied back
while the next region's backward computes. Source: Arctic Long Sequence Training, 3.3, whose copies block.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from seqtile.offload.store import Copies, HostMemoryFull, Pool, Saved, Store
from seqtile.renamed import enable_checkpointing
from seqtile.unwrapped import unwrapped

_ENABLED = "_seqtile_offload"  # the attribute of a model that holds its Checkpoints


@dataclass
class Checkpoints:
    """Checkpoints regions and keeps their inputs in one store until the backward."""

    store: Store
    strict: bool = False
    """True: raise an error if host memory is full."""
    small: int = 2**20
    """Bytes. Smaller tensors are not offloaded."""
    warned: bool = False
    watch: RemovableHandle | None = None
    """The hook that checks, at every forward of a model, that its layers are still checkpointed this way."""

    def __call__(self, function: Callable[..., Any], *args: Any, kept: bool = False) -> Any:
        """Returns `function(*args)` and recomputes it in the backward. `kept`: the inputs stay on the device."""
        function, args = _by_position(function, args)
        self.store.begin_region()
        if kept:
            self.store.settle()
        with torch.autograd.graph.saved_tensors_hooks(self._keep if kept else self._put, self.store.take):
            return torch_checkpoint(function, *args, use_reentrant=False)

    def close(self) -> None:
        """Removes the hook, and returns the host memory to the system."""
        self.watch.remove()
        self.store.pool.close()

    def _put(self, tensor: torch.Tensor) -> Saved:
        elsewhere = tensor.device.type != self.store.copies.device.type
        other_kind = isinstance(tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor)
        if tensor.nbytes < max(self.small, 1) or not tensor.is_floating_point() or elsewhere or other_kind:
            return self._keep(tensor)
        try:
            return self.store.put(tensor)
        except HostMemoryFull as error:
            if self.strict:
                raise
            if not self.warned:
                warnings.warn(f"the inputs of the other layers stay on the GPU: {error}", stacklevel=2)
                self.warned = True
            return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> Saved:
        return self.store.keep(tensor, prefetches=tensor.nbytes >= self.small)


def _by_position(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Moves the tensors with gradients from a `partial`'s keywords, where Hugging Face's layers pass them, to its
    arguments, because checkpointing saves only arguments. (A mask, which all layers share, stays.)"""
    keywords = function.keywords if isinstance(function, partial) else {}
    moved = {name: value for name, value in keywords.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    if not moved:
        return function, args
    names, others = tuple(moved), {name: value for name, value in keywords.items() if name not in moved}
    without = partial(function.func, *function.args, **others)

    def call(*values: Any) -> Any:
        return without(*values[len(names) :], **dict(zip(names, values, strict=False)))

    return call, (*moved.values(), *args)


def enable(
    model: PreTrainedModel,
    *,
    keep_last: int = 1,
    host_memory_limit: int | None = None,
    tokens: int | None = None,
    strict: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Checkpoints every layer, and keeps the layers' inputs in host memory until the backward.

    Args:
        model: any Hugging Face model whose layers can be checkpointed, on its GPU, also in PEFT's wrapper.
        keep_last: the number of last layers whose inputs stay on the GPU, because the backward needs them at once.
        host_memory_limit: bytes; by default the free memory of the machine or its control group, less 1 GiB.
        tokens: tokens per step on this GPU. If given, host memory for them is registered now, else in the first step.
        strict: raise HostMemoryFull when host memory is full; by default the inputs of the other layers stay on the
            GPU, with a warning.
        device: the GPU that the model computes on; by default the device of its first weight. The inputs of layers on
            other GPUs (`device_map`) are offloaded as well.

    Host memory: one layer input (tokens x hidden x bytes per element) for every layer except the last `keep_last`. It
    is pinned, reused in every step, and returned by `disable`; a deepcopy of the model takes its own, up to the same
    limit. The GPU holds the last layers' inputs and one input being copied out; in the backward, the input in use and
    one being copied back. Without a GPU this is plain checkpointing, with a warning. A second call replaces the first.

    Raises TypeError if it is no Hugging Face model; ValueError, and changes nothing, for a model without such layers,
    for keep_last or host_memory_limit below 0, for tokens < 1 and for a GPU that does not exist.
    """
    model = unwrapped(model, other="; for a model of another kind there is offload.checkpoint")
    layers = layers_of(model)
    if not layers or not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError(f"{type(model).__name__} has no layers that can be checkpointed so; use offload.checkpoint")
    least = (("keep_last", keep_last, 0), ("host_memory_limit", host_memory_limit, 0), ("tokens", tokens, 1))
    for name, value, smallest in least:
        if value is not None and value < smallest:
            raise ValueError(f"{name} is {value}, expected {smallest} or more")
    weight = next(model.parameters())
    device = torch.device(weight.device if device is None else device)
    if device.type == "cuda" and (device.index or 0) >= (gpus := torch.cuda.device_count()):
        raise ValueError(
            f"device is {device}, but torch finds {gpus} GPUs here; leave device out to take where the weights are"
        )
    disable(model)
    enable_checkpointing(model)
    if device.type != "cuda":
        remedy = "if it is going to be on a GPU, pass device='cuda'"
        warnings.warn(f"the model is on {device}: what its checkpoints save stays there; {remedy}", stacklevel=2)
        setattr(model, _ENABLED, None)
        return
    checkpoints = _on_gpu(torch.empty(0, device=device).device, host_memory_limit, strict)  # with its number
    if tokens is not None:
        size = tokens * model.config.get_text_config().hidden_size * weight.element_size()
        checkpoints.store.pool.reserve(len(layers) - keep_last, size)
    install(checkpoints, model, keep_last)


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def install(checkpoints: Checkpoints, model: PreTrainedModel, keep_last: int) -> None:
    """Makes `checkpoints` the checkpointing function of every layer of a model."""
    layers = layers_of(model)
    for i, layer in enumerate(layers):
        layer._gradient_checkpointing_func = partial(checkpoints, kept=i >= len(layers) - keep_last)
    setattr(model, _ENABLED, checkpoints)
    checkpoints.watch = model.register_forward_pre_hook(_warn_if_replaced)


def _warn_if_replaced(model: nn.Module, args: object) -> None:
    """Warns if checkpointing was switched on again or off since `enable`, as trainers do."""
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    function = getattr(layer, "_gradient_checkpointing_func", None)
    if not isinstance(getattr(function, "func", None), Checkpoints):
        warnings.warn(
            "the layers' inputs stay on the GPU: checkpointing was turned on again after offload.enable; call enable "
            "last, and pass gradient_checkpointing=False to a Trainer",
            stacklevel=2,
        )
        vars(model).pop(_ENABLED).close()


def disable(model: nn.Module | None = None) -> None:
    """Undoes `enable`, including checkpointing, and returns its host memory to the system. Without a model, returns the
    host memory of `checkpoint`. Memory that a graph still holds is returned when the graph is freed."""
    if model is None:
        _shared.cache_clear()
        return
    for inner in [module for module in model.modules() if _ENABLED in vars(module)]:  # in a wrapper, too
        switch = getattr(inner, "activation_checkpointing_disable", None) or inner.gradient_checkpointing_disable
        switch()
        if (checkpoints := vars(inner).pop(_ENABLED)) is not None:
            checkpoints.close()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs non-reentrant `torch.utils.checkpoint.checkpoint(function, *args)` with its saved arguments in host memory,
    for models that are not Hugging Face's. All calls whose first tensor on a GPU is on the same one share a store.
    Tensors that are not on a GPU are not moved."""
    gpu = next((arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda), None)
    checkpointed = partial(torch_checkpoint, use_reentrant=False) if gpu is None else _shared(gpu)
    return checkpointed(function, *args)


def _on_gpu(device: torch.device, limit: int | None = None, strict: bool = False) -> Checkpoints:
    return Checkpoints(Store(Pool(limit, device), Copies(device)), strict)


_shared = cache(_on_gpu)  # one per GPU, for all calls of `checkpoint`
