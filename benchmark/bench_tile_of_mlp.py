"""Tiles of the MLP of a quarter to four times the tokens that the rule of `seqtile.ops.chunks` gives."""

from functools import partial

from benchmark.bench_gated_mlp import Work, flops, huggingface, operands, seqtile
from benchmark.shapes import Case, K, Lengths
from benchmark.subject import Forward, Subject

from seqtile.ops.chunks import resolve_chunk_tokens

FACTORS = {"x 1/4": 0.25, "x 1/2": 0.5, "x 1": 1, "x 2": 2, "x 4": 4}
LENGTHS: Lengths = {
    "small": {"tiny": (5000,)},
    "cpu": {"smollm2_135m": (8 * K,)},
    "quick": {"llama3_8b": (32 * K,)},
    "full": dict.fromkeys(("llama3_8b", "qwen3_32b"), (32 * K, 128 * K)),
}


def chunk_tokens(hidden: int, factor: float) -> int:
    return int(resolve_chunk_tokens(None, hidden) * factor)


def tiled(factor: float, work: Work) -> Forward:
    return seqtile(work, chunk_tokens(work.x.shape[-1], factor))


CONTESTANTS = {"huggingface": huggingface} | {name: partial(tiled, factor) for name, factor in FACTORS.items()}
SUBJECT = Subject("tile_of_mlp", operands, CONTESTANTS, flops, lengths=LENGTHS)


def test_tile_of_mlp(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
