"""The tolerance of all tests: |ours - truth| <= 2 * |torch in the same dtype - truth| + floor, in relative norms.

Triton's interpreter (3.7) truncates float32 to bfloat16 where a GPU rounds to nearest. This costs up to 2**-7 of a
value, so that is the floor for bfloat16 in the interpreter only.
"""

from collections.abc import Iterable

import torch
from benchmark.errors import FLOOR, relative_error

from seqtile.kernels.dispatch import triton
from seqtile.models.logits.lazy import LazyLogits

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
    """Asserts that `ours` is at most twice as far from `truth` (float64) as torch's result in the same dtype."""
    error, allowed = relative_error(ours, truth), 2 * relative_error(same_dtype, truth) + floor_of(ours.dtype)
    assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.2e}"


def assert_all_as_exact(
    ours: Iterable[torch.Tensor], same_dtype: Iterable[torch.Tensor], truth: Iterable[torch.Tensor]
) -> None:
    """Asserts the same for each tensor."""
    for tensors in zip(ours, same_dtype, truth, strict=True):
        assert_as_exact(*tensors)


def assert_each_as_exact(
    ours: dict[str, torch.Tensor], same_dtype: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> None:
    """Asserts the same for values of parameters, by name: for each matrix, and for all vectors together.

    A vector of a dozen numbers has too few rounding errors for a factor of two: by chance one draw in some hundreds
    exceeds it. So the root mean square of the relative errors of all vectors is compared.
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
    """Returns a buffer full of NaN, so that reading before writing shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def unread(logits: object) -> bool:
    """Returns whether logits are a tensor that nothing has read yet."""
    return isinstance(logits, LazyLogits) and not logits.is_computed
