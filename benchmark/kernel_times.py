"""How long the parts of a tile take, at the size of a real one, beside what their products and bytes would take at the
rates that this device reaches with a large product and a large copy.

    python3 -m benchmark.kernel_times [FILE]

Median and distance of quartiles of CUDA events, by turns, so that clocks and heat meet all alike. What a part destroys
is made anew before each turn, outside its time; that keeps the GPU busy while the host launches the part. Appends each
to FILE, as lines of JSON.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmark.device import DEVICE, DTYPE, Watch, ceilings, spread, synchronize
from benchmark.one_tile import Tile, tile_at_hand
from benchmark.rates import Rates
from benchmark.rows import append

from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import (
    cross_entropy_,
    gated_activation_,
    gated_activation_backward_,
    rms_norm,
    rms_norm_backward,
    rotary_,
)
from seqtile.ops.weight_grads import WeightGrad

WARM, TURNS = 3, (30 if DEVICE == "cuda" else 3)


@dataclass(frozen=True)
class Part:
    """An operation to time, with its FLOP and the bytes that it moves."""

    run: Callable[[], object]
    flops: float = 0
    bytes: float = 0
    """The fewest: each input once, each output once."""
    restore: Callable[[], object] = lambda: None


def parts_of_loss(tile: Tile) -> dict[str, Part]:
    tokens, width, vocab = tile.tokens, tile.shape.hidden, tile.shape.vocab
    x, weight, source = tile.random(tokens, width), tile.random(vocab, width), tile.random(tokens, vocab)
    logits, losses = torch.empty_like(source), torch.empty(tokens, device=DEVICE)
    target = torch.randint(vocab, (tokens,), device=DEVICE)
    d_hidden, rounded = torch.empty_like(x), torch.empty_like(weight)
    sums = WeightGrad(weight)
    factor = torch.ones(1, device=DEVICE)

    def cross_entropy(write_grad: bool) -> Callable[[], None]:
        return lambda: cross_entropy_(logits, target, losses, LossOptions(), write_grad=write_grad)

    flops, in_float32 = 2.0 * tokens * width * vocab, 4 * weight.numel()  # of two readings or writings, half is hidden
    again = lambda: logits.copy_(source)  # noqa: E731
    return {
        "logits": Part(lambda: torch.mm(x, weight.t(), out=logits), flops),
        "d_hidden": Part(lambda: torch.mm(source, weight, out=d_hidden), flops),
        "d_weight, one product": Part(lambda: torch.mm(source.t(), x, out=rounded), flops),
        "d_weight, beta 0": Part(lambda: WeightGrad(weight).add(source, x), flops, in_float32 / 2),
        "d_weight, beta 1": Part(lambda: sums.add(source, x), flops, in_float32),
        "cross-entropy": Part(cross_entropy(True), 0, 3 * source.nbytes, again),
        "cross-entropy, no gradient": Part(cross_entropy(False), 0, source.nbytes, again),
        "scaling": Part(lambda: sums.buffer.mul_(factor), 0, 2 * sums.buffer.nbytes),
        "rounding": Part(lambda: rounded.copy_(sums.buffer), 0, sums.buffer.nbytes + rounded.nbytes),
        "scaling and rounding": Part(
            lambda: torch.mul(sums.buffer, factor, out=rounded), 0, sums.buffer.nbytes + rounded.nbytes
        ),
    }


def parts_of_mlp(tile: Tile) -> dict[str, Part]:
    tokens, width, inner = tile.tokens, tile.shape.hidden, tile.shape.mlp
    x, weight = tile.random(tokens, width), tile.random(inner, width)
    source, buffers = tile.random(3, tokens, inner), torch.empty(3, tokens, inner, device=DEVICE, dtype=DTYPE)
    gate, up, d_product = buffers
    again = lambda: buffers.copy_(source)  # noqa: E731
    return {
        "gate": Part(lambda: torch.mm(x, weight.t(), out=gate), 2.0 * tokens * width * inner),
        "gated activation": Part(lambda: gated_activation_(gate, up, "silu"), 0, buffers.nbytes, again),
        "gated activation, backward": Part(
            lambda: gated_activation_backward_(gate, up, d_product, "silu"), 0, 2 * buffers.nbytes, again
        ),
    }


def parts_of_layer(tile: Tile) -> dict[str, Part]:
    tokens, width, heads, head_dim = tile.longer, tile.shape.hidden, tile.shape.heads, tile.shape.head_dim
    x, d_y, add, out = (tile.random(tokens, width) for _ in range(4))
    weight, d_weight = tile.random(width), torch.zeros(width, device=DEVICE)
    source, turned = tile.random(2, tokens, heads, head_dim)
    cos, sin = tile.random(2, tokens, head_dim)
    again = lambda: turned.copy_(source)  # noqa: E731

    def backward() -> None:
        rms_norm_backward(x, weight, 1e-5, d_y, out, add=add, d_weight=d_weight)

    of_rotary = 2 * turned.nbytes + 2 * cos.nbytes
    return {
        "rms norm": Part(lambda: rms_norm(x, weight, 1e-5, out), 0, 2 * x.nbytes, again),
        "rms norm, backward": Part(backward, 0, 4 * x.nbytes, again),
        "rotary": Part(lambda: rotary_(turned, cos, sin), 0, of_rotary, again),
        "rotary, backward": Part(lambda: rotary_(turned, cos, sin, backward=True), 0, of_rotary, again),
    }


def predicted(part: Part, rates: Rates) -> float:
    """Milliseconds, as `benchmark.predicted_times` counts it."""
    return 1e3 * rates.seconds(part.flops, part.bytes)


def runnable(parts: dict[str, Part]) -> dict[str, Part]:
    """Returns the parts that run without an exception, and prints the exceptions of the others."""
    found = {}
    for name, part in parts.items():
        try:
            part.restore()
            part.run()
            synchronize()
            found[name] = part
        except Exception as error:
            print(f"{name:28} {type(error).__name__}: {error}", flush=True)
    return found


def measure(parts: dict[str, Part]) -> dict[str, dict[str, float]]:
    """Milliseconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    names = list(parts)
    for turn in range(WARM + TURNS):
        watches = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            parts[name].restore()
            watches[name] = Watch()
            watches[name].mark()
            parts[name].run()
            watches[name].mark()
        synchronize()
        for name, watch in watches.items() if turn >= WARM else ():
            seconds[name] += watch.seconds()
    return {name: spread(found) for name, found in seconds.items()}


