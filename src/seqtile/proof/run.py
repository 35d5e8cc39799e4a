"""Runs a forward and a backward of a model without side effects, and restores everything that they change.

what modules keep                 restored, see state.py
users' hooks                      not called, unless declared by `seqtile.tokenwise`
random numbers, autocast's casts  restored
.grad, main_grad                  not touched; a temporary main_grad replaces the user's
dropout, checkpointing            off
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqtile.declared import is_declared
from seqtile.models.find import experts_in, takes_use_cache
from seqtile.models.functions import innermost, package_of
from seqtile.models.hooks import hooks_of, is_known
from seqtile.models.placement import Placement, placement_at
from seqtile.models.varlen import former_attention
from seqtile.ops.chunks import chunk_tokens_everywhere
from seqtile.ops.save_early import saved_unseen
from seqtile.proof.difference import Vectors, loss_and_gradients
from seqtile.proof.ranks import Ranks
from seqtile.proof.small import DROPOUT_FIELDS
from seqtile.proof.state import SMALL, State
from seqtile.protocols import LAYOUT, SHARDED

_ALMOST_NONE = 1e-30  # a rate of dropout or noise that changes nothing; at exactly 0 other code would run
_RECORDERS = ("deepspeed", "wandb")  # ZeRO-3 records the order of modules
Placed = dict[nn.Module, Placement]


def tiled_modules(model: nn.Module) -> Placed:
    """Returns the Placement of every tiled module in a model."""
    found = {module: placement_at(module) for module in model.modules()}
    return {module: placement for module, placement in found.items() if placement is not None}


@dataclass
class Pass:
    """Runs a model on a short batch, untiled or with some of its modules tiled, and returns loss and gradients."""

    model: nn.Module
    original: Callable
    """The model's untiled forward, a plain function."""
    inputs: dict[str, Any]
    placed: Placed
    """The model's modules that have a tiled forward."""
    chunk_tokens: int
    full: bool
    """True to compare the gradients of all parameters, including large ones."""
    ranks: Ranks
    state: State

    def __post_init__(self) -> None:
        self.choices = SameChoices() if experts_in(self.model) else nullcontext()
        self.with_main_grad = [name for name, each in self.model.named_parameters() if "main_grad" in vars(each)]
        self.main_grads: dict[str, torch.Tensor] = {}
        """The temporary `main_grad`s at the start of a pass: the gradients of the first pass."""

    def run(self, *, tiled: Placed, varlen: bool | None = None, nudge: float = 0.0, seed: int = 1) -> Vectors:
        """Returns the loss and gradients with only `tiled` of the `placed` modules tiled. `varlen`: attention without
        masks is used if it is chosen; None: if any module is tiled. For `nudge` and `seed` see `loss_and_gradients`."""
        untiled = {module: placement for module, placement in self.placed.items() if module not in tiled}
        inputs, forward = dict(self.inputs), self.original
        if self.model in tiled:
            forward = tiled[self.model].forward
        elif "skip_logits" in inspect.signature(forward).parameters:  # Liger's forward without Liger's loss
            inputs["skip_logits"] = False
        if "return_dict" in inputs or not getattr(self.model.config, "return_dict", True):
            inputs["return_dict"] = True
        if any(placement.part in ("layer", "attention") for placement in untiled.values()):
            inputs["use_cache"] = False  # like tiled layers, which make no cache in training
        elif any(placement.part == "loss" for placement in untiled.values()) and takes_use_cache(forward):
            inputs.setdefault("use_cache", False)  # a tiled loss makes none either
        with ExitStack() as stack:
            stack.enter_context(without_a_trace(self.model, self.state))
            if not (tiled if varlen is None else varlen):
                stack.enter_context(former_attention(self.model))
            if (sharded := vars(self.model).get(SHARDED)) is not None:
                stack.enter_context(sharded.other_batch(self.ranks.check_sharing))
            for module, placement in untiled.items():
                if module is not self.model:  # the model's own forward is called below
                    _run_untiled(module, placement)
            stack.enter_context(self.choices)
            stack.enter_context(chunk_tokens_everywhere(self.chunk_tokens))
            stack.enter_context(self.ranks.gathering())
            if is_part := LAYOUT in inputs:  # below the hooks that cut a batch
                inputs = sharded.add_layout(self.model, (), inputs)[1]
            leaves = self._leaves()
            for name, before in self.main_grads.items():
                leaves[name].main_grad = before.clone()
            found = loss_and_gradients(self.model, forward, inputs, leaves, nudge, seed)
            for name, before in self.main_grads.items():
                added = 2 * (leaves[name].main_grad - before)  # hooks have doubled all gradients but these
                found[name] = added if found[name] is None else found[name] + added
            if sharded is not None and sharded.takes_whole and not is_part:  # each rank has a part of them, or all
                found = {name: value if value is None else sharded.averaged(value) for name, value in found.items()}
            if not self.main_grads:
                with_one = [name for name in self.with_main_grad if found.get(name) is not None]
                self.main_grads = {name: found[name].float() for name in with_one}
            return found

    def _leaves(self) -> dict[str, torch.Tensor]:
        """Returns the parameters whose gradients are compared, by name. Adds the parameters that FSDP2 gathers when
        their module runs."""
        leaves: dict[str, torch.Tensor] = {}

        def add(prefix: str, module: nn.Module) -> None:
            for name, parameter in module.named_parameters(prefix):
                size = 0 if isinstance(parameter, DTensor) else getattr(parameter, "ds_numel", parameter.numel())
                if parameter.requires_grad and size > 0 and (self.full or size <= SMALL):
                    leaves[name] = parameter

        add("", self.model)
        for prefix, module in self.model.named_modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(lambda module, args, prefix=prefix: add(prefix, module))
        return leaves


