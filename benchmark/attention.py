"""Causal attention by torch's sdpa: which of its kernels it chooses, and rows of a long sequence against float64.

Only few rows have an upstream gradient. Then the rows' outputs and gradients of queries, and the gradients of all keys
and values, can be computed in float64 for a million tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmark.device import DEVICE, DTYPE
from torch.nn.attention import SDPBackend

BLOCK = 65536  # tokens that are drawn or looked at together: fewer than 2**31 elements of any shape here


def backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> str:
    """Returns the name of the kernel that sdpa chooses for causal attention of [B, H, S, K], or under a mask."""
    options = {"is_causal": mask is None, "enable_gqa": q.shape[1] != k.shape[1]}
    return SDPBackend(torch._fused_sdp_choice(q, k, v, mask, **options)).name


@dataclass
class Long:
    """Queries, keys, values and the upstream gradient of one long sequence, laid out as in a model: [1, S, H, K]."""

    q: torch.Tensor
    k: torch.Tensor  # [1, S, kv heads, K]
    v: torch.Tensor
    d_out: torch.Tensor
    """Zero but in `rows`."""
    rows: torch.Tensor
    """Positions in the sequence, ascending."""

    @property
    def heads(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values as sdpa takes them, [1, H, S, K]."""
        return tuple(x.transpose(1, 2) for x in (self.q, self.k, self.v))


def bytes_needed(tokens: int, heads: int, kv_heads: int, width: int) -> int:
    """About what forward and backward hold: q, its gradient, the output and its gradient in half precision, a float32
    sum of the first, the gradients of keys and values for every head; k, v and their gradients; the truth of one kv
    head in float64."""
    return tokens * width * (heads * (4 * 2 + 4 + 2 * 2) + kv_heads * 4 * 2 + 10 * 8)


def random_blocks(*size: int) -> torch.Tensor:
    """Random, by blocks of tokens: each contiguous, and small enough for 32-bit offsets."""
    found = torch.empty(*size, device=DEVICE, dtype=DTYPE)
    for block in found.split(BLOCK, dim=1):
        block.normal_()
    return found


def operands(tokens: int, heads: int, kv_heads: int, width: int) -> Long:
    """The rows: spread over the sequence, the last among them, and those around element 2**31 of the queries. None of
    the first eighth: where a row looks at few keys, rounding takes much of its gradient."""
    border = 2**31 // (heads * width)
    near = [row for row in (border - 1, border) if 0 <= row < tokens]
    spread = torch.linspace(tokens // 8, tokens - 1, 8 - len(near)).long().tolist()
    rows = torch.tensor(sorted({*spread, *near}), device=DEVICE)
    q, k, v = (random_blocks(1, tokens, n, width) for n in (heads, kv_heads, kv_heads))
    d_out = torch.zeros(1, tokens, heads, width, device=DEVICE, dtype=DTYPE)
    d_out[:, rows] = random_blocks(1, len(rows), heads, width)
    return Long(*(x.requires_grad_() for x in (q, k, v)), d_out, rows)


def forward_and_backward(long: Long) -> torch.Tensor:
    """Forward and backward; returns the output, [1, S, H, K], without its graph. Gradients are in q, k and v."""
    q, k, v = long.heads
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    out.backward(long.d_out.transpose(1, 2))
    return out.detach().transpose(1, 2)


def in_float64(long: Long, kv_head: int) -> tuple[torch.Tensor, ...]:
    """In float64, of the query heads that read one kv head: the output's rows and the gradient of the queries' rows,
    both [G, R, K]; the gradients of all its keys and values, [S, K]."""
    group = long.q.shape[2] // long.k.shape[2]
    of_group = slice(kv_head * group, (kv_head + 1) * group)
    rows, d_rows = (x.detach()[0, long.rows, of_group].transpose(0, 1).double() for x in (long.q, long.d_out))
    k, v = (x.detach()[0, :, kv_head].double().requires_grad_() for x in (long.k, long.v))
    rows.requires_grad_()
    scores = rows @ k.t() * long.q.shape[-1] ** -0.5
    later = torch.arange(k.shape[0], device=DEVICE) > long.rows[:, None]
    out = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    return out.detach(), *torch.autograd.grad(out, (rows, k, v), d_rows)


def all_finite(x: torch.Tensor) -> bool:
    """Of [1, S, H, K]."""
    return all(bool(block.isfinite().all()) for block in x.split(BLOCK, dim=1))


def largest_outside(long: Long, x: torch.Tensor) -> float:
    """The largest absolute value of [1, S, H, K] in tokens other than the rows, NaN if there is one."""
    inside = torch.zeros(x.shape[1], dtype=torch.bool, device=DEVICE)
    inside[long.rows] = True
    parts = [
        block[0].float().abs().amax((1, 2)).masked_fill(of_block, 0)
        for block, of_block in zip(x.split(BLOCK, dim=1), inside.split(BLOCK), strict=True)
    ]
    return torch.cat(parts).max().item()
