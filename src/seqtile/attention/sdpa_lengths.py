"""The lengths in which torch's sdpa computes documents, and whether cuDNN may, its first choice on Hopper, see
`seqtile.sdpa`.

cuDNN builds a plan for every new shape, which takes 0.11 s on an H200, and under some masks its gradients are NaN. So
it is left out for blocks with a mask and for batches with documents of many lengths: FlashAttention needs no plans. For
documents of a few lengths torch chooses, and the lengths are rounded up, so that other batches have the same ones:

    documents of one length, or from 32,768 ->  as they are               what torch chooses
    documents of 700, 1,300 and 2,000       ->  704, 1,408 and 2,048      what torch chooses
    of five lengths or more; with a mask    ->  as they are               without cuDNN
    of more than twelve, in a row of 8,192  ->  16, 32, 64, 96, 128, 192, ... without cuDNN
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

FEW_LENGTHS = 4  # for which cuDNN may build plans in one batch
LONG = 2**15  # tokens
MOST_LENGTHS = 12  # in which sdpa is called for a row


def lengths_for_cudnn(documents: set[int]) -> dict[int, int] | None:
    """Returns the length in which to compute documents of each of these lengths; None if they are too many for cuDNN.
    A single length stays as it is, because padding copies queries, keys and values, and so do long ones, for which a
    plan takes less time than the padding would."""
    padded = {length for length in documents if len(documents) > 1 and length < LONG}
    found = {length: rounded(length) if length in padded else length for length in documents}
    return found if len(set(found.values())) <= FEW_LENGTHS else None


def few_lengths(documents: set[int], row: int) -> dict[int, int]:
    """Returns the length in which to compute documents of each of these lengths without cuDNN, in a row of so many
    tokens. More than twelve lengths are rounded up to a grid that depends on the row's length alone, so that other rows
    have the same ones: u, 2 u, 4 u, 6 u, 8 u, 12 u, 16 u, ... with u about 1/512 of the row. Drawn documents so take
    1.5 times their own work."""
    if len(documents) <= MOST_LENGTHS:
        return {}
    unit = 1 << max(0, (row - 1).bit_length() - 9)
    found = {}
    for length in documents:
        power = max(unit, 1 << (length - 1).bit_length())
        found[length] = power if power <= 4 * unit or length > 3 * power // 4 else 3 * power // 4
    return found


def rounded(length: int) -> int:
    """Returns the next number m * 2**e, m from 8 to 16: at most 1/8 more than the length, and 8 numbers from each power
    of two to the next. A length up to 16 is such a number."""
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step


def in_lengths(lengths: Mapping[int, int], attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes a causal square, from q, k and v [B, h, n, K] to [B, n, h, K], padded at its end to the length that
    `lengths` has for n. The padding changes nothing: no query before it sees it, and its outputs are dropped."""
    tokens = q.shape[2]
    if (more := lengths.get(tokens, tokens) - tokens) == 0:
        return attend(q, k, v)
    # Padded as [B, n, h, K]: sdpa's output follows the layout of q, and Hugging Face's is tokens first.
    padded = (F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, more)).transpose(1, 2) for x in (q, k, v))
    return attend(*padded)[:, :tokens]


def causal_from_the_end(queries: int, keys: int) -> CausalBias:
    """Returns the mask of causal attention in which the last query sees the last key, without its elements, as torch's
    `causal_lower_right` does. That function takes 8 bytes of host memory for each pair of a query and a key: the
    constructor of a tensor reads the two lengths as its sizes."""
    bias = CausalBias.__new__(CausalBias)
    bias.__init__(CausalVariant.LOWER_RIGHT, queries, keys)
    return bias