def main() -> None:
    tile = tile_at_hand()
    about = f"{tile.tokens} tokens, norms and rotary {tile.longer}, of {tile.shape.hidden} x {tile.shape.vocab}"
    reached = ceilings()
    rates = Rates(reached["matmul_tflops"] * 1e12, reached["copy_gbs"] * 1e9)
    print(f"predicted at {reached['matmul_tflops']:.0f} TFLOP/s, {reached['copy_gbs']:.0f} GB/s")
    print(f"{about}; milliseconds\n{'':28}{'median':>9}{'spread':>9}{'predicted':>11}{'ratio':>7}  rate", flush=True)
    for make, tokens in ((parts_of_loss, tile.tokens), (parts_of_mlp, tile.tokens), (parts_of_layer, tile.longer)):
        parts = runnable(make(tile))
        for name, found in measure(parts).items():
            part, expected = parts[name], predicted(parts[name], rates)
            rate = f"{part.flops / found['ms'] / 1e9:.0f} TFLOP/s" if part.flops else ""
            rate = rate or f"{part.bytes / found['ms'] / 1e6:.0f} GB/s"
            beside = f"{expected:11.3f}{found['ms'] / expected:7.2f}"
            print(f"{name:28}{found['ms']:9.3f}{found['iqr_ms']:9.3f}{beside}  {rate}", flush=True)
            row = found | {"what": name, "predicted_ms": expected, "flops": part.flops, "bytes": part.bytes}
            for file in sys.argv[1:2]:
                append(Path(file), {"part": "kernel_times", "tokens": tokens} | reached | row)
        del parts


if __name__ == "__main__":
    main()
