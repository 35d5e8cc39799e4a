"""The one tolerance law: |ours - truth| <= 2 * |torch in the same dtype - truth| + floor, in relative norms.

Triton's interpreter (3.7) truncates float32 to bfloat16 where a GPU rounds to nearest, which costs up to 2**-7 of a
value: that is the floor for bfloat16 there, and there alone.
"""

from collections.abc import Iterable

import torch
from benchmark.errors import FLOOR, relative_error

from seqtile.kernels.dispatch import triton
from seqtile.models.lazy_logits import LazyLogits

__all__ = [
    "FLOOR",
    "assert_all_as_exact",
    "assert_as_exact",
    "assert_each_as_exact",
    "floor_of",
    "poisoned",
    "relative_error",
    "unread",
]
INTERPRETER_BFLOAT16_FLOOR = 2**-7


def floor_of(dtype: torch.dtype) -> float:
    interpreted = dtype == torch.bfloat16 and triton is not None and triton.knobs.runtime.interpret
    return INTERPRETER_BFLOAT16_FLOOR if interpreted else FLOOR


def assert_as_exact(ours: torch.Tensor, same_dtype: torch.Tensor, truth: torch.Tensor) -> None:
    """`ours` is at most twice as far from the `truth` (float64) as what torch computes in the same dtype."""
    error, allowed = relative_error(ours, truth), 2 * relative_error(same_dtype, truth) + floor_of(ours.dtype)
    assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.2e}"


def assert_all_as_exact(
    ours: Iterable[torch.Tensor], same_dtype: Iterable[torch.Tensor], truth: Iterable[torch.Tensor]
) -> None:
    """The same for each of several."""
    for tensors in zip(ours, same_dtype, truth, strict=True):
        assert_as_exact(*tensors)


def assert_each_as_exact(
    ours: dict[str, torch.Tensor], same_dtype: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> None:
    """The same for what belongs to parameters, by name: for every matrix, and for all vectors together.

    The rounding errors of a vector of a dozen numbers are too few for a bound of two: by luck alone one fresh draw in
    some hundreds is beyond it. Of all vectors the root of the mean square of their relative errors is compared.
    """
    assert ours.keys() == same_dtype.keys() == truth.keys()
    vectors = [name for name, true in truth.items() if true.ndim < 2]
    errors = [{name: relative_error(found[name], true) for name, true in truth.items()} for found in (ours, same_dtype)]
    for name, true in truth.items():
        assert true.norm() > 0, f"{name}: nothing to compare"
        error, allowed = errors[0][name], 2 * errors[1][name] + FLOOR
        assert name in vectors or error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"
    error, same = (sum(found[name] ** 2 for name in vectors) ** 0.5 for found in errors)
    assert error <= 2 * same + FLOOR * len(vectors) ** 0.5, f"vectors: relative error {error:.2e}, untiled {same:.2e}"


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A buffer full of NaN: what is read before it is written shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def unread(logits: object) -> bool:
    """Says if logits are a tensor that nobody has read yet."""
    return isinstance(logits, LazyLogits) and not logits.is_computed
