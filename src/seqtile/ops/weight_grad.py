"""How a weight's gradient adds up over tiles: in one float32 buffer that reaches autograd once.

Because it is returned once, by one node, DDP, FSDP2 and ZeRO need no special code. Because it is float32, its error
does not grow with the number of tiles (bfloat16 sums over 256 tiles are 9 times worse than one rounding).
"""

import torch

# torch < 2.10 refuses a float32 addend to a half-precision product (pytorch #167931).
_ADDMM_TAKES_FLOAT32 = torch.__version__ >= "2.10"


class WeightGrad:
    """d_weight = sum over tiles of left' right, where the layer is y = x weight' and left = d_y, right = x.

    Allocates one float32 buffer of the weight's shape on the first `add`.
    """

    def __init__(self, weight: torch.Tensor):
        self.dtype = weight.dtype
        self.total = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        self._empty = True

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds left' right; left [C, out], right [C, in], both of one dtype."""
        beta = 0 if self._empty else 1  # beta 0 ignores what the empty buffer holds, NaN included
        self._empty = False
        if left.dtype == torch.float32:
            self.total.addmm_(left.t(), right, beta=beta)
        elif not left.is_cuda or torch.version.hip is not None:
            self.total.addmm_(left.t().float(), right.float(), beta=beta)
        elif _ADDMM_TAKES_FLOAT32:
            torch.addmm(self.total, left.t(), right, beta=beta, out_dtype=torch.float32, out=self.total)
        elif beta == 0:
            torch.mm(left.t(), right, out_dtype=torch.float32, out=self.total)
        else:
            self.total.add_(torch.mm(left.t(), right, out_dtype=torch.float32))

    def result(self) -> torch.Tensor:
        """The sum, rounded once to the weight's dtype."""
        return self.total.to(self.dtype)
