"""Caches the verdict on a module (how it is computed, and why) until something that it depends on changes. Functions
that end in `_verdict`, in forward/, make it.

    verdicts.of(layer)       inspects the layer's modules, classes and functions        the first time
                             compares these with what they were, one by one, by identity   afterwards

It compares the attributes of the module and its submodules, the contents of their dicts and lists (hooks, children,
parameters, adapters), the classes and their forwards, all globals that the forwards name, torch's functions, whether
autocast is on, and the active TorchFunctionModes. The comparison does not walk the module tree, and calls no Python
function. Hooks of forward and backward it refers to weakly, so that what one holds is freed when it is removed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, product
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules import linear as linear_module
from transformers import PreTrainedModel
from transformers.utils import logging

from seqtile.declared import tokenwise
from seqtile.models.functions import unbound
from seqtile.models.hooks import each_hook, hooks_of
from seqtile.models.known import CALLED, UNKNOWN
from seqtile.models.placement import placement_of
from seqtile.models.read import is_transformed
from seqtile.ops.save_early import saved_unseen

logger = logging.get_logger(__name__)
_END = object()
_DTYPE = attrgetter("dtype")
_OF_TORCH = (
    *CALLED,
    (nn.Linear, "forward"),
    (linear_module, "F"),
    *((torch._C._nn, name) for name in ("linear", "gelu")),
)


class Verdict(NamedTuple):
    """How a module that has a tiled forward is computed."""

    how: Literal["fused", "chunked", "untiled"]
    """From its weights; by running it once a chunk; by its original forward."""
    reason: str | None = None
    """Why it is not fused."""
    error: str | None = None
    """Why the tiled forward raises instead; None if it runs."""
    form: Any = None
    """The form of its forward: a `LayerForm` or a `Gated`."""
    linears: tuple[Any, ...] = ()
    """The projections of a fused module, each a `LoraLinear`: q, k, v and o of a layer, then gate, up if any, down."""
    tileable: bool = True
    """False for a kind of module that stays untiled."""
    sharded: bool = False
    """ZeRO-3 or FSDP2 holds its weights sharded: reading one is a collective."""
    parameters: tuple[nn.Parameter, ...] = ()
    """The parameters of an MLP."""
    weights: int = 0
    """The number of elements of a layer's parameters."""
    in_chunks: tuple[Any, ...] = ()
    """Its parts that run in chunks, see `InChunks`."""
    mlp_size: int = 0
    """The inner width of an MLP, or of a layer's; 0 if it is not known."""
    sparsity: float = 1
    """Experts over experts per token, of the experts inside."""


REMEDY = (
    "remove it; or, if it treats each token by itself, and keeps and counts nothing, declare it with seqtile.tokenwise "
    "(docs/compatibility.md)"
)


def left_untiled(module: nn.Module, unknown: str) -> Verdict:
    """Returns the verdict on a module that holds something unknown, see `unknown_in`, and warns once."""
    name = type(module).__name__
    what = f"the head and the loss of {name} are" if isinstance(module, PreTrainedModel) else f"{name} is"
    remedy = f"; {REMEDY}" if unknown.endswith(UNKNOWN) else ""
    logger.warning_once(f"seqtile: {what} left untiled: {unknown}{remedy}")
    return Verdict("untiled", unknown)


