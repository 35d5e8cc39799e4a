"""Calls that break a rule, one each. Unless each is reported, it means nothing that a case is right."""

from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import torch
from dev.check_cuda.rules import CudaRules
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten
Violation = Callable[[CudaRules], object]


def unreported(device: str) -> dict[str, list[str]]:
    """Runs the calls and returns those of which anything else is reported than should be, with what is."""
    found = {}
    for expected, call in violations(device).items():
        with CudaRules() as rules, patch.object(CausalBias, "__new__", rules.causal_bias), suppress(Exception):
            call(rules)  # some fail, after they were seen
        reported = list(rules.wrong())
        if len(reported) != 1 or expected not in reported[0]:
            found[expected] = reported
    return found


def violations(device: str) -> dict[str, Violation]:
    """Returns calls, each by a part of what has to be reported of it."""

    def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def rows(*shape: int, gap: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
        """[B, H, n, K] as a model makes it, tokens first; rows are K + `gap` apart."""
        batch, heads, tokens, size = shape
        return new(batch, tokens, heads, size + gap, dtype=dtype)[..., :size].transpose(1, 2)

    def product(
        total: torch.Tensor | None = None,
        left: torch.Tensor | None = None,
        right: torch.Tensor | None = None,
        out_dtype: torch.dtype = FP32,
        out: torch.Tensor | None = None,
    ) -> Violation:
        total = new(8, 64, dtype=FP32) if total is None else total
        left, right = new(8, 32) if left is None else left, new(32, 64) if right is None else right
        return lambda _: aten.addmm.dtype_out(total, left, right, out_dtype, out=total if out is None else out)

    def flash(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> Violation:
        k = q if k is None else k
        return lambda _: aten._scaled_dot_product_flash_attention(q, k, k if v is None else v)

    def efficient(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> Violation:
        k = q if k is None else k
        return lambda _: aten._scaled_dot_product_efficient_attention(q, k, k if v is None else v, None, False)

    def cudnn(q: torch.Tensor, k: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> Violation:
        k = q if k is None else k
        return lambda _: aten._scaled_dot_product_cudnn_attention(q, k, k, mask, False)

    def of_documents(
        q: torch.Tensor, k: torch.Tensor | None = None, starts: torch.Tensor | None = None, most: int = 16
    ) -> Violation:
        """Attention of documents whose queries and keys [n, h, K] are those of a layer."""
        k, ends = q if k is None else k, new(3, dtype=torch.int32)
        starts = ends if starts is None else starts
        return lambda _: aten._flash_attention_forward(q, k, k, ends, starts, 16, most, 0.0, True, False)

    def backward_of_documents(d_out: torch.Tensor) -> Violation:
        q, lse, seed = new(16, 8, 64), new(8, 16, dtype=FP32), new(2, dtype=torch.int64)
        ends = (new(3, dtype=torch.int32),) * 2
        call = q, q, q, q, lse, *ends, 16, 16, 0.0, True, seed, seed
        return lambda _: aten._flash_attention_backward(d_out, *call)

    def attend(q: torch.Tensor, k: torch.Tensor | None = None, **options: object) -> Violation:
        k = q if k is None else k
        return lambda rules: rules.attend(q, k, k, **options)

    def many_shapes(rules: CudaRules) -> None:
        for tokens in range(10, 15):
            rules.attend(*[rows(1, 2, tokens, 64)] * 3, is_causal=True)

    def heads_first(rules: CudaRules) -> None:
        """A gradient [B, H, n, K] in this order, of an output [B, n, H, K]."""
        q, lse, seed = rows(1, 2, 16, 64), new(1, 2, 16, dtype=FP32), new(2, dtype=torch.int64)
        lengths = (None, None, 16, 16)
        d_out = new(1, 2, 16, 64)
        aten._scaled_dot_product_flash_attention_backward(d_out, q, q, q, q, lse, *lengths, 0.0, True, seed, seed)

    def without_cudnn(rules: CudaRules) -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            cudnn(rows(1, 2, 16, 64))(rules)

    def twice_nonzero(rules: CudaRules) -> None:
        for _ in range(2):
            with suppress(Exception):  # without data it fails, after it was seen
                new(4).nonzero()

    usual, few = rows(1, 8, 16, 64), rows(1, 3, 16, 64)
    return {
        "[8, 2, 16] by [32, 64]": product(left=new(8, 2, 16)),
        "[8, 32] by [31, 64]": product(right=new(31, 64)),
        "bfloat16 by torch.float16": product(right=new(32, 64, dtype=FP16)),
        "torch.float16 of torch.bfloat16": product(new(8, 64, dtype=FP16), out_dtype=FP16),
        "torch.float32 of torch.float64": product(left=new(8, 32).double(), right=new(32, 64).double()),
        "into torch.bfloat16, of torch.bfloat16": product(new(8, 64)),
        "into [63], of [8, 64]": product(new(63, dtype=FP32), out=new(8, 64, dtype=FP32)),
        "into [64, 8], of [8, 64]": product(new(64, 8, dtype=FP32)),
        "the sum [8, 64] is copied": product(out=new(8, 64, dtype=FP32)),
        "[8, 32] with strides (64, 2) is copied": product(left=new(8, 64)[:, ::2]),
        "[1, 32] with strides (64, 2) is copied": product(new(1, 64, dtype=FP32), new(1, 64)[:, ::2]),
        "flash attention: dtypes": flash(rows(1, 8, 16, 64, dtype=FP32)),
        "flash attention: head widths [264]": flash(rows(1, 8, 16, 264)),
        "flash attention: head widths [32, 64]": flash(usual, v=rows(1, 8, 16, 32)),
        "flash attention: queries, keys and values of head width 60": flash(rows(1, 8, 16, 60, gap=4)),
        "flash attention: the last stride": flash(new(1, 8, 64, 16).transpose(2, 3)),
        "flash attention: 3 and 3 heads": flash(usual, few),
        "flash attention: batches differ": flash(usual, rows(2, 8, 16, 64)),
        "flash attention: no queries": flash(rows(1, 8, 0, 64), usual),
        "flash attention: query": flash(rows(1, 8, 16, 64, gap=1), usual),
        "flash attention: a gradient": heads_first,
        "documents, forward: dtypes": of_documents(new(16, 8, 64, dtype=FP32)),
        "documents, forward: head widths [264]": of_documents(new(16, 8, 264)),
        "documents, forward: head widths [32, 64]": of_documents(new(16, 8, 64), new(16, 8, 32)),
        "documents, forward: queries, keys and values of head width 60": of_documents(new(16, 8, 64)[..., :60]),
        "documents, forward: the last stride": of_documents(new(16, 64, 8).transpose(1, 2)),
        "documents, forward: 3 and 3 heads": of_documents(new(16, 8, 64), new(16, 3, 64)),
        "documents, forward: query": of_documents(new(16, 8, 65)[..., 1:], new(16, 8, 64)),
        "lengths of keys: torch.int64": of_documents(new(16, 8, 64), starts=new(3, dtype=torch.int64)),
        "lengths [4] of keys": of_documents(new(16, 8, 64), starts=new(4, dtype=torch.int32)),
        "lengths [3] of keys, of at most 0": of_documents(new(16, 8, 64), most=0),
        "documents, backward: output or gradient [16, 8, 64] with strides": backward_of_documents(
            new(8, 16, 64).transpose(0, 1)
        ),
        "efficient attention: head widths [60]": efficient(rows(1, 8, 16, 60, gap=4)),
        "efficient attention: 2 and 2 heads": efficient(usual, rows(1, 2, 16, 64)),
        "efficient attention: key": efficient(usual, rows(1, 8, 16, 65, gap=7)[..., 1:], usual),
        "cudnn attention: dtypes": cudnn(rows(1, 8, 16, 64, dtype=FP32)),
        "cudnn attention: head widths [264]": cudnn(rows(1, 8, 16, 264)),
        "cudnn attention: head widths [60]": cudnn(rows(1, 8, 16, 60, gap=4)),
        "cudnn attention: 3 and 3 heads": cudnn(usual, few),
        "cudnn attention: a single key": cudnn(usual, rows(1, 8, 1, 64)),
        "cudnn attention: the mask's shape": cudnn(usual, mask=new(1, 3, 16, 16)),
        "cudnn attention: the mask's last stride": cudnn(usual, mask=new(16, 32)[:, ::2]),
        "cudnn attention: it is switched off": without_cudnn,
        "shapes for which cuDNN makes a plan": many_shapes,
        "cuDNN could serve attention with a mask": attend(usual, attn_mask=new(16, 16)),
        "attention without a kernel": attend(
            rows(1, 8, 16, 64, dtype=FP32), rows(1, 2, 16, 64, dtype=FP32), enable_gqa=True
        ),
        "a mask [4097, 4097] of torch.bool is copied": attend(
            rows(1, 1, 4097, 64, dtype=FP32), attn_mask=new(4097, 4097, dtype=torch.bool)
        ),
        "is_causal of queries that are not as many": attend(rows(1, 8, 16, 60), rows(1, 8, 32, 60), is_causal=True),
        "CausalBias of [65536, 131072] asks the host for 64 GiB": lambda _: causal_lower_right(65_536, 131_072),
        "the host waits for nonzero": twice_nonzero,
        "the host waits for _local_scalar_dense": lambda _: new(1).item(),
    }
