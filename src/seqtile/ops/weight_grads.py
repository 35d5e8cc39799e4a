"""The gradients of weights inside a tiled function, summed over chunks.

A parameter's gradient is summed in one float32 buffer, and one node returns it to autograd once. DDP, FSDP2 and ZeRO
therefore need no special code. In float32 the error does not grow with the number of chunks; bfloat16 sums over 256
chunks are 9 times worse than one rounding.

If a parameter has a `main_grad` (float32, of its shape: Megatron's convention), the gradient is added there instead,
unrounded, and autograd gets None. Each chunk adds its part; only the loss's head adds its sum at the end, because the
sum must first be multiplied by the upstream gradient.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

# A CPU has no half-precision product with a float32 sum: operands are copied to float32, at most 4 MiB at a time.
# Rounding uses blocks of as many rows.
_CPU_BLOCK = (128, 4096)


class WeightGrad:
    """The gradient of one parameter, summed over chunks.

    d_weight = sum of left' right, where the layer is y = x weight' + bias and left = d_y, right = x. For d_bias, right
    is all ones. The first addition allocates one buffer of the parameter's shape, float32 or `dtype`, unless a
    `main_grad` is given.
    """

    def __init__(
        self, parameter: torch.Tensor, dtype: torch.dtype = torch.float32, main_grad: torch.Tensor | None = None
    ):
        self._shape, self._device, self._dtype = parameter.shape, parameter.device, parameter.dtype
        self._sum_dtype, self._main_grad = dtype, main_grad
        self._buffer = main_grad
        self.is_empty = main_grad is None  # nothing was added yet, and there is no `main_grad`

    @property
    def buffer(self) -> torch.Tensor:
        """The buffer, of the parameter's shape. Its values are undefined until the first addition."""
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=self._sum_dtype, device=self._device)
        return self._buffer

    def __getitem__(self, rows: slice) -> "WeightGrad":
        """Returns the sum of some rows of the parameter, as a view of the same buffer."""
        if rows == slice(0, self._shape[0]):
            return self
        total = self.total()[rows]
        return WeightGrad(total, main_grad=total)

    def total(self) -> torch.Tensor:
        """Returns the sum so far, zeros if there is none; the caller may add to it in place."""
        if self.is_empty:
            self.buffer.zero_()
            self.is_empty = False
        return self.buffer

    def add(self, left: torch.Tensor, right: torch.Tensor | None = None) -> None:
        """Adds left' right, or for a bias left' ones. left [C, out] and right [C, in] have one dtype."""
        if right is None and _on_gpu(left):
            return self.add_gradient(left.sum(0, dtype=torch.float32))
        total = self.buffer
        if right is None:
            total, right = total[:, None], left.new_ones(left.shape[0], 1)
        beta = 0 if self.is_empty else 1  # beta 0 ignores the buffer's old values, NaN included
        if left.dtype == total.dtype:
            total.addmm_(left.T, right, beta=beta)
        elif not _on_gpu(left) or torch.version.hip is not None:
            _add_in_float32(total, left, right, beta)
        elif not left.is_cuda:  # a simulation computes the same: torch 2.11 cannot simulate addmm's out_dtype
            total.addmm_(left.T, right, beta=beta)
        elif not torch.compiler.is_compiling():  # Inductor cannot lower it (pytorch #163880)
            if len(total) == 1:  # an adapter of rank 1: some releases take a row for a bias, which cublasLt gets
                total, left, right = total.T, right, left
            torch.addmm(total, left.T, right, beta=beta, out_dtype=torch.float32, out=total)
        else:
            self.add_gradient(torch.mm(left.T, right, out_dtype=torch.float32))
        self.is_empty = False

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Adds the gradient of a chunk, already computed, of the parameter's shape. It may be sparse."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        self.buffer.copy_(gradient) if self.is_empty else self.buffer.add_(gradient)
        self.is_empty = False

    def result(self) -> torch.Tensor | None:
        """Returns the sum, rounded once to the parameter's dtype, and releases the buffer. Zeros if nothing was added;
        None if a `main_grad` holds the sum."""
        total, self._buffer = self.total(), None
        return None if self._main_grad is not None else total.to(self._dtype)

    def scaled(self, factor: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the sum times `factor` (float32 [1]), rounded once, in one pass. If there is a `main_grad`, adds the
        product there and returns None."""
        total = self.total()
        if main_grad is not None:
            main_grad.addcmul_(total, factor)
            return None
        return scale_(total, factor, None if total.dtype == self._dtype else torch.empty_like(total, dtype=self._dtype))


def _add_in_float32(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: int) -> None:
    """Adds left' right to `total` (float32), copying the operands to float32 block by block."""
    block_rows, block_columns = left.shape if left.is_cuda else _CPU_BLOCK
    for row in range(0, left.shape[0], block_rows):
        rows = slice(row, row + block_rows)
        operand = right[rows].float()
        for column in range(0, left.shape[1], block_columns):
            columns = slice(column, column + block_columns)
            total[columns].addmm_(left[rows, columns].T.float(), operand, beta=beta)
        beta = 1


def scale_(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies x by `factor` (float32 [1]) in float32 and rounds once, in one pass. Writes to `out`, by default x,
    and returns it."""
    out = x if out is None else out
    whole = _on_gpu(x) or torch.compiler.is_compiling() or x.dim() == 1
    rows = len(x) if whole else _CPU_BLOCK[0]  # a CPU allocates a temporary to round
    for start in range(0, len(x), max(rows, 1)):
        part = slice(start, start + rows)
        torch.mul(x[part], factor, out=out[part])
    return out


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or isinstance(tensor, FakeTensor)  # a simulation with fake tensors represents a GPU


def main_grad_of(parameter: Any) -> torch.Tensor | None:
    """Returns the parameter's `main_grad`, or None. Raises ValueError unless it is float32 and of the parameter's
    shape.

    Call it in the forward: a saved parameter may come back as a copy without attributes.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None and (main_grad.dtype != torch.float32 or main_grad.shape != parameter.shape):
        raise ValueError(
            f"main_grad is {main_grad.dtype} {list(main_grad.shape)}, expected torch.float32 "
            f"{list(parameter.shape)}, the parameter's shape; allocate it with these, or remove it"
        )
    return main_grad


def weight_grads(
    tensors: Sequence[torch.Tensor | None], needs: Sequence[bool], main_grads: Sequence[torch.Tensor | None]
) -> list[WeightGrad | None]:
    """Returns a `WeightGrad` for every tensor that needs a gradient, None for the others."""
    each = zip(tensors, needs, main_grads, strict=True)
    return [WeightGrad(tensor, main_grad=main_grad) if need else None for tensor, need, main_grad in each]


def finish_weight_grads(sums: Iterable[WeightGrad | None]) -> list[torch.Tensor | None]:
    """Returns the summed gradients. A leaf that no chunk used, such as the weights of an expert without tokens, gets
    none, as when untiled."""
    return [None if total is None or total.is_empty else total.result() for total in sums]
