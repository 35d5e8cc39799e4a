"""The modules compute what the ops compute, with the options given once."""

import inspect

import pytest
import torch
from torch import nn

from seqtile import linear_cross_entropy, linear_log_probs
from seqtile.modules import LinearCrossEntropyLoss, LinearLogProbs

LOSS_OPTIONS = {
    "ignore_index": 7,
    "reduction": "none",
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "softcap": 5.0,
    "logit_scale": 0.5,
    "accumulate_dtype": None,
    "chunk_tokens": 20,
    "return_metrics": True,
}
LOG_PROBS_OPTIONS = {
    "temperature": 0.7,
    "outputs": ("entropy", "mean_logit"),
    "to_be_summed": True,
    "ignore_index": 7,
    "softcap": 5.0,
    "logit_scale": 0.5,
    "accumulate_dtype": None,
    "chunk_tokens": 20,
}


def operands(device: str) -> tuple[torch.Tensor, ...]:
    hidden, weight, bias = (torch.randn(*shape, device=device) for shape in ((63, 32), (100, 32), (100,)))
    return hidden, weight, torch.randint(0, 100, (63,), device=device), bias


@pytest.mark.parametrize("options", [{}, LOSS_OPTIONS], ids=["defaults", "every option"])
def test_cross_entropy(options: dict, device: str) -> None:
    hidden, weight, target, bias = operands(device)
    class_weight = torch.rand(100, device=device)
    module = LinearCrossEntropyLoss(class_weight=class_weight, **options)
    ours = module(hidden, weight, target, bias=bias)
    expected = linear_cross_entropy(hidden, weight, target, bias=bias, class_weight=class_weight, **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert module.state_dict()["class_weight"].equal(class_weight)


def test_num_items_at_every_call(device: str) -> None:
    hidden, weight, target, _ = operands(device)
    module = LinearCrossEntropyLoss()
    for num_items in (10, 77):
        expected = linear_cross_entropy(hidden, weight, target, num_items=num_items)
        torch.testing.assert_close(module(hidden, weight, target, num_items=num_items), expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, LOG_PROBS_OPTIONS], ids=["defaults", "every option"])
def test_log_probs(options: dict, device: str) -> None:
    hidden, weight, target, bias = operands(device)
    ours = LinearLogProbs(**options)(hidden, weight, target, bias=bias)
    expected = linear_log_probs(hidden, weight, target, bias=bias, **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("module", "op", "per_call"),
    [
        (LinearCrossEntropyLoss, linear_cross_entropy, {"bias", "num_items"}),
        (LinearLogProbs, linear_log_probs, {"bias"}),
    ],
)
def test_takes_every_option_with_the_same_default(module: type[nn.Module], op, per_call: set[str]) -> None:
    """No option of an op is missing from its module, and none means something else there."""
    theirs = {p.name: p.default for p in inspect.signature(op).parameters.values() if p.kind is p.KEYWORD_ONLY}
    ours = {p.name: p.default for p in inspect.signature(module).parameters.values()}
    assert ours == {name: default for name, default in theirs.items() if name not in per_call}
    assert "softcap=5.0" in repr(module(softcap=5.0))
