"""Measures without a clock: counts FLOP and tracks live bytes, see seqtile/memory/measure.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from seqtile.kernels.dispatch import triton
from seqtile.memory import measure
from support.tiny import batch_of, loss_and_gradients

eager_memory = pytest.mark.skipif(
    triton is not None and triton.knobs.runtime.interpret, reason="the interpreter has tensors of its own"
)


class FlopCount(measure.FlopCount):
    """Also counts the products, and notes the names of uncounted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in measure.PRODUCTS:
            self.calls += 1
        elif name in ("mv", "addmv", "dot", "linear") or "matmul" in name:
            self.unknown.add(name)
        return super().__torch_dispatch__(func, types, args, kwargs)


class LiveBytes(measure.LiveBytes):
    """Also notes the bytes of the largest storage."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def _add(self, storage: torch.UntypedStorage) -> None:
        super()._add(storage)
        self.largest = max(self.largest, storage.nbytes())


def saved_and_peak(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[int, int]:
    """Returns the live bytes after the forward without its output, and the peak of both passes."""
    with LiveBytes() as memory:
        y = function(x)
        saved = memory.live - y.nbytes
        y.backward(torch.ones_like(y))
    return saved, memory.peak


def flops_of_step(model: nn.Module, tokens: int) -> int:
    """Returns the FLOP of a forward and a backward of one sequence."""
    with FlopCount() as flops:
        loss_and_gradients(model, **batch_of(1, tokens))
    assert not flops.unknown
    return flops.total
