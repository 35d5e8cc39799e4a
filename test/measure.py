"""Laws without a clock: FLOP counted and live bytes tracked, see seqtile/memory/measure.py."""

import pytest

from seqtile.kernels.dispatch import triton
from seqtile.memory.measure import FlopCount, LiveBytes

__all__ = ["FlopCount", "LiveBytes", "eager_memory"]

eager_memory = pytest.mark.skipif(
    triton is not None and triton.knobs.runtime.interpret, reason="the interpreter has tensors of its own"
)
