"""Any function of tokens that does not mix them, tile by tile: a linear layer, a norm, an MLP with adapters.

The forward keeps its inputs and no activation; the backward of a tile runs the function again and differentiates it at
once, so that what is inside the function never has the length of the sequence.
Source: Arctic Long Sequence Training, 3.1 (TiledCompute).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from seqtile.ops.checks import check_first_derivative
from seqtile.ops.saver import save_input
from seqtile.ops.tiled_checks import check_inputs, check_leaves, check_outputs, listed
from seqtile.ops.tiles import resolve_chunk_tokens, tiles
from seqtile.ops.weight_grad import WeightGrad, main_grad_of

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


def tiled(
    fn: Callable[..., Outputs],
    *inputs: torch.Tensor,
    params: Iterable[torch.Tensor] = (),
    shared: Iterable[torch.Tensor] = (),
    chunk_tokens: int | None = None,
    dim: int = -2,
) -> Outputs:
    """fn(*inputs, *shared), computed tile by tile along `dim`.

    Args:
        fn: of tensors cut along `dim`, then of `shared`; a tensor or a tuple of tensors, as long along `dim` as the
            inputs it was given. What it makes of a token must depend on no other token.
        inputs: [..., S, ...] with S at `dim` in each; any dtype, those of floating point with gradients.
        params: every leaf that requires a gradient and that `fn` uses without being given it, such as a module's
            parameters. Each gets one gradient, summed over tiles in float32 and rounded once (or its `main_grad` does).
        shared: tensors that every tile is given whole, with gradients, summed likewise.
        chunk_tokens: tokens a tile (all dimensions but `dim` and the last counted in), see `ops/tiles.py`; None for its
            rule.
        dim: the dimension that is cut.

    Random numbers: a tile draws in the backward what it drew in the forward, not what an untiled fn would. Autocast
    is in the backward what it was in the forward; casts are not cached between tiles.

    FLOPs: one forward of `fn` more than untiled. Under non-reentrant checkpointing, whose replay stops before `fn`, no
    more, but for what the replay of an untiled `fn` leaves out at its end.

    Memory: saves the inputs and nothing of what is inside; allocates the outputs, in the backward the gradients of the
    inputs and a float32 sum for each of `params` and `shared`; and what `fn` needs for one tile.

    No more tokens than a tile: fn is called as it is.

    Under torch.compile this is one graph break.

    Raises:
        TypeError, ValueError: inputs that are no tensors or of different lengths; an output that is not as long as its
            inputs; a leaf that `fn` uses but that is not in `params`; parameters that are sharded (ZeRO-3, DTensor):
            each tile would gather them, and ranks with different numbers of tiles would wait for each other for ever.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`).
    """
    params, shared = listed("params", params), listed("shared", shared)
    length, tokens_of_one = check_inputs(inputs, shared, params, dim)
    step = max(1, resolve_chunk_tokens(chunk_tokens, inputs[0].shape[-1]) // max(1, tokens_of_one))
    if length <= step:
        return fn(*inputs, *shared)
    return _tiled(fn, inputs, params, shared, step, dim)


@dataclass
class Plan:
    """What a tile is and how it is computed: the same in the forward and in the backward."""

    fn: Callable[..., Outputs]
    step: int
    dim: int
    inputs: int
    """How many of the saved tensors are inputs; the shared ones follow, then the parameters."""
    shared: int
    device: torch.device
    autocast: dict[str, Any]
    random_states: list[torch.Tensor]

    def cut(self, tensor: torch.Tensor, tile: slice) -> torch.Tensor:
        return tensor.narrow(self.dim, tile.start, tile.stop - tile.start)

    def run(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(**self.autocast, cache_enabled=False):  # a cached cast's graph would serve one tile only
            outputs = self.fn(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    @contextmanager
    def replayed_random(self) -> Iterator[None]:
        """Random numbers from where the forward drew them."""
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.set_rng_state(self.random_states[0])
            if devices:
                torch.get_device_module(self.device).set_rng_state(self.random_states[1], self.device)
            yield


def _plan(fn: Callable, inputs: tuple[torch.Tensor, ...], shared: int, step: int, dim: int) -> Plan:
    device = inputs[0].device
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    autocast = {
        "device_type": device.type,
        "dtype": torch.get_autocast_dtype(device.type),
        "enabled": torch.is_autocast_enabled(device.type),
    }
    return Plan(fn, step, dim, len(inputs), shared, device, autocast, states)


@torch.compiler.disable(reason="seqtile.tiled runs its function tile by tile")
def _tiled(
    fn: Callable,
    inputs: tuple[torch.Tensor, ...],
    params: tuple[torch.Tensor, ...],
    shared: tuple[torch.Tensor, ...],
    step: int,
    dim: int,
) -> Outputs:
    plan = _plan(fn, inputs, len(shared), step, dim)
    given = (*inputs, *shared)
    leaves = [param.view_as(param) for param in params]  # gradients then arrive in the reverse of this order
    node, first = None, next((i for i, tensor in enumerate(given) if tensor.requires_grad), None)
    if torch.is_grad_enabled() and first is not None:
        saved, node = save_input(given[first], *given[:first], *given[first + 1 :], *params)
        given = (*given[:first], saved, *given[first + 1 :])
    outputs = TiledFunction.apply(plan, params, first or 0, node, torch.is_grad_enabled(), *given, *leaves)
    return outputs if len(outputs) > 1 else outputs[0]


class TiledFunction(torch.autograd.Function):
    """`tensors` are inputs, shared tensors and leaves that stand for `params`, which take their gradients. `node` holds
    them for the backward, that of index `first` foremost, if one of them requires a gradient."""

    @staticmethod
    def forward(
        ctx,
        plan: Plan,
        params: tuple[torch.Tensor, ...],
        first: int,
        node: Node | None,
        differentiate: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        given = tensors[: plan.inputs + plan.shared]
        ctx.plan, ctx.params, ctx.first, ctx.node = plan, params, first, node
        ctx.main_grads = [None] * plan.shared + [main_grad_of(param) for param in params]
        if node is None:
            ctx.save_for_backward(*given, *params)
        inputs, shared = given[: plan.inputs], given[plan.inputs :]
        length = inputs[0].shape[plan.dim]
        outputs: list[torch.Tensor] = []
        for tile in tiles(length, plan.step):
            pieces = [plan.cut(tensor, tile) for tensor in inputs]
            if not outputs and differentiate:  # what fn uses is the same in every tile, so the first tells
                with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
                    leaves = _leaves((*pieces, *shared))  # the hooks hide what is saved here from a checkpoint around
                    results = plan.run(*leaves)
                check_outputs(results, tile.stop - tile.start, plan.dim)
                check_leaves(results, (*leaves, *params))
            else:
                results = plan.run(*pieces, *shared)
                check_outputs(results, tile.stop - tile.start, plan.dim)
            if not outputs:
                outputs = [_lengthened(result, length, plan.dim) for result in results]
            for output, result in zip(outputs, results, strict=True):
                plan.cut(output, tile).copy_(result.detach())
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *d_outputs: torch.Tensor):
        check_first_derivative("tiled")
        plan: Plan = ctx.plan
        given = _saved(ctx)
        inputs, shared = given[: plan.inputs], given[plan.inputs :]
        needs = ctx.needs_input_grad[5:]
        d_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needs, strict=False)]
        sums = [
            WeightGrad(tensor, main_grad=main_grad) if need else None
            for tensor, need, main_grad in zip(
                (*shared, *ctx.params), needs[plan.inputs :], ctx.main_grads, strict=True
            )
        ]

        def add_tile(tile: slice) -> None:  # a function, so that the gradients of a tile are gone before the next
            with torch.enable_grad():
                leaves = _leaves((*(plan.cut(x, tile) for x in inputs), *shared))
                results = plan.run(*leaves)
            gradients = _gradients(results, [plan.cut(d, tile) for d in d_outputs], [*leaves, *ctx.params], list(needs))
            for d_input, gradient in zip(d_inputs, gradients, strict=False):
                if d_input is not None:
                    piece = plan.cut(d_input, tile)
                    piece.zero_() if gradient is None else piece.copy_(gradient)
            for total, gradient in zip(sums, gradients[plan.inputs :], strict=True):
                if total is not None and gradient is not None:
                    total.add_whole(gradient)

        with plan.replayed_random():
            for tile in tiles(inputs[0].shape[plan.dim], plan.step):
                add_tile(tile)
        return None, None, None, None, None, *d_inputs, *(None if total is None else total.result() for total in sums)


def _saved(ctx) -> tuple[torch.Tensor, ...]:
    """Inputs and shared tensors, in their order."""
    count = ctx.plan.inputs + ctx.plan.shared
    if ctx.node is None:
        return ctx.saved_tensors[:count]
    foremost, *others = ctx.node.saved_tensors[:count]
    return (*others[: ctx.first], foremost, *others[ctx.first :])


def _leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


def _lengthened(result: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    shape = list(result.shape)
    shape[dim] = length
    return result.new_empty(shape)


def _gradients(
    results: Sequence[torch.Tensor], d_results: Sequence[torch.Tensor], leaves: list[torch.Tensor], needs: list[bool]
) -> list[torch.Tensor | None]:
    """Of the `leaves` that need one, given those of the results; None for the others."""
    pairs = [(result, d) for result, d in zip(results, d_results, strict=True) if result.requires_grad]
    wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
    if not pairs or not wanted:
        return [None] * len(leaves)
    outputs, upstream = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, upstream, allow_unused=True))
    return [next(found) if need else None for need in needs]
