"""Finds modules that replace those that a model's class makes, and tries out if they compute token by token.

....layers.#.mlp.act_fn     a user's class      tried out: it runs on random tokens, all at once and a few at a time
....layers.#.mlp.up_proj    Linear4bit          of a library whose layers treat every token alike
....layers.#.mlp.down_proj  nn.Linear           what the class makes
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, pairwise
from types import CodeType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import _disable_current_modes

from seqtile.models.difference import brief, precision_of
from seqtile.models.find import inside_peft
from seqtile.models.forms import code_of
from seqtile.models.gathered import remove_hooks_that_gather
from seqtile.models.placement import computed_forward, decorated, home_of, is_own_class
from seqtile.models.weights import is_users

TOKENS, FEW = (2, 9), 4  # of a trial: rows of tokens, and how many at a time
Kind = tuple[type, CodeType | None]
"""The class of a module, and the code that runs as its forward."""
_LIBRARIES = ("liger_kernel", "peft", "bitsandbytes", "torchao", "seqtile")
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Inside(NamedTuple):
    """What stands at a place inside a module: a module, or a function in place of one."""

    place: str
    function: Callable
    is_replaced: bool
    """It is neither what the model's class makes there nor of a library."""


class Made:
    """The kinds of modules that a model has, by their places: what its class makes."""

    def __init__(self, model: nn.Module):
        self._kinds: dict[str, set[Kind]] = {}
        self._names: dict[str, set[str]] = {}
        for place, module in modules_by_place(model):
            self._kinds.setdefault(place, set()).add(_kind_of(module))
            self._names.setdefault(place, set()).update(name for name, _ in _children(module))

    def inside(self, place: str, module: nn.Module, also: tuple[str, ...] = ()) -> Iterator[Inside]:
        """Yields a module that stands at a place and what is in it, but not what is in what was replaced. `also`:
        Python modules whose classes are no replacement."""
        for at, one in modules_by_place(module, place, self._has):
            if not self._has(at, one):
                yield Inside(at, one, not all(home in also or is_of_library(home) for home in homes_of(one)))
                continue
            yield Inside(at, one, False)
            for name in sorted(self._names[at] - dict(_children(one)).keys()):
                if callable(function := getattr(one, name, None)):
                    yield Inside(f"{at}.{name}", function, True)

    def _has(self, place: str, module: nn.Module) -> bool:
        return _kind_of(module) in self._kinds.get(place, ())


def modules_by_place(
    module: nn.Module, place: str = "", entered: Callable[[str, nn.Module], bool] = lambda *_: True
) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and all in it, of a wrapper what is in it; not what is in those that are not `entered`."""
    waiting = [(place, module)]
    while waiting:
        place, module = waiting.pop()
        module = inside_wrappers(module)
        yield place, module
        if entered(place, module):
            waiting += [(f"{place}.{'#' if name.isdigit() else name}", child) for name, child in _children(module)]


def _kind_of(module: nn.Module) -> Kind:
    return class_of(module), code_of(decorated(computed_forward(module)))


def homes_of(module: nn.Module) -> set[str]:
    """Returns the Python modules that hold a module's class and its forward."""
    return {class_of(module).__module__, home_of(decorated(computed_forward(module)))}


def class_of(module: nn.Module) -> type:
    """Returns the class of a module as it was made: without what seqtile and torch derive from it."""
    for cls, base in pairwise(classes_of(module)):
        stands_in = (cls.__module__, cls.__qualname__) == (base.__module__, base.__qualname__)
        if not stands_in and not cls.__module__.startswith(("torch.distributed.", "torch.nn.utils.")):
            return cls
    return object


def classes_of(module: nn.Module) -> list[type]:
    """Returns a module's class and what it is derived from, beneath what a tiled module is given."""
    classes = list(type(module).__mro__)
    tiled = [i for i, cls in enumerate(classes) if is_own_class(cls)]
    return classes[max(tiled, default=-1) + 1 :]


def is_of_library(home: str) -> bool:
    """Says if a Python module is of a library of layers that treat every token alike."""
    return home.split(".")[0] in _LIBRARIES or (home.startswith("transformers.") and ".models." not in home)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the names and modules of what a module calls: not those that make its weights."""
    of_weights = "parametrizations" if is_parametrized(module) else None
    return [(name, child) for name, child in module._modules.items() if child is not None and name != of_weights]


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Returns what runs within PEFT's and torch's wrappers around a module."""
    package, inner = type(module).__module__.split(".")[0], module
    if package == "peft":
        inner = inside_peft(module)
    elif package == "torch":
        inner = next((module._modules[name] for name in _WRAPPED if name in module._modules), module)
    return module if inner is module else inside_wrappers(inner)


