"""Computes a function that does not mix tokens, such as a norm or an MLP with adapters, chunk by chunk.

The forward saves its inputs and no activation. The backward runs the function again on each chunk and differentiates it
at once, so no tensor inside the function ever has the length of the sequence.
Source: Arctic Long Sequence Training, 3.1 (TiledCompute).

    forward    inputs [.., S, ..] --cut--> fn(chunk 0), fn(chunk 1), ...  --copied to--> outputs [.., S, ..]
    backward   for each chunk: fn(chunk) with a graph, torch.autograd.grad, gradients of
                   inputs    copied to their place in [.., S, ..]
                   shared    added to float32 sums
                   params    likewise, or to their main_grad
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqtile.ops.checks import check_dense, check_first_derivative, check_no_transform
from seqtile.ops.chunks import chunks, is_trial, resolve_chunk_tokens, to_be_filled
from seqtile.ops.graph import gradients_of, leaves_behind
from seqtile.ops.save_early import Unchanged, save_early, saved_for, saved_unseen
from seqtile.ops.state import ForwardState, Found, Tensors, WatchedState, default_generators, equal
from seqtile.ops.weight_grads import finish_weight_grads, main_grad_of, weight_grads

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
TRIED_TOKENS = 8  # by `check=True`


def tiled(
    fn: Callable[..., Outputs],
    *inputs: torch.Tensor,
    params: Iterable[torch.Tensor] = (),
    shared: Iterable[torch.Tensor] = (),
    chunk_tokens: int | None = None,
    dim: int = -2,
    check: bool = False,
) -> Outputs:
    """Computes `fn(*inputs, *shared)` chunk by chunk along `dim`.

    Args:
        fn: a function or module. It gets the inputs cut along `dim`, then `shared`. It returns a tensor or a tuple of
            tensors, each as long along `dim` as the inputs it gets. A token's output must depend on no other token.
        inputs: [..., S, ...] with S at `dim` in each; any dtype. Floating-point inputs get gradients.
        params: every leaf that requires a gradient and that `fn` uses without getting it as an argument, such as a
            module's parameters. Each gets one gradient, summed over chunks in float32 and rounded once (or added to its
            `main_grad`).
        shared: tensors that every chunk gets whole. Their gradients are summed in the same way.
        chunk_tokens: tokens per chunk, counting all dimensions but the last; None for max(2048, size of the last
            dimension).
        dim: the dimension that is cut.
        check: first compute 8 tokens whole, whole again, and in two chunks. Raise ValueError if fn mixes tokens, keeps
            state or draws random numbers, and restore what it changed. Use it to try a function out: it waits for the
            device, and copies `shared` and what fn holds.

    State: `fn` runs once per chunk and again in the backward, so it must have no side effects. `tiled` raises if fn
    changes in place its inputs, `shared`, `params`, or tensors that it holds (in its closure, defaults, bound arguments
    and globals, or in buffers and attributes of modules there), or if it draws random numbers from a generator that it
    holds. It first restores the changed tensors, unless they are larger than a chunk. Without `check` it does not see
    changes through `.data`, tensors that replace others, Python numbers, state that is kept elsewhere, and arguments
    that F.batch_norm changes (it does see nn.BatchNorm).

    Random numbers from torch's default generators: a chunk draws the same in the backward as in the forward, but not
    the same as an untiled fn. The backward uses the forward's autocast; casts are not cached between chunks.

    FLOPs: one more forward of `fn` than untiled. Under non-reentrant checkpointing, which recomputes `fn` anyway, only
    the products at the end of `fn` are added, because an untiled recomputation stops before them.

    Memory: saves the inputs and no activation. Allocates the outputs; in the backward the gradients of the inputs and
    a float32 sum for each of `params` and `shared`; the activations of `fn` for one chunk; a copy of the first chunk's
    inputs, and of small tensors that `fn` gets or holds, together no larger than that.

    If all tokens fit in one chunk, `tiled` simply calls fn.

    Under torch.compile this is one graph break.

    Raises:
        TypeError, ValueError: inputs that are no tensors or of different lengths; an output that is not as long as its
            inputs; a leaf that `fn` uses but that is not in `params`; parameters that are sharded (ZeRO-3, DTensor):
            each chunk would gather them, and ranks with different numbers of chunks would wait for each other forever;
            state, as above; sparse inputs; an enclosing torch.vmap or torch.func transform.
        RuntimeError: in the backward, for second derivatives (`create_graph=True`), and for a leaf that is not in
            `params` and that only a later chunk uses.
    """
    params, shared = _listed("params", params), _listed("shared", shared)
    _check_whole(params)
    if check:
        _check_inputs(inputs, shared, params, dim)
        _check_trial(fn, inputs, shared, dim)
    return tiled_part(fn, *inputs, params=params, shared=shared, chunk_tokens=chunk_tokens, dim=dim)


def tiled_part(
    fn: Callable[..., Outputs],
    *inputs: torch.Tensor,
    params: Tensors = (),
    shared: Tensors = (),
    chunk_tokens: int | None = None,
    dim: int = -2,
    always: bool = False,
    used_alone: bool = False,
) -> Outputs:
    """Is `tiled` without the check for sharded parameters: the caller gathers them, in the forward and in the backward.

    Args:
        always: compute a single chunk like several, so that gradients arrive in the same order on all ranks, however
            long their sequences.
        used_alone: drop the `params` that the first chunk does not use, so that their gradients do not wait for this
            backward.
    """
    _check_inputs(inputs, shared, params, dim)
    step = _step(inputs[0], chunk_tokens, dim)
    if not always and inputs[0].shape[dim] <= step:
        return fn(*inputs, *shared)
    return _tiled(fn, inputs, shared, params, step, dim, used_alone)


def _step(first: torch.Tensor, chunk_tokens: int | None, dim: int) -> int:
    """Returns the number of positions of a chunk along `dim`."""
    tokens_of_one = torch.Size([size for i, size in enumerate(first.shape[:-1]) if i != dim % first.dim()]).numel()
    return max(1, resolve_chunk_tokens(chunk_tokens, first.shape[-1]) // max(1, tokens_of_one))


@torch.compiler.disable(reason="seqtile.tiled runs its function chunk by chunk")
def _tiled(
    fn: Callable, inputs: Tensors, shared: Tensors, params: Tensors, step: int, dim: int, used_alone: bool
) -> Outputs:
    check_no_transform("tiled")
    given, node = save_early((*inputs, *shared))
    fn = fn if isinstance(fn, Holding) else Holding(fn, [("", fn, None)])
    state = ForwardState.now(inputs[0].device)
    call = Call(fn, len(inputs), params, None, step, dim, node, torch.is_grad_enabled(), state, is_trial())
    held = call.held(given, ValueError)
    first, used = call.run_first(held, given)
    found = [param for param in params if not used_alone or id(param) in used]
    params = tuple(sorted(found, key=lambda param: used.get(id(param), (0, 0))))
    leaves = [param.view_as(param) for param in params]  # gradients then arrive in the reverse of this order
    call = call._replace(params=params, unchanged=Unchanged(params))
    outputs = TiledFunction.apply(call, held, first, *given, *leaves)
    return outputs if len(outputs) > 1 else outputs[0]


class Holding(NamedTuple):
    """A function for `tiled` with the tensors and generators that it holds, or objects to search for them, see
    `found_in`."""

    fn: Callable[..., Outputs]
    holds: Sequence[Found]

    def __call__(self, *tensors: torch.Tensor) -> Outputs:
        return self.fn(*tensors)


class Call(NamedTuple):
    """A call of `tiled` without its saved tensors `given`: the inputs, then the shared tensors."""

    fn: Holding
    inputs: int
    params: Tensors
    unchanged: Unchanged | None
    """The parameters after the first chunk, which shows which are used."""
    step: int
    """The number of positions of a chunk."""
    dim: int
    node: Node | None
    """The node that saves `given`; None if no tensor of `given` requires a gradient."""
    differentiate: bool
    state: ForwardState
    trial: bool  # see `to_be_filled`

    def cut(self, tensor: torch.Tensor, chunk: slice) -> torch.Tensor:
        return tensor.narrow(self.dim, chunk.start, chunk.stop - chunk.start)

    def held(self, given: Tensors, error: type[Exception]) -> WatchedState:
        """Returns the state that fn must not change, else `error` is raised. Copies at most as much as a chunk's
        input."""
        first = self.cut(given[0], chunks(given[0].shape[self.dim], self.step)[0])
        kinds = {"input": given[: self.inputs], "shared tensor": given[self.inputs :], "parameter": self.params}
        return WatchedState(self.fn.holds, kinds, error, room=first.nbytes)

    def run_first(self, held: WatchedState, given: Tensors) -> tuple[list[torch.Tensor], dict[int, tuple[int, int]]]:
        """Returns fn's detached outputs for the first chunk, and the order in which fn first used each leaf, see
        `_leaves_behind`. An untiled backward produces gradients in the reverse order. Under ZeRO all ranks must,
        including those whose sequence fits in a chunk."""
        first = chunks(given[0].shape[self.dim], self.step)[0]
        with torch.set_grad_enabled(self.differentiate), saved_unseen():  # most use the same leaves in every chunk
            _, results = self.run(held, given, first, guarded=True)
        return [result.detach() for result in results], _leaves_behind(results)

    def run(self, held: WatchedState, given: Tensors, chunk: slice, guarded: bool = False) -> tuple[Tensors, Tensors]:
        """Returns the leaves for the chunk's inputs and shared tensors, and fn's outputs for them."""
        pieces = (*(self.cut(tensor, chunk) for tensor in given[: self.inputs]), *given[self.inputs :])
        leaves = [piece.detach().requires_grad_(piece.requires_grad) for piece in pieces]
        guarded_pieces = held.guarded(leaves[: self.inputs]) if guarded else []
        with self.state.forward_autocast():
            outputs = self.fn(*(guard.tensor for guard in guarded_pieces), *leaves[len(guarded_pieces) :])
        held.check(guarded_pieces)
        results = _checked_outputs(outputs, chunk.stop - chunk.start, self.dim)
        if torch.is_grad_enabled():
            _check_leaves(results, (*leaves, *self.params), held.error)
        return leaves, results


class TiledFunction(torch.autograd.Function):
    """Runs a function once a chunk, and again, with gradients, in the backward.

    `first` are the outputs of the first chunk. `tensors` are those of `given`, then leaves that represent
    `call.params` and receive their gradients."""

    @staticmethod
    def forward(ctx, call: Call, held: WatchedState, first: list[torch.Tensor], *tensors: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)  # unused outputs get no gradient
        ctx.call, ctx.node, given = call, call.node, tensors[: len(tensors) - len(call.params)]
        if call.node is None:
            ctx.save_for_backward(*given)
        results, length = tuple(first), given[0].shape[call.dim]
        first.clear()  # frees the first chunk's outputs after they are copied
        outputs = []
        for result in results:
            shape = list(result.shape)
            shape[call.dim] = length
            outputs.append(to_be_filled(result, shape, trial=call.trial))
        for chunk in chunks(length, call.step):
            if chunk.start:
                with torch.no_grad():
                    _, results = call.run(held, given, chunk)
            for output, result in zip(outputs, results, strict=True):
                call.cut(output, chunk).copy_(result)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable(reason="seqtile.tiled runs its function chunk by chunk")
    def backward(ctx, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_first_derivative("tiled")
        call: Call = ctx.call
        given = saved_for(ctx)
        call.unchanged.check()
        needs = list(ctx.needs_input_grad[3:])
        for i, param in enumerate(call.params, len(given)):
            needs[i] &= param.requires_grad  # autograd drops the gradient of a leaf that is frozen by now
        inputs = zip(given, needs[: call.inputs], strict=False)
        d_inputs = [to_be_filled(x, trial=call.trial) if need else None for x, need in inputs]
        shared = given[call.inputs :]
        main_grads = [None] * len(shared) + [main_grad_of(param) for param in call.params]
        sums = weight_grads((*shared, *call.params), needs[call.inputs :], main_grads)
        held = call.held(given, RuntimeError)

        def add(chunk: slice) -> None:  # a function: a chunk's gradients are freed before the next chunk
            with torch.enable_grad():
                leaves, results = call.run(held, given, chunk)
            pairs = zip(results, d_outputs, strict=True)
            trained = [(result, d) for result, d in pairs if result.requires_grad and d is not None]
            outputs, upstream = [result for result, _ in trained], [call.cut(d, chunk) for _, d in trained]
            wanted = [leaf for leaf, need in zip((*leaves, *call.params), needs, strict=True) if need]
            found = gradients_of(outputs, wanted, upstream)
            gradients = iter(found)  # in the order of `wanted`: inputs, then summed tensors
            for d_input in d_inputs:
                if d_input is not None:
                    piece, gradient = call.cut(d_input, chunk), next(gradients)
                    piece.zero_() if gradient is None else piece.copy_(gradient)
            for total in sums:
                if total is not None and (gradient := next(gradients)) is not None:
                    total.add_gradient(gradient)

        with call.state.forward_random():
            for chunk in chunks(given[0].shape[call.dim], call.step):
                add(chunk)
        return None, None, None, *d_inputs, *finish_weight_grads(sums)


def _listed(name: str, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of an iterable. Raises TypeError for other elements and for a single tensor."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tiled: {name} is a {type(tensors).__name__}, expected a list of tensors")
    return tuple(tensors)


def _check_inputs(inputs: Tensors, shared: Tensors, params: Tensors, dim: int) -> None:
    if not inputs:
        raise ValueError("tiled: no input to cut; pass the tensors that hold the tokens")
    for kind, tensors in (("input", inputs), ("shared tensor", shared), ("parameter", params)):
        for i, tensor in enumerate(tensors):
            if kind == "input" or getattr(tensor, "requires_grad", True):  # unsummed tensors may have any layout
                check_dense("tiled", f"{kind} {i}", tensor)
    for i, tensor in enumerate(inputs):
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] == 0:
            raise ValueError(f"tiled: input {i} has shape {list(tensor.shape)}, expected tokens along dimension {dim}")
        if (length := tensor.shape[dim]) != (first := inputs[0].shape[dim]):
            differ = f"input {i} is {length} long along dimension {dim}, input 0 is {first}"
            raise ValueError(f"tiled: {differ}; pass what has no tokens as shared")
    for i, param in enumerate(params):
        if not param.is_leaf:
            raise ValueError(f"tiled: parameter {i} is computed from others; pass it as shared, or list those")


def _check_whole(params: Tensors) -> None:
    """Raises ValueError for a parameter that is sharded over ranks."""
    for i, param in enumerate(params):
        if hasattr(param, "ds_id") or is_traceable_wrapper_subclass(param):
            how = "by ZeRO-3" if hasattr(param, "ds_id") else f"as a {type(param).__name__}"
            raise ValueError(
                f"tiled: parameter {i} is sharded over ranks {how}: every chunk would gather it, inside "
                "GatheredParameters too, and ranks may have different numbers of chunks; leave this part untiled, use "
                "ZeRO-2, under FSDP2 call tiled in the forward of the module that is sharded, or pass the whole as "
                "shared: .full_tensor(), or its clone inside GatheredParameters around forward and backward"
            )


def _checked_outputs(outputs: Any, length: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Returns a chunk's outputs as a tuple. Raises TypeError or ValueError unless each is as long as the chunk."""
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    for i, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"tiled: output {i} of fn is a {type(result).__name__}, expected a tensor")
        if not -result.dim() <= dim < result.dim() or result.shape[dim] != length:
            raise ValueError(
                f"tiled: output {i} of fn is {list(result.shape)} for a chunk of {length}, expected {length} along "
                f"dimension {dim}: fn must make one output a token"
            )
    return results


