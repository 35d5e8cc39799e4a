"""Any function of tokens that does not mix them, tile by tile: a linear layer, a norm, an MLP with adapters.

The forward keeps its inputs and no activation; the backward of a tile runs the function again and differentiates it at
once, so that what is inside the function never has the length of the sequence.
Source: Arctic Long Sequence Training, 3.1 (TiledCompute).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from seqtile.ops.checks import check_first_derivative, check_no_transform
from seqtile.ops.saver import Saved, save_inputs
from seqtile.ops.tiled_checks import check_inputs, check_leaves, listed
from seqtile.ops.tiled_plan import Plan, plan_for
from seqtile.ops.tiled_trial import check_by_trial
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
    check: bool = False,
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
        check: compute 8 tokens whole, once more and cut in two first, and raise ValueError if fn mixes tokens, keeps
            state or draws random numbers; what it changed is put back. For trying a function out: it waits for the
            device, and copies `shared` and what fn holds.

    State: fn runs once a tile and again in the backward, so it must change nothing. A change in place raises: of its
    inputs, of `shared` and `params`, and of tensors that it holds (in its closure, defaults and bound arguments, in
    globals that it names, as buffers and attributes of modules there). So do random numbers from a generator that it
    holds. What was changed is put back before, unless it is larger than a tile. Not seen without `check` are changes
    through `.data`, a tensor put in another's place, numbers of Python, what is kept elsewhere, and what F.batch_norm
    is given (nn.BatchNorm is seen).

    Random numbers of torch's default generators: a tile draws in the backward what it drew in the forward, not what an
    untiled fn would. Autocast is in the backward what it was in the forward; casts are not cached between tiles.

    FLOPs: one forward of `fn` more than untiled. Under non-reentrant checkpointing, whose replay stops before `fn`, no
    more, but for what the replay of an untiled `fn` leaves out at its end.

    Memory: saves the inputs and nothing of what is inside; allocates the outputs, in the backward the gradients of the
    inputs and a float32 sum for each of `params` and `shared`; what `fn` needs for one tile; a copy of the first
    tile's inputs, and as much at most of small tensors that `fn` holds.

    No more tokens than a tile: fn is called as it is.

    Under torch.compile this is one graph break.

    Raises:
        TypeError, ValueError: inputs that are no tensors or of different lengths; an output that is not as long as its
            inputs; a leaf that `fn` uses but that is not in `params`; parameters that are sharded (ZeRO-3, DTensor):
            each tile would gather them, and ranks with different numbers of tiles would wait for each other for ever;
            state, as above; sparse inputs; torch.vmap or torch.func around it.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`), and for a leaf that is not in
            `params` and that only a later tile uses.
    """
    params, shared = listed("params", params), listed("shared", shared)
    length, tokens_of_one = check_inputs(inputs, shared, params, dim)
    step = max(1, resolve_chunk_tokens(chunk_tokens, inputs[0].shape[-1]) // max(1, tokens_of_one))
    if check:
        check_by_trial(fn, inputs, shared, dim)
    if length <= step:
        return fn(*inputs, *shared)
    return _tiled(fn, inputs, params, shared, step, dim)


@torch.compiler.disable(reason="seqtile.tiled runs its function tile by tile")
def _tiled(
    fn: Callable,
    inputs: tuple[torch.Tensor, ...],
    params: tuple[torch.Tensor, ...],
    shared: tuple[torch.Tensor, ...],
    step: int,
    dim: int,
) -> Outputs:
    check_no_transform("tiled")
    plan = plan_for(fn, inputs, len(shared), step, dim)
    given = (*inputs, *shared)
    leaves = [param.view_as(param) for param in params]  # gradients then arrive in the reverse of this order
    given, saved = save_inputs(given, *params)
    outputs = TiledFunction.apply(plan, params, saved, torch.is_grad_enabled(), *given, *leaves)
    return outputs if len(outputs) > 1 else outputs[0]


class TiledFunction(torch.autograd.Function):
    """`tensors` are inputs, shared tensors and leaves that stand for `params`, which take their gradients. They are
    `saved` for the backward if an input or shared tensor requires a gradient."""

    @staticmethod
    def forward(
        ctx,
        plan: Plan,
        params: tuple[torch.Tensor, ...],
        saved: Saved | None,
        differentiate: bool,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        given = tensors[: plan.inputs + plan.shared]
        ctx.plan, ctx.params, ctx.saved = plan, params, saved
        ctx.main_grads = [None] * plan.shared + [main_grad_of(param) for param in params]
        if saved is None:
            ctx.save_for_backward(*given, *params)
        inputs, shared = given[: plan.inputs], given[plan.inputs :]
        length = inputs[0].shape[plan.dim]
        watch = plan.watch(inputs, shared, params)
        outputs: list[torch.Tensor] = []
        for tile in tiles(length, plan.step):
            pieces = [plan.cut(tensor, tile) for tensor in inputs]
            if not outputs and differentiate:  # most functions use the same in every tile, so the first tells
                with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
                    leaves = _leaves((*pieces, *shared))  # the hooks hide what is saved here from a checkpoint around
                    results = plan.run(watch, (*watch.guarded(leaves[: plan.inputs]), *leaves[plan.inputs :]))
                check_leaves(results, (*leaves, *params))
            else:
                results = plan.run(watch, (*(pieces if outputs else watch.guarded(pieces)), *shared))
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
        saved = ctx.saved_tensors if ctx.saved is None else ctx.saved.tensors
        given = saved[: plan.inputs + plan.shared]
        inputs, shared = given[: plan.inputs], given[plan.inputs :]
        needs = ctx.needs_input_grad[4:]
        d_inputs = [torch.empty_like(x) if need else None for x, need in zip(inputs, needs, strict=False)]
        sums = [
            WeightGrad(tensor, main_grad=main_grad) if need else None
            for tensor, need, main_grad in zip(
                (*shared, *ctx.params), needs[plan.inputs :], ctx.main_grads, strict=True
            )
        ]

        watch = plan.watch(inputs, shared, ctx.params)

        def add_tile(tile: slice) -> None:  # a function, so that the gradients of a tile are gone before the next
            with torch.enable_grad():
                leaves = _leaves((*(plan.cut(x, tile) for x in inputs), *shared))
                results = plan.run(watch, leaves, RuntimeError)
            check_leaves(results, (*leaves, *ctx.params), RuntimeError)  # a later tile may use what the first does not
            gradients = _gradients(results, [plan.cut(d, tile) for d in d_outputs], [*leaves, *ctx.params], list(needs))
            for d_input, gradient in zip(d_inputs, gradients, strict=False):
                if d_input is not None:
                    piece = plan.cut(d_input, tile)
                    piece.zero_() if gradient is None else piece.copy_(gradient)
            for total, gradient in zip(sums, gradients[plan.inputs :], strict=True):
                if total is not None and gradient is not None:
                    total.add_whole(gradient)

        with plan.state.random_as_then():
            for tile in tiles(inputs[0].shape[plan.dim], plan.step):
                add_tile(tile)
        return None, None, None, None, *d_inputs, *(None if total is None else total.result() for total in sums)


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
