"""The attention that a model had, asked for some queries of a sequence as Hugging Face would ask it."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.sp.documents import Layout
from seqtile.sp.heads import Share


class Attention(NamedTuple):
    """What is asked for, by whom, of whom."""

    module: nn.Module
    layout: Layout
    share: Share
    window: int | None
    options: dict[str, Any]
    """scaling, dropout and, if there is one, softcap, as Hugging Face passes them."""

    def of(self, row: int) -> "Attention":
        """What is asked for in one row of the batch."""
        return self._replace(layout=replace(self.layout, documents=(self.layout.of(row),)))

    def compute(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **others: Any
    ) -> torch.Tensor:
        """The wrapped attention. q [B, h, n, K], k and v [B, kv, m, K] to [B, n, h, K]."""
        name = self.layout.implementation
        function = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        module = _Seen(
            self.module,
            config=_Seen(self.module.config, _attn_implementation=name),
            num_key_value_groups=q.shape[1] // k.shape[1],
        )
        return function(module, q, k, v, mask, sliding_window=self.window, is_causal=True, **self.options, **others)[0]


class _Seen:
    """An object with some of its attributes replaced."""

    def __init__(self, of: object, **attributes: object):
        vars(self).update(attributes, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def eager(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """By matrix products, as Hugging Face's: the softmax in float32, a soft cap of the scores. It is in no registry."""
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + mask, -1, dtype=torch.float32).to(q.dtype)
    return (F.dropout(weights, dropout) @ v).transpose(1, 2), None


def nothing(q: torch.Tensor, v: torch.Tensor, rows: int) -> torch.Tensor:
    """The outputs of so many queries of padding."""
    return q.new_zeros(q.shape[0], rows, q.shape[1], v.shape[3])
