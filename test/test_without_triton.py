"""`import seqtile` and everything in it works where Triton is not installed."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
import torch, seqtile
from seqtile.kernels.dispatch import triton_serves
assert not triton_serves(torch.zeros(1))
hidden, weight = torch.randn(63, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
target = torch.randint(0, 50, (63,))
loss = seqtile.linear_cross_entropy(hidden, weight, target, chunk_tokens=16)
expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target)
torch.testing.assert_close(loss, expected)
loss.backward()
gate, up, down = (torch.randn(shape, requires_grad=True) for shape in ((12, 8), (12, 8), (8, 12)))
seqtile.gated_mlp(hidden, gate, up, down, chunk_tokens=16).sum().backward()
assert all(weight.grad is not None for weight in (gate, up, down))
"""


def test_without_triton() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
