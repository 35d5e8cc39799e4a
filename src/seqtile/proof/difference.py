"""One training step's loss and gradients, and how far those of a tiled model may be from the untiled model's.

    untiled                                      loss, gradients
    untiled, embeddings changed by one bit       how far rounding goes
    tiled                                        FACTOR times as far, or it is a difference

Used by the first training step, the proofs on small models and the sweep over variants.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from statistics import median
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from seqtile.ops.checks import autocast_dtype
from seqtile.ops.graph import without_hooks
from seqtile.protocols import ShardedTokens

FACTOR = 5  # of 169 small models in float32 and bfloat16 no gradient was beyond 2
_FEW = 8  # numbers of a parameter, by chance little changed by one bit: a scalar was 5 times that apart in float16
_OF_SUMS = 2.0**-20  # chunks are summed in float32, and in another order
_OF_THE_WHOLE = 1e-7  # a gradient that is so small is rounding
LOSS_NAME, STATES_NAME = "the loss", "the last hidden states"
_RETURNED = (LOSS_NAME, STATES_NAME)
Vectors = dict[str, torch.Tensor | None]
"""What a forward returned, by `LOSS_NAME` or `STATES_NAME`, and gradients by the names of their parameters; None of a
parameter that got none."""


class Difference(NamedTuple):
    """A difference from the untiled model that rounding does not explain."""

    said: str
    """Such as "the loss differs by 3.1%"."""
    error: float
    """The norm of the difference over the norm of the untiled vector."""
    rounding: float
    """The same for the untiled model whose embeddings changed by one bit."""


def loss_and_gradients(
    model: nn.Module,
    forward: Callable,
    inputs: dict[str, Any],
    leaves: dict[str, torch.Tensor],
    nudge: float = 0.0,
    seed: int = 1,
) -> Vectors:
    """Runs a forward and a backward, and returns the loss and the gradients of `leaves` and of the embeddings' output.

    `forward` is a plain function, which may add to `leaves`. Of a model without a loss, its last hidden states replace
    the loss, and the gradients are those of their mean with random signs. `nudge` is the relative change of what the
    embeddings return, up or down as `seed` says.
    """
    embedded: list[torch.Tensor] = []

    def nudged(output: torch.Tensor) -> torch.Tensor:
        if nudge:
            output = output * (1 + nudge * _signs(output, seed)).to(output.dtype)
        embedded.append(output)
        return output

    if (given := inputs.get("inputs_embeds")) is not None:
        output = forward(model, **inputs | {"inputs_embeds": nudged(given.detach().requires_grad_())})
    else:
        with model.get_input_embeddings().register_forward_hook(lambda module, args, output: nudged(output)):
            output = forward(model, **inputs)
    name, returned, loss = _returned(output, inputs.get("attention_mask"))
    wanted = dict(leaves)
    wanted |= {f"the embeddings' output {i}".removesuffix(" 0"): x for i, x in enumerate(embedded) if x.requires_grad}
    in_half = torch.float16 in _dtypes(next(iter(embedded), loss))
    found: Sequence[torch.Tensor | None] = []
    if loss.requires_grad and wanted:
        with without_hooks(leaves.values()), ExitStack() as hooks:
            for leaf in leaves.values():  # each doubles its gradient, so that a hook that is called once a chunk shows
                doubled = leaf.register_hook(lambda d: None if d is None else d + d)  # none of a leaf with a main_grad
                hooks.enter_context(doubled)
            scaled = loss * 2.0**10 if in_half else loss  # gradients may be small
            keeps = _holds_graphs(model)
            found = torch.autograd.grad(scaled, list(wanted.values()), allow_unused=True, retain_graph=keeps)
    vectors = {name: None if g is None else g.detach() for name, g in zip(wanted, found, strict=False)}
    return {name: returned.detach().flatten()} | vectors


def _holds_graphs(model: nn.Module) -> bool:
    """Returns whether modules hold tensors with a graph, which the user's own backward may need: such as a weight that
    `parametrize.cached()` keeps, or one that another module computed."""
    dicts = chain.from_iterable((vars(module), module._parameters, module._buffers) for module in model.modules())
    held = chain(parametrize._cache.values(), *(dict.values(each) for each in dicts if isinstance(each, dict)))
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in held)


def _returned(output: Any, mask: torch.Tensor | None) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Returns the name and the value of what is compared of an output, and the scalar whose gradients are. Hidden
    states [B, S, D] of padding, of which `mask` [B, S] tells, are left out."""
    if (loss := getattr(output, "loss", None)) is not None:
        return LOSS_NAME, loss, loss
    states = output.last_hidden_state
    if isinstance(states, ShardedTokens):
        states = states.whole()
    if isinstance(mask, torch.Tensor) and mask.shape == states.shape[:-1]:
        states = states[mask.to(states.device) != 0]
    return STATES_NAME, states, (states * _signs(states, 3)).float().mean() * states.shape[-1] ** 0.5


