"""Records what modules depend on in a forward, and restores it for the backward, which runs the modules again.

    forward    snapshot = Snapshot(parts, dicts, ...)
    backward   with snapshot.put_back():      classes, attributes, children, parameters, adapters, hooks of then
                   ... the modules run ...
                                              as before

`changed` names what cannot be put back.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from seqtile.models.hooks import each_hook, is_harmless
from seqtile.models.known import CALLED
from seqtile.ops.save_early import Unchanged

_OF_TORCH = (*CALLED, (F, "cross_entropy"))


def dicts_of(module: nn.Module) -> Iterator[dict]:
    """Yields the dicts that a module keeps: its children, parameters, buffers, hooks, scalings of adapters."""
    for name, value in vars(module).items():
        if isinstance(value, dict) and "state_dict" not in name:
            yield value


class Snapshot:
    """The classes and the attributes of modules, and the contents of their dicts, as they are now.

    Args:
        parts: every module.
        dicts: what `dicts_of` yields for them.
        without: (dict, key) pairs whose values it does not keep alive.
        rewritten: ids of tensors that may be changed in place.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        dicts: Sequence[dict],
        without: Sequence[tuple[dict[str, Any], str]],
        rewritten: Collection[int],
    ):
        self._parts, self._dicts = parts, [*map(vars, parts), *dicts]
        self._types, self._then = [*map(type, parts)], [*map(dict.copy, self._dicts)]
        # Their classes hold a property for each weight, unless the caller computes that.
        parametrized = [part for part in parts if is_parametrized(part) and part.parametrizations in parts]
        self._looked_up = [*_OF_TORCH, *[(kind, "forward") for kind in self._types]]
        self._looked_up += [(type(part), name) for part in parametrized for name in part.parametrizations]
        own = [each for part in parts for each in (part._parameters, part._buffers)]
        held = [each for each in chain.from_iterable(map(dict.values, own)) if each is not None]
        self._requires_grad = [(each, each.requires_grad) for each in held if each.is_leaf]
        # trained ones are checked by those who use them: an optimizer may step inside the backward
        self._frozen = Unchanged([each for each in held if not each.requires_grad and id(each) not in rewritten])
        kept = {id(own): then for own, then in zip(self._dicts, self._then, strict=True)} if without else {}
        for own, name in without:
            del kept[id(own)][name]
        self._fixed = self._fixed_now()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restores, for the time of the context, all that can be restored; the method `changed` names the rest."""
        types = [(part, type(part), then) for part, then in zip(self._parts, self._types, strict=True)]
        types = [(part, now, then) for part, now, then in types if now is not then]
        changed = []
        if not all(map(is_, _flat(self._dicts), _flat(self._then))):
            pairs = [(own, dict(own), _wanted(own, then)) for own, then in zip(self._dicts, self._then, strict=True)]
            changed = [(own, now, wanted) for own, now, wanted in pairs if not _same(now, wanted)]
        thawed = [each for each, required in self._requires_grad if each.requires_grad and not required]
        try:
            for part, _, then in types:
                part.__class__ = then
            for own, _, wanted in changed:
                _fill(own, wanted)
            for each in thawed:
                each.requires_grad_(False)
            yield
        finally:
            for each in thawed:
                each.requires_grad_()
            for own, now, _ in reversed(changed):  # what FSDP2 has exchanged meanwhile stays: it knows what is gathered
                _fill(own, now | {name: value for name, value in own.items() if _is_exchanged(value, now.get(name))})
            for part, now, _ in types:
                part.__class__ = now

    def _fixed_now(self) -> list[Any]:
        """Returns what cannot be put back: the adapters that are merged into weights, the global module hooks, and what
        was looked up."""
        merged = filter(None, map(dict.get, map(vars, self._parts), repeat("merged_adapters")))
        hooks = [hook for hook in each_hook(None) if not is_harmless(hook, False)]
        return [[*map(tuple, merged)], hooks, *[getattr(owner, name, None) for owner, name in self._looked_up]]

    def changed(self) -> list[str]:
        """Returns the names of what has changed and cannot be put back."""
        names = ("the adapters that are merged into weights", "the global module hooks")
        names += tuple([f"{owner.__name__}.{name}" for owner, name in self._looked_up])
        each = zip(names, self._fixed, self._fixed_now(), strict=True)
        changed = [*dict.fromkeys([name for name, then, now in each if then != now])]
        if (found := self._frozen.changed()) is not None:
            tensor, how = found
            held = ((part, name, value) for part in self._parts for name, value in part.named_parameters(recurse=False))
            names = (f"{type(part).__name__}.{name}" for part, name, value in held if value is tensor)
            changed.append(f"{next(names, 'a buffer')} {list(tensor.shape)}, which {how}")
        return changed


def _wanted(now: dict, then: dict) -> dict:
    """Returns what a dict is to hold: what it held in the forward, except for entries that may differ
    (`_is_exchanged`). A new key with the value True is a flag of a new hook (such as with_kwargs), and stays."""
    new = {name: value for name, value in now.items() if value is True and name not in then}
    kept = new | {name: value for name, value in now.items() if _is_exchanged(value, then.get(name))}
    return {name: value for name, value in then.items() if not _is_exchanged(value, now.get(name))} | kept


def _is_exchanged(value: Any, other: Any) -> bool:
    """Returns whether a value of a dict may differ between forward and backward: a hook that only watches, or one of
    FSDP2's pairs of a sharded and an unsharded parameter."""
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, DTensor) != isinstance(other, DTensor) and value is not None and other is not None
    return callable(value) and is_harmless(value, False)


def _flat(dicts: Sequence[dict]) -> Iterator[Any]:
    names, values = (chain.from_iterable(map(kind, dicts)) for kind in (dict.keys, dict.values))
    return chain(map(len, dicts), names, values)


def _same(now: dict, then: dict) -> bool:
    return [*now] == [*then] and all(map(is_, now.values(), then.values()))


def _fill(own: dict, items: dict) -> None:
    """Gives a dict these items, in this order."""
    for name in own.keys() - items.keys():
        del own[name]
    if [*own] != [*items]:
        for name in items:
            own[name] = own.pop(name, None)
    own.update(items)
