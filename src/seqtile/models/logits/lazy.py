"""Logits that a model returns as a tensor and that are computed when they are read.

    forward    hidden ─── Edge ── LazyLogits ── what reducers and wrappers do with outputs ── LazyLogits ── Read
    backward   gradients ─ Edge ─────────────── LazyGradient, which keeps what was read ──────────────────── Read

FSDP2 and ZeRO put hooks on a model's outputs and gather weights in them before the backward. They therefore run before
Edge's backward, which recomputes the logits chunk by chunk, and from them the gradients of hidden states and head.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from seqtile.models.logits.late import AtForward, gathers, head_alone, in_rows
from seqtile.models.logits.recipe import RULES, LogitsRecipe, autocast_now
from seqtile.models.read import leaves_of
from seqtile.models.sharded import in_own_call, is_sharded
from seqtile.ops.checks import check_first_derivative
from seqtile.ops.graph import gradients_of
from seqtile.ops.weight_grads import finish_weight_grads, main_grad_of, weight_grads
from seqtile.protocols import ShardedTokens
from seqtile.tensor_like import ABOUT, CrossEntropy, input_first, is_in_place

Rowwise = Callable[..., torch.Tensor]
"""Computes [n, ...] from logits [n, V] and further tensors [n, ...], each row by itself."""


def connected(recipe: LogitsRecipe, hidden: torch.Tensor | None = None) -> "LazyLogits":
    """Returns the head's logits as an uncomputed tensor, with gradients for hidden states and head if autograd records.

    With `hidden`, call it inside the head's own call (`in_own_call`), with that call's hidden states. Without `hidden`,
    it makes that call, so that the backward also gathers a head that is sharded by itself.
    """
    leaves = [leaf for leaf in leaves_of(recipe.head) if leaf.requires_grad]
    recorded = torch.is_grad_enabled() and (bool(leaves) or recipe.hidden.requires_grad)
    if hidden is None and recorded and (gathers(recipe.head) or is_sharded(recipe.head)):
        return in_own_call(recipe.head, lambda hidden: connected(recipe, hidden), recipe.hidden)
    given = recipe.changed(at_forward=AtForward(recipe), cross_entropy=None)
    if not recorded:
        return LazyLogits(given)
    return _Edge.apply(given, recipe.hidden if hidden is None else hidden, *leaves)


@torch.compiler.disable(reason="logits that are not computed cannot be traced")
def lazy_logits(recipe: LogitsRecipe) -> torch.Tensor:
    """Returns a recipe's logits as a tensor."""
    given = [argument for step in recipe.steps for argument in step.arguments]
    if recipe._real is not None or any(getattr(argument, "requires_grad", False) for argument in given):
        return recipe.real("its output")
    root = recipe.root
    tensor = connected(root) if root.tensor is None else root.tensor
    if root is recipe:
        return tensor
    return tensor._derived(recipe.changed(at_forward=tensor.recipe.at_forward, cross_entropy=None))


