"""Tiles of the loss of a quarter to four times the tokens that the rule of `seqtile.ops.chunks` gives."""

from functools import partial

from benchmark.bench_linear_cross_entropy import Head, flops, huggingface, operands, seqtile
from benchmark.bench_tile_of_mlp import FACTORS, LENGTHS, chunk_tokens
from benchmark.shapes import Case
from benchmark.subject import Forward, Subject


def tiled(factor: float, head: Head) -> Forward:
    return seqtile(head, chunk_tokens=chunk_tokens(head.hidden.shape[-1], factor))


CONTESTANTS = {"huggingface": huggingface} | {name: partial(tiled, factor) for name, factor in FACTORS.items()}
SUBJECT = Subject("tile_of_loss", operands, CONTESTANTS, flops, lengths=LENGTHS)


def test_tile_of_loss(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
