"""What the causal-LM forward promises besides the loss: to behave as Hugging Face's."""

import copy
import inspect

import pytest
import torch

import seqtile
from seqtile.arch import ARCHS
from support.assertions import relative_error
from support.tiny import CHUNK, CLASSES, VOCAB, batch_of, build, loss_and_gradients

pytestmark = pytest.mark.on_gpu(
    "what a model returns for which arguments is decided by the host; with a scale, a cap and experts",
    only=("*cohere*", "*gemma2*", "*qwen3_moe*"),
)


@pytest.fixture(params=CLASSES)
def pair(request: pytest.FixtureRequest, device: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same model untiled and tiled."""
    untiled = build(request.param, device)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    return untiled, tiled


def test_training_returns_a_loss_and_no_logits(pair, device: str) -> None:
    untiled, tiled = pair
    batch = batch_of(3, 101, device)
    output = tiled(**batch, output_hidden_states=True)
    expected = untiled(**batch, output_hidden_states=True)
    assert type(output) is type(expected) and output.logits is None
    assert [name for name in output] == [name for name in expected if name != "logits"]
    assert relative_error(output.loss, expected.loss) <= 1e-6
    assert len(output.hidden_states) == len(expected.hidden_states)
    assert relative_error(output.hidden_states[-1], expected.hidden_states[-1]) <= 1e-5
    loss, *_ = tiled(**batch, return_dict=False)
    assert loss.equal(output.loss)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 50}, {"ignore_index": 7}], ids=str)
def test_shift_labels(pair, options: dict, device: str) -> None:
    """Labels that are shifted already, and Hugging Face's other loss arguments, mean what they mean there."""
    untiled, tiled = pair
    batch = batch_of(3, 101, device)
    shifted = torch.randint(0, VOCAB, (3, 101), device=device)
    shifted[shifted % 5 == 0] = options.get("ignore_index", -100)
    expected = untiled(**batch, shift_labels=shifted, **options).loss
    assert relative_error(tiled(**batch, shift_labels=shifted, **options).loss, expected) <= 1e-6
    del batch["labels"]
    alone = tiled(**batch, shift_labels=shifted, **options)
    assert relative_error(alone.loss, expected) <= 1e-6 and alone.logits is None


def test_eval_returns_logits(pair, device: str) -> None:
    untiled, tiled = (model.eval() for model in pair)
    batch = batch_of(3, 101, device)
    with torch.no_grad():
        output, expected = tiled(**batch), untiled(**batch)
        assert type(output) is type(expected)
        assert relative_error(output.logits, expected.logits) <= 1e-5
        assert relative_error(output.loss, expected.loss) <= 1e-5
        skipped = tiled(**batch, skip_logits=True)
        assert skipped.logits is None and relative_error(skipped.loss, expected.loss) <= 1e-5


@pytest.mark.parametrize("logits_to_keep", [1, 7, torch.tensor([0, 3, 99])], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_logits_to_keep(pair, training: bool, logits_to_keep, device: str) -> None:
    untiled, tiled = (model.train(training) for model in pair)
    batch = batch_of(1, 101, device)
    del batch["labels"]
    if isinstance(logits_to_keep, torch.Tensor):
        logits_to_keep = logits_to_keep.to(device)
    output = tiled(**batch, logits_to_keep=logits_to_keep)
    expected = untiled(**batch, logits_to_keep=logits_to_keep)
    assert output.loss is None and output.logits.shape == expected.logits.shape
    assert relative_error(output.logits, expected.logits) <= 1e-5


def test_logits_in_training_when_asked_for(pair, device: str) -> None:
    untiled, tiled = pair
    batch = batch_of(1, 101, device)
    output, expected = tiled(**batch, skip_logits=False), untiled(**batch)
    assert relative_error(output.logits, expected.logits) <= 1e-5
    assert relative_error(output.loss, expected.loss) <= 1e-5
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    assert tiled(**unlabelled).logits is not None


def test_generate_with_a_cache(pair, device: str) -> None:
    untiled, tiled = (model.eval() for model in pair)
    prompt = torch.randint(3, VOCAB, (2, 60), device=device)  # longer than a chunk
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert tiled.generate(prompt, **options).equal(untiled.generate(prompt, **options))


def test_inputs_embeds_and_positional_arguments(pair, device: str) -> None:
    untiled, tiled = pair
    batch = batch_of(1, 101, device)
    embeds = untiled.get_input_embeddings()(batch["input_ids"]).detach()
    expected = untiled(**batch).loss
    assert relative_error(tiled(inputs_embeds=embeds, labels=batch["labels"]).loss, expected) <= 1e-6
    assert (
        relative_error(tiled(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss, expected)
        <= 1e-6
    )


def test_every_argument_by_position(pair, device: str) -> None:
    untiled, tiled = pair
    batch = batch_of(1, 101, device)
    first = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"], False)
    later = (*([True] if hasattr(untiled.config, "output_router_logits") else []), 0)
    expected, output = untiled(*first, *later), tiled(*first, *later)
    assert output.logits is None and relative_error(output.loss, expected.loss) <= 1e-6
    kept = (*later[:-1], 3)
    unlabelled = (*first[:5], None, False)
    assert relative_error(tiled(*unlabelled, *kept).logits, untiled(*unlabelled, *kept).logits) <= 1e-5
    with pytest.raises(TypeError, match="positional arguments"):
        tiled(*first, *later, 0)


def test_signature_is_kept(pair) -> None:
    untiled, tiled = pair
    assert inspect.signature(tiled.forward) == inspect.signature(untiled.forward)


def test_all_labels_ignored(pair, device: str) -> None:
    _, tiled = pair
    batch = batch_of(1, 101, device)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss, gradients = loss_and_gradients(tiled, **batch, num_items_in_batch=5)
    assert loss == 0 and all(gradient.count_nonzero() == 0 for gradient in gradients.values())
    loss, gradients = loss_and_gradients(tiled, **batch)
    assert loss.isnan() and all(gradient.count_nonzero() == 0 for gradient in gradients.values())


def test_skip_logits_without_labels(pair, device: str) -> None:
    _, tiled = pair
    batch = batch_of(1, 101, device)
    with pytest.raises(ValueError, match="skip_logits=True asks for a loss alone"):
        tiled(**batch, skip_logits=True, logits_to_keep=3)
    del batch["labels"]
    with pytest.raises(ValueError, match="skip_logits=True asks for a loss alone"):
        tiled(**batch, skip_logits=True)


def test_labels_out_of_range(pair) -> None:
    _, tiled = pair
    batch = batch_of(1, 101)
    batch["labels"][0, 50] = VOCAB
    with pytest.raises(ValueError, match=f"target holds {VOCAB}"):
        tiled.cpu()(**batch)


@pytest.mark.parametrize("arch", [arch for arch in CLASSES if ARCHS[arch].routed])
@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("usual", [False, True])
def test_loss_that_balances_experts(arch: str, asked: bool | None, usual: bool, device: str) -> None:
    """As Hugging Face adds it: where the call asks for it, or if the call says nothing the config; in the gradients."""
    untiled = build(arch, device, output_router_logits=usual, router_aux_loss_coef=0.7)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK)
    batch = batch_of(3, 101, device) | {"output_router_logits": asked}
    expected, output = untiled(**batch), tiled(**batch)
    assert relative_error(output.loss, expected.loss) <= 1e-6
    assert (output.aux_loss is None) == (expected.aux_loss is None) == (not (usual if asked is None else asked))
    if output.aux_loss is not None:
        assert relative_error(output.aux_loss, expected.aux_loss) <= 1e-6
        theirs = output.loss - output.aux_loss * 0.7
        assert relative_error(theirs, untiled(**batch | {"output_router_logits": False}).loss) <= 1e-5
    (_, theirs), (_, ours) = loss_and_gradients(untiled, **batch), loss_and_gradients(tiled, **batch)
    for name, gradient in theirs.items():
        assert relative_error(ours[name], gradient) <= 1e-5, name
