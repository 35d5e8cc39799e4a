"""Runs the forward of modules that cannot be fused, once per chunk.

The backward runs the modules again as they were in the forward: their attributes, children, adapters and hooks are put
back by snapshot.py, random numbers and autocast by ops/state.py. A TorchFunctionMode that is active in
the forward leaves the part untiled; one that is active only in the backward is an error.

Weights that are computed from others, such as those of torch.func.functional_call, are computed once: every chunk gets
them, and their gradient goes on from there.

Hugging Face records a router's logits by hooks, in a dict that is active during a model's forward. Each chunk runs with
a dict of its own; what it recorded leaves the tiled function as further outputs, with gradients, and is recorded whole.

    chunk       function(x [B, C, D])  ->  tree of tensors, recorded: {"router_logits": [[B * C, E]]}
    the whole                              the same tree,             {"router_logits": [[B * S, E]]}
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.utils.output_capturing import _active_collector

from seqtile.models.functions import named
from seqtile.models.read import function_modes, leaves_of
from seqtile.models.sharded import hooks_in_loop, silent
from seqtile.models.snapshot import Snapshot, dicts_of
from seqtile.ops.state import exchanged, found_in, having
from seqtile.ops.tiled import Holding, Outputs, tiled_part

_inside_chunk: ContextVar[bool] = ContextVar("inside_chunk", default=False)


def inside_chunk() -> bool:
    """Returns whether the current call computes one chunk of a module."""
    return _inside_chunk.get()


class InChunks:
    """Modules that run in chunks: their trainable parameters, their state, and everything else that determines their
    result.

    All of it is found once and holds until the modules' structure changes. Only weak references lead to the modules,
    because a module may hold this object.
    """

    def __init__(self, once: nn.Module | None = None, unread: Iterable[torch.Tensor] = (), **modules: nn.Module):
        """`once`: the module whose parametrized weights the caller computes a single time, before the loop. `unread`:
        tensors of the modules that what runs in chunks does not read, and that may be changed in place."""
        self.name = type(next(iter(modules.values()))).__name__
        parts = dict.fromkeys(part for module in modules.values() for part in module.modules())
        parts = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]  # whose attributes are fixed
        self._modules = [ref(module) for module in modules.values() if module in parts]
        made = {*once.parametrizations.modules()} if once is not None and is_parametrized(once) else ()
        self._inside = [part for part in parts if part not in modules.values() and part not in made]
        # PEFT raises the version of a weight whenever it computes one with an adapter in its place
        self._rewritten = {id(part.get_param()) for part in parts if type(part).__name__ == "ParamWrapper"}
        unused = {id(leaf) for part in parts for leaf in _of_inactive_adapters(part)}  # and may be trained meanwhile
        self._rewritten |= unused | set(map(id, unread))
        self._dicts = [each for part in parts for each in dicts_of(part)]
        self._parameters = [part._parameters for part in parts]
        held = [vars(part) for part in parts if part not in made]
        self._parameters += [own for own in held if any(isinstance(each, torch.Tensor) for each in own.values())]
        self._leaves = [each for each in leaves_of(*modules.values()) if each.is_leaf and id(each) not in unused]
        found = found_in([(name, module, None) for name, module in modules.items()])
        self._state = [(name, thing, owner and ref(owner)) for name, thing, owner in found]

    @property
    def state(self) -> list[tuple[str, Any, nn.Module | None]]:
        """The tensors and generators that the modules hold, see `found_in`."""
        return [(name, thing, owner and owner()) for name, thing, owner in self._state]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The leaves that require a gradient."""
        return [leaf for leaf in self._leaves if leaf.requires_grad]

    def computed(self) -> list[tuple[dict[str, Any], str]]:
        """Returns the places of the weights that are computed from others: dicts of parameters, and names there."""
        places = ((own, name, weight) for own in self._parameters for name, weight in dict.items(own))
        return [(own, name) for own, name, weight in places if isinstance(weight, torch.Tensor) and not weight.is_leaf]

    def snapshot(self, without: Sequence[tuple[dict[str, Any], str]] = ()) -> Snapshot:
        """Returns what determines the modules' result now."""
        parts = [*(module() for module in self._modules), *self._inside]
        return Snapshot(parts, self._dicts, without, self._rewritten)


