"""Logits that are not computed until somebody reads them.

    hidden [..., D] ─ head ─ LazyLogits [..., V] ─ * 0.1 ─ / 30 ─ tanh ─ * 30 ─ LazyLogits, which know all this

A model's forward may scale, cap, cast, slice along tokens and flatten them as it does logits: a loss that knows
`LazyLogits` reads off them what it is to compute. Anything else computes the logits, and goes on with these.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.utils import logging

logger = logging.get_logger(__name__)
Step = tuple[str, float | torch.dtype | torch.Tensor | None]
"""The name of a tensor's method and its argument: "mul", "div", "add", "tanh", "to"."""


class Affine(NamedTuple):
    """Logits as `linear_cross_entropy` takes them: scale * head(hidden) + the sum of `added`, soft-capped."""

    scale: float
    added: list[torch.Tensor]
    """Each [V]."""
    softcap: float | None


class LazyLogits:
    """Stands for head(hidden) [..., V] after some steps. `cross_entropy` is called for torch's, where a forward calls
    that itself, and returns NotImplemented for what it does not know."""

    def __init__(
        self,
        hidden: torch.Tensor,
        head: nn.Module,
        steps: tuple[Step, ...] = (),
        cross_entropy: Callable | None = None,
    ):
        self.hidden, self.head, self.steps, self.cross_entropy = hidden, head, steps, cross_entropy
        self._real: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        size = getattr(self.head, "out_features", None) or self.head.weight.shape[0]
        return torch.Size((*self.hidden.shape[:-1], size))

    @property
    def dtype(self) -> torch.dtype:
        return next((value for name, value in reversed(self.steps) if name == "to"), self.hidden.dtype)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def affine(self) -> Affine | None:
        """What the steps make of head(hidden); None if that is not affine with a soft cap, or without one."""
        scale, softcap, added = 1.0, None, []
        steps = [step for step in self.steps if step[0] != "to"]
        for i, (name, value) in enumerate(steps):
            if name == "tanh":  # and then times the cap, and nothing more
                if [name for name, _ in steps[i + 1 :]] != ["mul"] or (softcap := steps[i + 1][1]) <= 0:
                    return None
                return Affine(scale * softcap, [tensor * softcap for tensor in added], softcap)
            if name == "add":
                added.append(value.reshape(-1))
            else:
                factor = value if name == "mul" else 1 / value
                scale, added = scale * factor, [tensor * factor for tensor in added]
        return Affine(scale, added, softcap)

    def real(self, reader: str = "") -> torch.Tensor:
        """Computes the logits; once, however often they are read."""
        if self._real is None:
            if reader:
                logger.warning_once(f"the forward reads its logits ({reader}), so they are computed, untiled")
            logits = self.head(self.hidden)
            for name, value in self.steps:
                logits = getattr(logits, name)(*(() if value is None else (value,)))
            self._real = logits
        return self._real

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    def contiguous(self) -> "LazyLogits":
        return self

    def float(self) -> "LazyLogits":
        return self._after("to", torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            return self._after("to", args[0])
        return self if args == (self.device,) and not kwargs else self.real("to").to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if all(isinstance(size, int) for size in sizes) and sizes and sizes[-1] == self.shape[-1]:
            return self._of(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.real("view").view(*shape)

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        if Ellipsis in [entry for entry in entries if not isinstance(entry, torch.Tensor)]:
            at = entries.index(Ellipsis)
            missing = self.dim() - len(entries) + 1
            entries = (*entries[:at], *[slice(None)] * missing, *entries[at + 1 :])
        whole = len(entries) < self.dim() or entries[-1] == slice(None)
        if whole and len(entries) <= self.dim() and all(isinstance(entry, slice) for entry in entries):
            return self._of(self.hidden[entries[: self.dim() - 1]])
        return self.real("indexing")[index]

    def __mul__(self, other: Any) -> Any:
        return self._after("mul", other) if isinstance(other, int | float) else self.real("*") * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._after("div", other) if isinstance(other, int | float) else self.real("/") / other

    def __add__(self, other: Any) -> Any:
        per_word = isinstance(other, torch.Tensor) and other.numel() == other.shape[-1:].numel() == self.shape[-1]
        return self._after("add", other) if per_word else self.real("+") + other

    def tanh(self) -> "LazyLogits":
        return self._after("tanh", None)

    def _after(self, name: str, value: Any) -> "LazyLogits":
        return LazyLogits(self.hidden, self.head, (*self.steps, (name, value)), self.cross_entropy)

    def _of(self, hidden: torch.Tensor) -> "LazyLogits":
        return LazyLogits(hidden, self.head, self.steps, self.cross_entropy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.real(name), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        if function is F.cross_entropy and isinstance(args[0], cls) and args[0].cross_entropy is not None:
            if (loss := args[0].cross_entropy(*args, **(kwargs or {}))) is not NotImplemented:
                return loss
        name = getattr(function, "__name__", "a function of torch's")
        args, kwargs = tree_map_only(cls, lambda logits: logits.real(name), (args, kwargs or {}))
        return function(*args, **kwargs)


def _operator(name: str) -> Callable:
    def operate(self: LazyLogits, *args: Any) -> Any:
        return getattr(self.real(name), name)(*args)

    return operate


for _name in ("radd", "sub", "rsub", "matmul", "pow", "neg", "lt", "le", "gt", "ge", "len", "iter"):
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))
