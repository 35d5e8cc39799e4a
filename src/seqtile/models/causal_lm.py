"""The one causal-LM forward, for every architecture: Hugging Face's own, with a tiled loss where a loss is wanted.

Whatever is not a tiled loss goes to the forward that stood there before, so it behaves as Hugging Face does because it
is Hugging Face.
"""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from seqtile.models.plain import check_plain_linear, local_weight
from seqtile.models.stand_in import stand_in_for
from seqtile.ops.linear_cross_entropy import linear_cross_entropy


def tiled_loss_forward(original: Callable, chunk_tokens: int | None) -> Callable:
    """`original`, a causal LM's forward (a plain function), with the loss tiled.

    In training, given `labels` or `shift_labels`, the loss is computed without logits, and `logits` is None. The same
    happens in eval with `skip_logits=True`; `skip_logits=False` asks for logits, and so an untiled loss, in training.
    Everything else, such as eval with logits, generation, a cache or `logits_to_keep`, is `original`'s.
    """
    takes_skip_logits = "skip_logits" in inspect.signature(original).parameters

    @stand_in_for(original)
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        skip_logits=None,
        **kwargs,
    ):
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        has_labels = labels is not None or kwargs.get("shift_labels") is not None
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if skip_logits and not (has_labels and keeps_all):
            raise ValueError(
                "skip_logits=True asks for a loss alone: pass labels or shift_labels, and no logits_to_keep"
            )
        if skip_logits is None:
            skip_logits = self.training and has_labels and keeps_all
        if not skip_logits:
            if takes_skip_logits:
                inputs["skip_logits"] = False
            return original(self, labels=labels, logits_to_keep=logits_to_keep, **inputs)

        check_loss(self)
        outputs = self.model(**inputs)
        weight = local_weight("lm_head", self.lm_head)
        return CausalLMOutputWithPast(
            loss=_loss(outputs.last_hidden_state, weight, labels, chunk_tokens, **kwargs),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    return forward


def check_loss(model: nn.Module) -> None:
    """Raises ValueError where the tiled loss would not compute what `model` computes."""
    check_plain_linear("lm_head", model.lm_head)
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"model.loss_function is {model.loss_function!r}, expected Hugging Face's ForCausalLMLoss, the only loss "
            "that seqtile tiles; apply with loss=False"
        )
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(model.config, name, None)
        if value not in (None, 1, 1.0):
            raise ValueError(f"config.{name} is {value}: the tiled loss does not support it yet; apply with loss=False")


def _loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None,
    chunk_tokens: int | None,
    *,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    **_,
) -> torch.Tensor:
    """What Hugging Face's ForCausalLMLoss computes from logits, from hidden states [B, S, D]."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return linear_cross_entropy(
        hidden,
        weight,
        shift_labels.to(hidden.device),
        ignore_index=ignore_index,
        num_items=num_items_in_batch,
        chunk_tokens=chunk_tokens,
    )
