"""Hooks on a parameter's gradient run once, on the whole gradient, as untiled."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import seqtile
from models.layered import KINDS, assert_equal
from support.choice import every_value
from support.tiny import batch_of, build, checkpointing, loss_and_gradients, tiled_copy
from support.training import with_lora

CALLED = {  # changes to a model that make its parts run chunk by chunk
    "experts": ("qwen3_moe", {}),
    "layer of another shape": ("gemma3_text", {"layer": True}),
    "head with dropout in LoRA": ("llama", {"layer": True}),
}


def adapted(model: nn.Module) -> nn.Module:
    """Uses a dropout rate that drops nothing, so that both models compute the same."""
    return with_lora(model, "q_proj", "down_proj", "lm_head", lora_dropout=1e-9).train()


@pytest.mark.full("half a second each", but=every_value)
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("case", CALLED)
def test_hook_sees_the_whole_gradient_once(case: str, reentrant: bool | None, device: str) -> None:
    arch, options = CALLED[case]
    untiled = build(arch, device)
    untiled = adapted(untiled) if "LoRA" in case else untiled
    batch, found = batch_of(2, 131, device), []
    for each in (untiled, tiled_copy(untiled, **options)):
        checkpointing(each.get_base_model() if "LoRA" in case else each, reentrant)
        if reentrant and "LoRA" in case:
            each.enable_input_require_grads()
        calls: Counter[str] = Counter()

        def clipped(calls: Counter[str], name: str, gradient: torch.Tensor) -> torch.Tensor:
            calls[name] += 1
            return gradient.clamp(-1e-3, 1e-3) * 0.5

        for name, parameter in each.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(clipped, calls, name))
        found.append((*loss_and_gradients(each, **batch), calls))
    (*theirs, calls), (*ours, tiled_calls) = found
    assert set(calls.values()) == {1} and tiled_calls == calls
    assert_equal(ours, theirs, gradients=3e-4)


def test_hooks_are_there_again_after_a_backward_that_fails(device: str) -> None:
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    calls: list[int] = []
    weight.register_hook(lambda gradient: calls.append(1))
    failing = [True]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, d_x: torch.Tensor) -> torch.Tensor:
            if failing:
                raise RuntimeError("no gradient today")
            return d_x

    x = torch.randn(30, 8, device=device)

    def backward() -> None:
        seqtile.tiled(lambda x: Fails.apply(x @ weight), x, params=[weight], chunk_tokens=7).sum().backward()

    with pytest.raises(RuntimeError, match="no gradient today"):
        backward()
    assert calls == []
    failing.clear()
    backward()
    assert calls == [1]


@pytest.mark.parametrize("frozen_route", [True, False], ids=["unused", "used"])
def test_parameter_without_a_gradient_gets_none(frozen_route: bool, device: str) -> None:
    """AdamW decays a weight whose gradient is zeros, and does not change one without a gradient."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.each[0](x) if frozen_route else self.each[0](x) + self.each[1](x)

    experts = Experts().to(device)
    x = torch.randn(30, 8, device=device, requires_grad=True)
    seqtile.tiled(experts, x, params=experts.parameters(), chunk_tokens=7).square().sum().backward()
    assert experts.each[0].weight.grad is not None
    assert (experts.each[1].weight.grad is None) == frozen_route
