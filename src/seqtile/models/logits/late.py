"""Computes logits that are read after the forward: the values that the forward would have computed, or an error.

`AtForward` records autocast, random state, what the head is made of, and the versions of the head's weights and of the
hidden states. It also copies a sample of the weights, because ZeRO and FSDP2 write weights without changing their
versions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from seqtile.models.chunked import InChunks
from seqtile.models.logits.recipe import LogitsRecipe
from seqtile.models.sharded import in_own_call
from seqtile.ops.chunks import chunks, resolve_chunk_tokens
from seqtile.ops.state import ForwardState, WatchedTensor, autocast_on, default_generators
from seqtile.protocols import ShardedTokens

ARRIVAL_LIMIT = timedelta(minutes=5)
"""How long a rank waits for the others when they gather a head's weights."""
Weights = dict[str, torch.Tensor]


class AtForward:
    """The state of the forward that made the logits. If the head's weights are sharded, create it while they are
    gathered."""

    def __init__(self, recipe: LogitsRecipe):
        head, hidden = recipe.head, recipe.hidden
        draws_nothing = recipe.verdict.how == "fused"  # a plain linear layer
        random = [] if draws_nothing else default_generators(hidden.device)
        self._state = ForwardState(hidden.device, autocast_on(hidden.device), random)
        in_chunks = recipe.verdict.in_chunks or (InChunks(head=head),)  # the latter if a compiler traced the forward
        self._head = in_chunks[0].snapshot()
        self._draws = any(module.training and getattr(module, "p", 0) for module in head.modules())  # dropout
        self._hidden = WatchedTensor(
            "the hidden states", hidden
        )  # kept: a view made later in inference mode has a version of its own
        self._weights = {
            name: WatchedTensor(f"the head's {name}", weight, copy=_sample(weight))
            for name, weight in _weights_of(head).items()
        }

    @contextmanager
    def as_then(self, recipe: LogitsRecipe) -> Iterator[None]:
        """Restores autocast, random state and the head of the forward. Raises RuntimeError, see `check`."""
        with self._head.put_back():
            self.check(recipe)
            with self._state.forward_autocast(), self._state.forward_random():
                yield

    def compute(
        self, recipe: LogitsRecipe, function: Callable[..., torch.Tensor] | None = None, *along: torch.Tensor
    ) -> torch.Tensor:
        """Returns the recipe's logits [..., V]. With `function`, returns function(logits [n, V], rows of `along`
        [..., *]), computed chunk by chunk; `function` must treat each row by itself.

        Raises RuntimeError if something has changed since the forward, or if a rank that holds a shard of the head's
        weights does not read the logits.
        """
        head = recipe.head
        with self.as_then(recipe):
            now, call, gathered = _weights_of(head), head_alone(head), {}
            for ranks in _to_gather_with(now.values()):
                _arrive(ranks)
            for name, weight in now.items() if not isinstance(head, FSDPModule) else ():
                before = self._weights[name].tensor
                if isinstance(weight, DTensor) and not isinstance(before, DTensor):
                    gathered[name] = weight.full_tensor().to(before.dtype)
            if gathered:
                call = partial(functional_call, head, gathered)

            def of_hidden(hidden: torch.Tensor) -> torch.Tensor:
                if gathered or gathers(head):  # so far only shards were checked
                    self.check(recipe, gathered)
                if function is None and not self._draws:
                    return recipe.of(hidden, call)
                of_rows = function or (lambda rows: rows)
                return in_rows(lambda hidden, *along: of_rows(recipe.of(hidden, call), *along), hidden, *along)

            found = in_own_call(head, of_hidden, recipe.hidden)
        return found.whole() if isinstance(found, ShardedTokens) else found

    def check(self, recipe: LogitsRecipe, weights: Weights | None = None) -> None:
        """Raises RuntimeError if the head, the hidden states or the head's weights (`weights` if given) changed since
        the forward. Waits once for each device of the weights, to compare samples of them."""
        changed, weights = self._head.changed(), weights or _weights_of(recipe.head)
        if self._hidden.changed:
            changed.append(self._hidden.name)
        differs: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, weight in weights.items():
            before = self._weights[name]
            if isinstance(weight, DTensor) != isinstance(before.tensor, DTensor):
                continue  # one is a shard, the other the whole weight
            if weight is before.tensor and before.changed:
                changed.append(before.name)
            else:
                differs.setdefault(before.copy.device, {})[before.name] = _differs(_sample(weight), before.copy)
        for found in differs.values():
            if torch.stack([*found.values()]).any():
                changed += [name for name, differ in found.items() if differ]
        if changed:
            raise RuntimeError(
                f"these logits were not computed in the forward, and since then {' and '.join(changed)} changed: read "
                "them before that (a step of the optimizer, a merge of adapters), or keep only what you need later"
            )


