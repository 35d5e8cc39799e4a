"""The comparison over ranks: gathers sharded parameters, and stops all ranks if one fails.

    FSDP2   gathers with its own hooks. Modules that were gathered when the comparison began, such as the root, whose
            forward is running, are gathered again at the end of each pass.
    ZeRO-3  records the order of modules with its hooks, so they are removed. Modules in a list, such as layers, are
            gathered one at a time, in the forward and in the backward; all others for the whole pass.
    sp      sends tokens between ranks inside of layers.

Before each of these the ranks tell each other if one has failed; otherwise the others would wait for ever.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from seqtile.protocols import SHARDED

_LISTS = (nn.ModuleList, nn.Sequential)
_Partitioned = list[tuple[nn.Parameter, torch.Tensor, Any]]
"""Parameters of ZeRO-3, the data that each held while partitioned, and its status."""


class OtherRankFailed(RuntimeError):
    """Raised on a rank when another has failed."""


def run_together(model: nn.Module) -> bool:
    """Returns whether ranks must run each forward together, since they share sequences or shard parameters."""
    modules = model.modules()
    return SHARDED in vars(model) or any(isinstance(each, FSDPModule) or "ds_id" in vars(each) for each in modules)


class Ranks:
    """The ranks that run a model's forward together, seen from inside it. A rank that shares nothing is alone."""

    def __init__(self, model: nn.Module, tensors: Iterable[torch.Tensor]):
        self.model = model
        self.fsdp = [module for module in model.modules() if isinstance(module, FSDPModule)]
        running = (state for state in self._states() if state._training_state.name == "FORWARD")
        self._running = [module for state in running for module in state._modules]
        self.together = run_together(model)
        sharded = vars(model).get(SHARDED)
        self._sharing = [] if sharded is None or sharded.sp_group.size == 1 else [sharded.sp_group.group]
        self._groups = list(dict.fromkeys([*self._sharing, *self._groups_of_ranks()]))
        devices = [tensor.device for tensor in (*tensors, *model.parameters())]
        self._device = max(devices, key=lambda device: device.type != "cpu")  # the first that is not a CPU, if any
        self._block: _Partitioned = []

    def any(self, is_so: bool) -> bool:
        """Returns whether `is_so` is True on any rank. A collective: every rank must call it."""
        return self._any_of(self._groups, is_so)

    def _any_of(self, groups: list[dist.ProcessGroup], is_so: bool) -> bool:
        if not groups:
            return is_so
        flag = torch.tensor(float(is_so), device=self._device)
        for group in groups:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def check_sharing(self) -> None:
        """Raises OtherRankFailed if another of the ranks that share a sequence has failed. Called before each of their
        collectives: within a layer the others would wait for ever."""
        if self._any_of(self._sharing, False):
            self._any_of([group for group in self._groups if group not in self._sharing], True)
            raise OtherRankFailed("another rank failed")

    @contextmanager
    def stop_together(self) -> Iterator[None]:
        """Raises OtherRankFailed if the block inside fails on another rank."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OtherRankFailed):
                self.any(True)
            raise
        self._check()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Gathers the parameters that a forward and a backward inside need, then frees them. Inside `without_a_trace`,
        which has removed ZeRO-3's hooks and removes those added here."""
        blocks = self.fsdp or list(_blocks(self.model))
        inside = {module for block in blocks for module in block.modules()}
        others = [module for module in self.model.modules() if module not in inside]
        outside = _gather(dict.fromkeys(chain(*(module.parameters(recurse=False) for module in others))))
        for module in self.model.modules():
            if "ds_id" in vars(module):  # its dict gathers a parameter that is read, and records that
                vars(module)["_parameters"] = dict(module._parameters.items())
        for block in blocks if self.together else ():
            block.register_forward_pre_hook(lambda module, args: self._before(module), prepend=True)
            block.register_forward_hook(self._before_backward, prepend=True)
        try:
            with self.stop_together():
                yield
        except Exception:
            for state in self._states():
                if state._is_root:  # cleans up as at the end of a backward
                    state._root_post_backward_final_callback()
            raise
        finally:
            for module in self._running:
                module.unshard()
            _partition(self._block)
            _partition(outside)

    def _groups_of_ranks(self) -> list[dist.ProcessGroup]:
        """Returns the groups of ranks that run a forward together, the same on each of these. They are dimensions of
        one grid of ranks, or one contains another: a maximum over one after the other is that of them all."""
        if not self.together or not dist.is_initialized():
            return []
        parameters = list(self.model.parameters())
        for state in self._states():  # that are gathered now
            of_state = vars(state).get("_fsdp_param_groups") or [state._fsdp_param_group]  # before torch 2.12 one
            parameters += [each.sharded_param for group in of_state if group for each in group.fsdp_params]
        meshes = dict.fromkeys(each.device_mesh for each in parameters if isinstance(each, DTensor))
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        groups += [each.ds_process_group for each in parameters if "ds_id" in vars(each)]
        return [group for group in groups if group is not None and group.size() > 1]

    def _states(self) -> list[Any]:
        """Returns the states of the FSDP2 modules that run with this model's, also of those around it."""
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
    """Yields the modules in the outermost module lists."""
    for child in module.children():
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _blocks(child)


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


@torch.no_grad()
def _gather(parameters: Iterable[nn.Parameter]) -> _Partitioned:
    """Gathers the partitioned parameters, and returns their state before."""
    before = [(each, each.data, each.ds_status) for each in parameters if _is_partitioned(each)]
    for parameter, _, status in before:
        parameter.ds_status = type(status).NOT_AVAILABLE  # even if ZeRO-3 has begun to prefetch it
    if before:
        before[0][0].all_gather(param_list=[parameter for parameter, *_ in before])
    return before


@torch.no_grad()
def _partition(before: _Partitioned) -> None:
    """Restores the state before `_gather`, and empties the list."""
    if before:
        before[0][0].partition(param_list=[parameter for parameter, *_ in before])
    for parameter, held, status in before:
        parameter.data, parameter.ds_status = held, status
    before.clear()
