"""Helpers for the ranks of a pool: groups, results that one rank computes for all, and comparisons with one process."""

import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seqtile import sp
from seqtile.ops.state import having
from support.assertions import relative_error

_nodes: ContextVar[int | None] = ContextVar("nodes", default=None)
Step = tuple[Tensor, dict[str, Tensor]]
"""The loss, and every gradient."""


def by_first_rank(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns the result of `function` on rank 0, the only rank that calls it."""
    found = [function(*arguments, **options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def context(size: int | None = None) -> sp.SequenceParallel:
    """Groups of `size` ranks, by default of all, on nodes as `on_nodes` says."""
    return _context(size or dist.get_world_size(), _nodes.get())


@cache  # because every group keeps its connections
def _context(size: int, per_node: int | None) -> sp.SequenceParallel:
    return sp.initialize(size, per_node=per_node)


def on_nodes(per_node: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function on ranks that pass for several nodes with so many each."""
    with having(_nodes, per_node):
        return function(*arguments, **options)


def alone(backend: str) -> Iterator[sp.SequenceParallel]:
    """A group with only this process."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield sp.initialize(1)
    dist.destroy_process_group()


class Traffic:
    """Records the all-to-alls inside: the bytes that each sends from this rank to others."""

    def __enter__(self) -> "Traffic":
        self.sent, self.function = [], dist.all_to_all_single
        dist.all_to_all_single = self.counted
        return self

    def counted(self, received: Tensor, sent: Tensor, counts: list[int], sent_counts: list[int], **rest: Any) -> object:
        self.sent.append((sum(sent_counts) - sent_counts[dist.get_rank()]) * sent.itemsize)
        return self.function(received, sent, counts, sent_counts, **rest)

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self.function


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients after a reducer that averages over all ranks."""
    named = dict(model.named_parameters())
    total = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in named.values()])
    dist.all_reduce(total)
    parts = (total / dist.get_world_size()).split([parameter.numel() for parameter in named.values()])
    return {name: part.view_as(named[name]) for name, part in zip(named, parts, strict=True)}


def assert_same_step(loss: Tensor, model: nn.Module, expected: Step, what: str = "") -> None:
    """Asserts that a loss and the gradients of a model over ranks equal those of one process."""
    assert relative_error(loss.detach(), expected[0]) <= 1e-5, f"{what}: loss"
    found = averaged(model)
    for name, gradient in expected[1].items():
        if gradient is not None:
            error = relative_error(found[name], gradient)
            assert error <= 1e-5, f"{what}: {name} is {error:.1e} off"


def nudged(model: nn.Module, step: Callable[[nn.Module], Step], gradients: dict[str, Tensor]) -> dict[str, float]:
    """Returns how far each gradient moves when every weight changes by its last bit, up or down at random: the maximum
    of four trials, shared by the vectors of one module, which have only a dozen elements."""
    most: dict[str, float] = dict.fromkeys(gradients, 0.0)
    for time in range(4):
        moved = copy.deepcopy(model)
        with torch.no_grad(), torch.random.fork_rng():  # the other ranks draw nothing
            torch.manual_seed(time)
            for parameter in moved.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.inf * torch.randn_like(parameter).sign()))
        for name, gradient in step(moved)[1].items():
            if name in most:
                most[name] = max(most[name], relative_error(gradient, gradients[name]))
    vectors = [name for name, gradient in gradients.items() if gradient.dim() == 1]
    module = {name: name.rpartition(".")[0] for name in vectors}
    pooled = {name: max(most[other] for other in vectors if module[other] == module[name]) for name in vectors}
    return most | pooled


def assert_same_gradients(
    model: nn.Module,
    gradients: dict[str, Tensor],
    step: Callable[[nn.Module], Step],
    one: nn.Module,
    what: str,
    times: float = 2,
) -> None:
    """Asserts that the gradients of a model over ranks equal those that `step` computes for `one` in one process: to
    1e-5, or to `times` the change caused by the last bit of the weights."""
    found = averaged(model)
    errors = {name: relative_error(found[name], gradient) for name, gradient in gradients.items()}
    if max(errors.values()) > 1e-5:
        least = by_first_rank(nudged, one, step, gradients)
        errors = {name: error for name, error in errors.items() if error > max(1e-5, times * least[name])}
        assert not errors, f"{what}: {errors}, by a bit of the weights { ({name: least[name] for name in errors}) }"
