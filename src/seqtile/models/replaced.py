"""Finds modules that replace those that a model's class makes, and tests whether they treat each token by itself.

....layers.#.mlp.act_fn     a user's class      tested: runs on random tokens, all at once and a few at a time
....layers.#.mlp.up_proj    Linear4bit          of a library whose layers treat each token by itself
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
from seqtile.models.hooks import is_known
from seqtile.models.placement import computed_forward, decorated, home_of, is_own_class

TOKENS, FEW = (2, 9), 4  # of a test: its batch, and tokens of a chunk
Kind = tuple[type, CodeType | None]
"""The class of a module, and the code that runs as its forward."""
_LIBRARIES = ("liger_kernel", "peft", "bitsandbytes", "torchao", "seqtile")
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Inside(NamedTuple):
    """A module, or a function in place of one, at some place inside a module."""

    place: str
    function: Callable
    is_replaced: bool
    """True if it is neither what the model's class makes there nor of a known library."""


class Made:
    """The kinds of modules that a model's class makes, by their places."""

    def __init__(self, model: nn.Module):
        self._kinds: dict[str, set[Kind]] = {}
        self._names: dict[str, set[str]] = {}
        for place, module in modules_by_place(model):
            self._kinds.setdefault(place, set()).add(_kind_of(module))
            self._names.setdefault(place, set()).update(name for name, _ in _children(module))

    def inside(self, place: str, module: nn.Module, also: tuple[str, ...] = ()) -> Iterator[Inside]:
        """Yields a module at a place and all inside it, except what is inside replaced modules. Classes of the Python
        modules in `also` do not count as replacements."""
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
    """Yields a module and all inside it, without wrappers, and only inside modules that are `entered`."""
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
    """Returns a module's original class, not one that seqtile or torch derived from it."""
    for cls, base in pairwise(classes_of(module)):
        stands_in = (cls.__module__, cls.__qualname__) == (base.__module__, base.__qualname__)
        if not stands_in and not cls.__module__.startswith(("torch.distributed.", "torch.nn.utils.")):
            return cls
    return object


def classes_of(module: nn.Module) -> list[type]:
    """Returns a module's class and its bases, without the classes that seqtile puts before them."""
    classes = list(type(module).__mro__)
    tiled = [i for i, cls in enumerate(classes) if is_own_class(cls)]
    return classes[max(tiled, default=-1) + 1 :]


def is_of_library(home: str) -> bool:
    """Returns whether a Python module is of a library whose layers treat each token by itself."""
    return home.split(".")[0] in _LIBRARIES or (home.startswith("transformers.") and ".models." not in home)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the names and submodules that a module calls, without those that compute its weights."""
    of_weights = "parametrizations" if is_parametrized(module) else None
    return [(name, child) for name, child in module._modules.items() if child is not None and name != of_weights]


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Returns the module inside PEFT's and torch's wrappers."""
    package, inner = type(module).__module__.split(".")[0], module
    if package == "peft":
        inner = inside_peft(module)
    elif package == "torch":
        inner = next((module._modules[name] for name in _WRAPPED if name in module._modules), module)
    return module if inner is module else inside_wrappers(inner)


def sizes_of(model: nn.Module) -> set[int]:
    """Returns the possible widths of a module's input."""
    values = vars(model.config.get_text_config()).values()
    return {size for size in values if type(size) is int and 1 < size < 2**20}


class NothingShown(Exception):
    """Raised, with the reason, if a test cannot show whether a module treats each token by itself."""


def hook_reason(root: nn.Module, sizes: Iterable[int], is_head: bool) -> str | None:
    """Says which module in `root` mixes tokens because of a user's forward hook; None if none does, or if it cannot be
    tested. A hook on `root` itself runs once, on the whole sequence, except on a head, where it runs in each chunk."""
    for place, module in modules_by_place(root, "lm_head"):
        hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
        if (module is not root or is_head) and not all(map(is_known, hooks)):
            with suppress(NothingShown):
                if (mixing := _tried_out(module, sizes)) is not None:
                    return f"a hook on its {place.rpartition('.')[2]} ({type(module).__name__}) mixes tokens: {mixing}"
    return None


