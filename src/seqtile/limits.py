"""What attention kernels compute wrongly in some releases of their package: the lengths, and in which releases.

One table, asked by tiled layers, sequence parallelism, plans, `fit` and `status`. It needs no torch.
"""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

INT32, UINT32 = 2**31, 2**32


class Limit(NamedTuple):
    """A defect of a kernel, in the releases of a package from `since` on and before `fixed`."""

    package: str
    since: tuple[int, int]
    fixed: tuple[int, int] | None
    """None if no release is known that has it mended."""


LIMITS = {
    # FlashAttention-2's backward numbers the elements of its sum of dQ, [S, h, K] in float32, by int32, those of each
    # document by themselves, but for 128 tokens for each document before.
    ("flash", "sdpa"): Limit("torch", (0, 0), (2, 11)),
    ("flash", "seqtile_torch_varlen"): Limit("torch", (0, 0), (2, 11)),
    ("flash", "flash_attention_2"): Limit("flash-attn", (0, 0), (2, 8)),
    # The forward of torch's efficient attention numbers the elements of a mask [S, S] by uint32.
    ("efficient", "sdpa"): Limit("torch", (0, 0), (2, 13)),
    # cuDNN's backward, which sdpa prefers on these GPUs, see `cudnn_limit`.
    ("cudnn", "sdpa"): Limit("torch", (2, 11), None),
}
"""By the kernel, and the name by which Hugging Face's models ask for the attention that runs it."""


def installed(package: str) -> str | None:
    """Returns the release of a package that is installed; None if it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def limit_of(kernel: str, attn_implementation: str) -> tuple[str, str] | None:
    """Returns the releases that are installed and that are needed, as texts, if a kernel of this attention has a defect
    as installed; else None."""
    limit = LIMITS.get((kernel, attn_implementation))
    if limit is None or (release := installed(limit.package)) is None:
        return None
    number = tuple(int(part) for part in re.findall(r"\d+", release)[:2])  # of "2.11.0+cu130": 2, 11
    if number < limit.since or (limit.fixed is not None and number >= limit.fixed):
        return None
    needed = "" if limit.fixed is None else f"{limit.package} {'.'.join(map(str, limit.fixed))} or later"
    return f"{limit.package} {release}", needed


def flash_limit(attn_implementation: str, heads: int, head_dim: int) -> tuple[int, str] | None:
    """Returns from how many tokens of a document on flash's backward is wrong, and a sentence that says so; None if it
    is right as installed.

    Args:
        attn_implementation: Hugging Face's name, such as "sdpa".
        heads: query heads that are computed at once.
        head_dim: width of a head, which the kernel pads to a multiple of 32.
    """
    if (found := limit_of("flash", attn_implementation)) is None:
        return None
    release, needed = found
    tokens = -(-INT32 // (heads * (-(-head_dim // 32) * 32)))
    return tokens, (
        f"{attn_implementation}: from {tokens:,} tokens in a document on, with {heads} query heads of {head_dim} at "
        f"once, the backward of FlashAttention in {release} overflows: wrong gradients, or a crash. Compute fewer "
        f'heads at once (layer=True, head_groups="auto"; seqtile.sp over more GPUs), or install {needed}'
    )


def mask_limit(attn_implementation: str, queries: int, keys: int) -> str | None:
    """Says that torch's efficient attention misreads a mask of queries x keys; None if it does not as installed."""
    if queries * keys <= UINT32 or (found := limit_of("efficient", attn_implementation)) is None:
        return None
    release, needed = found
    return (
        f"{attn_implementation}: a mask of {queries:,} x {keys:,} has more than 2**32 elements, of which the efficient "
        f'attention of {release} reads the wrong ones. Load with attn_implementation="flash_attention_2", which needs '
        f"no mask; or pass rows without padding and packing, or install {needed}"
    )


def prefers_cudnn(dtype: str, capability: tuple[int, int] | None) -> str | None:
    """Returns the release of torch, as a text, if its sdpa prefers cuDNN for queries of this dtype, such as "bfloat16",
    on a GPU of this compute capability (None without one); else None."""
    known = dtype in ("bfloat16", "float16") and capability in ((9, 0), (10, 0), (10, 3))
    found = limit_of("cudnn", "sdpa") if known else None
    return found and found[0]


def cudnn_limit(elements: int, keys: int, has_mask: bool) -> str | None:
    """Says which gradients cuDNN computes wrongly for queries, keys or values of so many elements, batch and heads
    included, and so many keys, with a mask or without; None if none are known. Which releases of torch prefer cuDNN
    says `prefers_cudnn`."""
    if elements >= INT32:
        return (
            f"sdpa: batch x heads x tokens x head width is {elements:,}, not less than 2**31, beyond which cuDNN "
            "computes wrong gradients of queries and keys (measured with cuDNN 9.19 on an H200: off by 11 to 58 %). "
            "Another kernel computes them, in about twice the time. In head chunks cuDNN is right, and fast: "
            'layer=True, head_groups="auto"'
        )
    if has_mask and keys % 128 == 64:
        return (
            f"sdpa: under a mask (padded or packed rows) over {keys:,} keys, 64 more than a multiple of 128, cuDNN may "
            "compute NaN as gradients of queries. Another kernel computes them. Rows padded to a multiple of 128 "
            "(pad_to_multiple_of=128) are computed by cuDNN"
        )
    return None
