"""Computes attention in several calls, which gather keys and masks again in the backward instead of saving them.

Each call gets some of the queries and the keys that they see: parts of the sequence, which calls may share. Only q, k
and v are saved for the backward, once.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqtile.attention.heads import Rows
from seqtile.ops.state import ForwardState


class Call(NamedTuple):
    """One call of attention."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    """From q [B, h, n, K], k and v [B, kv, m, K], and sinks [h] if there are any, to [B, n, h, K]."""
    keys: Rows
    """The parts [start, stop) of the sequence's keys and values that the call gets."""


def gathered(x: Tensor, keys: Rows | Tensor | None) -> Tensor:
    """Returns parts of x [B, h, S, K] as [B, h, m, K]. `keys`: parts (a single one gives a view), an index [m], or None
    for all."""
    if keys is None:
        return x
    if isinstance(keys, Tensor):
        return x.transpose(1, 2).index_select(1, keys).transpose(1, 2)  # tokens first, as layers make them
    parts = [x[:, :, start:stop] for start, stop in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def call_again_in_backward(
    calls: Sequence[Call], queries: Sequence[Tensor], k: Tensor, v: Tensor, sinks: Tensor | None, draws: bool
) -> tuple[Tensor, ...]:
    """Returns each call's output for its queries. The gradients of keys, values and sinks are summed in float32.

    Allocates the keys and values of one call at a time, in forward and backward, and in the backward the float32
    gradients. `draws`: the calls draw random numbers, the same in forward and backward.
    """
    if not calls:
        return ()
    state = ForwardState.now(k.device)
    return _Calls.apply(calls, state if draws else state._replace(random=[]), k, v, sinks, *queries)


class _Calls(torch.autograd.Function):
    @staticmethod
    def forward(node, calls: Sequence[Call], state: ForwardState, k: Tensor, v: Tensor, sinks: Any, *queries: Tensor):
        node.calls, node.state = calls, state
        node.save_for_backward(k, v, sinks, *queries)
        each = zip(calls, queries, strict=True)
        return tuple(call.function(q, gathered(k, call.keys), gathered(v, call.keys), sinks) for call, q in each)

    @staticmethod
    def backward(node, *gradients: Tensor):
        k, v, sinks, *queries = node.saved_tensors
        wanted = dict(zip(("k", "v", "sinks"), node.needs_input_grad[2:5], strict=True))
        sums = {
            name: torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for name, x in (("k", k), ("v", v), ("sinks", sinks))
            if wanted[name]
        }
        d_queries: list[Tensor | None] = []
        random = node.state.forward_random() if node.state.random else nullcontext()
        with torch.enable_grad(), node.state.forward_autocast(), random:
            for call, q, gradient in zip(node.calls, queries, gradients, strict=True):
                given = {"q": q, "k": gathered(k, call.keys), "v": gathered(v, call.keys), "sinks": sinks}
                given = {name: None if x is None else x.detach() for name, x in given.items()}
                asked = [given[name].requires_grad_() for name in given if name in sums or (name == "q")]
                out = call.function(*given.values())
                found = dict(zip(("q", *sums), torch.autograd.grad(out, asked, gradient), strict=True))
                d_queries.append(found["q"])
                for name, total in sums.items():
                    _add(total, found[name], call.keys if name in "kv" else None)
                del given, asked, out, found  # free them before the next call
        d_kv = [sums[name].to(x.dtype) if name in sums else None for name, x in (("k", k), ("v", v), ("sinks", sinks))]
        return None, None, *d_kv, *d_queries


def _add(total: Tensor, part: Tensor, keys: Rows | None) -> None:
    """Adds a gradient of some keys to the total of all keys."""
    if keys is None:
        total += part
    else:
        sizes = [stop - start for start, stop in keys]
        for (start, stop), piece in zip(keys, part.split(sizes, 2), strict=True):
            total[:, :, start:stop] += piece