def mixing_reason(function: Callable, sizes: Iterable[int]) -> str | None:
    """Says why a module, or a function, must not run in chunks: a token's output depends on other tokens, or nothing
    shows that it does not. A copy of it is tested; `sizes` are the possible widths of its input."""
    name = f"a {type(function).__name__}" if isinstance(function, nn.Module) else "a function"
    try:
        mixing = _tried_out(function, sizes)
    except NothingShown as why:
        return f"is {name}{why}"
    return None if mixing is None else f"is {name}, which mixes tokens: {mixing}"


def _tried_out(function: Callable, sizes: Iterable[int]) -> str | None:
    """Says how tokens depend on others in a copy of a module or a function; None if they do not. Raises NothingShown if
    it cannot be tested."""
    try:
        copied, weights = copy.deepcopy(function), []
        if isinstance(copied, nn.Module):
            remove_hooks_that_gather(copied)
            weights = [*copied.parameters(), *copied.buffers()]
        like = next((weight for weight in weights if weight.is_floating_point()), torch.empty(0))
        own = [size for weight in weights if weight.dim() <= 2 for size in reversed(weight.shape)]
        widths = dict.fromkeys([getattr(copied, "in_features", 1), *own, *sorted(sizes)])
    except Exception as error:  # a user's code may raise anything
        raise NothingShown(f", which cannot be copied to be tried out: {brief(error)}") from error
    devices = [like.device] if like.is_cuda else []
    for width in widths:
        try:
            with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices):
                return _mixing(copied, torch.randn(*TOKENS, width).to(like.device, like.dtype))
        except NothingShown:
            raise
        except Exception:  # a user's code may expect another width
            continue
    raise NothingShown(", and nothing shows that it treats every token by itself: it does not run on some")


def _mixing(function: Callable, x: torch.Tensor) -> str | None:
    """Says how the result for x [B, S, D] differs when it is computed a few tokens at a time, in evaluation and in
    training. A difference in training does not count if noise or state already changes it from run to run."""
    allowed = max(1e-4, 4 * precision_of(x))
    for training in (False, True):
        if isinstance(function, nn.Module):
            function.train(training)
        first, second, chunked = (_results(function, x, few) for few in (None, None, FEW))
        if _error(first, second) > allowed:
            if not training:
                raise NothingShown(", which does not compute the same twice")
        elif (error := _error(first, chunked)) > allowed:
            return f"given {FEW} at a time, its result differs by {error:.1%}"
    return None


def _results(function: Callable, x: torch.Tensor, few: int | None) -> list[torch.Tensor]:
    """Returns the outputs of a function and the gradients of its input and parameters, with all tokens at once or a few
    at a time."""
    x = x.detach().requires_grad_()
    pieces = [x] if few is None else x.reshape(1, -1, x.shape[-1]).split(few, 1)
    made = [function(piece.clone()) for piece in pieces]  # it may write to its input
    if any(y.shape[:2] != piece.shape[:2] for y, piece in zip(made, pieces, strict=True)):
        raise ValueError(f"expected an output for each token, got {list(made[0].shape)}")
    y = torch.cat([piece.flatten(0, 1) for piece in made])
    weights = function.parameters() if isinstance(function, nn.Module) else []
    leaves = [x, *(weight for weight in weights if weight.requires_grad)]
    upstream = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    gradients = torch.autograd.grad(y, leaves, upstream, allow_unused=True) if y.requires_grad else []
    return [y.detach(), *(x.new_zeros(()) if gradient is None else gradient for gradient in gradients)]


def _error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Returns the largest relative difference, in norm."""
    pairs = [(one.double(), other.double()) for one, other in zip(ours, theirs, strict=True)]
    return max(float((one - other).norm() / other.norm().clamp_min(1e-12)) for one, other in pairs)
