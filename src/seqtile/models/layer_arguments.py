"""What a layer is given besides its hidden states: whole, and as it is given for a chunk of the tokens.

a tensor with a row a token              its rows
a dict that layers hand to each other    a copy: what is written into it leaves the chunk as further outputs
a mask, a cache, a number                as it is
"""

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from seqtile.renamed import CACHE_NAMES

_WHOLE = ("attention_mask", *CACHE_NAMES)  # what is not of a chunk's tokens alone


class LayerArguments:
    """What a layer is `given` for the whole sequence, by name, as it is now: when a backward runs the layer again,
    other layers may have written into its dicts.

    The dicts themselves are not kept. What the layer writes into them has a graph that leads back to this object.
    """

    def __init__(self, given: dict[str, Any], rows: int, length: int):
        self._rest = {name: given[name] for name in _WHOLE if name in given}
        leaves, self._spec = tree_flatten({name: value for name, value in given.items() if name not in _WHOLE})
        self._leaves = [copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf for leaf in leaves]
        axes = (_axis_of(leaf, rows, length) for leaf in leaves)
        self._axes = {i: axis for i, axis in enumerate(axes) if axis is not None}
        self.tensors = [self._moved(leaves[i], axis) for i, axis in self._axes.items()]
        """The tensors to cut, each with its tokens along dimension 1, and at least one more dimension after it."""

    def of_chunk(self, pieces: tuple[torch.Tensor, ...]) -> "ChunkArguments":
        """Returns the layer's arguments for a chunk, given its `pieces` of `tensors`."""
        leaves = [copy.copy(leaf) if isinstance(leaf, MutableMapping) else leaf for leaf in self._leaves]
        for (i, axis), piece in zip(self._axes.items(), pieces, strict=True):
            leaves[i] = piece.squeeze(-1) if self._leaves[i].dim() == 2 else piece.movedim(1, axis)
        wholes = {id(leaf): whole for leaf, whole in zip(leaves, self._leaves, strict=True)}
        in_dicts = tree_leaves([dict(leaf) for leaf in leaves if isinstance(leaf, MutableMapping)])
        wholes |= {id(leaf): leaf for leaf in in_dicts}
        return ChunkArguments(tree_unflatten(leaves, self._spec) | self._rest, wholes)

    @staticmethod
    def _moved(leaf: torch.Tensor, axis: int) -> torch.Tensor:
        return leaf.unsqueeze(-1) if leaf.dim() == 2 else leaf.movedim(axis, 1)


class ChunkArguments:
    """A layer's arguments for a chunk, by name."""

    def __init__(self, given: dict[str, Any], wholes: dict[int, Any]):
        self.given, self._wholes = given, wholes
        self._before = {name: dict(_parts_of(value)) for name, value in given.items() if name not in _WHOLE}

    def whole_of(self, tensor: Any) -> torch.Tensor | None:
        """Returns the whole sequence's tensor from which `tensor` was cut; None for any other tensor."""
        whole = self._wholes.get(id(tensor))
        return whole if isinstance(whole, torch.Tensor) else None

    def whole_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns an attention function's arguments for the whole sequence, given those for the chunk."""
        found = {}
        for name, value in options.items():
            known = not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter)
            if not known and (value := self.whole_of(value)) is None:
                raise ValueError(f"expected an attention that is given no tensor computed from its tokens, got {name}")
            found[name] = value
        return found

    def written(self) -> dict[str, dict[Any, Any]]:
        """Returns what the layer has put into dicts that it got. Raises ValueError if it changed anything else."""
        found: dict[str, dict[Any, Any]] = {}
        for name, before in self._before.items():
            value, after = self.given[name], dict(_parts_of(self.given[name]))
            changed = [path for path in before | after if before.get(path, self) is not after.get(path, self)]
            put = [path[0] for path in changed if len(path) == 1 and path in after]
            if any(path[0] not in put for path in changed) or (put and not isinstance(value, MutableMapping)):
                raise ValueError(
                    f"a layer that is computed chunk by chunk changes {name}: expected it to put tensors with a row "
                    "for each token into a dict, or nothing; apply with layer=False"
                )
            if put:
                found[name] = {key: value[key] for key in put}
        return found


def _parts_of(thing: Any, depth: int = 3) -> Iterator[tuple[tuple, Any]]:
    """Yields the contents of a container or an object, recursively, each with its path."""
    if isinstance(thing, MutableMapping):
        parts = thing.items()
    elif isinstance(thing, list | tuple | set):
        parts = enumerate(thing)
    elif callable(thing) or not hasattr(thing, "__dict__") or isinstance(thing, torch.Tensor):
        return
    else:
        parts = vars(thing).items()
    for step, part in list(parts):
        yield (step,), part
        if depth:
            yield from (((step, *path), inner) for path, inner in _parts_of(part, depth - 1))


def _axis_of(leaf: Any, rows: int, length: int) -> int | None:
    """Returns the dimension of a tensor along which it has a row for each of the tokens; None if there is none."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
        return None
    axes = [axis for axis in (1, 2) if axis < leaf.dim() and leaf.shape[axis] == length]
    if len(axes) > 1 and leaf.shape[0] not in (1, rows):  # [3, B, S], as many rows as tokens
        return 2
    return axes[0] if axes else None