def in_rows(function: Callable[..., torch.Tensor], hidden: torch.Tensor, *along: torch.Tensor) -> torch.Tensor:
    """Returns function(hidden [n, D], rows of `along`), computed chunk by chunk over all leading dimensions of
    `hidden`. If ranks share a sequence, each rank computes its own tokens."""
    if isinstance(hidden, ShardedTokens):
        return hidden.each(partial(in_rows, function), *along)
    leading = hidden.shape[:-1]
    rows = [tensor.reshape(leading.numel(), *tensor.shape[len(leading) :]) for tensor in (hidden, *along)]
    cut = chunks(len(rows[0]), rows_of_chunk(hidden)) if len(rows[0]) else [slice(0, 0)]
    found = torch.cat([function(*(tensor[chunk] for tensor in rows)) for chunk in cut])
    return found.reshape((*leading, *found.shape[1:]))


def rows_of_chunk(hidden: torch.Tensor, chunk_tokens: int | None = None) -> int:
    """Returns a quarter of a chunk's tokens: torch's functions keep four chunks of logits where seqtile's keep one."""
    return max(1, resolve_chunk_tokens(chunk_tokens, hidden.shape[-1]) // 4)


def gathers(head: nn.Module) -> bool:
    """Returns whether calling the head gathers its weights: under ZeRO-3, or if FSDP2 wraps the head by itself."""
    return isinstance(head, FSDPModule) or any(hasattr(weight, "ds_id") for weight in head.parameters())


def head_alone(head: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that computes the head's logits without the hooks that gather weights. Use it inside the
    head's own call (`in_own_call`)."""
    return (lambda hidden: head.forward(hidden)) if gathers(head) else head


def _weights_of(head: nn.Module) -> Weights:
    return dict(head.named_parameters()) | dict(head.named_buffers())


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Copies up to 64 x 64 elements of a weight, or of this rank's shard of it."""
    held = getattr(weight, "ds_tensor", weight)
    held = (held.to_local() if isinstance(held, DTensor) else held).detach()
    return held[tuple(slice(None, None, max(1, size // 32)) for size in held.shape)].clone()


def _differs(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Returns a bool tensor [] on the device: nothing waits for it yet."""
    if now.shape != before.shape:
        return torch.ones((), dtype=torch.bool, device=before.device)
    return (now != before).any()


def _to_gather_with(weights: Any) -> Iterator[tuple[int, ...]]:
    """Yields the groups of more than one rank that must gather the weights together."""
    groups = []
    for weight in weights:
        if isinstance(weight, DTensor):
            sharded = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]
            groups += [weight.device_mesh.get_group(i) for i in sharded]
        elif hasattr(weight, "ds_id") and weight.ds_status.name != "AVAILABLE":
            groups.append(weight.ds_process_group)
    found = dict.fromkeys(tuple(dist.get_process_group_ranks(group)) for group in groups)
    yield from (ranks for ranks in found if len(ranks) > 1)


def _arrive(ranks: tuple[int, ...]) -> None:
    """Waits until every rank in `ranks` has made the same number of calls. Raises RuntimeError after
    `ARRIVAL_LIMIT`."""
    store = dist.distributed_c10d._get_default_store()
    key = f"seqtile/logits/{ranks}"
    key = f"{key}/{store.add(f'{key} of {dist.get_rank()}', 1)}"
    if store.add(f"{key}/count", 1) == len(ranks):
        store.set(key, "all")
    try:
        store.wait([key], ARRIVAL_LIMIT)
    except dist.DistStoreError as error:
        here = store.add(f"{key}/count", 0)
        raise RuntimeError(
            f"logits of a sharded head are read on {here} of {len(ranks)} ranks, and it takes all of them to gather "
            "its weights: read them on every rank, or none"
        ) from error
