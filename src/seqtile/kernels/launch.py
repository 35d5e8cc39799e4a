"""The one choice between Triton and PyTorch.

A tensor on a GPU is served by the Triton kernels, any other by their eager twins. Two exceptions: where Triton is not
installed the eager twins serve every device, and under Triton's interpreter (`TRITON_INTERPRET=1`) the kernels serve
CPU tensors too, which is how they are tested without a GPU.
"""

from types import ModuleType

import torch

from seqtile.kernels import eager

try:
    import triton
except ModuleNotFoundError:
    triton = None
else:
    from seqtile.kernels import cross_entropy as triton_cross_entropy
    from seqtile.kernels import gated_activation as triton_gated_activation


def triton_serves(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels, rather than their eager twins, run on `tensor`."""
    return triton is not None and (tensor.is_cuda or triton.knobs.runtime.interpret)


def cross_entropy_(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int, write_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of every row of a tile of logits, and its gradient written over the logits.

    Args:
        logits: [C, V] float32, bfloat16 or float16, last dimension contiguous. **Destroyed**: holds
            d loss / d logits = softmax(logits) - onehot(target) afterwards if `write_grad`, undefined values otherwise.
        target: [C] int64. A row whose target is `ignore_index` has loss 0, log-sum-exp 0 and gradient 0. A row whose
            target lies outside [0, V) is poisoned with NaN; nothing out of bounds is read.

    Returns:
        losses [C] and log-sum-exp [C], float32.

    Moves 2 * C * V elements (3 with the gradient); allocates 8 * C bytes (the eager twin: one float32 copy of a
    half-precision tile besides).
    """
    backend: ModuleType = triton_cross_entropy if triton_serves(logits) else eager
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        return backend.cross_entropy_(logits, target, ignore_index=ignore_index, write_grad=write_grad)


def gated_activation_(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, computed in float32 and written over `gate`, which is returned.

    Args:
        gate, up: [C, M] of one dtype, last dimension contiguous. `gate` is **destroyed**.

    Moves 3 * C * M elements.
    """
    backend: ModuleType = triton_gated_activation if triton_serves(gate) else eager
    with torch.cuda.device_of(gate):
        return backend.gated_activation_(gate, up)


def gated_activation_backward_(gate: torch.Tensor, up: torch.Tensor, d_product: torch.Tensor) -> None:
    """Backward of silu(gate) * up, in place, the product recomputed on the way.

    Args:
        gate, up, d_product: [C, M] of one dtype, last dimension contiguous. All three are **destroyed**: afterwards
            `gate` holds d_gate, `up` holds d_up, and `d_product` holds the product silu(gate) * up.

    Moves 6 * C * M elements, allocates nothing on a GPU.
    """
    backend: ModuleType = triton_gated_activation if triton_serves(gate) else eager
    with torch.cuda.device_of(gate):
        backend.gated_activation_backward_(gate, up, d_product)
