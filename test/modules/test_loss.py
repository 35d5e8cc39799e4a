"""The modules compute what the ops compute; their options are given once."""

import inspect

import pytest
import torch
from torch import nn

from seqtile import linear_cross_entropy, linear_log_probs
from seqtile.modules import LinearCrossEntropyLoss, LinearLogProbs

BOTH = {"ignore_index": 7, "softcap": 5.0, "logit_scale": 0.5, "accumulate_dtype": None, "chunk_tokens": 20}
LOSS_OPTIONS = BOTH | {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3, "return_metrics": True}
LOG_PROBS_OPTIONS = BOTH | {"temperature": 0.7, "outputs": ("entropy", "mean_logit"), "to_be_summed": True}


def operands(device: str) -> tuple[torch.Tensor, ...]:
    hidden, weight, bias = (torch.randn(*shape, device=device) for shape in ((63, 32), (100, 32), (100,)))
    return hidden, weight, torch.randint(0, 100, (63,), device=device), bias


MODULES = {  # the op, every option, and the arguments of a call
    LinearCrossEntropyLoss: (linear_cross_entropy, LOSS_OPTIONS, {"bias", "num_items"}),
    LinearLogProbs: (linear_log_probs, LOG_PROBS_OPTIONS, {"bias"}),
}


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("module", MODULES)
def test_as_the_op(module: type[nn.Module], every: bool, device: str) -> None:
    op, options, _ = MODULES[module]
    options = options if every else {}
    hidden, weight, target, bias = operands(device)
    if module is LinearCrossEntropyLoss:
        options = options | {"class_weight": torch.rand(100, device=device)}
    made = module(**options)
    expected = op(hidden, weight, target, bias=bias, **options)
    torch.testing.assert_close(made(hidden, weight, target, bias=bias), expected, rtol=0, atol=0)
    assert ("class_weight" in made.state_dict()) == ("class_weight" in options)


def test_num_items_at_every_call(device: str) -> None:
    hidden, weight, target, _ = operands(device)
    module = LinearCrossEntropyLoss()
    for num_items in (10, 77):
        expected = linear_cross_entropy(hidden, weight, target, num_items=num_items)
        torch.testing.assert_close(module(hidden, weight, target, num_items=num_items), expected, rtol=0, atol=0)


@pytest.mark.parametrize("module", MODULES)
def test_takes_every_option_with_the_same_default(module: type[nn.Module]) -> None:
    """The modules have every option of their ops, with the same meaning."""
    op, _, per_call = MODULES[module]
    theirs = {p.name: p.default for p in inspect.signature(op).parameters.values() if p.kind is p.KEYWORD_ONLY}
    ours = {p.name: p.default for p in inspect.signature(module).parameters.values()}
    assert ours == {name: default for name, default in theirs.items() if name not in per_call}
    assert "softcap=5.0" in repr(module(softcap=5.0))
