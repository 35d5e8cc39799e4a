"""Leaves cuDNN out of torch's sdpa where it would compute wrong gradients.

On Hopper, torch from 2.11 on prefers cuDNN for bfloat16 and float16. Its backward has two defects, see
`seqtile.limits.cudnn_limit`. Hugging Face looks its function for sdpa up in a table. The function is replaced there,
once for the process, also after `restore`: so the untiled attention of a model is right, too, and a layer that is
computed again in its backward has the same.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from seqtile import limits
from seqtile.limits import cudnn_limit, mask_limit, prefers_cudnn

logger = logging.get_logger(__name__)
BACKENDS_BUT_CUDNN = {
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
}


def may_choose_cudnn(implementation: str, q: Tensor) -> bool:
    """Returns whether torch may compute an attention call of these queries by cuDNN, as installed and switched."""
    if implementation != "sdpa" or not q.is_cuda or not cuda.cudnn_sdp_enabled():
        return False
    is_simulated = not torch.cuda.is_available()
    capability = None if is_simulated else torch.cuda.get_device_capability(q.device)
    return prefers_cudnn(str(q.dtype).removeprefix("torch."), capability) is not None


def without_cudnn() -> AbstractContextManager:
    """Returns a context in which sdpa does not choose cuDNN, but another backend that is enabled.

    Changes nothing if neither flash nor efficient attention is enabled: what is left makes scores of length x length.
    """
    enabled = [backend for backend, is_enabled in BACKENDS_BUT_CUDNN.items() if is_enabled()]
    return nullcontext() if enabled in ([], [SDPBackend.MATH]) else sdpa_kernel(enabled)


def watch_sdpa() -> None:
    """Replaces Hugging Face's function for sdpa by one that leaves cuDNN out where it is wrong, unless that has been
    done."""
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(function, WatchedSdpa):
        AttentionInterface.register("sdpa", WatchedSdpa(function))


class WatchedSdpa:
    """Calls a function for sdpa: without cuDNN, and with one warning, where cuDNN's backward is wrong."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if (mask is None and query.numel() <= limits.INT32) or torch.compiler.is_compiling():
            return self.function(module, query, key, value, mask, **options)
        with around(query, key, mask):
            return self.function(module, query, key, value, mask, **options)


def around(q: Tensor, k: Tensor, mask: Any) -> AbstractContextManager:
    """Returns a context for an sdpa call of queries [B, h, S, K], keys [B, kv, keys, K] and a mask or None."""
    said = cudnn_limit(q.numel(), k.shape[2], isinstance(mask, Tensor))
    if said is None or not may_choose_cudnn("sdpa", q):
        return nullcontext()
    if isinstance(mask, Tensor) and mask_limit("sdpa", *mask.shape[-2:]) is not None:
        return nullcontext()  # which the efficient attention would misread: cuDNN's NaN are rare, and seen
    logger.warning_once(said)
    return without_cudnn()
