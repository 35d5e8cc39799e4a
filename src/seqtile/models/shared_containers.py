"""Dicts that layers hand to each other, such as the keys and values that Gemma 4's later layers share.

A layer that is called chunk by chunk is given stand-ins. What it wrote into one leaves as further outputs, with
gradients, and is put into the dict itself once, whole; what it reads, which earlier layers wrote, is whole.
"""

import copy
from collections import UserDict
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_ANGLES = "position_embeddings"  # a dict of these holds a row a token, and is cut


class SharedContainers:
    """The dicts and lists among what a layer is `given`; `others` is the rest."""

    def __init__(self, given: dict[str, Any]):
        kinds = (dict, UserDict, list)
        self._shared = {name: value for name, value in given.items() if isinstance(value, kinds) and name != _ANGLES}
        self.others = {name: value for name, value in given.items() if name not in self._shared}
        # As they are now: when a backward calls the layer again, others may have written into them.
        self._before = {name: copy.copy(value) for name, value in self._shared.items()}
        wholes = [dict(value) for value in self._before.values() if not isinstance(value, list)]
        self._wholes = {id(leaf): leaf for leaf in tree_leaves(wholes) if isinstance(leaf, torch.Tensor)}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Says if a dict held this tensor before the layer was called."""
        return id(tensor) in self._wholes

    def stand_ins(self) -> dict[str, Any]:
        """Returns what a chunk is given instead."""
        return {name: copy.copy(value) for name, value in self._before.items()}

    def written(self, stand_ins: dict[str, Any]) -> dict[str, dict[Any, Any]]:
        """Returns what a chunk wrote into its stand-ins. ValueError for what cannot be put together."""
        found: dict[str, dict[Any, Any]] = {}
        for name, shared in self._before.items():
            before, after = (dict(enumerate(x)) if isinstance(x, list) else dict(x) for x in (shared, stand_ins[name]))
            new = {key: value for key, value in after.items() if key not in before or before[key] is not value}
            leaves = tree_leaves(new)
            tensors = all(isinstance(leaf, torch.Tensor) and leaf.dim() > 1 for leaf in leaves)
            if before.keys() - after.keys() or (new and (isinstance(shared, list) or not tensors)):
                raise ValueError(
                    f"a layer that is computed chunk by chunk changes {name}: expected it to write tensors with a row "
                    "for each token into a dict, or nothing; apply with layer=False"
                )
            if new:
                found[name] = new
        return found

    def write(self, written: dict[str, dict[Any, Any]]) -> None:
        for name, new in written.items():
            self._shared[name].update(new)
