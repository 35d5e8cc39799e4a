"""Records how logits are computed: the hidden states, the head, and the operations after the head.

    hidden [..., D] ─ head ─ LogitsRecipe [..., V] ─ * 0.1 ─ / 30 ─ tanh ─ * 30 ─ LogitsRecipe, which knows all this

A model's forward may scale, cap, cast, flatten and slice (along tokens) a recipe as it does logits. A loss that accepts
recipes reads from it what to compute. Any other function computes the logits and continues with them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, partialmethod
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.utils import logging

from seqtile.ops.checks import autocast_dtype
from seqtile.ops.state import autocast_on
from seqtile.tensor_like import VIEWS, View, input_first, view_of

logger = logging.get_logger(__name__)


class Step(NamedTuple):
    """An operation on logits: one of the tensor methods mul, div, add, tanh, to, softmax and log_softmax."""

    name: str
    arguments: tuple
    under: Callable[[], AbstractContextManager] = nullcontext
    """Returns an autocast context: the autocast of the code that applied the step after the forward."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        with self.under():
            return getattr(logits, self.name)(*self.arguments)


def autocast_now(device: torch.device) -> Callable[[], AbstractContextManager]:
    """Returns a function that creates contexts with the autocast that is active now."""
    return partial(torch.autocast, *autocast_on(device), cache_enabled=False)


class Affine(NamedTuple):
    """Logits in the form that `linear_cross_entropy` takes: scale * head(hidden) + sum(`added`), soft-capped."""

    scale: float
    added: list[torch.Tensor]
    """Each [V]."""
    softcap: float | None


