"""Leaves cuDNN out of torch's sdpa where it would compute wrong gradients.

On GPUs of compute capability 9 and 10, torch from 2.11 on prefers cuDNN for bfloat16 and float16. Its backward has two
defects, see `seqtile.limits.cudnn_limit`. Hugging Face looks its function for sdpa up in a table. The function is
replaced there, once for the process, also after `restore`: so the untiled attention of a model is right, too, and a
layer that is computed again in its backward has the same. Compiled attention, and models that call torch's sdpa
themselves, are not reached.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
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
_SWITCHING = RLock()
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
    dtype = q.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled("cuda"):  # which casts what sdpa gets
        dtype = torch.get_autocast_dtype("cuda")
    return prefers_cudnn(str(dtype).removeprefix("torch."), capability) is not None


def others_enabled() -> list[SDPBackend]:
    """Returns the backends but cuDNN that are enabled; none if that is at most the one that makes scores of length x
    length."""
    enabled = [backend for backend, is_enabled in BACKENDS_BUT_CUDNN.items() if is_enabled()]
    return [] if enabled == [SDPBackend.MATH] else enabled


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Inside, sdpa does not choose cuDNN, but another backend that is enabled. Changes nothing if there is none, see
    `others_enabled`. One thread at a time: torch's switches are the process's."""
    with _SWITCHING, sdpa_kernel(enabled) if (enabled := others_enabled()) else nullcontext():
        yield


def watch_sdpa() -> None:
    """Replaces Hugging Face's function for sdpa by one that leaves cuDNN out where it is wrong, unless that has been
    done."""
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(function, WatchedSdpa):
        AttentionInterface.register("sdpa", WatchedSdpa(function))


class WatchedSdpa:
    """Calls a function for sdpa: without cuDNN, and with one warning, where cuDNN's gradients are wrong."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Any:
        mask = options.get("position_bias") if attention_mask is None else attention_mask  # which becomes a mask
        is_usual = mask is None and max(query.numel(), key.numel(), value.numel()) < limits.INT32
        if is_usual or torch.compiler.is_compiling() or not _is_trained(module):
            return self.function(module, query, key, value, attention_mask, **options)
        with around(query, key, value, mask):
            return self.function(module, query, key, value, attention_mask, **options)


def _is_trained(module: nn.Module) -> bool:
    """Returns whether there will be a backward; the forward of a reentrant checkpoint runs without gradients."""
    return torch.is_grad_enabled() or getattr(module, "training", True)


def around(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> AbstractContextManager:
    """Returns a context for an sdpa call of queries [B, h, S, K], keys and values [B, kv, keys, K] and a mask or None.

    Raises ValueError if no kernel of torch's computes it rightly.
    """
    has_mask = isinstance(mask, Tensor)
    elements = max(q.numel(), k.numel(), v.numel())
    said = cudnn_limit(elements, k.shape[2], has_mask)
    if said is None or not may_choose_cudnn("sdpa", q):
        return nullcontext()
    if not others_enabled():
        logger.warning_once(f"{said}. But no other kernel is enabled, so cuDNN computes it")
        return nullcontext()
    if has_mask and (misread := mask_limit("sdpa", *mask.shape[-2:])) is not None:  # by the other kernel
        if elements >= limits.INT32:
            raise ValueError(f"{said}. But {misread}")
        return nullcontext()  # cuDNN's NaN are rare, and seen
    logger.warning_once(said)
    return without_cudnn()
