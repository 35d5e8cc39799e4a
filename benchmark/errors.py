"""How far a result is from the truth; of the tests too, see test/support/assertions.py."""

import torch

FLOOR = 1e-6  # of the law: at most twice as far as torch in the same dtype, and this


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """||value - truth|| / ||truth||, in float64; ||value|| where the truth is zero."""
    value, truth = value.detach().double().cpu(), truth.detach().double().cpu()
    assert value.shape == truth.shape
    norm = truth.norm()
    return ((value - truth).norm() / (norm if norm > 0 else 1)).item()


def distance(value: torch.Tensor, truth: torch.Tensor) -> float:
    """||value - truth|| / ||truth|| as `relative_error`, for large tensors: on their device, float32 at least."""
    truth = truth.float() if truth.dtype.itemsize < 4 else truth
    norm = truth.norm()
    return ((value.detach().to(truth.dtype) - truth).norm() / (norm if norm > 0 else 1)).item()
