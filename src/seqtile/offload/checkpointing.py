"""Activation checkpointing whose saved inputs wait in host memory.

Non-reentrant checkpointing saves a region's inputs as autograd saves any tensor, through hooks; here the hooks put them
into a `Store` and take them back. Copies out run while the region computes, copies back while the next one does.
Source: Arctic Long Sequence Training, 3.3 (there with copies that wait).
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from seqtile.offload.copies import OnSideStream
from seqtile.offload.host import HostMemoryFull, Pool
from seqtile.offload.store import Held, Store, check_unchanged

SMALL = 2**20  # bytes: what is smaller stays where it is
_ENABLED = "_seqtile_offload"  # on a model: its Checkpoints


class Kept(NamedTuple):
    """What stands for a tensor that stays where it is."""

    tensor: torch.Tensor
    version: int
    last: Callable[[], Held | None]
    """What was put in the store before it."""


@dataclass
class Checkpoints:
    """Checkpointed regions that put their inputs into one store."""

    store: Store
    strict: bool = False
    """Whether host memory that is full is an error."""
    small: int = SMALL
    device: torch.device | None = None
    """The store's; what is elsewhere stays there. None: all are put."""
    warned: bool = False
    watch: RemovableHandle | None = None
    """What looks, at every forward of a model, whether its layers are still checkpointed so."""

    def __call__(self, function: Callable[..., Any], *args: Any, kept: bool = False) -> Any:
        """`function(*args)`, to be computed again in the backward. `kept`: its inputs stay where they are."""
        pack = self._keep if kept else self._put
        self.store.region += 1
        with torch.autograd.graph.saved_tensors_hooks(pack, self._take):
            return torch_checkpoint(function, *args, use_reentrant=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Checkpoints":
        """A copied model shares the store."""
        return self

    def _put(self, tensor: torch.Tensor) -> torch.Tensor | Held | Kept:
        small = tensor.numel() * tensor.element_size() < max(self.small, 1) or not tensor.is_floating_point()
        elsewhere = self.device is not None and tensor.device != self.device
        if small or elsewhere or isinstance(tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor):
            return self._stays(tensor)
        try:
            return self.store.put(tensor)
        except HostMemoryFull as error:
            if self.strict:
                raise
            if not self.warned:
                warnings.warn(f"the inputs of the other layers stay on the GPU: {error}", stacklevel=2)
                self.warned = True
            return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> Kept:
        if tensor.numel() * tensor.element_size() >= self.small:
            self.store.settle()
        return self._stays(tensor)

    def _stays(self, tensor: torch.Tensor) -> Kept:
        return Kept(tensor, tensor._version, self.store.last)

    def _take(self, saved: Held | Kept) -> torch.Tensor:
        if isinstance(saved, Held):
            return self.store.take(saved)
        check_unchanged(saved.tensor._version != saved.version)
        if saved.tensor.numel() * saved.tensor.element_size() >= self.small:
            self.store.prefetch(saved.last())
        return saved.tensor


def enable(
    model: PreTrainedModel,
    *,
    keep_last: int = 1,
    host_memory_limit: int | None = None,
    tokens: int | None = None,
    strict: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Activation checkpointing of every layer, with the layers' inputs in host memory until the backward.

    Args:
        model: any Hugging Face model whose layers can be checkpointed, on its GPU.
        keep_last: how many of the last layers keep their inputs on the GPU, where the backward needs them at once.
        host_memory_limit: bytes; by default what the machine, or its control group, has left but for 1 GiB.
        tokens: of a step on this GPU. Given, host memory for them is registered now; else in the first step.
        strict: raise HostMemoryFull when host memory is full; by default the inputs of the other layers stay on the
            GPU, with a warning.
        device: the GPU that the model computes on; by default where its weights are.

    Host memory: one layer input (tokens x hidden x bytes an element) for every layer but the last ones, pinned, reused
    in every step, returned by `disable`. On the GPU, besides those kept: one input on its way out, or in the backward
    the one in use and one on its way back. Without a GPU it is plain checkpointing, with a warning. A call replaces
    the one before.

    Raises ValueError, and changes nothing, for a model without such layers, for keep_last or host_memory_limit
    below 0, for tokens < 1 and for a GPU that is not there.
    """
    layers = layers_of(model) if isinstance(model, nn.Module) else []
    if not layers or not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError(f"{type(model).__name__} has no layers that can be checkpointed so; use offload.checkpoint")
    if keep_last < 0:
        raise ValueError(f"keep_last is {keep_last}, expected 0 or more layers")
    if host_memory_limit is not None and host_memory_limit < 0:
        raise ValueError(f"host_memory_limit is {host_memory_limit}, expected 0 or more bytes")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens is {tokens}, expected at least 1")
    weight = next(model.parameters())
    device = _present(torch.device(weight.device if device is None else device))
    disable(model)
    checkpoints = None
    if device.type == "cuda":
        checkpoints = Checkpoints(store_on(device, host_memory_limit), strict, device=device)
        if tokens is not None:
            size = tokens * model.config.get_text_config().hidden_size * weight.element_size()
            checkpoints.store.pool.reserve(max(0, len(layers) - keep_last), size)
    else:
        warnings.warn(f"the model is on {device}: what its checkpoints save stays there", stacklevel=2)
    enable_checkpointing(model)
    if checkpoints is None:
        setattr(model, _ENABLED, None)
    else:
        hand_out(checkpoints, model, keep_last)


def _present(device: torch.device) -> torch.device:
    """The device, with its number if it is a GPU. ValueError for a GPU that is not there."""
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= gpus:
        raise ValueError(
            f"device is {device}, but torch finds {gpus} GPUs here; leave device out to take where the weights are"
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def enable_checkpointing(model: nn.Module) -> None:
    """Activation checkpointing by the name that the installed transformers has for it."""
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch({"use_reentrant": False})


def hand_out(checkpoints: Checkpoints, model: PreTrainedModel, keep_last: int) -> None:
    """Gives every layer of a model that checkpoints its function."""
    layers = layers_of(model)
    for i, layer in enumerate(layers):
        layer._gradient_checkpointing_func = partial(checkpoints, kept=i >= len(layers) - keep_last)
    setattr(model, _ENABLED, checkpoints)
    checkpoints.watch = model.register_forward_pre_hook(_look)


def _look(model: nn.Module, args: object) -> None:
    """Says so where checkpointing was switched on once more, or off, since `enable`: Trainers do."""
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    function = getattr(layer, "_gradient_checkpointing_func", None)
    if not isinstance(getattr(function, "func", None), Checkpoints) and getattr(model, _ENABLED, None) is not None:
        warnings.warn(
            "the layers' inputs stay on the GPU: checkpointing was switched again after offload.enable; call enable "
            "last, and pass gradient_checkpointing=False to a Trainer",
            stacklevel=2,
        )
        _release(vars(model).pop(_ENABLED))


def _release(checkpoints: Checkpoints | None) -> None:
    if checkpoints is not None:
        checkpoints.watch.remove()
        checkpoints.store.pool.close()


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def disable(model: PreTrainedModel | None = None) -> None:
    """Takes `enable` back, checkpointing included, and returns its host memory to the system; without a model, the host
    memory of `checkpoint`. What a graph still holds is returned when it is freed."""
    if model is None:
        _shared.cache_clear()
    elif _ENABLED in vars(model):
        switch = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        switch()
        _release(vars(model).pop(_ENABLED))


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Non-reentrant `torch.utils.checkpoint.checkpoint(function, *args)` with its saved arguments in host memory, for
    models that are not Hugging Face's. All calls on a GPU share a store. What is not on a GPU stays where it is."""
    devices = {arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda}
    if len(devices) != 1:
        return torch_checkpoint(function, *args, use_reentrant=False)
    return _shared(devices.pop())(function, *args)


@cache
def _shared(device: torch.device) -> Checkpoints:
    return Checkpoints(store_on(device, None), device=device)


def store_on(device: torch.device, limit: int | None) -> Store:
    """A store for tensors of a GPU, in registered (pinned) memory."""
    runtime = torch.cuda.cudart()

    def register(address: int, size: int) -> None:
        try:
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
        except RuntimeError:
            with suppress(RuntimeError):  # the driver's last error, which the next launch would report as its own
                torch.empty(1, device=device).fill_(0)
            raise

    def unregister(address: int) -> None:
        torch.cuda.synchronize(device)
        torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

    return Store(Pool(limit, register, unregister), OnSideStream(device))
