"""Computes a module of your own chunk by chunk, and compares its gradients with those of the module as it is.

python examples/tiled_module.py [TOKENS]"""

import sys

import torch
from torch import nn

import seqtile


class FeedForward(nn.Module):
    """Two projections with a squared ReLU between them; what it makes of a token depends on no other token."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu().square())


tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
device = "cuda" if torch.cuda.is_available() else "cpu"
module = FeedForward(256, 1024).to(device)
x = torch.randn(1, tokens, 256, device=device, requires_grad=True)

y = seqtile.tiled(module, x, params=module.parameters(), chunk_tokens=1024, check=True)  # check: once is enough
leaves = (x, *module.parameters())
ours = torch.autograd.grad(y.square().mean(), leaves)
theirs = torch.autograd.grad(module(x).square().mean(), leaves)
error = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))
print(f"largest relative difference of a gradient: {error:.1e}")
