"""The ranks of a comparison: parameters of which each rank holds a part, and ranks that stop together.

    FSDP2   gathers by its own hooks. What was gathered when the comparison began, such as the root, whose forward runs,
            is gathered again at the end of each pass.
    ZeRO-3  records the order of modules by its hooks, so they are left out. What is in a list of modules, such as a
            layer, is gathered one module at a time, in the forward and in the backward; the rest for the whole pass.

Before each of these gathers ranks tell each other if one has failed, since the others would wait for it for ever.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from seqtile.protocols import SHARDED

_LISTS = (nn.ModuleList, nn.Sequential)
_Partitioned = list[tuple[nn.Parameter, torch.Tensor, Any]]
"""Parameters of ZeRO-3, what each held instead of its numbers, and its status."""


class OtherRankFailed(RuntimeError):
    """Raised on a rank by the failure of another."""


def run_together(model: nn.Module) -> bool:
    """Says if ranks must run each forward of the model together: they share sequences, or hold parts of parameters."""
    return SHARDED in vars(model) or any(
        isinstance(module, FSDPModule) or "ds_id" in vars(module) for module in model.modules()
    )


class Ranks:
    """The ranks that run a model's forward together, inside that forward; one that shares nothing is alone."""

    def __init__(self, model: nn.Module, tensors: Iterable[torch.Tensor]):
        self.model = model
        self.fsdp = [module for module in model.modules() if isinstance(module, FSDPModule)]
        running = (state for state in self._states() if state._training_state.name == "FORWARD")
        self._running = [module for state in running for module in state._modules]
        self.together = run_together(model)
        devices = [tensor.device for tensor in (*tensors, *model.parameters())]
        self._device = max(devices, key=lambda device: device.type != "cpu")  # the first that is none
        self._block: _Partitioned = []

    def any(self, is_so: bool) -> bool:
        """Returns whether it is so on any rank. A collective, which every rank must do."""
        if not self.together or not dist.is_initialized():
            return is_so
        flag = torch.tensor(float(is_so), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    @contextmanager
    def stop_together(self) -> Iterator[None]:
        """Raises OtherRankFailed where what is done inside fails on another rank."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OtherRankFailed):
                self.any(True)
            raise
        self._check()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Gathers what a forward and a backward inside need, and gives back what it gathered. The model's hooks must be
        copies, and ZeRO-3's not among them."""
        blocks = self.fsdp or list(_blocks(self.model))
        outside = _gather(_outside(self.model, blocks)) if self.together and not self.fsdp else []
        for module in self.model.modules():
            if "ds_id" in vars(module):  # a dict that gathers what is asked of it, and records that
                vars(module)["_parameters"] = dict(module._parameters.items())
        for block in blocks if self.together else ():
            block.register_forward_pre_hook(lambda module, args: self._before(module), prepend=True)
            block.register_forward_hook(self._before_backward, prepend=True)
        try:
            with self.stop_together():
                yield
        except Exception:
            for state in self._states():
                if state._is_root:  # as at the end of a backward
                    state._root_post_backward_final_callback()
            raise
        finally:
            for module in self._running:
                module.unshard()
            _partition(self._block)
            _partition(outside)

    def _states(self) -> list[Any]:
        """Returns the state of each module of FSDP2's that runs with this model's, also around it."""
        contexts = [module._get_fsdp_state()._state_ctx for module in self.fsdp]
        return list({id(state): state for context in contexts for state in context.all_states}.values())

    def _check(self) -> None:
        if self.any(False):
            raise OtherRankFailed("another rank failed")

    def _before(self, module: nn.Module) -> None:
        self._check()
        if any(map(_is_partitioned, module.parameters())):
            _partition(self._block)
            self._block[:] = _gather(module.parameters())

    def _before_backward(self, module: nn.Module, args: tuple, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._before(module))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules in the outermost lists."""
    for child in module.children():
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _blocks(child)


def _outside(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters that modules hold that are in none of the blocks."""
    inside = {module for block in blocks for module in block.modules()}
    others = [module for module in model.modules() if module not in inside]
    return list(dict.fromkeys(each for module in others for each in module.parameters(recurse=False)))


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


@torch.no_grad()
def _gather(parameters: Iterable[nn.Parameter]) -> _Partitioned:
    """Gathers those that are partitioned, and returns them as they were."""
    before = [(each, each.data, each.ds_status) for each in parameters if _is_partitioned(each)]
    for parameter, _, status in before:
        parameter.ds_status = type(status).NOT_AVAILABLE  # also where ZeRO-3 has begun to gather it for later
    if before:
        before[0][0].all_gather(param_list=[parameter for parameter, *_ in before])
    return before


@torch.no_grad()
def _partition(before: _Partitioned) -> None:
    """Makes them what they were before `_gather`, and empties the list."""
    if before:
        before[0][0].partition(param_list=[parameter for parameter, *_ in before])
    for parameter, held, status in before:
        parameter.data, parameter.ds_status = held, status
    before.clear()
