"""Notices that a function changes what it must leave as it is, and puts it back.

A tiled function runs once a tile, and once more in the backward. One that changes its input, a buffer or another tensor
in place, or that draws from a generator of its own, would compute something else each time. A change is seen by the
version that every tensor counts, so that nothing waits for the device.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.ops.held import held_by
from seqtile.ops.random_state import is_generator, same_state, set_state, state_of


class Version(NamedTuple):
    """Of a tensor, when it began to be watched."""

    name: str
    tensor: torch.Tensor
    number: int
    copy: torch.Tensor | None = None

    @property
    def changed(self) -> bool:
        return self.tensor._version != self.number


class Watch:
    """What `function` must leave as it is: its `inputs`, the `shared` tensors, `params`, and what it holds.

    Copies the smallest tensors of those that may have to be put back, `room` bytes in all at most.
    """

    def __init__(
        self,
        function: Any,
        inputs: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        room: int,
    ):
        held = [each[:2] for each in held_by(function)]
        self._generators = [(name, value, state_of(value)) for name, value in held if is_generator(value)]
        kept = [(name, value) for name, value in held if not is_generator(value)] + _numbered("shared tensor", shared)
        self._versions = _versions([*_numbered("input", inputs), *_numbered("parameter", params)])
        simulated = isinstance(inputs[0], FakeTensor)  # in a simulation real tensors cannot be copied
        for version in sorted(_versions(kept), key=lambda version: version.tensor.numel()):
            tensor = version.tensor
            if not tensor.requires_grad and isinstance(tensor, FakeTensor) == simulated:
                room -= tensor.numel() * tensor.element_size()
                version = version._replace(copy=tensor.detach().clone() if room >= 0 else None)
            self._versions.append(version)
        self._guarded: list[Version] = []

    def guarded(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of a tile's inputs: what changes them in place is seen, and reaches nothing of the caller's."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # they count versions
            copies = [piece.clone() for piece in pieces]
        self._guarded = _versions(_numbered("input", copies))
        return copies

    def check(self, error: type[Exception] = ValueError) -> None:
        """Raises `error` if anything has changed, having put it back."""
        guarded, self._guarded = self._guarded, []
        names = [version.name for version in guarded if version.changed]
        changed = [version for version in self._versions if version.changed]
        if names or changed:
            with torch.no_grad():
                for version in self._versions:  # all, since some operators change what counts no version
                    if version.copy is not None:
                        version.tensor.copy_(version.copy)
            lost = ", ".join(version.name for version in changed if version.copy is None)
            names += [version.name for version in changed]
            raise error(
                f"tiled: fn changes {', '.join(names)} in place, and it runs once a tile and again in the backward; "
                "make it compute new tensors, put a module that keeps state in eval mode, or leave this part untiled"
                + (f" ({lost} could not be put back)" if lost else "")
            )
        drawn = [each for each in self._generators if not same_state(state_of(each[1]), each[2])]
        for _, generator, state in drawn:
            set_state(generator, state)
        if drawn:
            raise error(
                f"tiled: fn draws random numbers from {', '.join(name for name, *_ in drawn)}, and the backward would "
                "draw others; draw from torch's default generator, or pass the numbers as an input"
            )


def _numbered(kind: str, tensors: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(f"{kind} {i}", tensor) for i, tensor in enumerate(tensors)]


def _versions(named: Iterable[tuple[str, torch.Tensor]]) -> list[Version]:
    """Of all but tensors made in inference mode, which count none."""
    return [Version(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]
