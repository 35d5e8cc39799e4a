"""A recipe of logits records the operations on them, for the loss or for code that reads them in the forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BartConfig, BartForCausalLM, BertConfig, BertLMHeadModel

from seqtile.models.forward.loss import head_verdict
from seqtile.models.logits.recipe import LogitsRecipe
from seqtile.proof import findings
from seqtile.proof.difference import difference
from seqtile.proof.small import small_model
from support.assertions import unread
from support.tiny import tiled_copy

V, D = 11, 8
STEPS = {
    "plain": lambda x: x,
    "scaled": lambda x: x * 0.3 / 2,
    "capped": lambda x: torch.tanh(x / 5) * 5,
    "biased, then scaled": lambda x: (x + torch.arange(V).float()) * 0.5,
    "scaled, biased, cast, cut": lambda x: (2 * x + torch.ones(1, V)).float()[:, 1:].contiguous(),
    "flattened": lambda x: x.view(-1, V),
    "scaled by name": lambda x: torch.mul(input=x, other=2.0),
    "divided by name": lambda x: torch.div(input=x, other=3),
    "biased by name": lambda x: torch.add(input=x, other=torch.arange(V).float()),
    "capped by name": lambda x: torch.tanh(input=x / 5) * 5,
    "reshaped by name": lambda x: torch.reshape(input=x, shape=(-1, V)),
    "viewed by name": lambda x: x.view(size=(-1, V)),
    "flattened by name": lambda x: torch.flatten(input=x, start_dim=0, end_dim=1),
    "split by name": lambda x: torch.split(tensor=x, split_size_or_sections=2, dim=1)[1],
    "split by a method": lambda x: x.split(split_size=2, dim=1)[0],
    "unbound by name": lambda x: torch.unbind(input=x, dim=0)[1],
    "cast by name": lambda x: x.to(dtype=torch.float64).to(dtype=torch.float32),
}
OTHER = {
    "capped twice": lambda x: (x / 5).tanh().tanh(),
    "capped, then biased": lambda x: torch.tanh(x / 5) * 5 + torch.ones(V),
    "a cap of another height": lambda x: torch.tanh(x / 5) * -5,
}
READS = (
    lambda x: x.argmax(-1),
    lambda x: x[..., 3],
    lambda x: x.transpose(1, 2),
    lambda x: torch.softmax(x, -1),
    lambda x: x + torch.ones(2, 5, 1),
    lambda x: x @ torch.ones(V, 2),
    lambda x: -x,
    lambda x: torch.cat([x, x]),
    lambda x: torch.cat(tensors=[x, x]),
    lambda x: torch.softmax(input=x, dim=-1),
    lambda x: F.log_softmax(input=x, dim=-1, dtype=torch.float64),
    lambda x: torch.argmax(input=x, dim=-1),
    lambda x: torch.add(input=x, other=torch.ones(V), alpha=2),
    lambda x: torch.div(input=x, other=3, rounding_mode="floor"),
    lambda x: torch.where(condition=torch.ones(V) > 0, input=x, other=0.0),
    lambda x: x.float(memory_format=torch.contiguous_format),
    lambda x: x.contiguous(memory_format=torch.contiguous_format),
)


def recipe_and_real() -> tuple[LogitsRecipe, torch.Tensor]:
    hidden, head = torch.randn(2, 5, D), nn.Linear(D, V)
    return LogitsRecipe(hidden, head, head_verdict(head)), head(hidden)


@pytest.mark.parametrize("name", STEPS)
def test_what_was_done(name: str) -> None:
    recipe, real = recipe_and_real()
    changed, expected = STEPS[name](recipe), STEPS[name](real)
    assert isinstance(changed, LogitsRecipe) and changed.shape == expected.shape and recipe._real is None
    torch.testing.assert_close(changed.real("a test"), expected)
    scale, added, softcap = changed.affine
    logits = changed.head(changed.hidden) * scale + sum(added)
    torch.testing.assert_close(logits if softcap is None else softcap * torch.tanh(logits / softcap), expected)


@pytest.mark.parametrize("name", OTHER)
def test_what_no_loss_knows(name: str) -> None:
    recipe, real = recipe_and_real()
    changed = OTHER[name](recipe)
    if isinstance(changed, LogitsRecipe):
        assert changed.affine is None
        changed = changed.real("a test")
    torch.testing.assert_close(changed, OTHER[name](real))


def test_who_reads_them() -> None:
    recipe, real = recipe_and_real()
    for read in READS:
        found = read(recipe)
        torch.testing.assert_close(found.real("a test") if isinstance(found, LogitsRecipe) else found, read(real))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_handed_over(reduction: str, label_smoothing: float) -> None:
    recipe, real = recipe_and_real()
    calls: list[tuple] = []

    def ours(logits: LogitsRecipe, target: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append((args, kwargs))
        return NotImplemented if kwargs["reduction"] == "none" else torch.tensor(7.0)

    recipe.cross_entropy = ours
    target = torch.randint(V, (10,))
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    found = F.cross_entropy((recipe * 2).view(-1, V), target, **options)
    assert len(calls) == 1
    expected = F.cross_entropy((real * 2).view(-1, V), target, **options) if reduction == "none" else torch.tensor(7.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("model_class", "config"), [(BartForCausalLM, BartConfig()), (BertLMHeadModel, BertConfig(is_decoder=True))]
)
def test_a_loss_that_the_forward_computes_itself(model_class: type, config: object) -> None:
    model = small_model(model_class, config)
    tiled = tiled_copy(model, mlp=False, chunk_tokens=findings.CHUNK, check=False)
    plain, nudged = findings.gradients_of(model), findings.gradients_of(model, nudge=findings.EPS)
    assert difference(plain, findings.gradients_of(tiled), nudged, findings.EPS) is None
    ids = torch.randint(5, 100, (1, 50))
    assert unread(tiled(input_ids=ids, labels=ids).logits), "it is tiled"
