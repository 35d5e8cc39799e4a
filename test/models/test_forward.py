"""The causal-LM forward behaves as Hugging Face's beyond the loss."""

import inspect

import pytest
import torch
from torch import nn

from models.layered import assert_equal
from seqtile.arch import ARCHS
from support.assertions import relative_error, unread
from support.tiny import CLASSES, VOCAB, batch_of, build, loss_and_gradients, tiled_copy

UNLIKE = ("*cohere*", "*gemma2*", "*qwen3_moe*")  # a scale, a cap and experts
pytestmark = [
    pytest.mark.on_gpu("what a model returns for which arguments is decided by the host", only=UNLIKE),
    pytest.mark.full("what a model returns for which arguments is decided by the same lines for all", but=UNLIKE),
]
Pair = tuple[nn.Module, nn.Module]


@pytest.fixture(scope="module", params=CLASSES)
def built(request: pytest.FixtureRequest, device: str) -> Pair:
    untiled = build(request.param, device)
    return untiled, tiled_copy(untiled)


@pytest.fixture
def pair(built: Pair) -> Pair:
    """The same model untiled and tiled, in training mode."""
    return built[0].train(), built[1].train()


def without_labels(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "labels"}


def test_training_returns_a_loss_and_logits_that_are_not_computed(pair: Pair, device: str) -> None:
    batch = batch_of(3, 101, device)
    expected, output = (model(**batch, output_hidden_states=True) for model in pair)
    assert type(output) is type(expected) and unread(output.logits)
    assert [*output] == [*expected] and output.logits.shape == expected.logits.shape
    assert relative_error(output.loss, expected.loss) <= 1e-6
    assert len(output.hidden_states) == len(expected.hidden_states)
    assert relative_error(output.hidden_states[-1], expected.hidden_states[-1]) <= 1e-5
    loss, *_ = pair[1](**batch, return_dict=False)
    assert loss.equal(output.loss)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 50}, {"ignore_index": 7}], ids=str)
def test_shift_labels(pair: Pair, options: dict, device: str) -> None:
    """Shifted labels and Hugging Face's other loss arguments keep their meaning."""
    untiled, tiled = pair
    batch = batch_of(3, 101, device)
    options["shift_labels"] = shifted = torch.randint(0, VOCAB, (3, 101), device=device)
    shifted[shifted % 5 == 0] = options.get("ignore_index", -100)
    expected = untiled(**batch, **options).loss
    assert relative_error(tiled(**batch, **options).loss, expected) <= 1e-6
    alone = tiled(**without_labels(batch), **options)
    assert relative_error(alone.loss, expected) <= 1e-6 and unread(alone.logits)


def test_eval_returns_logits(pair: Pair, device: str) -> None:
    batch = batch_of(3, 101, device)
    with torch.no_grad():
        expected, output = (model.eval()(**batch) for model in pair)
        skipped = pair[1](**batch, skip_logits=True)
    assert type(output) is type(expected) and skipped.logits is None
    assert relative_error(output.logits, expected.logits) <= 1e-5
    assert all(relative_error(found.loss, expected.loss) <= 1e-5 for found in (output, skipped))


@pytest.mark.parametrize("training", [False, True])
def test_logits_to_keep(pair: Pair, training: bool, device: str) -> None:
    batch = without_labels(batch_of(1, 101, device))
    for kept in (1, 7, torch.tensor([0, 3, 99], device=device)):
        expected, output = (model.train(training)(**batch, logits_to_keep=kept) for model in pair)
        assert output.loss is None and output.logits.shape == expected.logits.shape
        assert relative_error(output.logits, expected.logits) <= 1e-5


def test_logits_in_training_when_asked_for(pair: Pair, device: str) -> None:
    untiled, tiled = pair
    batch = batch_of(1, 101, device)
    output, expected = tiled(**batch, skip_logits=False), untiled(**batch)
    assert relative_error(output.logits, expected.logits) <= 1e-5
    assert relative_error(output.loss, expected.loss) <= 1e-5
    assert unread(tiled(**without_labels(batch)).logits)


def test_generate_with_a_cache(pair: Pair, device: str) -> None:
    prompt = torch.randint(3, VOCAB, (2, 60), device=device)  # longer than a chunk
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    theirs, ours = (model.eval().generate(prompt, **options) for model in pair)
    assert ours.equal(theirs)


def test_embeddings_and_every_argument_by_position(pair: Pair, device: str) -> None:
    untiled, tiled = pair
    batch = batch_of(1, 101, device)
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    routed = [True] if hasattr(untiled.config, "output_router_logits") else []
    expected, output = (model(ids, mask, None, None, None, labels, False, *routed, 0) for model in pair)
    assert unread(output.logits) and relative_error(output.loss, expected.loss) <= 1e-6
    kept = [model(ids, mask, None, None, None, None, False, *routed, 3).logits for model in pair]
    assert relative_error(*kept[::-1]) <= 1e-5
    with pytest.raises(TypeError, match="positional arguments"):
        tiled(ids, mask, None, None, None, labels, False, *routed, 0, 0)
    expected = untiled(**batch).loss
    embeds = untiled.get_input_embeddings()(ids).detach()
    assert relative_error(tiled(inputs_embeds=embeds, labels=labels).loss, expected) <= 1e-6
    assert relative_error(tiled(ids, mask, labels=labels).loss, expected) <= 1e-6
    assert inspect.signature(tiled.forward) == inspect.signature(untiled.forward)


def test_all_labels_ignored(pair: Pair, device: str) -> None:
    batch = batch_of(1, 101, device)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for items, expected in (({"num_items_in_batch": 5}, 0.0), ({}, torch.nan)):
        loss, gradients = loss_and_gradients(pair[1], **batch, **items)
        assert loss.allclose(torch.tensor(expected, device=device), equal_nan=True)
        assert all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def test_refusals(pair: Pair, device: str) -> None:
    tiled, batch = pair[1], batch_of(1, 101, device)
    for given in (batch | {"logits_to_keep": 3}, without_labels(batch)):
        with pytest.raises(ValueError, match="skip_logits=True asks for a loss alone"):
            tiled(**given, skip_logits=True)
    if device == "cpu":  # on a GPU the values are not read
        batch["labels"][0, 50] = VOCAB
        with pytest.raises(ValueError, match=f"target holds {VOCAB}"):
            tiled(**batch)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("usual", [False, True])
@pytest.mark.parametrize("arch", [arch for arch in CLASSES if ARCHS[arch].routed])
def test_loss_that_balances_experts(arch: str, asked: bool | None, usual: bool, device: str) -> None:
    """As Hugging Face adds it: if the call requests it, or else if the config does; also in the gradients."""
    untiled = build(arch, device, output_router_logits=usual, router_aux_loss_coef=0.7)
    tiled = tiled_copy(untiled)
    batch = batch_of(3, 101, device) | {"output_router_logits": asked}
    expected, output = untiled(**batch), tiled(**batch)
    assert (output.aux_loss is None) == (expected.aux_loss is None) == (not (usual if asked is None else asked))
    if output.aux_loss is not None:
        assert relative_error(output.aux_loss, expected.aux_loss) <= 1e-6
        theirs = output.loss - output.aux_loss * 0.7
        assert relative_error(theirs, untiled(**batch | {"output_router_logits": False}).loss) <= 1e-5
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))
