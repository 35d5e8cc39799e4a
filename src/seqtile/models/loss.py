"""The one causal-LM forward, for every architecture: Hugging Face's own, with a tiled loss where a loss is wanted.

Whatever is not a tiled loss goes to the forward that stood there before, so it behaves as Hugging Face does because it
is Hugging Face.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.loss import loss_utils
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from seqtile.arch import Arch
from seqtile.models.fallback import call_tiled
from seqtile.models.layer import note_that_all_is_kept
from seqtile.models.placement import Options, stand_in_for
from seqtile.models.weights import (
    call_inside,
    check_not_zero3,
    check_untransformed,
    defining_path,
    named,
    process_fallback_reason,
    projection_fallback_reason,
    read_projection,
)
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.ops.linear_cross_entropy import linear_cross_entropy

_CROSS_ENTROPIES = (  # where one of these was written
    "torch.nn.functional.cross_entropy",
    "liger_kernel.transformers.functional.liger_cross_entropy",
)
# A compiler knows torch's own by identity alone.
_CROSS_ENTROPY = F.cross_entropy if defining_path(F.cross_entropy) in _CROSS_ENTROPIES else None
_LOSS_ARGUMENTS = ("shift_labels", "num_items_in_batch", "ignore_index")  # of Hugging Face's loss, beside the labels


def tiled_loss_forward(arch: Arch, options: Options, original: Callable) -> Callable:
    """Returns `original`, the forward (a plain function) of a causal LM of `arch`, with the loss tiled.

    In training, given `labels` or `shift_labels`, the loss is computed without logits, and `logits` is None. The same
    happens in eval with `skip_logits=True`; `skip_logits=False` asks for logits, and so an untiled loss, in training.
    Everything else, such as eval with logits, generation, a cache or `logits_to_keep`, is `original`'s.
    """
    parameters = inspect.signature(original).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]
    takes_skip_logits = "skip_logits" in names

    @stand_in_for(original)
    @_as_tuple_if_asked
    def forward(self, *args, skip_logits=None, **kwargs):
        inputs = dict(zip(names, args, strict=False)) | kwargs
        if len(inputs) < len(args) + len(kwargs):
            raise TypeError(
                f"expected at most {len(names)} positional arguments, none of them by name too, got {len(args)}"
            )
        has_labels = inputs.get("labels") is not None or inputs.get("shift_labels") is not None
        kept = inputs.get("logits_to_keep", 0)
        keeps_all = isinstance(kept, int) and kept == 0
        if skip_logits and not (has_labels and keeps_all):
            raise ValueError(
                "skip_logits=True asks for a loss alone: pass labels or shift_labels, and no logits_to_keep"
            )
        if skip_logits is None:
            skip_logits = self.training and has_labels and keeps_all
        if skip_logits:
            inputs.pop("logits_to_keep", None)
            return _without_logits(arch, self, inputs.pop("labels", None), options, inputs)
        if takes_skip_logits:
            inputs["skip_logits"] = False
        return original(self, **inputs)

    return forward


def _as_tuple_if_asked(forward: Callable) -> Callable:
    """Lets a forward take `return_dict`, as Hugging Face's do: a tuple of what is not None, and of the logits, which
    keep their place where they were not computed."""

    @wraps(forward)
    def wrapper(self, *args, return_dict=None, **kwargs):
        output = forward(self, *args, **kwargs)
        if isinstance(output, tuple) or (self.config.return_dict if return_dict is None else return_dict):
            return output
        values = {field.name: getattr(output, field.name) for field in fields(output)}
        return tuple(value for name, value in values.items() if value is not None or name == "logits")

    return wrapper


def _without_logits(
    arch: Arch, model: nn.Module, labels: torch.Tensor | None, options: Options, inputs: dict[str, Any]
) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
    """Returns the output of `model`, with a tiled loss and no logits."""
    reason = check_loss(arch, model, options)
    if arch.routed and inputs.get("output_router_logits") is None:
        inputs["output_router_logits"] = model.config.output_router_logits
    outputs = model.model(**inputs)
    hidden, head = outputs.last_hidden_state, model.lm_head
    note_that_all_is_kept(model, hidden.shape[:-1].numel())
    arguments = {name: inputs[name] for name in _LOSS_ARGUMENTS if name in inputs}
    arguments |= {"labels": labels, "chunk_tokens": options.chunk_tokens, **logit_options(arch, model.config)}
    loss_of = partial(_loss, head=head, fallback=reason is not None, **arguments)
    output = CausalLMOutputWithPast(
        # A head that is called has its weight gathered by its own call.
        loss=call_inside(head, loss_of, hidden) if reason is None else loss_of(hidden),
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
    return _balanced(arch, model, inputs, outputs.router_logits, output) if arch.routed else output


def _balanced(
    arch: Arch,
    model: nn.Module,
    inputs: dict[str, Any],
    router_logits: tuple[torch.Tensor, ...] | None,
    output: CausalLMOutputWithPast,
) -> MoeCausalLMOutputWithPast:
    """Returns a mixture's output, with Hugging Face's own loss that balances the experts if router logits were asked
    for."""
    balance = None
    if inputs["output_router_logits"]:
        balance = arch.modeling.load_balancing_loss_func(
            router_logits, model.num_experts, model.num_experts_per_tok, inputs.get("attention_mask")
        )
        output.loss = output.loss + model.router_aux_loss_coef * balance.to(output.loss.device)
    return MoeCausalLMOutputWithPast(**output, aux_loss=balance, router_logits=router_logits)


def check_loss(arch: Arch, model: nn.Module, options: Options) -> str | None:
    """Raises ValueError where the tiled loss would refuse to run, or not compute what `model` computes; returns why
    lm_head is called chunk by chunk rather than read, None if it is read."""
    check_untransformed()
    if (fallback := head_fallback_reason(model.lm_head)) is not None:
        check_not_zero3(model.lm_head, fallback)
    if (reason := _unknown_loss_reason(model.loss_function)) is not None:
        raise ValueError(
            f"{reason}; expected Hugging Face's ForCausalLMLoss, the one loss that seqtile tiles; apply with loss=False"
        )
    return fallback


def head_fallback_reason(head: nn.Module) -> str | None:
    """Says why lm_head is called rather than read."""
    reason = process_fallback_reason() or projection_fallback_reason("lm_head", head)
    return "lm_head has an adapter" if reason is None and hasattr(head, "lora_A") else reason


def _unknown_loss_reason(function: Any) -> str | None:
    """Says why a model's loss is not the cross-entropy that is computed in its place."""
    if defining_path(function) != "transformers.loss.loss_utils.ForCausalLMLoss":
        return f"model.loss_function is {function!r}"
    inner = loss_utils.fixed_cross_entropy
    if defining_path(inner) != (name := "transformers.loss.loss_utils.fixed_cross_entropy"):
        return f"{name}, which model.loss_function calls, was replaced by {named(inner)}"
    if F.cross_entropy is not _CROSS_ENTROPY and defining_path(F.cross_entropy) not in _CROSS_ENTROPIES:
        return f"torch.nn.functional.cross_entropy was replaced by {named(F.cross_entropy)}"
    return None


