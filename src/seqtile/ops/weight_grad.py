"""How a weight's gradient adds up over tiles: in one float32 buffer that reaches autograd once.

Because it is returned once, by one node, DDP, FSDP2 and ZeRO need no special code. Because it is float32, its error
does not grow with the number of tiles (bfloat16 sums over 256 tiles are 9 times worse than one rounding).
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor

# torch < 2.10 refuses a float32 addend to a half-precision product (pytorch #167931).
_ADDMM_TAKES_FLOAT32 = torch.__version__ >= "2.10"
# A CPU has no half-precision product with a float32 sum: operands are copied to float32, 4 MiB of them at a time.
_CPU_BLOCK = (128, 4096)


class WeightGrad:
    """d_weight = sum over tiles of left' right, where the layer is y = x weight' and left = d_y, right = x.

    Allocates one buffer of the weight's shape, float32 or `dtype`.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype = torch.float32):
        self.total = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        self._weight_dtype = weight.dtype
        self._empty = True

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds left' right; left [C, out], right [C, in], both of one dtype."""
        beta = 0 if self._empty else 1  # beta 0 ignores what the empty buffer holds, NaN included
        self._empty = False
        if left.dtype == self.total.dtype:
            self.total.addmm_(left.t(), right, beta=beta)
        elif torch.version.hip is not None or not (left.is_cuda or isinstance(left, FakeTensor)):
            self._add_in_float32(left, right, beta)  # a simulation on fake tensors stands for a GPU
        elif _ADDMM_TAKES_FLOAT32:
            torch.addmm(self.total, left.t(), right, beta=beta, out_dtype=torch.float32, out=self.total)
        elif beta == 0:
            torch.mm(left.t(), right, out_dtype=torch.float32, out=self.total)
        else:
            self.total.add_(torch.mm(left.t(), right, out_dtype=torch.float32))

    def _add_in_float32(self, left: torch.Tensor, right: torch.Tensor, beta: int) -> None:
        block_rows, block_columns = left.shape if left.is_cuda else _CPU_BLOCK
        for row in range(0, left.shape[0], block_rows):
            rows = slice(row, row + block_rows)
            operand = right[rows].float()
            for column in range(0, left.shape[1], block_columns):
                columns = slice(column, column + block_columns)
                self.total[columns].addmm_(left[rows, columns].t().float(), operand, beta=beta)
            beta = 1

    def result(self) -> torch.Tensor:
        """The sum, rounded once to the weight's dtype; zeros if nothing was added."""
        return (self.total.zero_() if self._empty else self.total).to(self._weight_dtype)