def _signs(like: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, like.shape, generator=drawn, device="cpu") * 2 - 1).to(like.device)


def precision_of(*tensors: torch.Tensor | None) -> float:
    """Returns the distance from 1 to the next number, in the coarsest dtype that one of the tensors has or that its
    products are computed in. Numbers of a byte are a way to store them."""
    given = [tensor for tensor in tensors if tensor is not None and tensor.itemsize > 1 and tensor.is_floating_point()]
    in_tf32 = torch.backends.cuda.matmul.allow_tf32 and any(each.is_cuda and each.itemsize == 4 for each in given)
    return max(2.0**-10 * in_tf32, *(torch.finfo(dtype).eps for tensor in given for dtype in _dtypes(tensor)))


def _dtypes(tensor: torch.Tensor) -> set[torch.dtype]:
    """Returns the dtype of a tensor, and under autocast that of its products."""
    return {tensor.dtype, autocast_dtype(tensor) or tensor.dtype}


def difference(untiled: Vectors, tiled: Vectors, nudged: Vectors, eps: float) -> Difference | None:
    """Returns the largest difference between the untiled and the tiled model that rounding does not explain; `eps` is
    the relative distance of the numbers that the model computes in.

    Rounding rarely points along the gradient, so an error of its length alone gets half the tolerance.
    """
    sizes = {name: float(each.norm()) for name, each in untiled.items() if each is not None}
    finite = [size for name, size in sizes.items() if name != STATES_NAME and size < float("inf")]  # others overflowed
    whole = max(finite, default=0.0)
    bit = {name: distance(truth, nudged.get(name)) for name, truth in untiled.items() if truth is not None}
    of_gradients = [share for name, share in bit.items() if name not in _RETURNED]
    typical = median(of_gradients or [0.0])  # some are small by chance
    found: list[Difference] = []
    for name, truth in untiled.items():
        ours = tiled.get(name)
        size = sizes.get(name, 0.0)
        if truth is None and ours is not None:
            found.append(Difference(f"{name} gets a gradient, untiled none,", 1.0, 0.0))
        elif ours is None and size > 0:
            found.append(Difference(f"{name} gets no gradient", 1.0, 0.0))
        if truth is None or ours is None or not size < float("inf"):  # an overflow of float16
            continue
        rounding, factor, products = max(bit[name], typical), FACTOR * max(1.0, _FEW / truth.numel()), 2 * eps
        if name in _RETURNED:
            rounding, factor = bit[name], FACTOR
            products *= 1 if truth.dtype == torch.float32 else 3  # PyTorch's is up to 1.6 eps off in bfloat16
        allowed = (factor * (rounding + _OF_SUMS) + products) * size + _OF_THE_WHOLE * whole
        off = ours.double() - truth.double()
        error = float(off.norm())
        along = abs(float((off * truth).sum())) / size if size else 0.0
        if not max(error, 2 * along) <= allowed:
            what = name if name in _RETURNED else f"the gradient of {name}"
            relative = error / size if size else error
            share = f"{relative:.1%}" if relative >= 1e-3 else f"{relative:.1e} of it"
            verb = "differ" if name == STATES_NAME else "differs"
            found.append(Difference(f"{what} {verb} by {share}", relative, rounding))
    return max(found, key=lambda each: each.error, default=None)


def distance(truth: torch.Tensor, other: torch.Tensor | None) -> float:
    """Returns the norm of the difference over that of the truth, 0 where either is missing."""
    size = float(truth.norm())
    return 0.0 if other is None or not 0 < size < float("inf") else float((other.double() - truth).norm()) / size


def brief(error: BaseException) -> str:
    """Returns an error of a model's own code in one line."""
    return f"{type(error).__name__}: {shorten(str(error), 600, placeholder=' …')}"
