"""Warns of large attention masks before Hugging Face makes them, and of attentions that a release computes wrongly.

Hugging Face looks the function that makes a mask up in a table, and calls it in every forward. The functions for sdpa
and eager attention are replaced there, once for the process, also after `restore`. The new ones pass on a
`mask_function` that warns when it is called: after Hugging Face has decided that it needs a mask, and just before it
allocates one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils import logging

from seqtile.limits import mask_limit
from seqtile.ops.attention_limits import attention_warning

logger = logging.get_logger(__name__)
LARGE = 2**28  # bytes
_VARLEN = 'apply_seqtile(model, attention="varlen") needs none'
_WHY = {  # why there is a mask: what to do instead
    "its attention is eager": _VARLEN,
    "its attention has a window": _VARLEN,
    "keys are cached before the queries": 'attn_implementation="flash_attention_2" needs none',
    "rows are padded": f"{_VARLEN}; nor does sdpa without an attention_mask, where rows have one length",
    "documents are packed in a row, or spans attend both ways": _VARLEN,
}
_EAGER, _WINDOW, _CACHED, _PADDED, _PACKED = _WHY


def check_attention(attention: nn.Module, q: torch.Tensor, mask: Any) -> None:
    """Warns once if the attention of queries [B, h, S, K] is longer than the installed releases compute rightly. Raises
    ValueError if sdpa would silently compute something else."""
    name = getattr(getattr(attention, "config", None), "_attn_implementation", None) or ""
    if not torch.compiler.is_compiling() and (said := attention_warning(name, q, mask)) is not None:
        logger.warning_once(said)


def watch_masks() -> None:
    """Replaces Hugging Face's functions that make masks of length x length, unless that has been done."""
    for name in ("sdpa", "eager"):
        function = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not isinstance(function, WatchedMask):
            AttentionMaskInterface.register(name, WatchedMask(name, function))


class WatchedMask:
    """A function that makes masks, which warns before it makes a large one, once for each reason.

    It is equal to the function, so that a table by functions, as that of attention/backends.py, has it too.
    """

    def __init__(self, attention: str, function: Callable[..., Any]):
        self.attention, self.function = attention, function
        self._said: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return other is self or other == self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        is_named = kwargs.keys() >= {"mask_function", "batch_size", "q_length", "kv_length"}  # by Hugging Face's code
        if not is_named or self._bytes(kwargs) <= LARGE:
            return self.function(*args, **kwargs)
        function = kwargs["mask_function"]

        def told(*indices: torch.Tensor) -> torch.Tensor:
            self._warn(kwargs)
            return function(*indices)

        return self.function(*args, **kwargs | {"mask_function": told})

    def _bytes(self, given: dict[str, Any]) -> int:
        """Returns the size of a mask: of bools, one for all rows if these have the same; of floats for eager."""
        rows = given["batch_size"]
        if self.attention == "eager":
            rows *= given.get("dtype", torch.float32).itemsize
        elif given.get("attention_mask") is None and given.get("allow_is_causal_skip"):
            rows = 1
        return rows * given["q_length"] * given["kv_length"]

    def _warn(self, given: dict[str, Any]) -> None:
        why = self._why(given)
        if why in self._said:
            return
        self._said.add(why)
        queries, keys = given["q_length"], given["kv_length"]
        size = f"{queries:,} x {keys:,}, {self._bytes(given) / 2**30:.2g} GiB"
        said = f"Hugging Face makes attention masks of {size}, because {why}: {_WHY[why]}"
        limit = mask_limit(self.attention, queries, keys) if "cuda" in str(given.get("device")) else None
        logger.warning(said if limit is None else f"{said}. And {limit}")

    def _why(self, given: dict[str, Any]) -> str:
        if self.attention == "eager":
            return _EAGER
        if given.get("local_size") is not None:
            return _WINDOW
        if given["q_length"] < given["kv_length"]:
            return _CACHED
        skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")  # what a whole batch would have skipped
        return _PADDED if any(given.get(skip) for skip in skips) else _PACKED
