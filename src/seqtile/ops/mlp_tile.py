"""A tile of a gated MLP, down(act(gate(x)) * up(x)), forward and backward, in buffers that serve every tile."""

from collections.abc import Sequence

import torch

from seqtile.kernels.launch import gated_activation_, gated_activation_backward_
from seqtile.ops.projection import Projection, ProjectionGrad


class MLPTile:
    """Allocates [rows, 2M], and at the first backward [rows, M]. The products are `x`'s dtype.

    `into` are gate and up, or one projection that makes gate above up.
    """

    def __init__(self, x: torch.Tensor, rows: int, into: Sequence[Projection], down: Projection, activation: str):
        self.into, self.down, self.activation = into, down, activation
        self._both = x.new_empty(rows, 2 * down.weight.shape[1], dtype=down.weight.dtype)
        self._product: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes y [C, D] of x [C, D] to `out`, which may be x. 3 u, where u = 2 C D M FLOP."""
        gate, up, _ = self._gate_and_up(x)
        return self.down.forward(gated_activation_(gate, up, self.activation), out=out)

    def backward(
        self,
        x: torch.Tensor,
        d_y: torch.Tensor,
        into_grads: Sequence[ProjectionGrad],
        down_grad: ProjectionGrad,
        out: torch.Tensor | None,
    ) -> None:
        """Adds to the gradients, and writes that of x to `out` if given, which must not be x. Gate and up again, then
        6 u: 8 u."""
        gate, up, both = self._gate_and_up(x)
        if self._product is None:
            self._product = self._both.new_empty(self._both.shape[0], self._both.shape[1] // 2)
        product = self._product[: x.shape[0]]
        self.down.backward(d_y, out=product)
        gated_activation_backward_(gate, up, product, self.activation)
        down_grad.add(d_y, product)
        d_into = (both,) if len(self.into) == 1 else (gate, up)  # the kernel left d_gate and d_up there
        for i, (projection, grad, d_out) in enumerate(zip(self.into, into_grads, d_into, strict=True)):
            grad.add(d_out, x)
            if out is not None:
                projection.backward(d_out, out=out, add=i > 0)

    def _gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate and up of a tile, side by side in what comes third, [C, 2M]."""
        both = self._both[: x.shape[0]]
        gate, up = both.chunk(2, dim=1)
        if len(self.into) == 1:
            self.into[0].forward(x, out=both)
        else:
            self.into[0].forward(x, out=gate)
            self.into[1].forward(x, out=up)
        return gate, up, both