def _run_untiled(module: nn.Module, placement: Placement) -> None:
    """Makes a module run its original forward until its attributes are restored."""
    own = vars(module)
    kept = [name for name, value in own.items() if getattr(value, "__func__", None) is placement.forward]
    if "forward" in own and not kept:
        raise ValueError(f"another library's forward stands around the tiled one of {type(module).__name__}")
    for name in kept or ["forward"]:  # another library's wrapper calls the forward that it keeps
        own[name] = MethodType(placement.original, module)


@contextmanager
def without_a_trace(model: nn.Module, state: State) -> Iterator[None]:
    """Restores on exit whatever a forward or a backward of the model changes. Inside, checkpointing and dropout are
    off, and users' module hooks are not called, unless declared."""
    with ExitStack() as stack:
        stack.enter_context(saved_unseen())
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        stack.callback(state.put_back)
        for parameter in model.parameters():
            vars(parameter).pop("main_grad", None)
        for module in (None, *model.modules()):
            if getattr(module, "gradient_checkpointing", False):
                vars(module)["gradient_checkpointing"] = False
            for hooks in hooks_of(module):
                for key in [key for key, hook in hooks.items() if not _is_called(hook, module)]:
                    del hooks[key]
        for attributes in state.attributes:
            for name, value in attributes.items():
                if isinstance(value, float) and value > 0 and (name == "p" or DROPOUT_FIELDS.fullmatch(name)):
                    attributes[name] = _ALMOST_NONE
        yield


def _is_called(hook: Callable, module: nn.Module | None) -> bool:
    """Returns whether a hook of a module, or of all, is declared, or known and does not record what runs."""
    is_recorder = module is None or package_of(innermost(hook)) in _RECORDERS
    return is_declared(hook) or (is_known(hook) and not is_recorder)


class SameChoices(TorchDispatchMode):
    """Sends each token to the same experts in every pass, although rounding would change some choices. The first time
    it is entered, it records each token's scores and what `topk` chooses. Later, `topk` chooses as for the most similar
    recorded scores."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._notes = True

    def __exit__(self, *error: Any) -> None:
        self._notes = False
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **kwargs or {})
        if function is not torch.ops.aten.topk.default or (args[2:3] or (-1,))[0] not in (-1, args[0].dim() - 1):
            return made
        scores, chosen = args[0], made[1]
        rows = scores.flatten(0, -2).float().nan_to_num(0, 0, 0)
        noted = self._noted.setdefault((scores.shape[-1], chosen.shape[-1]), [])
        if self._notes:
            noted.append((rows, chosen.flatten(0, -2)))
        elif noted:
            before, chosen_before = (torch.cat(tensors) for tensors in zip(*noted, strict=True))
            nearest = torch.cdist(rows, before, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
            chosen = chosen_before[nearest].view_as(chosen)
            return scores.gather(-1, chosen), chosen
        return made
