"""The shapes at which kernels are checked and timed: one tile of Llama-8B's loss, MLP and norms; tiny without a GPU."""

from dataclasses import dataclass

import torch
from benchmark.device import DEVICE, DTYPE
from benchmark.shapes import SHAPES, Shape

from seqtile.ops.chunks import resolve_chunk_tokens


@dataclass(frozen=True)
class Tile:
    shape: Shape
    tokens: int
    """Of the loss and the MLP."""
    longer: int
    """Of norms and rotary embeddings, whose tiles would otherwise fit in the L2."""

    def random(self, *size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, dtype=dtype)


def tile_at_hand() -> Tile:
    shape = SHAPES["llama3_8b" if DEVICE == "cuda" else "tiny"]
    tokens = resolve_chunk_tokens(None, shape.hidden) if DEVICE == "cuda" else 128
    return Tile(shape, tokens, 8 * tokens)
