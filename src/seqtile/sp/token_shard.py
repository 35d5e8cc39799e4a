"""Hidden states and logits of whole sequences as one tensor, of which each rank holds the rows of its own tokens.

    text model ── rows [n, K] ── TokenShard [B, S, K] ── slices, casts, projections ── TokenShard [..., V]
                                          └─ any other function: one all-gather, [B, S, K] on every rank

Functions that treat each token by itself run on a rank's own rows. Losses over tokens are in row_losses.py.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers.utils import logging

from seqtile.ops.checks import check_first_derivative
from seqtile.sp.owners import Owners, depends_on_all_ranks, gathered, of_tokens
from seqtile.sp.row_losses import LOSSES
from seqtile.tensor_like import ABOUT, VIEWS, is_in_place, view_of

logger = logging.get_logger(__name__)
_UNCHANGED = "values whose tokens are spread over ranks cannot be changed in place; use a copy"
_ELEMENTWISE = "add sub rsub mul multiply div true_divide neg pow square rsqrt exp tanh sigmoid relu gelu silu dropout"
_ELEMENTWISE += " to float half bfloat16 double contiguous clone detach __add__ __radd__ __sub__ __rsub__ __mul__"
_ELEMENTWISE += " __rmul__ __truediv__ __pow__ __neg__"
_ELEMENTWISE = _ELEMENTWISE.split()
_REDUCTIONS = "mean sum argmax logsumexp amax var".split()
_OVER_LAST = (*_REDUCTIONS, "softmax", "log_softmax")
_WITH_WEIGHTS = (F.linear, F.layer_norm, F.rms_norm)


class TokenShard(Tensor):
    """Values [..., K] of tokens. This rank holds only the `rows` [n, K] of its own tokens, see `Owners`.

    The rows of a gradient are this rank's gradient times the number of ranks, because reducers (DDP, FSDP2, ZeRO)
    divide by it.
    """

    @staticmethod
    def __new__(cls, rows: Tensor, owners: Owners, is_gradient: bool = False) -> "TokenShard":
        shape = (*owners.shape, *rows.shape[1:])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)

    def __init__(self, rows: Tensor, owners: Owners, is_gradient: bool = False):
        self.rows, self.owners, self.is_gradient = rows.detach(), owners, is_gradient

    def _held(self) -> Tensor:
        """Returns this rank's rows, connected to the graph if autograd records."""
        return _Rows.apply(self) if torch.is_grad_enabled() and self.requires_grad else self.rows

    def connected_rows(self) -> Tensor:
        """Returns one row for each of this rank's tokens [n, K], connected to the graph if autograd records."""
        return of_tokens(self._held(), self.owners)

    def each(self, function: Callable[..., Tensor], *along: Tensor) -> "TokenShard":
        """Returns function(rows, ...) as values of the same tokens. The function must treat each row by itself; it also
        gets this rank's rows of each tensor [..., *] in `along`."""
        own, owners = self._operands(bool(along))
        return shared(function(*map(own, (self, *along))), owners)

    def _operands(self, along: bool) -> tuple[Callable[[Tensor], Tensor], Owners]:
        """Returns what gives this rank's rows of a function's operands, and the owners of the result. Rows that tokens
        share are computed once, unless an operand has other values for each token (`along`) or few of them are
        shown."""
        owners = self.owners
        shows_few = owners.is_shared and owners.shape.numel() < owners.most * owners.sp_group.size
        return (self.own, owners.by_token()) if along or shows_few else (TokenShard._held, owners)

    def own(self, values: Tensor) -> Tensor:
        """Returns the rows of this rank's tokens, from values [..., *] of the same tokens."""
        if not isinstance(values, TokenShard):
            return self.owners.own(values)
        is_own = values.owners == self.owners or values.owners == self.owners.by_token()
        return values.connected_rows() if is_own else self.owners.own(values.whole())

    def whole(self) -> Tensor:
        """Returns the values of all tokens, on every rank. One all-gather. Raises RuntimeError as `as_value`."""
        shard = self.as_value()
        return gathered(shard._held(), shard.owners)

    def gradient(self, of_whole: Tensor) -> "TokenShard":
        """Returns a gradient of these values as a TokenShard with one row per token. The given gradient may be whole on
        every rank, or a TokenShard."""
        by_token = TokenShard(self.rows, self.owners.by_token())
        rows = of_whole.rows if isinstance(of_whole, TokenShard) else _rows_of_gradient(of_whole, by_token)
        return TokenShard(rows, by_token.owners, is_gradient=True)

    def as_value(self) -> "TokenShard":
        """Divides a gradient by the group's size, undoing the factor that reducers expect; returns other values
        unchanged. Raises RuntimeError for a gradient of tokens that share rows, of which only the sum is known."""
        if not self.is_gradient:
            return self
        if self.owners.is_shared:
            raise RuntimeError(
                "of the gradient of hidden states that rows of a batch share only the sum over these rows is known; "
                "to read that of each, seqtile.restore(model), then seqtile.apply_seqtile(model) again to tile it alone"
            )
        return TokenShard(self.rows / self.owners.sp_group.size, self.owners)

    def _viewed(self, view: FunctionType, device: torch.device | None) -> "TokenShard":
        owners, taken = self.owners.viewed(view, device)
        rows = self._held()
        return shared(rows if taken is None else rows[taken.to(rows.device)], owners)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if torch.compiler.is_compiling():
            raise RuntimeError("values whose tokens are spread over ranks cannot be compiled; pass their .whole()")
        first = args[0] if args else None
        # FSDP2's hooks call these with the tensor itself, dispatch modes call OpOverloads
        is_same = name in ("view_as", "reshape_as", "expand_as") and first.shape == args[1].shape
        if function in ABOUT or is_same or isinstance(function, torch._ops.OpOverload):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        changed = first if is_in_place(name, kwargs) or name == "data_ptr" else kwargs.get("out")
        if isinstance(changed, cls) or function == Tensor.data.__set__:
            raise RuntimeError(f"{name}: {_UNCHANGED}")
        args, kwargs = tree_map_only(cls, TokenShard.as_value, (args, kwargs))
        first = args[0] if args else None
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        if any(not isinstance(each, cls) and depends_on_all_ranks(each) for each in tensors):
            return cls._of_all(function, args, kwargs)
        if function in LOSSES:
            return LOSSES[function](*args, **kwargs)
        if isinstance(first, cls) and name in VIEWS:
            indices = [each for each in tree_flatten(args[1:])[0] if isinstance(each, Tensor)]
            views = view_of(name, first.shape, *args[1:], **kwargs)
            if views is not NotImplemented:
                device = indices[0].device if indices else None
                return tree_map_only(FunctionType, partial(first._viewed, device=device), views)
        elif _is_by_token(function, name, args, kwargs):
            return _by_token(function, name, args, kwargs)
        if name == "gather" and (found := _along_last(*args, **kwargs)) is not None:
            return found
        return cls._of_all(function, args, kwargs)

    @classmethod
    def _of_all(cls, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls a function with the values of all tokens."""
        name = getattr(function, "__name__", "a function")
        shards = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, cls)]
        over_ranks = any(each.owners.sp_group.size > 1 for each in shards)
        how = "gathered on every rank" if over_ranks else "copied for each row"
        logger.warning_once(f"{name} reads the values of all tokens, so they are {how}")
        args, kwargs = tree_map_only(cls, TokenShard.whole, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Handles the operations that autograd and C++ code call, below the graph."""
        name, first = function.overloadpacket.__name__, args[0]
        is_same = name in ("view", "expand") and tuple(args[1]) == tuple(first.shape)
        if name in ("detach", "alias", "clone") or is_same:
            rows = first.rows.clone() if name == "clone" else first.rows
            return TokenShard(rows, first.owners, first.is_gradient)
        if name in ("add", "add_", "mul", "div") and not kwargs and (found := _of_gradients(name, *args)) is not None:
            if name != "add_":
                return found
            if isinstance(first, cls):
                first.rows = found.rows
                return first
        places = [each.alias_info for each in function._schema.arguments]
        written = [given for place, given in zip(places, args, strict=False) if place is not None and place.is_write]
        if any(isinstance(each, cls) for each in tree_flatten(written)[0]):
            raise RuntimeError(f"{name}: {_UNCHANGED}")
        args, kwargs = tree_map_only(cls, lambda shard: shard.whole().detach(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.whole().detach().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TokenShard({list(self.shape)}, {self.dtype}, {len(self.rows)} of its tokens on this rank)"


def shared(rows: Tensor, owners: Owners) -> TokenShard:
    """Returns the values of all tokens as a TokenShard of this rank's rows [n, *]."""
    is_recorded = torch.is_grad_enabled() and rows.requires_grad
    return _Shared.apply(rows, owners) if is_recorded else TokenShard(rows, owners)


def _of_gradients(name: str, *operands: Any) -> TokenShard | None:
    """Returns the sum, product or quotient of a TokenShard gradient and a gradient or number; None for others."""
    shards = [each for each in operands if isinstance(each, TokenShard)]
    gradient = next((each for each in shards if each.owners.is_shared), shards[0])
    tensors = [each for each in operands if isinstance(each, Tensor) and each.dim()]
    if not gradient.is_gradient or any(each.shape != gradient.shape for each in tensors):
        return None
    if name not in ("add", "add_") and len(tensors) > 1:
        return None
    rows = tree_map_only(Tensor, lambda each: _rows_of_gradient(each, gradient) if each.dim() else each, operands)
    return TokenShard(getattr(torch, name.rstrip("_"))(*rows), gradient.owners, is_gradient=True)


def _is_by_token(function: Callable, name: str, args: tuple, kwargs: dict) -> bool:
    """Returns whether a function, with these arguments, computes each token's values [K] by themselves."""
    shards = [each for each in args if isinstance(each, TokenShard)]
    if not shards or any(each.owners != shards[0].owners for each in shards):
        return False
    if function in _WITH_WEIGHTS:
        of_last = function is F.linear or len(args) < 2 or len(args[1]) == 1
        return isinstance(args[0], TokenShard) and len(shards) == 1 and of_last
    plain = [each for each in args if isinstance(each, Tensor) and not isinstance(each, TokenShard)]
    if any(isinstance(each, Tensor) for each in tree_flatten(kwargs)[0]):
        return False
    if name in _OVER_LAST:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return not plain and dim in (-1, shards[0].dim() - 1, [-1], (-1,))
    along = [each.dim() <= 1 or each.shape[:-1] == shards[0].owners.shape for each in plain]  # [K], or one per token
    return name in _ELEMENTWISE and all(along) and (name != "to" or isinstance(args[0], TokenShard))


def _by_token(function: Callable, name: str, args: tuple, kwargs: dict) -> Tensor:
    """Computes this rank's rows of the function's result for all tokens."""
    shard = next(each for each in args if isinstance(each, TokenShard))
    if name in _OVER_LAST:  # rows [n, K] may have another number of dimensions
        args, kwargs = (args[0], *args[2:]), kwargs | {"dim": -1}
    operands = args[:1] if function in _WITH_WEIGHTS else args
    has_tokens = [isinstance(each, Tensor) and each.dim() == shard.dim() for each in operands]
    has_others = any(is_so and each.__class__ is Tensor for each, is_so in zip(operands, has_tokens, strict=True))
    rows_of, owners = shard._operands(has_others)
    rows = [rows_of(each) if is_so else each for each, is_so in zip(operands, has_tokens, strict=True)]
    rows += args[len(operands) :]
    if name == "dropout" and not owners.is_shared:  # so that every rank draws equally many random numbers
        padded = F.pad(rows[0], (0, 0, 0, owners.most - len(rows[0])))
        found = function(padded, *rows[1:], **kwargs)[: len(rows[0])]
        return shared(found, owners)
    found = shared(function(*rows, **kwargs), owners)
    return found.whole() if name in _REDUCTIONS else found


def _along_last(values: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor | None:
    """Returns the result of torch.gather along K, on every rank; None for any other gather."""
    is_last = isinstance(values, TokenShard) and dim in (-1, values.dim() - 1)
    if not is_last or kwargs or index.shape[:-1] != values.owners.shape:
        return None
    return values.each(lambda rows, index: rows.gather(-1, index), index).whole()


def _rows_of_gradient(gradient: Tensor, like: Any) -> Tensor:
    """Returns the rows of a gradient of `like`, which is a TokenShard or an object with the same `owners` and number of
    `rows`."""
    owners = like.owners
    if isinstance(gradient, TokenShard) and gradient.is_gradient:
        return gradient.rows if gradient.owners.is_shared else owners.summed(gradient.rows, len(like.rows))
    own = gradient.connected_rows() if isinstance(gradient, TokenShard) else owners.own(gradient)
    return owners.summed(own * owners.sp_group.size, len(like.rows))


class _Shared(torch.autograd.Function):
    """Makes the TokenShard from this rank's rows."""

    seqtile_of_all_ranks = True

    @staticmethod
    def forward(node, rows: Tensor, owners: Owners) -> TokenShard:
        node.owners, node.rows = owners, range(len(rows))
        return TokenShard(rows, owners)

    @staticmethod
    def backward(node, gradient: Tensor) -> tuple[Tensor, None]:
        check_first_derivative("values over ranks")
        return _rows_of_gradient(gradient, node), None


class _Rows(torch.autograd.Function):
    """Returns this rank's rows of the TokenShard."""

    @staticmethod
    def forward(node, shard: TokenShard) -> Tensor:
        node.owners = shard.owners
        return shard.rows.detach()

    @staticmethod
    def backward(node, gradient: Tensor) -> TokenShard:
        check_first_derivative("values over ranks")
        return TokenShard(gradient, node.owners, is_gradient=True)
