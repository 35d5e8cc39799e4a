"""Cases of the sequence-parallel benchmark: shapes, heads, kinds of sequences; models and batches of them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from benchmark.device import DEVICE
from benchmark.models import build as build_model
from benchmark.shapes import Shape as ModelShape
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads are query heads / kv heads. The vocabulary is small: the loss is another benchmark's."""

    hidden: int
    mlp: int
    layers: int
    head_dim: int
    heads: tuple[str, ...]
    tokens: tuple[int, ...]
    vocab: int = 1024


SIZES = {
    "small": {"tiny": Shape(72, 128, 2, 16, ("8/2", "9/3"), (512,))},
    "cpu": {"smollm2_135m": Shape(576, 1536, 2, 64, ("8/2", "8/8", "9/3"), (8192,))},
    "quick": {"llama3_8b": Shape(4096, 14336, 4, 128, ("32/8",), (32768,))},
    "full": {
        "llama3_8b": Shape(4096, 14336, 4, 128, ("32/8", "32/32"), (32768, 131072)),
        "smollm2_360m": Shape(960, 2560, 4, 64, ("15/5",), (32768, 131072)),
    },
}


def shape_of(name: str) -> Shape:
    return next(shapes[name] for shapes in SIZES.values() if name in shapes)


class Case(NamedTuple):
    shape: str
    heads: str
    kind: str
    """`plain`, or `packed`: documents, told apart by their position_ids."""
    checkpointed: bool
    tokens: int

    def __str__(self) -> str:
        return f"{self.shape} {self.heads} {self.kind}{', ckpt' if self.checkpointed else ''}"


def cases(name: str) -> list[Case]:
    """Of a shape. Checkpointing and packed documents with the first heads only."""
    shape = shape_of(name)
    return [
        Case(name, heads, kind, checkpointed, tokens)
        for tokens in shape.tokens
        for heads in shape.heads
        for kind, checkpointed in (("plain", False), ("plain", True), ("packed", False))
        if heads == shape.heads[0] or (kind, checkpointed) == ("plain", False)
    ]


def build(shape: Shape, heads: str, dtype: torch.dtype) -> nn.Module:
    """A model of Hugging Face's, the same on every rank; its weights are large, so that attention is not uniform."""
    torch.manual_seed(0)
    q_heads, kv_heads = map(int, heads.split("/"))
    dense = ModelShape(shape.hidden, shape.mlp, shape.layers, q_heads, kv_heads, shape.head_dim, shape.vocab)
    model = build_model(dense, dtype, shape.layers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def batch_of(kind: str, tokens: int, vocab: int) -> Batch:
    """A whole sequence with a masked prompt, so that shards differ in labels; the second document lies on two ranks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (1, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : tokens // 16] = -100
    lengths = [tokens * 3 // 8, tokens // 2, tokens - tokens * 3 // 8 - tokens // 2] if kind == "packed" else [tokens]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels[positions == 0] = -100
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}
