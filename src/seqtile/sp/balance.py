"""The loss that balances a mixture's experts, over ranks that share sequences.

Hugging Face computes it from the router logits of all layers: experts * sum(f p), where f is the fraction of tokens
sent to an expert and p the expert's mean probability (Switch Transformer, arXiv:2101.03961, 2.2). Both are means over
tokens, so ranks exchange only sums over their tokens, [experts] each, and no logits.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqtile.sp.groups import SequenceParallel, add_up

_NAMES = {"load_balancing_loss_func", "router_aux_loss_coef"}  # a forward that adds the loss uses these names


class Balance(NamedTuple):
    """The factor and the experts per token of a model's balancing loss."""

    factor: float
    top_k: int

    @classmethod
    def of(cls, model: nn.Module) -> "Balance":
        """Returns the model's balancing loss. ValueError unless its class adds it as Hugging Face's do."""
        forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind)]
        codes = [forward.__code__ for forward in forwards if hasattr(forward, "__code__")]
        config = model.config.get_text_config()
        names = "router_aux_loss_coef", "num_experts_per_tok"
        factor, top_k = (getattr(model, name, getattr(config, name, None)) for name in names)
        if factor is None or top_k is None or not any(set(code.co_names) >= _NAMES for code in codes):
            raise ValueError(
                "the router's balancing loss of this model is not known; expected output_router_logits=False over ranks"
            )
        return cls(factor, top_k)

    def over_ranks(self, output: Any, counted: Tensor, sp_group: SequenceParallel) -> None:
        """Replaces this rank's balancing loss in a model's output by the loss over all ranks' tokens: `aux_loss` gets
        the whole, `loss` this rank's part. `counted` [B S] is False for padding. One all-reduce."""
        own, whole = output["aux_loss"], self._whole(output["router_logits"], counted, sp_group)
        if output.get("loss") is not None:
            # The value is 1 / size of the whole; the gradient is that of this rank's tokens.
            part = whole - whole.detach() * (1 - 1 / sp_group.size)
            output["loss"] = output["loss"] + self.factor * (part - own)
        output["aux_loss"] = whole.detach()

    def _whole(self, router_logits: tuple[Tensor, ...], counted: Tensor, sp_group: SequenceParallel) -> Tensor:
        experts = router_logits[0].shape[-1]
        chosen, probability = (router_logits[0].new_zeros(experts, dtype=torch.float32) for _ in range(2))
        weight = counted.to(router_logits[0].device, torch.float32)
        for logits in router_logits:
            probabilities = logits.softmax(-1)
            picked = probabilities.detach().topk(self.top_k, -1).indices
            chosen = chosen.scatter_add(0, picked.flatten(), weight.repeat_interleave(self.top_k))
            probability = probability + (probabilities.float() * weight[:, None]).sum(0)
        tokens = weight.sum() * len(router_logits)
        sums = add_up(torch.cat([chosen, probability, tokens[None]]), sp_group)
        of_all = sums[experts:-1] - probability.detach() + probability  # the gradient is that of this rank's tokens
        return experts * (sums[:experts] / sums[-1] * (of_all / sums[-1])).sum()