def call_in_chunks(
    function: Callable[..., Outputs],
    modules: InChunks,
    *inputs: torch.Tensor,
    shared: Sequence[torch.Tensor] = (),
    **options: Any,
) -> Outputs:
    """Returns function(*inputs, *shared), computed by `tiled_part` with these options. `function` calls the modules."""
    options["always"] = hooks_in_loop() is not None and not inside_chunk()
    repeat = _Repeat(function, modules)
    shared, fn = (*shared, *repeat.computed), Holding(repeat, modules.state)
    outputs = tiled_part(fn, *inputs, params=modules.trained, shared=shared, **options)
    end_forward = _end_apart if torch.compiler.is_compiling() else _Repeat.end_forward
    end_forward(repeat)
    return outputs


class _Repeat:
    """A function of chunks that the backward calls again, with its modules as they were in the forward.

    Raises RuntimeError there if something has changed that cannot be put back.
    """

    def __init__(self, function: Callable, modules: InChunks):
        self._function, self._modules, self._snapshot = function, modules, None
        self._hooks = hooks_in_loop()
        self._places = modules.computed() if torch.is_grad_enabled() else []

    @property
    def computed(self) -> list[torch.Tensor]:
        """The computed weights, which each call gets behind its other arguments."""
        return [own[name] for own, name in self._places]

    def end_forward(self) -> None:
        """Keeps what the modules are, for the backward."""
        if torch.is_grad_enabled():
            self._snapshot = self._modules.snapshot(self._places)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():  # all tokens at once: what runs in chunks is not compiled
            return self._function(*tensors[: len(tensors) - len(self._places)])
        changed = [] if self._snapshot is None else self._snapshot.changed()
        if changed := changed + [named(type(mode)) for mode in function_modes()]:  # there was none in the forward
            raise RuntimeError(
                "a module is called chunk by chunk, in the forward and again in the backward, and what it computes has "
                f"changed in between: {', '.join(changed)}; call backward() before that"
            )
        given = len(tensors) - len(self._places)
        weights = [(*place, tensor) for place, tensor in zip(self._places, tensors[given:], strict=True)]
        with ExitStack() as stack:
            stack.enter_context(having(_inside_chunk, True))
            if self._snapshot is not None:
                stack.enter_context(self._snapshot.put_back())
            if weights:
                stack.enter_context(exchanged(weights))
            if self._hooks is not None:
                stack.enter_context(silent(self._hooks))
            return self._function(*tensors[:given])


_end_apart = torch.compiler.disable(_Repeat.end_forward, reason="seqtile keeps what the modules of a part are")


