"""Which of torch's attention kernels can serve a call on an H100, and what each of them would copy.

Written from what torch 2.11 checks before it chooses a kernel for `scaled_dot_product_attention` (sdp_utils.cpp, on
sm_90 with cuDNN 9.19), and from what the kernels and their wrappers do with what they get. Nothing here needs a GPU.
"""

from typing import NamedTuple

import torch

HALF = (torch.float16, torch.bfloat16)
ALIGNED = 16  # bytes that a kernel reads at once
ORDER = ("cudnn", "flash", "efficient")
"""The kernels, as torch 2.11 tries them on sm_90."""
MASK_ELEMENTS = 2**24
"""A mask of more elements is large: torch copies a boolean mask to the dtype of the queries, and one whose rows are not
aligned once more."""


class Call(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: torch.Tensor
    """[B, H, n, K]"""
    key: torch.Tensor
    """[B, KV, m, K]"""
    value: torch.Tensor
    """[B, KV, m, width of the output]"""
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    gqa: bool = False

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        return {"query": self.query, "key": self.key, "value": self.value}


def refusals(kernel: str, call: Call) -> list[str]:
    """Returns why torch does not choose a kernel for a call; nothing if it can serve it."""
    query, key, value, mask, dropout, is_causal, gqa = call
    if any(operand.dim() != 4 for operand in call.operands.values()):
        return ["operands are not 4-dimensional"]
    enabled = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    }
    heads, key_heads, value_heads = (operand.shape[1] for operand in call.operands.values())
    if gqa and kernel != "efficient":
        heads_fit = heads % key_heads == heads % value_heads == 0 and (kernel == "cudnn" or key_heads == value_heads)
    else:
        heads_fit = heads == key_heads == value_heads
    widths = {operand.shape[3] for operand in call.operands.values()}
    step = 16 // query.element_size()
    in_order = all(operand.stride(3) == 1 for operand in call.operands.values())
    tests = {
        "it is switched off": enabled[kernel](),
        f"dtypes {[str(operand.dtype) for operand in call.operands.values()]}": query.dtype == key.dtype == value.dtype
        and query.dtype in (HALF if kernel != "efficient" else (*HALF, torch.float32)),
        "batches differ": query.shape[0] == key.shape[0] == value.shape[0],
        f"{key_heads} and {value_heads} heads of keys and values for {heads} of queries": heads_fit,
        "no queries or no keys": query.shape[2] > 0 and key.shape[2] > 0,
        "the last stride is not 1": in_order or (query.shape[3] == 1 and kernel != "efficient"),
        "the mask's last stride is not 1": mask is None or mask.stride(-1) == 1,
    }
    if kernel == "flash":
        tests |= {
            "a mask": mask is None,
            f"head widths {sorted(widths)}": len(widths) == 1 and query.shape[3] <= 256,
            "is_causal of queries that are not as many as keys": not is_causal or query.shape[2] == key.shape[2],
        }
    elif kernel == "efficient":
        tests[f"head widths {sorted(widths)}"] = query.shape[3] == key.shape[3] and all(w % step == 0 for w in widths)
    else:
        tests |= {
            f"head widths {sorted(widths)}": all(width % 8 == 0 and width <= 256 for width in widths),
            "the mask's shape, or it requires a gradient": _takes_mask(call),
            "a single key": key.shape[2] != 1,
            "dropout of a single query": not dropout or query.shape[2] != 1,
            "algorithms have to be deterministic": not torch.are_deterministic_algorithms_enabled()
            or torch.is_deterministic_algorithms_warn_only_enabled(),
        }
    return [why for why, is_fine in tests.items() if not is_fine]


def _takes_mask(call: Call) -> bool:
    mask, (batch, heads, queries, _), keys = call.mask, call.query.shape, call.key.shape[2]
    if mask is None:
        return True
    wanted = (batch, heads, queries, keys)[-mask.dim() :]
    fits = all(size in (1, want) for size, want in zip(mask.shape, wanted, strict=True))
    return mask.dim() in (2, 4) and fits and not mask.requires_grad


def copies(kernel: str, call: Call) -> list[str]:
    """Returns what a kernel that takes a call would copy first, or read at an address that it cannot read."""
    found = []
    for name, operand in call.operands.items():
        if not is_aligned(operand):
            found.append(f"{name} {list(operand.shape)} with strides {operand.stride()} is not aligned to 16 bytes")
    if kernel == "flash" and call.query.shape[3] % 8:
        found.append(f"queries, keys and values of head width {call.query.shape[3]} are padded")
    return found


def faults_of_lengths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
) -> list[str]:  # fmt: skip
    """Returns why torch's FlashAttention would refuse documents [tokens, heads, width] with cumulative lengths, or what
    it would read at an address that it cannot read (mha_varlen_fwd in flash_api.cpp)."""
    if any(operand.dim() != 3 for operand in (query, key, value)):
        return ["operands of documents are not 3-dimensional"]
    call = Call(*(operand.transpose(0, 1)[None] for operand in (query, key, value)), gqa=True)
    found = [why for why in refusals("flash", call) if why != "it is switched off"] or copies("flash", call)
    for name, lengths, most in zip(("queries", "keys"), starts, longest, strict=True):
        if lengths.dtype != torch.int32 or lengths.device != query.device or not lengths.is_contiguous():
            found.append(f"cumulative lengths of {name}: {lengths.dtype} on {lengths.device}")
        if lengths.shape != starts[0].shape or lengths.dim() != 1 or len(lengths) < 2 or most < 1:
            found.append(f"cumulative lengths {list(lengths.shape)} of {name}, of at most {most}")
    return found


def mask_copies(call: Call) -> list[str]:
    """Returns the large copies that torch makes of a mask for any kernel."""
    mask = call.mask
    if mask is None or mask.numel() <= MASK_ELEMENTS or (mask.dtype == call.query.dtype and is_aligned(mask, 8)):
        return []
    return [f"a mask {list(mask.shape)} of {mask.dtype} is copied"]


def is_aligned(tensor: torch.Tensor, elements: int | None = None) -> bool:
    """Whether rows start at multiples of `elements`, by default of 16 bytes."""
    step = elements or ALIGNED // tensor.element_size()
    strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1]
    return all(number % step == 0 for number in (tensor.storage_offset(), *strides))


def lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, except where there is a single element."""
    each = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.shape == other.shape and all(size == 1 or a == b for size, a, b in each)
