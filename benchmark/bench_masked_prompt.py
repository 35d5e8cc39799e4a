"""The loss where three of four tokens are a prompt, which has no labels."""

from dataclasses import replace

import torch
from benchmark.bench_linear_cross_entropy import CONTESTANTS, Head, last_rows, right_rows
from benchmark.bench_linear_cross_entropy import flops as flops_of_all
from benchmark.bench_linear_cross_entropy import operands as all_labelled
from benchmark.shapes import Case, K, Lengths, Shape
from benchmark.subject import Subject

LENGTHS: Lengths = {
    "small": {"tiny": (300, 5000)},
    "cpu": {"smollm2_135m": (8 * K,)},
    "quick": {"llama3_8b": (32 * K,)},
    "full": {"llama3_8b": (32 * K, 128 * K)},
}


def operands(shape: Shape, tokens: int, dtype: torch.dtype) -> Head:
    head = all_labelled(shape, tokens, dtype)
    prompt = torch.arange(tokens, device=head.target.device) < tokens * 3 // 4
    return replace(head, target=head.target.masked_fill(prompt, -100))


def flops(shape: Shape, tokens: int) -> float:
    return flops_of_all(shape, tokens) / 4


SUBJECT = Subject("masked_prompt", operands, CONTESTANTS, flops, last_rows, right_rows, LENGTHS)


def test_masked_prompt(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