def _of_inactive_adapters(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the parameters of a layer's adapters that are not active, which compute nothing."""
    active = getattr(module, "active_adapters", None)
    for held in module.children() if active is not None else ():
        for name, leaf in held.named_parameters() if isinstance(held, nn.ModuleDict | nn.ParameterDict) else ():
            if name.split(".")[0] not in active:
                yield leaf


def records_attentions() -> bool:
    """Returns whether Hugging Face is recording attention weights, which a tiled layer does not have."""
    return any("attentions" in name for name in _active_collector.get() or ())


def recorded_names() -> list[str]:
    """Returns the names under which Hugging Face is recording outputs of modules inside layers."""
    return [name for name in _active_collector.get() or () if not name.lstrip("_").startswith("hidden_states")]


def recording(collected: dict[str, list] | None) -> AbstractContextManager[None]:
    """Makes Hugging Face record outputs into `collected`; None: nowhere."""
    if _active_collector.compiling:  # it holds the dict while a compiled model runs
        return exchanged([(vars(_active_collector), "global_var", collected)])
    return having(_active_collector, collected)


def call_with_further_outputs(
    function: Callable[..., tuple[Outputs, Any]],
    modules: InChunks,
    *inputs: torch.Tensor,
    rows: int,
    chunk_tokens: int | None,
) -> tuple[Outputs, Any]:
    """Returns function(*inputs), computed chunk by chunk, and records what it records.

    Args:
        function: called with inputs cut along dimension 1. It returns a tensor or a tuple of them, cut likewise, and a
            tree of None and of tensors with a row for each token, [B, C, ...], [B * C, ...] or [B, H, C, ...].
            ValueError for anything else.
        modules: those that function calls.
        inputs: their tokens are along dimension 1.
        rows: B, the sequences in a batch.
        chunk_tokens: tokens of a chunk.
    """
    collected, names = _active_collector.get(), recorded_names()
    form, made_count = _Form(modules.name), 0

    def of_chunk(*pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal made_count
        recorded: dict[str, list] = {name: [] for name in names}
        with recording(recorded if names else None):
            made, further = function(*pieces)
        made = made if isinstance(made, tuple) else (made,)
        made_count = len(made)
        return *made, *form.flat((further, recorded), rows, pieces[0].shape[1])

    outputs = call_in_chunks(of_chunk, modules, *inputs, chunk_tokens=chunk_tokens, dim=1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    made, further = outputs[:made_count], outputs[made_count:]
    tree, recorded = form.whole(further)
    for name in names:
        collected[name] += recorded[name]
    return made if len(made) > 1 else made[0], tree


class _Form:
    """The layout of the tensors in a tree, which is the same for every chunk."""

    def __init__(self, owner: str):
        self._owner, self._spec = owner, None

    def flat(self, tree: Any, rows: int, length: int) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of a chunk's tree, each [rows, length, ...]."""
        leaves, spec = tree_flatten(tree)
        if others := [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | None)]:
            raise self._error(f"a {type(others[0]).__name__}")
        if self._spec is None:
            self._spec, self._axes = spec, [x if x is None else self._axis_of(x, rows, length) for x in leaves]
        elif (spec, [x is None for x in leaves]) != (self._spec, [axis is None for axis in self._axes]):
            raise self._error("other outputs for one chunk than for another")
        made = [(x, axis) for x, axis in zip(leaves, self._axes, strict=True) if axis is not None]
        return tuple(x.unflatten(0, (rows, length)) if axis == 0 else x.movedim(axis, 1) for x, axis in made)

    def whole(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Returns the tree of the whole sequence, given its tensors [B, S, ...]."""
        left = iter(tensors)
        whole = [
            None if axis is None else (next(left).movedim(1, axis) if axis else next(left).flatten(0, 1))
            for axis in self._axes
        ]
        return tree_unflatten(whole, self._spec)

    def _axis_of(self, tensor: torch.Tensor, rows: int, length: int) -> int:
        """Returns the dimension of a chunk's tokens, 0 if all rows are one after the other along that."""
        shape = list(tensor.shape)
        axes = [axis for axis in (1, 2) if shape[:1] == [rows] and shape[axis : axis + 1] == [length]]
        if len(axes) > 1 and len(shape) > 3:
            raise self._error(f"a tensor {shape} for a chunk of {length} tokens, two dimensions of which are as long")
        if axes:
            return axes[0]
        if shape[:1] == [rows * length]:
            return 0
        raise self._error(f"a tensor {shape} for a chunk of {length} tokens in {rows} rows")

    def _error(self, got: str) -> ValueError:
        return ValueError(
            f"a {self._owner} is computed chunk by chunk: expected it to make tensors with a row for each token, or "
            f"None, got {got}; apply with layer=False"
        )