def sizes_of(model: nn.Module) -> set[int]:
    """Returns what the width of a module's input may be."""
    values = vars(model.config.get_text_config()).values()
    return {size for size in values if type(size) is int and 1 < size < 2**20}


class NothingShown(Exception):
    """Raised where nothing shows whether a module treats every token by itself, with why."""


def hook_reason(root: nn.Module, sizes: Iterable[int], is_head: bool) -> str | None:
    """Says with which of the modules in `root` a user's forward hook makes tokens depend on others; None if with none,
    or where that cannot be tried out. A hook on `root` itself runs around its chunks, on the whole sequence, but that
    of a head in each."""
    for place, module in modules_by_place(root, "lm_head"):
        hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
        if (module is not root or is_head) and any(map(is_users, hooks)):
            with suppress(NothingShown):
                if (mixing := _tried_out(module, sizes)) is not None:
                    return f"its {place.rpartition('.')[2]} has a hook, and is a {type(module).__name__}, {mixing}"
    return None


def mixing_reason(function: Callable, sizes: Iterable[int]) -> str | None:
    """Says why a module, or a function, is not to run in chunks: a token's output depends on other tokens,
    or nothing shows that it does not. A copy of it is tried out; `sizes` are those that its input may have."""
    name = f"a {type(function).__name__}" if isinstance(function, nn.Module) else "a function"
    try:
        mixing = _tried_out(function, sizes)
    except NothingShown as why:
        return f"is {name}{why}"
    return None if mixing is None else f"is {name}, {mixing}"


def _tried_out(function: Callable, sizes: Iterable[int]) -> str | None:
    """Says how tokens depend on others in a copy of a module or a function; None if they do not. Raises
    NothingShown."""
    try:
        copied, weights = copy.deepcopy(function), []
        if isinstance(copied, nn.Module):
            remove_hooks_that_gather(copied)
            weights = [*copied.parameters(), *copied.buffers()]
        like = next((weight for weight in weights if weight.is_floating_point()), torch.empty(0))
        own = [size for weight in weights if weight.dim() <= 2 for size in reversed(weight.shape)]
        widths = dict.fromkeys([getattr(copied, "in_features", 1), *own, *sorted(sizes)])
    except Exception as error:  # of anyone's code
        raise NothingShown(f", which cannot be copied to be tried out: {brief(error)}") from error
    devices = [like.device] if like.is_cuda else []
    for width in widths:
        try:
            with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices):
                return _mixing(copied, torch.randn(*TOKENS, width).to(like.device, like.dtype))
        except NothingShown:
            raise
        except Exception:  # of anyone's code, which expects something else
            continue
    raise NothingShown(", and nothing shows that it treats every token by itself: it does not run on some")


def _mixing(function: Callable, x: torch.Tensor) -> str | None:
    """Says how what comes of x [B, S, D] differs when it is given a few tokens at a time, in evaluation and in
    training; where training changes from run to run, by noise or by what is kept, that tells nothing."""
    allowed = max(1e-4, 4 * precision_of(x))
    for training in (False, True):
        if isinstance(function, nn.Module):
            function.train(training)
        first, second, chunked = (_results(function, x, few) for few in (None, None, FEW))
        if _error(first, second) > allowed:
            if not training:
                raise NothingShown(", which does not compute the same twice")
        elif (error := _error(first, chunked)) > allowed:
            return f"in which tokens depend on others: given {FEW} at a time, it differs by {error:.1%}"
    return None


def _results(function: Callable, x: torch.Tensor, few: int | None) -> list[torch.Tensor]:
    """Returns the outputs of a function, and the gradients of its input and its parameters; of all tokens at once or a
    few at a time."""
    x = x.detach().requires_grad_()
    pieces = [x] if few is None else x.reshape(1, -1, x.shape[-1]).split(few, 1)
    made = [function(piece.clone()) for piece in pieces]  # which it may write over
    if any(y.shape[:2] != piece.shape[:2] for y, piece in zip(made, pieces, strict=True)):
        raise ValueError(f"expected an output for each token, got {list(made[0].shape)}")
    y = torch.cat([piece.flatten(0, 1) for piece in made])
    weights = function.parameters() if isinstance(function, nn.Module) else []
    leaves = [x, *(weight for weight in weights if weight.requires_grad)]
    upstream = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    gradients = torch.autograd.grad(y, leaves, upstream, allow_unused=True) if y.requires_grad else []
    return [y.detach(), *(x.new_zeros(()) if gradient is None else gradient for gradient in gradients)]


def _error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Returns the largest difference relative to its norm."""
    pairs = [(one.double(), other.double()) for one, other in zip(ours, theirs, strict=True)]
    return max(float((one - other).norm() / other.norm().clamp_min(1e-12)) for one, other in pairs)