class LogitsRecipe:
    """Represents head(hidden) [..., V] after some steps. If a forward calls torch's cross_entropy, `cross_entropy` runs
    instead; it returns NotImplemented for unknown arguments."""

    def __init__(self, hidden: torch.Tensor, head: nn.Module, verdict: Any, cross_entropy: Callable | None = None):
        """`verdict`: the `Verdict` on the head."""
        self.hidden, self.head, self.verdict, self.cross_entropy = hidden, head, verdict, cross_entropy
        self.views: tuple[View, ...] = ()
        """The views that made `hidden` from the head's input."""
        self.steps: tuple[Step, ...] = ()
        autocast = autocast_dtype(hidden)
        self.dtype = hidden.dtype if autocast is None or hidden.dtype == torch.float64 else autocast
        self._root: LogitsRecipe | None = None
        self.at_forward: Any = None
        """The state of the forward, for later readers, see `AtForward`."""
        self.tensor: torch.Tensor | None = None
        """The head's output as a tensor with a gradient, once made."""
        self._real: torch.Tensor | None = None
        self._words: int | None = None

    @property
    def root(self) -> "LogitsRecipe":
        """The recipe that the head returned and that this one derives from, or is."""
        return self if self._root is None else self._root

    @property
    def shape(self) -> torch.Size:
        root = self.root
        if root._words is None:  # reading a weight may be a collective
            root._words = getattr(self.head, "out_features", None) or root._words_of_head()
        return torch.Size((*self.hidden.shape[:-1], root._words))

    def _words_of_head(self) -> int:
        weight = getattr(self.head, "weight", None)
        if isinstance(weight, torch.Tensor):
            return weight.shape[0]
        with torch.no_grad():
            return self.head(self.hidden[..., :1, :]).shape[-1]  # it treats each token by itself

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def affine(self) -> Affine | None:
        """The steps as one affine function with an optional soft cap; None if they are not of that form."""
        scale, added = 1.0, []
        steps = [(name, *arguments) for name, arguments, _ in self.steps if name != "to"]
        for i, (name, *arguments) in enumerate(steps):
            if name == "tanh":  # only `* softcap` may follow
                match steps[i + 1 :]:
                    case [("mul", softcap)] if softcap > 0:
                        return Affine(scale * softcap, [tensor * softcap for tensor in added], softcap)
                return None
            if name == "add":
                added.append(arguments[0].reshape(-1))
            elif name in ("mul", "div"):
                factor = arguments[0] if name == "mul" else 1 / arguments[0]
                scale, added = scale * factor, [tensor * factor for tensor in added]
            else:
                return None
        return Affine(scale, added, None)

    def of(self, hidden: torch.Tensor, head: Callable | None = None) -> torch.Tensor:
        """Computes the logits of other hidden states [..., D]."""
        logits = (head or self.head)(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits

    def real(self, reader: str) -> torch.Tensor:
        """Computes the logits once, for a forward that reads them. `reader` names what reads them."""
        if self._real is None:
            logger.warning_once(f"the forward reads its logits ({reader}), so they are all computed and kept")
            self._real = self.of(self.hidden)
        return self._real

    def changed(self, **fields: Any) -> "LogitsRecipe":
        """Returns a copy with other fields, of which nothing is computed yet."""
        other = object.__new__(type(self))
        vars(other).update(vars(self) | {"_real": None, "tensor": None} | fields)
        return other

    def viewed(self, view: View) -> "LogitsRecipe":
        return self.changed(hidden=view(self.hidden), views=(*self.views, view), _root=self.root)

    def then(self, name: str, *arguments: Any, dtype: torch.dtype | None = None) -> "LogitsRecipe":
        under = nullcontext if self.at_forward is None else autocast_now(self.device)
        steps = (*self.steps, Step(name, arguments, under))
        return self.changed(steps=steps, dtype=dtype or self.dtype, _root=self.root)

    def detached(self) -> "LogitsRecipe":
        return self.changed(hidden=self.hidden.detach(), _root=None)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        rule = RULES.get(name)
        found = NotImplemented if rule is None else rule(self, *args, **kwargs)
        return getattr(self.real(name), name)(*args, **kwargs) if found is NotImplemented else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in RULES:
            return getattr(self.real(name), name)
        return lambda *args, **kwargs: self._call(name, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = getattr(function, "__name__", "a function of torch's"), kwargs or {}
        given, named = input_first(args, kwargs)
        if given and isinstance(given[0], cls):
            if function is F.cross_entropy and given[0].cross_entropy is not None:
                if (loss := given[0].cross_entropy(*given, **named)) is not NotImplemented:
                    return loss
            elif name in RULES and (found := RULES[name](*given, **named)) is not NotImplemented:
                return found
        args, kwargs = tree_map_only(cls, lambda logits: logits.real(name), (args, kwargs))
        return function(*args, **kwargs)


def _to(recipe: LogitsRecipe, *args: Any, **kwargs: Any) -> Any:
    args = (*args, *kwargs.values()) if kwargs.keys() <= {"dtype", "device"} else (None, None)
    if len(args) == 1 and isinstance(args[0], torch.dtype) and args[0].is_floating_point:
        return recipe if args[0] == recipe.dtype else recipe.then("to", args[0], dtype=args[0])
    return recipe if args in ((recipe.device,), (str(recipe.device),)) else NotImplemented


def _viewed(recipe: LogitsRecipe, *args: Any, name: str, **kwargs: Any) -> Any:
    views = view_of(name, recipe.shape, *args, **kwargs)
    return views if views is NotImplemented else tree_map_only(FunctionType, recipe.viewed, views)


def _scaled(recipe: LogitsRecipe, other: Any, *, by: str, **kwargs: Any) -> Any:
    return recipe.then(by, other) if isinstance(other, int | float) and not kwargs else NotImplemented


def _added(recipe: LogitsRecipe, other: Any, **kwargs: Any) -> Any:
    per_word = isinstance(other, torch.Tensor) and other.numel() == other.shape[-1:].numel() == recipe.shape[-1]
    if not per_word or kwargs or other.dim() > recipe.dim():
        return NotImplemented
    if recipe.at_forward is not None:  # a reader may change `other` before it is added
        if other.requires_grad:
            return NotImplemented
        other = other.clone()
    return recipe.then("add", other, dtype=torch.promote_types(recipe.dtype, other.dtype))


def _softmax(
    recipe: LogitsRecipe,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    name: str,
    **kwargs: Any,
) -> Any:
    if dim not in (-1, recipe.dim() - 1) or recipe.at_forward is None or kwargs or not isinstance(_stacklevel, int):
        return NotImplemented
    recipe = recipe if dtype is None else _to(recipe, dtype)
    number = torch.empty(1, dtype=recipe.dtype, device=recipe.device)
    dtype = getattr(number, name)(-1).dtype  # autocast may change it, and differently on a GPU and a CPU
    return recipe.then(name, -1, dtype=dtype)


def _if_alone(rule: Callable[[LogitsRecipe], Any], recipe: LogitsRecipe, *args: Any, **kwargs: Any) -> Any:
    """Returns rule(recipe) for a function that is given nothing else, such as a memory format."""
    return NotImplemented if args or kwargs else rule(recipe)


_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_ALONE = {name: partial(_to, dtype=dtype) for name, dtype in _DTYPES.items()}
_ALONE |= {"contiguous": lambda recipe: recipe, "tanh": lambda recipe: recipe.then("tanh")}
RULES: dict[str, Callable] = {name: partial(_if_alone, rule) for name, rule in _ALONE.items()}
RULES |= dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), partial(_scaled, by="mul"))
RULES |= dict.fromkeys(("div", "true_divide", "__truediv__"), partial(_scaled, by="div"))
RULES |= dict.fromkeys(("add", "__add__", "__radd__"), _added)
RULES |= {name: partial(_viewed, name=name) for name in VIEWS}
RULES |= {name: partial(_softmax, name=name) for name in ("softmax", "log_softmax")}
RULES |= {"to": _to, "__iter__": lambda recipe: iter(RULES["unbind"](recipe))}
"""The operations that leave a recipe uncomputed, by the name of a tensor method or torch function. Each returns a
recipe, or NotImplemented if the logits must be computed."""
for _name in "mul rmul truediv add radd getitem sub rsub matmul pow neg lt le gt ge len iter".split():
    setattr(LogitsRecipe, f"__{_name}__", partialmethod(LogitsRecipe._call, f"__{_name}__"))