class Verdicts:
    """The verdicts of the modules that run one tiled forward; a copy of a module gets one of its own. Under
    torch.compile none is kept, since its guards notice changes.
    """

    def __init__(self, inspect: Callable[[nn.Module, torch.dtype | None], Verdict]):
        self._inspect = inspect
        self._kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()

    def of(self, module: nn.Module, dtype: torch.dtype | None = None) -> Verdict:
        """Returns the verdict on a module whose products are in `dtype`, where that is known."""
        return self._inspect(module, dtype) if torch.compiler.is_compiling() else self.kept(module, dtype)

    def kept(self, module: nn.Module, dtype: torch.dtype | None = None) -> Verdict:
        """Like `of`, outside torch.compile: returns the verdict that was kept, or a new one if something changed."""
        kept = self._kept.get(module)
        try:
            if kept is not None and all(map(is_, kept.now(module, dtype), kept.seen)):
                return kept.verdict
        except TypeError:  # of a hook that cannot be referred to weakly
            pass
        with nullcontext() if is_transformed() else saved_unseen():  # a checkpoint counts what is saved
            verdict = self._inspect(module, dtype)  # which may compute a parametrized weight
        # Weights by functional_call are not kept alive here.
        if all(isinstance(weight, nn.Parameter) for weight in module.parameters()) and _are_weak(module):
            self._kept[module] = _Kept(verdict, module, dtype)
        return verdict


def _are_weak(module: nn.Module) -> bool:
    """Returns whether all hooks on a module, inside it and on all modules can be referred to weakly."""
    return all(type(hook).__weakrefoffset__ for inner in (*module.modules(), None) for hook in each_hook(inner))


class _Kept:
    """A verdict, and what it was found from. It holds no reference to the module's own `__dict__`: that would be a
    cycle, which only the garbage collector frees."""

    def __init__(self, verdict: Verdict, module: nn.Module, dtype: torch.dtype | None):
        self.verdict = verdict
        self._inside = [inner for inner in module.modules() if inner is not module]
        self._parameters = list(module.parameters())
        owned = [vars(module), *map(vars, self._inside)]
        held = [value for own in owned for value in own.values()]
        self._hooks = [hooks for inner in (module, *self._inside, None) for hooks in hooks_of(inner)]
        of_hooks = set(map(id, self._hooks))
        self._dicts = [*owned[1:], *(each for each in held if isinstance(each, dict) and id(each) not in of_hooks)]
        self._lists = [each for each in held if isinstance(each, list)]
        bases = (base for inner in (module, *self._inside) for base in type(inner).__mro__)
        classes = dict.fromkeys(base for base in bases if issubclass(base, nn.Module))
        looked_up = [*_OF_TORCH, *product(classes, ("forward", "__call__", "_call_impl"))]
        looked_up = [(owner, name) for owner, name in looked_up if hasattr(owner, name)]
        self._owners, self._names = zip(*looked_up, strict=True)
        functions = [*map(getattr, self._owners, self._names), *held]
        named = [(tokenwise.__globals__, "latest"), *_named_by(functions)]
        self._globals, self._global_names = zip(*named, strict=True)
        now = self.now(module, dtype)
        loose = {id(each) for each in held if isinstance(each, torch.Tensor)}
        self.seen = [None if id(each) in loose else each for each in now]  # they may have a graph; not kept alive here

    def now(self, module: nn.Module, dtype: torch.dtype | None) -> Iterable[Any]:
        return chain(
            (dtype, torch._C._is_any_autocast_enabled(), type(module)),
            module.__dict__,
            module.__dict__.values(),
            map(type, self._inside),
            chain.from_iterable(chain(map(dict.keys, self._dicts), map(dict.values, self._dicts), self._lists)),
            map(ref, chain.from_iterable(map(dict.values, self._hooks))),
            map(type, self._parameters),
            map(_DTYPE, self._parameters),
            map(getattr, self._owners, self._names),
            map(dict.get, self._globals, self._global_names),
            map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())),
            (_END,),
        )


def _named_by(things: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the globals that the code of functions names, each as the dict that holds it and its name; of functions
    that are wrapped, replaced by a tiled forward, or named by one of the same file, too."""
    seen: set[Any] = set()
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        function = unbound(thing)
        if type(function) is not FunctionType or function in seen:
            continue
        seen.add(function)
        waiting += [vars(function).get("__wrapped__"), getattr(placement_of(function), "original", None)]
        names = function.__globals__
        for name in function.__code__.co_names:
            if name in names:
                yield names, name
                if type(names[name]) is FunctionType and names[name].__globals__ is names:
                    waiting.append(names[name])