def _leaves_behind(results: Tensors) -> dict[int, tuple[int, int]]:
    """Returns the leaves that a graph reaches, by id, each with its place in the forward: the number of the node that
    used it first, and the negative index among that node's inputs."""
    used: dict[int, tuple[int, int]] = {}
    for leaf, node, place in leaves_behind(result.grad_fn for result in results):
        use = (node._sequence_nr(), -place)
        used[id(leaf)] = min(use, used.get(id(leaf), use))
    return used


def _check_leaves(results: Tensors, known: Tensors, error: type[Exception]) -> None:
    """Raises `error` if the results' graph reaches a leaf that is not in `known`: its gradient would be lost."""
    allowed = {id(tensor) for tensor in known}
    for leaf, _, _ in leaves_behind(result.grad_fn for result in results):
        if id(leaf) not in allowed:
            raise error(
                f"tiled: fn uses a tensor {list(leaf.shape)} that requires a gradient and that it was not given; list "
                "it in params, or if it is computed from others pass what fn uses as shared"
            )


@torch.compiler.disable(reason="seqtile.tiled(check=True) looks at values")
@torch.no_grad()
def _check_trial(fn: Callable, inputs: Tensors, shared: Tensors, dim: int) -> None:
    """Raises ValueError if fn, tried on a few tokens, mixes tokens, keeps state or draws random numbers. Restores what
    fn holds and random state."""
    check_no_transform("tiled")
    if inputs[0].is_meta:
        raise ValueError("tiled: check=True compares values, and tensors on the meta device have none; leave it out")
    tokens = min(TRIED_TOKENS, inputs[0].shape[dim])
    given = [tensor.detach().narrow(dim, 0, tokens).clone() for tensor in inputs]
    before = WatchedState([("", fn, None)], {"input": given, "shared tensor": shared}, ValueError)
    before.generators += default_generators(inputs[0].device)

    def run(pieces: Tensors) -> list[torch.Tensor]:
        outputs = fn(*pieces, *(tensor.detach() for tensor in shared))
        return [result.clone() for result in _checked_outputs(outputs, pieces[0].shape[dim], dim)]

    try:
        whole = run(given)
        drawn = [generator.name for generator in before.generators if generator.drawn]
        again = run(given)  # with the state that the first run left
        changed = [held.name for held in before.tensors if held.differs]
        before.put_back()
        parts = []
        for half in zip(*(tensor.split((tokens + 1) // 2, dim) for tensor in given), strict=True):
            parts.append(run([piece.clone() for piece in half]))
            before.put_back()
    finally:
        before.put_back()
    found = []
    if changed:
        found.append(f"it changes {', '.join(changed)}")
    if drawn:
        found.append(f"it draws random numbers from {', '.join(drawn)}, and draws others in chunks")
    elif not changed and not all(equal(*pair, rounded=True) for pair in zip(again, whole, strict=True)):
        found.append("it computes something else when it runs again: it keeps state or draws numbers")
    elif not all(equal(torch.cat(cut, dim), result, rounded=True) for result, *cut in zip(whole, *parts, strict=True)):
        found.append("it mixes tokens: it computes something else when they are cut in two")
    if found:
        raise ValueError(f"tiled: fn is not the same chunk by chunk: {'; '.join(found)}; leave it untiled, or fix that")
