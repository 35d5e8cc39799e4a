"""Hooks on modules: which of them are known, by where they were written.

    harmless  only watches, or gathers parameters, so seqtile may compute a module from its weights without calling it
    known     belongs to a listed library or to seqtile, and may be called once for each chunk
    declared  a user's, marked by `seqtile.tokenwise`: the same
    unknown   any other: the part of the model around it is not tiled

A hook is recognised by its code, never by a name that it may give itself.
"""

import inspect
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules import module as module_module

from seqtile.declared import is_declared
from seqtile.models.functions import defining_path, innermost

_HARMLESS = (
    "torch.utils.module_tracker.",  # of FlopCounterMode, too
    "torch.distributed._tools.mod_tracker.",
    "torch.distributed.tensor.debug._comm_mode.",
    "torch.distributed.fsdp.",
    "deepspeed.runtime.zero.",
    "seqtile.proof.difference.",
    "seqtile.models.sharded.",
    "seqtile.proof.findings.WayTaken.",
    "seqtile.proof.run.Pass.",
    "seqtile.proof.ranks.",
)
_RECORDING = "transformers.utils.output_capturing."
# Of PEFT only what makes the embeddings' output require a gradient. Its other hooks hand over what belongs to rows or
# positions (mixed adapter batches, Poly, aLoRA, X-LoRA), or must see whole inputs (EVA, CorDA, LoRA-GA).
_KNOWN = (
    *_HARMLESS,
    _RECORDING,
    "torch.distributed._composable.checkpoint_activation.",
    "transformers.modeling_utils.PreTrainedModel.enable_input_require_grads.",
    "peft.mixed_model._prepare_model_for_gradient_checkpointing.",
    "peft.peft_model.PeftModel._prepare_model_for_gradient_checkpointing.",
    "peft.utils.other.prepare_model_for_kbit_training.",
    "bitsandbytes.nn.parametrize.",
    "deepspeed.profiling.flops_profiler.profiler.",
    "trl.models.activation_offloading.get_act_offloading_ctx_manager.",
    "wandb.integration.torch.wandb_torch.",
    "seqtile.offload.",
    "seqtile.sp.",
)


def hooks_of(module: nn.Module | None) -> tuple[dict[int, Callable], ...]:
    """Returns the hooks of a module, or without a module the global hooks, by kind."""
    if module is not None:
        return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    forward = module_module._global_forward_hooks, module_module._global_forward_pre_hooks
    return *forward, module_module._global_backward_hooks, module_module._global_backward_pre_hooks


def each_hook(module: nn.Module | None) -> Iterator[Callable]:
    """Yields the hooks of a module, or without a module the global hooks."""
    return (hook for hooks in hooks_of(module) for hook in hooks.values())


def unknown_hook(module: nn.Module | None) -> Callable | None:
    """Returns the first hook of a module, or without a module the first global hook, that is neither known nor
    declared."""
    unknown = (hook for hook in each_hook(module) if not is_known(hook) and not is_declared(hook))
    return next((hook for hook in unknown if not is_declared(innermost(hook))), None)


def is_known(hook: Callable) -> bool:
    """Returns whether a hook may be called once a chunk, since it is a listed library's or seqtile's."""
    return _written_in(hook).startswith(_KNOWN)


def is_harmless(hook: Callable, recording: bool) -> bool:
    """Returns whether a module with this hook may be computed from its weights, without calling the hook. If
    `recording`, Hugging Face's recorders of outputs must be called."""
    return _written_in(hook).startswith(_HARMLESS if recording else (*_HARMLESS, _RECORDING))


def recorded_names_of(module: nn.Module) -> set[str]:
    """Returns the names under which Hugging Face may record a module's output, whether or not it records now: in a
    checkpoint's recomputation it does not."""
    recorders = (hook for hook in module._forward_hooks.values() if _written_in(hook).startswith(_RECORDING))
    return {inspect.getclosurevars(hook).nonlocals.get("key", "") for hook in recorders}


def _written_in(hook: Callable) -> str:
    function = innermost(hook)
    return defining_path(function) or defining_path(type(function).__call__)
