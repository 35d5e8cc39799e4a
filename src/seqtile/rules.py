"""The rules that a tiled model and its plan both follow: tokens of a chunk, head chunks, heads of a rank."""

from math import ceil

MIN_CHUNK_TOKENS = 2048
MLP_CHUNK_BYTES = 2**29  # of what an untiled MLP computes of a chunk; an 8B model's chunk of D tokens has as much
CHUNK_MULTIPLE = 512  # of tokens, a whole number of every matmul's blocks
MAX_AUTO_GROUPS = 8  # what exists of one group only is an eighth then, and its products are wide still


def default_chunk_tokens(hidden_size: int, sparsity: float = 1, mlp_size: int = 0, itemsize: int = 2) -> int:
    """Returns the tokens of a chunk, see `ops/chunks.py`.

    `sparsity` is experts / experts a token in a mixture. `mlp_size` is the MLP's inner width where the chunk is found
    by bytes, else 0; `itemsize` are the bytes of an element of its products."""
    tokens = max(hidden_size, int(MIN_CHUNK_TOKENS * sparsity))
    if mlp_size == 0 or sparsity != 1:
        return tokens
    a_token = (5 * mlp_size + hidden_size) * itemsize  # gate, up, activation, product, a gradient; the output
    return max(tokens, ceil(MLP_CHUNK_BYTES / a_token / CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def number_of_groups(kv_heads: int, head_groups: int | str | None, ranks: int = 1) -> int | None:
    """Returns how many head chunks attend one after the other, None for all heads at once.

    "auto" is as many as divide the kv heads, up to `MAX_AUTO_GROUPS`, and give each rank a kv head of its own in every
    group; None if that is one. Raises ValueError if the number asked for cannot be."""
    if head_groups == "auto":
        many = range(2, MAX_AUTO_GROUPS + 1)
        return max((n for n in many if kv_heads % n == 0 and kv_heads // n >= ranks), default=None)
    if head_groups is not None and kv_heads % head_groups:
        raise ValueError(f"head_groups: expected a divisor of the {kv_heads} kv heads, got {head_groups}")
    return head_groups


def heads_of_rank(rank: int, size: int, q_heads: int, kv_heads: int) -> tuple[slice, slice]:
    """Returns the query heads that a rank computes, dealt out in order and balanced to within one, at least one; and
    the kv heads that these read. `kv_heads` divides `q_heads`."""
    first = rank * q_heads // size
    last, per_kv = max(first + 1, (rank + 1) * q_heads // size), q_heads // kv_heads
    return slice(first, last), slice(first // per_kv, (last - 1) // per_kv + 1)
