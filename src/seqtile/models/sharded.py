"""Sharded weights, gathered once for all chunks of a module, in the forward and in the backward.

ZeRO-3 and FSDP2 gather by hooks around a module's call. A module called chunk by chunk would be gathered once a chunk,
and ranks with different numbers of chunks would deadlock. So around the loop

    ZeRO-3   the module is marked as a leaf, as `deepspeed.utils.set_z3_leaf_modules` does: its own hooks gather all
             that is inside of it
    FSDP2    the hooks of the modules inside that are sharded by themselves run once

and inside the loop, in the forward and the backward, the hooks of ZeRO-3 and FSDP2 only cast to the dtype of the
mixed-precision policy. DeepSpeed marks the mixtures' blocks of some types as leaves by itself, and reduces the
gradients of such a leaf by a hook on its backward: inside of a larger part that hook, too, runs around the loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import BackwardHook

from seqtile.models.functions import defining_path, innermost
from seqtile.ops.state import exchanged, having

_OF_FSDP, _OF_DEEPSPEED = "torch.distributed.fsdp.", "deepspeed.runtime.zero."
_OF_TRIALS = ("seqtile.proof.run.", "seqtile.proof.ranks.")  # of a comparison, which look at what was gathered
_LEAF = "_z3_leaf"  # what DeepSpeed reads at every call of a module
_MARK = "of seqtile"  # its value on modules marked here; True on DeepSpeed's own


_Hook = tuple[dict[int, Callable], int, Callable]
"""A hook as the dict and the key where it is, and what stands in for it in a loop."""
_in_loop: ContextVar[list[_Hook] | None] = ContextVar("in_loop", default=None)


def is_sharded(module: nn.Module) -> bool:
    """Returns whether a module has parameters of ZeRO-3, or a submodule that FSDP2 shards by itself. All ranks must
    then call it alike."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters()) or bool(_sharded_inside(module))


def gathered(
    module: nn.Module, function: Callable, *tensors: torch.Tensor, chunked: bool = True, inside_call: bool = True
) -> Any:
    """Returns function(*tensors), which computes a module's forward, with all weights in the module gathered around it,
    once in the forward and once in the backward.

    Args:
        tensors: hidden states, through which the backward reaches the module.
        chunked: function calls modules, by `call_in_chunks`; False where it reads their weights.
        inside_call: the module's hooks before its forward have run for this call, and gathered what they know of.
    """
    if not is_sharded(module) and not isinstance(module, FSDPModule):
        return function(*tensors)
    around = _sharded_inside(module)
    if any(_is_of(hook, _OF_DEEPSPEED) for hook in module._forward_pre_hooks.values()):
        if chunked and not vars(module).get(_LEAF):
            setattr(module, _LEAF, _MARK)
            inside_call = False  # they ran before it was a leaf, so gather by hand this once
        if not inside_call:
            around = [module]
    elif not inside_call and isinstance(module, FSDPModule):
        around = [module, *around]
    around += [each for each in module.modules() if each is not module and _of_a_leaf(each)]
    for each in reversed(around):
        function = _inside_hooks(each, function, casts=each is module and not chunked)
    if not chunked:
        return function(*tensors)
    with having(_in_loop, [hook for inside in module.modules() for hook in _silenced(inside)]):
        return function(*tensors)


def unmark_leaves(model: nn.Module) -> None:
    """Takes the marks off the modules of a model that `gathered` marked for ZeRO-3."""
    for module in model.modules():
        if vars(module).get(_LEAF) == _MARK:
            delattr(module, _LEAF)


def in_own_call(module: nn.Module, function: Callable, *tensors: torch.Tensor) -> Any:
    """Returns function(*tensors), which reads a module's weights or calls its forward, inside the module's own call:
    between the hooks that gather the weights and handle their gradients."""
    return gathered(module, function, *tensors, chunked=False, inside_call=False)


def hooks_in_loop() -> list[_Hook] | None:
    """Returns what `silent` needs; None if nothing is sharded."""
    return None if torch.compiler.is_compiling() else _in_loop.get()


@contextmanager
def silent(hooks: list[_Hook]) -> Iterator[None]:
    """Makes hooks that gather only cast."""
    left = [(own, key, stand_in) for own, key, stand_in in hooks if key in own]
    with having(_in_loop, hooks), exchanged(left):
        yield


def _sharded_inside(module: nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if each is not module and isinstance(each, FSDPModule)]


def _of_a_leaf(module: nn.Module) -> list[Callable]:
    """Returns the hooks by which DeepSpeed reduces the gradients of one of its own leaves, such as Mixtral's block."""
    return [hook for hook in module._backward_hooks.values() if _is_of(hook, _OF_DEEPSPEED)]


def _is_of(hook: Callable, *whose: str) -> bool:
    return defining_path(innermost(hook)).startswith(whose)


def _inside_hooks(module: nn.Module, function: Callable, casts: bool) -> Callable:
    """Returns `function`, called between those hooks of a module that gather, as `module(*args)` calls its forward.
    Without `casts`, FSDP2's hooks do not cast: the dtypes around `function` are not the module's own."""
    as_called, to_run = nullcontext, set()
    if isinstance(module, FSDPModule):
        state = vars(module._get_fsdp_state())
        to_run = state["_modules_to_run_forward"]
        if not casts:
            policy = replace(state["_mp_policy"], cast_forward_inputs=False, output_dtype=None)
            as_called = partial(exchanged, [(state, "_mp_policy", policy)])

    def between(*args: torch.Tensor) -> Any:
        begins = not to_run
        for key, hook in [*module._forward_pre_hooks.items()]:
            if _is_of(hook, _OF_FSDP, _OF_DEEPSPEED, *_OF_TRIALS):
                with as_called():
                    with_kwargs = key in module._forward_pre_hooks_with_kwargs
                    changed = hook(module, args, {}) if with_kwargs else hook(module, args)
                args = args if changed is None else changed[0] if with_kwargs else changed
        if begins:  # others of its group, as fully_shard([norm, head]) makes, do not run: the weights wait for none
            to_run.intersection_update({module})
        backward = _of_a_leaf(module) if torch.is_grad_enabled() else []
        if backward:
            if not any(arg.requires_grad for arg in args):  # they run when the gradient of an input is there
                args = (args[0].detach().requires_grad_(), *args[1:])
            around = BackwardHook(module, backward, [])
            args = around.setup_input_hook(args)
        output = function(*args)
        for hook in [*module._forward_hooks.values()]:
            if _is_of(hook, _OF_FSDP, _OF_DEEPSPEED, *_OF_TRIALS):
                with as_called():
                    changed = hook(module, args, output)
                output = output if changed is None else changed
        return around.setup_output_hook(output) if backward else output

    return between


def _silenced(module: nn.Module) -> Iterator[_Hook]:
    """Yields the hooks of a module that gather, with what stands in for each in a loop."""
    kinds = (module._forward_pre_hooks, _cast_inputs), (module._forward_hooks, _cast_output)
    for hooks, casts in (*kinds, (module._backward_hooks, _nothing)):
        for key, hook in hooks.items():
            if _is_of(hook, _OF_FSDP):
                yield hooks, key, casts
            elif _is_of(hook, _OF_DEEPSPEED, *_OF_TRIALS):
                yield hooks, key, _nothing


def _nothing(module: nn.Module, *given: Any) -> None:
    pass


def _cast_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return module._get_fsdp_state()._cast_forward_inputs(args, kwargs)


def _cast_output(module: nn.Module, args: tuple, output: Any) -> Any:
    return module._get_fsdp_state()._cast_output_dtype(output)
