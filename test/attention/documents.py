"""Attention within documents of drawn lengths: the calls that are compared, and dense attention of each document."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqtile.attention.torch_varlen import torch_varlen
from sp.attentions import dense

Named = dict[str, Tensor]


class Case(NamedTuple):
    heads: tuple[int, int] = (4, 4)
    """Of queries, and of keys."""
    widths: tuple[int, int] = (64, 64)
    """Of queries and keys, and of values."""
    window: int | None = None
    has_sinks: bool = False
    scaling: float | None = None
    few_queries: bool = False
    """Documents have fewer queries than keys."""


CASES = {  # with sinks, many heads: of a few, rounding errors vary more than the law allows
    "ragged documents": Case(widths=(24, 24)),
    "queries fewer than keys": Case(few_queries=True),
    "window": Case(window=17),
    "window of two keys": Case(window=2),
    "grouped heads, few queries, window": Case((6, 2), window=40, few_queries=True),
    "scaling": Case(scaling=0.3),
    "sinks": Case((64, 8), (24, 24), has_sinks=True),
    "sinks, window, few queries": Case((64, 64), (16, 16), window=9, has_sinks=True, few_queries=True),
    "latent attention's widths": Case(widths=(192, 128)),
    "odd widths, values wider": Case((4, 2), (20, 33), scaling=0.2),
    "a width that the kernel rounds up": Case((2, 1), (136, 136)),
}


class Documents(NamedTuple):
    """Queries, keys and values of documents that follow one another, as a model's layer makes them."""

    operands: Named
    """q [1, h, n, K], k [1, kv, m, K], v [1, kv, m, Kv], and sinks [h] if the case has them."""
    upstream: Tensor
    """The gradient of the output [1, n, h, Kv]."""
    ends: dict[str, list[int]]
    """Of "q" and "k", where documents start and the last one ends."""
    case: Case

    @classmethod
    def drawn(cls, case: Case, dtype: torch.dtype, device: str = "cpu", number: int = 5, most: int = 90) -> "Documents":
        keys = torch.randint(1, most, (number,))
        queries = (keys * torch.rand(number)).long().clamp(1) if case.few_queries else keys
        ends = {name: [0, *sizes.cumsum(0).tolist()] for name, sizes in (("q", queries), ("k", keys))}
        (heads, kv), (wide, of_values) = case.heads, case.widths

        def new(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        sizes = {"q": (ends["q"][-1], heads, wide), "k": (ends["k"][-1], kv, wide), "v": (ends["k"][-1], kv, of_values)}
        operands = {name: new(1, *size).transpose(1, 2) for name, size in sizes.items()}
        if case.has_sinks:
            operands["sinks"] = 2 * new(heads)
        return cls(operands, new(1, ends["q"][-1], heads, of_values), ends, case)

    @property
    def lengths(self) -> dict[str, Any]:
        """Where documents start, as Hugging Face's attentions get it."""
        found: dict[str, Any] = {}
        for name, ends in self.ends.items():
            found[f"cu_seq_lens_{name}"] = torch.tensor(ends, dtype=torch.int32, device=self.upstream.device)
            found[f"max_length_{name}"] = max(b - a for a, b in pairwise(ends))
        return found

    def by_kernel(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        options = {"scaling": self.case.scaling, "sliding_window": self.case.window, "is_causal": True, "dropout": 0.0}
        return torch_varlen(None, q, k, v, None, s_aux=sinks, **options, **self.lengths)[0]

    def dense(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        found = []
        for (q0, q1), (k0, k1) in zip(pairwise(self.ends["q"]), pairwise(self.ends["k"]), strict=True):
            away = torch.arange(q0, q1)[:, None] - q1 + k1 - torch.arange(k0, k1)
            seen = (away >= 0) & (away < (self.case.window or len(away) + k1))
            parts = q[0, :, q0:q1], k[0, :, k0:k1], v[0, :, k0:k1]
            found.append(dense(*parts, seen.to(q.device), self.case.scaling, sinks).transpose(0, 1))
        return torch.cat(found)[None]

    def results(self, attention: Callable[..., Tensor], dtype: torch.dtype | None = None) -> Named:
        """Returns the output and the gradients of all operands, computed in a dtype or their own."""
        given = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in self.operands.items()}
        out = attention(**given)
        gradients = torch.autograd.grad(out, list(given.values()), self.upstream.to(out.dtype))
        return {"out": out.detach()} | dict(zip(given, gradients, strict=True))