def logit_options(arch: Arch, config: PreTrainedConfig) -> dict[str, float | None]:
    """Returns the cap and the scale of an architecture's logits, as arguments of linear_cross_entropy."""
    scale = getattr(config, arch.logit_scale) if arch.logit_scale else 1.0
    divisor = getattr(config, arch.logit_divisor) if arch.logit_divisor else 1.0
    return {"softcap": getattr(config, arch.softcap) if arch.softcap else None, "logit_scale": scale / divisor}


def _loss(
    hidden: torch.Tensor,
    *,
    head: nn.Module,
    fallback: bool,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> torch.Tensor:
    """Computes what Hugging Face's ForCausalLMLoss computes from logits, from hidden states [B, S, D]."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(hidden.device)
    if fallback:
        losses = _fallback_losses(hidden, targets, head, ignore_index, **options)
        return losses.sum() / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)
    weight, bias, *_ = read_projection("lm_head", head)
    return linear_cross_entropy(
        hidden, weight, targets, bias=bias, ignore_index=ignore_index, num_items=num_items_in_batch, **options
    )


def _fallback_losses(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: nn.Module,
    ignore_index: int,
    *,
    chunk_tokens: int | None,
    softcap: float | None,
    logit_scale: float,
) -> torch.Tensor:
    """Computes the loss of every token under a head that is called: its logits once more in the backward. 4 u."""

    def losses_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = head(hidden) * logit_scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        losses = F.cross_entropy(
            logits.float().flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="none"
        )
        return losses.view(targets.shape)

    # torch's cross-entropy keeps four chunks of logits where ours keeps one
    quarter = max(1, resolve_chunk_tokens(chunk_tokens, hidden.shape[-1]) // 4)
    return call_tiled(losses_of, [head], hidden, targets.unsqueeze(-1), chunk_tokens=quarter)
