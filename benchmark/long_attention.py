"""Attention of a sequence so long that offsets pass 2**31, forward and backward, some rows against float64.

    python3 -m benchmark.long_attention CASE [FILE] [--flash]

CASE: all-heads, 640K tokens with the 32 heads of an 8B model, about 55 GB; or head-group, 1M tokens with the 4 heads of
one of eight head groups. A case that memory is too small for is not run, and says so. sdpa chooses as it does in a
model with seqtile; --flash: FlashAttention. Appends what was found to FILE, as lines of JSON. Ends with 1 if anything
is wrong.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from benchmark.attention import (
    Long,
    all_finite,
    backend,
    bytes_needed,
    forward_and_backward,
    in_float64,
    largest_outside,
    operands,
)
from benchmark.checks import Check, Findings, run_checks
from benchmark.comparison import WRONG
from benchmark.device import DEVICE, DTYPE, Watch
from benchmark.errors import distance
from benchmark.shapes import K
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqtile.sdpa import around


class Sequence(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    width: int


CASES = {"all-heads": Sequence(640 * K, 32, 8, 128), "head-group": Sequence(K * K, 4, 1, 128)}
TINY = {"all-heads": Sequence(1200, 8, 2, 16), "head-group": Sequence(2000, 4, 1, 16)}  # without a GPU


def attention(name: str, sequence: Sequence, flash: bool) -> Findings:
    what = f"attention, {sequence.tokens:,} tokens, {sequence.heads} heads"
    needed = bytes_needed(*sequence)
    if DEVICE == "cuda" and needed > (free := torch.cuda.mem_get_info()[0]):
        yield {"what": what, "skipped": f"it needs about {needed / 1e9:.0f} GB, and {free / 1e9:.0f} are free"}
        return
    long = operands(*sequence)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else around(*long.heads, None):
        chosen = backend(*long.heads)
        yield {"what": f"{what}: begins", "sdpa": chosen}  # all that is left if it takes the process with it
        watch = Watch()
        watch.mark()
        out = forward_and_backward(long)
    watch.mark()
    about = {"sdpa": chosen, "cudnn": str(torch.backends.cudnn.version()), "seconds": round(watch.seconds()[0], 3)}
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    yield {"what": what, **about, "peak_gb": round(peak / 1e9, 1)}
    what = f"{what}, {chosen}"
    found = {"output": out, "gradient of q": long.q.grad, "of k": long.k.grad, "of v": long.v.grad}
    wrong = [each for each, tensor in found.items() if not all_finite(tensor)]
    yield Check(f"{what}: not finite ({', '.join(wrong) or 'none'})", len(wrong), 0)
    yield Check(f"{what}: gradient of q where there is none upstream", largest_outside(long, long.q.grad), 0)
    for name, error in errors(long, out).items():
        yield Check(f"{what}: {name}", error, WRONG[DTYPE])


def errors(long: Long, out: torch.Tensor) -> dict[str, float]:
    """The largest relative error of any head and row of the output and of q's gradient, of any head of k's and v's."""
    largest: dict[str, float] = {}
    group = long.q.shape[2] // long.k.shape[2]
    for kv_head in range(long.k.shape[2]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        rows, d_rows, d_k, d_v = in_float64(long, kv_head)
        pairs = {
            "gradient of k": [(long.k.grad[0, :, kv_head], d_k)],
            "gradient of v": [(long.v.grad[0, :, kv_head], d_v)],
        }
        for name, tensor, right in (("output", out, rows), ("gradient of q", long.q.grad, d_rows)):
            pairs[name] = list(zip(tensor[0, long.rows, heads].unbind(0), right.transpose(0, 1).unbind(0), strict=True))
        for name, of_head in pairs.items():
            found = torch.tensor([distance(*pair) for pair in of_head])  # NaN stays the largest
            largest[name] = torch.stack([torch.tensor(largest.get(name, 0.0)), found.max()]).max().item()
    return largest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--flash", action="store_true")
    given = parser.parse_args()
    sequence = (CASES if DEVICE == "cuda" else TINY)[given.case]
    run_checks("long attention", {given.case: partial(attention, given.case, sequence, given.flash)}, given.file)


if __name__ == "__main__":
    main()
