"""How a parameter's gradient adds up over tiles: in one float32 buffer that reaches autograd once.

Because it is returned once, by one node, DDP, FSDP2 and ZeRO need no special code. Because it is float32, its error
does not grow with the number of tiles (bfloat16 sums over 256 tiles are 9 times worse than one rounding).

A parameter that carries a `main_grad` (float32, of its shape: Megatron's convention) takes its gradient there instead:
tiles and micro-batches add up in it, unrounded, and autograd is given nothing.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor

# torch < 2.10 refuses a float32 addend to a half-precision product (pytorch #167931).
_ADDMM_TAKES_FLOAT32 = torch.__version__ >= "2.10"
# A CPU has no half-precision product with a float32 sum: operands are copied to float32, 4 MiB of them at a time, and
# what is rounded is copied by as many rows.
_CPU_BLOCK = (128, 4096)


class WeightGrad:
    """d_weight = sum over tiles of left' right, where the layer is y = x weight' + bias and left = d_y, right = x; or
    d_bias, where right is all ones.

    Allocates one buffer of the parameter's shape, float32 or `dtype`, unless it is given a `main_grad` to add to.
    """

    def __init__(
        self, parameter: torch.Tensor, dtype: torch.dtype = torch.float32, main_grad: torch.Tensor | None = None
    ):
        self._shape, self._dtype = parameter.shape, parameter.dtype
        self._in_place = main_grad is not None
        self._empty = not self._in_place
        total = main_grad if self._in_place else torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        self.total = total.unsqueeze(1) if total.dim() == 1 else total

    def add(self, left: torch.Tensor, right: torch.Tensor | None = None) -> None:
        """Adds left' right, or for a bias left' ones; left [C, out], right [C, in], both of one dtype."""
        on_gpu = _on_gpu(left)
        if right is None and on_gpu:
            return self.add_whole(left.sum(0, dtype=torch.float32))
        right = left.new_ones(left.shape[0], 1) if right is None else right
        beta = 0 if self._empty else 1  # beta 0 ignores what the empty buffer holds, NaN included
        self._empty = False
        if left.dtype == self.total.dtype:
            self.total.addmm_(left.t(), right, beta=beta)
        elif not on_gpu or torch.version.hip is not None:
            self._add_in_float32(left, right, beta)
        elif not left.is_cuda:  # a simulation: the same product and sum; torch 2.11 cannot simulate addmm's out_dtype
            self.total.addmm_(left.t(), right, beta=beta)
        elif _ADDMM_TAKES_FLOAT32 and not torch.compiler.is_compiling():  # Inductor cannot lower it (pytorch #163880)
            torch.addmm(self.total, left.t(), right, beta=beta, out_dtype=torch.float32, out=self.total)
        elif beta == 0:
            self.total.copy_(torch.mm(left.t(), right, out_dtype=torch.float32))
        else:
            self.total.add_(torch.mm(left.t(), right, out_dtype=torch.float32))

    def add_whole(self, gradient: torch.Tensor) -> None:
        """Adds a tile's gradient that is there already, of the parameter's shape; it may be sparse."""
        total = self.total.view(self._shape)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        total.copy_(gradient) if self._empty else total.add_(gradient)
        self._empty = False

    def begun(self) -> torch.Tensor:
        """The sum so far, of the parameter's shape, to be added to."""
        if self._empty:
            self.total.zero_()
            self._empty = False
        return self.total.view(self._shape)

    def add_rows(self, rows: slice, gradient: torch.Tensor) -> None:
        """Adds a gradient of some of the parameter's rows."""
        self.begun()[rows].add_(gradient)

    def _add_in_float32(self, left: torch.Tensor, right: torch.Tensor, beta: int) -> None:
        block_rows, block_columns = left.shape if left.is_cuda else _CPU_BLOCK
        for row in range(0, left.shape[0], block_rows):
            rows = slice(row, row + block_rows)
            operand = right[rows].float()
            for column in range(0, left.shape[1], block_columns):
                columns = slice(column, column + block_columns)
                self.total[columns].addmm_(left[rows, columns].t().float(), operand, beta=beta)
            beta = 1

    def result(self) -> torch.Tensor | None:
        """The sum, rounded once to the parameter's dtype; zeros if nothing was added; None if it is a `main_grad`."""
        total = self.begun()
        return None if self._in_place else total.to(self._dtype)

    def scaled(self, factor: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor | None:
        """The sum times `factor`, float32 [1], rounded once, in one pass over it. None if there is a `main_grad`, to
        which it is added."""
        total = self.begun()
        if main_grad is not None:
            main_grad.addcmul_(total, factor)
            return None
        return scale_(total, factor, None if total.dtype == self._dtype else torch.empty_like(total, dtype=self._dtype))


def scale_(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x times `factor`, float32 [1], in float32, rounded once, in one pass; written to `out`, or over x; returned."""
    out = x if out is None else out
    whole = _on_gpu(x) or torch.compiler.is_compiling() or x.dim() == 1
    rows = len(x) if whole else _CPU_BLOCK[0]  # a CPU rounds out of place
    for start in range(0, len(x), max(rows, 1)):
        part = slice(start, start + rows)
        torch.mul(x[part], factor, out=out[part])
    return out


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda or isinstance(tensor, FakeTensor)  # a simulation on fake tensors stands for a GPU


def main_grad_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """The parameter's `main_grad`, None if it has none. Raises ValueError unless it is float32 and of its shape.

    To be asked for in the forward: what a backward finds saved may be a copy without attributes.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None and (main_grad.dtype != torch.float32 or main_grad.shape != parameter.shape):
        raise ValueError(
            f"main_grad is {main_grad.dtype} {list(main_grad.shape)}, expected torch.float32 "
            f"{list(parameter.shape)}, the parameter's shape; allocate it so, or take it off"
        )
    return main_grad
