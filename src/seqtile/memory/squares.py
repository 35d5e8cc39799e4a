"""Counts the tensors of length x length that sdpa and eager attention make: masks, biases and scores.

Hugging Face makes a mask for each kind of layer, with a window and without, before the first layer, and every layer's
checkpoint keeps it. Under a mask it repeats keys and values for all query heads, and sdpa turns the bools into a bias
in each layer. FlashAttention and varlen attention make none of these; nor do `seqtile.sp` and shared prefixes, which
attend in blocks of at most 2**24 elements.
"""

from typing import NamedTuple

from seqtile.memory.batch import Batch
from seqtile.memory.setup import FLOAT, Setup
from seqtile.memory.shape import Shape

ALIGNED = 8  # elements of a row of a bias, which torch pads for its efficient kernel


class Squares(NamedTuple):
    """Bytes on one GPU, of a step with `rows` sequences of one length."""

    masks: int = 0
    """From the first layer's forward to its backward."""
    kept: int = 0
    """Of a layer, from its forward to its attention's backward: a bias; or eager scores."""
    backward: int = 0
    """Of a layer, in addition to these in its attention's backward."""
    evaluated: int = 0
    """Of a layer, at the peak of a forward without autograd."""


def makes_squares(shape: Shape, setup: Setup) -> bool:
    """Returns whether this setup's attention makes tensors of length x length, for sequences longer than a window."""
    alone = setup.sequence_parallel == 1 and not setup.shared_tokens
    masked = setup.rows != "plain" or any(shape.windows)
    return alone and (setup.attention == "eager" or (setup.attention == "sdpa" and masked))


def keeps_copies(setup: Setup) -> bool:
    """Returns whether attention without masks keeps copies for its backward: of padded rows, or in float32 of each
    document's output."""
    is_float32 = setup.dtype == "float32" and not setup.autocast
    return setup.attention == "varlen" and (setup.rows == "padded" or (setup.rows == "packed" and is_float32))


def squares_of(shape: Shape, setup: Setup, batch: Batch) -> Squares:
    """Returns the bytes of these tensors.

    Eager attention keeps a softmax in float32 and its copy in the dtype of queries. Its backward then holds the former
    (in a layer that is tiled as a whole both) with its gradient and that of the scores, in float32. A forward holds the
    softmax, and the scores in both dtypes (under autocast in float32 alone). Capped scores are kept, too.
    """
    if not makes_squares(shape, setup):
        return Squares()
    length, size = batch.seq_len, setup.bytes
    square = batch.rows * length**2
    if setup.attention == "eager":
        scores, copied = square * shape.heads, size if size < FLOAT else 0
        capped = size if shape.arch.capped_scores else 0
        freed = 0 if "layer" in setup.tiles else copied
        masks = square * setup.weight_bytes * len(shape.windows)
        kept, backward, forward = FLOAT + copied + capped, 2 * FLOAT - freed, 2 * FLOAT + copied * (not setup.autocast)
        return Squares(masks, scores * kept, scores * backward, scores * forward)
    masks = sum(setup.rows != "plain" or (window or length + 1) <= length for window in shape.windows)
    bias = batch.rows * length * (-(-length // ALIGNED) * ALIGNED) * size * (masks > 0)
    one_for_all = setup.rows == "plain"  # a window masks all rows alike
    return Squares(masks * (length**2 if one_for_all else square), bias, 0, bias)