class LazyLogits(torch.Tensor):
    """Logits [..., V] that are computed once, when a function reads them.

    Casts, slices and masks along tokens, scales, soft caps and softmax return LazyLogits again. argmax, logsumexp,
    amax, gather and cross_entropy are computed chunk by chunk.
    """

    @staticmethod
    def __new__(cls, recipe: LogitsRecipe) -> "LazyLogits":
        return torch.Tensor._make_wrapper_subclass(cls, recipe.shape, dtype=recipe.dtype, device=recipe.device)

    def __init__(self, recipe: LogitsRecipe):
        self.recipe = recipe
        self._computed: torch.Tensor | None = None
        self._tracked: torch.Tensor | None = None
        self._layout = torch.empty(recipe.shape, dtype=recipe.dtype, device="meta")
        """A meta tensor with the strides that plain logits would have."""
        self._viewed: LazyLogits | None = None
        """The logits that these logits are a view of."""
        self._views: list[tuple[ref[LazyLogits], Callable]] = []
        """Views of these logits made before the logits were computed, each with the function that makes it."""

    @property
    def is_computed(self) -> bool:
        return self._computed is not None or self._tracked is not None

    def computed(self) -> torch.Tensor:
        """Returns the logits, computing them on the first call; with a graph if autograd records."""
        if not (torch.is_grad_enabled() and self.requires_grad):
            if self._tracked is not None:
                return self._tracked.detach()
            if self._computed is None:
                self._computed = self._read()
            return self._computed
        if self._tracked is None:
            self._tracked = _Read.apply(self, None)
        return self._tracked

    def _read(self, function: Rowwise | None = None, *along: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.recipe.at_forward.compute(self.recipe, function, *along)

    def by_rows(self, function: Rowwise, *along: torch.Tensor) -> torch.Tensor:
        """Returns function(logits [n, V], ...) for all rows [..., *], computed chunk by chunk under the current
        autocast."""
        function = autocast_now(self.device)()(function)
        if torch.is_grad_enabled() and self.requires_grad:
            return _Read.apply(self, function, *along)
        return self._read(function, *along)

    def _derived(self, recipe: LogitsRecipe) -> "LazyLogits":
        """Returns the logits of `recipe`, which extends this recipe, with a graph that leads back to these logits."""
        if recipe is self.recipe:
            return self
        derived = LazyLogits(recipe)
        if torch.is_grad_enabled() and self.requires_grad:
            derived = _Derived.apply(self, [derived])
        if len(recipe.views) > len(self.recipe.views) and len(recipe.steps) == len(self.recipe.steps):
            derived._share(self, recipe.views[-1])
        return derived

    def _share(self, base: "LazyLogits", view: Callable) -> None:
        """Records that these logits are a view of `base`, or a copy where plain logits would be a view. Both are
        computed before either is changed in place."""
        self._viewed = base
        base._views.append((ref(self), view))
        with suppress(RuntimeError):  # masks, which depend on values, and copies fail
            self._layout = view(base._layout)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if function in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function == torch.Tensor.data.__set__:
            raise RuntimeError("logits that are computed when they are read cannot be given other data; use a copy")
        given, named = input_first(args, kwargs)
        first, out = given[0] if given else None, kwargs.get("out")
        changed = first if is_in_place(name, kwargs) else out
        if isinstance(changed, cls):
            changed._to_be_changed()
        elif isinstance(first, cls) and not first.is_computed:
            if name == "detach" or function == torch.Tensor.data.__get__:
                return first._unread()
            if name == "contiguous" and not first._layout.is_contiguous():
                return first._derived(first.recipe.changed())
            if name in RULES and (found := RULES[name](first.recipe, *given[1:], **named)) is not NotImplemented:
                return tree_map_only(LogitsRecipe, first._derived, found)
            if name in _BY_ROWS and (found := _BY_ROWS[name](*given, **named)) is not NotImplemented:
                return found
        args, kwargs = tree_map_only(cls, lambda logits: logits.computed(), (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.clone):
            return args[0]._unread()
        args, kwargs = tree_map_only(cls, lambda logits: logits.computed().detach(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def _to_be_changed(self) -> None:
        """Computes all logits that may share memory with these."""
        if self._viewed is not None:
            return self._viewed._to_be_changed()
        with torch.enable_grad():  # a clone: autograd forbids in-place changes of a view that a Function returned
            self._become(self.computed().clone())

    def _become(self, tensor: torch.Tensor) -> None:
        """Makes `tensor`, a plain tensor, the value of these logits, and views of it the values of their views."""
        self._tracked, self._computed, self._layout, views = tensor, None, tensor.to("meta"), self._views
        self._viewed, self._views = None, []
        for reference, view in views:
            if (other := reference()) is not None:
                other._become(view(tensor))

    def _unread(self) -> torch.Tensor:
        """Returns these logits without a graph, and does not compute them."""
        if self.is_computed:
            return self.computed().detach()
        unread = LazyLogits(self.recipe.detached())
        unread._share(self, torch.Tensor.detach)
        return unread

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self.computed(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyLogits({list(self.shape)}, {self.dtype}, {'computed' if self.is_computed else 'not computed'})"


def _reduced(logits: LazyLogits, dim: int | None = None, keepdim: bool = False, *, name: str, **kwargs: Any) -> Any:
    if dim not in (-1, logits.dim() - 1) or kwargs:
        return NotImplemented
    return logits.by_rows(lambda rows: getattr(rows, name)(-1, keepdim=keepdim))


def _gathered(logits: LazyLogits, dim: int, index: torch.Tensor, **kwargs: Any) -> Any:
    if dim not in (-1, logits.dim() - 1) or kwargs or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    return logits.by_rows(lambda rows, index: rows.gather(-1, index), index)


def _cross_entropy(logits: LazyLogits, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    weight, _, ignore_index, _, reduction, label_smoothing = asked = CrossEntropy(*args, **kwargs)
    of_rows = logits.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    is_trained = weight is not None and weight.requires_grad
    if not of_rows or asked.is_deprecated or reduction not in ("mean", "sum", "none") or is_trained:
        return NotImplemented
    weight = weight if weight is None else weight.clone()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "weight": weight}
    losses = logits.by_rows(lambda rows, target: F.cross_entropy(rows, target, reduction="none", **options), target)
    if reduction != "mean":
        return losses.sum() if reduction == "sum" else losses
    counted = target != ignore_index
    divisor = counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0).sum()
    return losses.sum() / divisor


_BY_ROWS: dict[str, Callable] = {name: partial(_reduced, name=name) for name in ("argmax", "logsumexp", "amax")}
_BY_ROWS |= {"gather": _gathered, "cross_entropy": _cross_entropy}


class _Read(torch.autograd.Function):
    """Reads logits: all of them, or a function of their rows."""

    seqtile_of_all_ranks = True  # see seqtile.protocols.OF_ALL_RANKS

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, function: Rowwise | None, *along: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*along)  # autograd then checks that they do not change
        ctx.read = (logits.recipe.detached(), function)
        found = logits._read(function, *along) if function is not None or logits._computed is None else logits._computed
        if not found.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        check_first_derivative("logits")
        (recipe, function), along = ctx.read, ctx.saved_tensors
        return LazyGradient(recipe, [(recipe, function, along, grad)]), None, *[None] * len(along)


class _Derived(torch.autograd.Function):
    """Connects logits to the logits that they derive from, without computing either."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, derived: list[LazyLogits]) -> LazyLogits:
        ctx.of, ctx.to = logits.recipe.detached(), derived[0].recipe.detached()
        return derived[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return LazyGradient(ctx.of, _reads_in(grad, ctx.to)), None


class _Edge(torch.autograd.Function):
    """Connects logits to the hidden states and to the head's trainable leaves, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, recipe: LogitsRecipe, hidden: torch.Tensor, *leaves: torch.Tensor) -> LazyLogits:
        ctx.save_for_backward(hidden)
        ctx.recipe, ctx.leaves, ctx.main_grads = recipe.detached(), leaves, [main_grad_of(leaf) for leaf in leaves]
        return LazyLogits(recipe)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (hidden,), needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        # autograd drops the gradient of a leaf that is frozen by now
        wanted = [need and leaf.requires_grad for need, leaf in zip(needs[1:], ctx.leaves, strict=True)]
        sums = weight_grads(ctx.leaves, wanted, ctx.main_grads)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
        for reading in _reads_in(grad, ctx.recipe):
            _add_gradients(leaf, [*ctx.leaves], sums, reading)
        return None, leaf.grad if needs[0] else None, *finish_weight_grads(sums)


def _add_gradients(leaf: torch.Tensor, leaves: list[torch.Tensor], sums: list, reading: "Reading") -> None:
    """Adds the gradients of one reading to leaf.grad (of the hidden states) and to the leaves' sums."""
    recipe, function, along, d_output = reading
    trained = [(weight, total) for weight, total in zip(leaves, sums, strict=True) if total is not None]
    call = head_alone(recipe.head)

    def of_chunk(hidden: torch.Tensor, d: torch.Tensor, *along: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            logits = recipe.of(hidden, call)
            found = logits if function is None else function(logits, *along)
        d_hidden, *gradients = gradients_of([found], [hidden, *(weight for weight, _ in trained)], [d])
        for (_, total), gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                total.add_gradient(gradient)
        return torch.zeros_like(hidden) if d_hidden is None else d_hidden

    with torch.enable_grad():
        rows = leaf
        for view in recipe.views:
            rows = view(rows)
    as_gradient = rows.gradient if isinstance(rows, ShardedTokens) else lambda gradient: gradient
    with recipe.at_forward.as_then(recipe):
        d_rows = as_gradient(in_rows(of_chunk, rows.detach(), as_gradient(d_output), *along))
    torch.autograd.backward([rows], [d_rows], inputs=[leaf])


Reading = tuple[LogitsRecipe, Rowwise | None, tuple[torch.Tensor, ...], torch.Tensor]
"""The logits that were read, the function and its further tensors, and the gradient of the function's result."""


class LazyGradient(torch.Tensor):
    """The gradient of logits as a list of readings: each a function of the logits and the gradient of its result.
    `_Edge` computes with the readings; the tensor itself is computed only if a hook or other code reads it.

    `recipe` describes the logits. Each reading's recipe starts with the same views and steps.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, recipe: LogitsRecipe, readings: list[Reading]) -> "LazyGradient":
        return torch.Tensor._make_wrapper_subclass(cls, recipe.shape, dtype=recipe.dtype, device=recipe.device)

    def __init__(self, recipe: LogitsRecipe, readings: list[Reading]):
        self.recipe, self.readings = recipe, readings

    def computed(self) -> torch.Tensor:
        recipe = self.recipe
        logits = LazyLogits(recipe).computed().requires_grad_()
        # Inside of `__torch_dispatch__` autograd records nothing before inference mode is set anew, to False.
        with torch.inference_mode(False), torch.enable_grad(), recipe.at_forward.as_then(recipe):
            for read, function, along, d_output in self.readings:
                found = logits
                for change in (*read.views[len(recipe.views) :], *read.steps[len(recipe.steps) :]):
                    found = change(found)
                found = found if function is None else in_rows(function, found, *along)
                torch.autograd.backward([found], [d_output], inputs=[logits])
        return logits.grad

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, first, others = function.overloadpacket.__name__, args[0], args[1:]
        if name in ("detach", "alias", "clone"):
            return LazyGradient(first.recipe, first.readings)
        if name in ("add", "add_") and getattr(others[0], "shape", None) == first.shape and not kwargs:
            mine = first if isinstance(first, cls) else others[0]
            readings = [*_reads_in(first, mine.recipe), *_reads_in(others[0], mine.recipe)]
            if name == "add":
                return LazyGradient(mine.recipe, readings)
            if isinstance(first, cls):
                first.readings = readings
                return first
        if name in ("mul", "div") and isinstance(first, cls) and not getattr(others[0], "shape", ()):
            readings = [(*read, function(d_output, *others)) for *read, d_output in first.readings]
            return LazyGradient(first.recipe, readings)
        args, kwargs = tree_map_only(cls, lambda gradient: gradient.computed(), (args, kwargs or {}))
        found = function(*args, **kwargs)
        if isinstance(first, cls) and is_in_place(name):  # `function` has changed its first argument
            first.readings = [(first.recipe, None, (), found)]
            return first
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyGradient({list(self.shape)}, {self.dtype}, of {len(self.readings)} readings)"


def _reads_in(gradient: torch.Tensor, recipe: LogitsRecipe) -> list[Reading]:
    return gradient.readings if isinstance(gradient, LazyGradient) else [(recipe, None, (), gradient)]
