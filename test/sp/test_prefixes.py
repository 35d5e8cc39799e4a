"""Prefixes that rows share are computed once: the tree, and whole models. Attention over a tree is in
test_documents.py."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForCausalLM

import seqtile
from models.layered import small_of
from seqtile.attention import by_masks, local, segments
from seqtile.attention.backends import attend
from seqtile.attention.heads import rank_heads
from seqtile.models.model_types import model_classes, model_types
from seqtile.proof.small import small_model
from seqtile.protocols import SHARDED
from seqtile.sp.prefixes import prefix_tree
from sp import images, recurrences
from sp.attentions import INSTALLED, asked, flex_with_sinks, install
from sp.on_device import OnDevice
from sp.over_ranks import nudged
from sp.prefixes import (
    assert_as_exact,
    groups,
    padded_right,
    path_mask,
    rows_again,
    saved,
    sharing,
    step,
    tokens_of,
)
from sp.whole import generated
from support.assertions import relative_error
from support.choice import every_value
from support.measure import LiveBytes
from support.tiny import OLDEST, build, checkpointing, loss_and_gradients
from support.type_table import config_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def attentions() -> Iterator[None]:
    install()
    yield
    torch.compiler.set_stance("default")


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    """Rows over a two-word vocabulary, which share long prefixes; padding on either side."""
    rows, length = draw(st.integers(2, 6)), draw(st.integers(1, 12))
    words = st.lists(st.integers(1, 2), min_size=length, max_size=length)
    ids = torch.tensor([draw(words) for _ in range(rows)])
    for row in range(1, rows):
        other, alike = draw(st.integers(0, row - 1)), draw(st.integers(0, length))
        ids[row, :alike] = ids[other, :alike]
    mask = torch.zeros_like(ids)
    for row in range(rows):
        start = draw(st.integers(0, length - 1))
        mask[row, start : draw(st.integers(start + 1, length))] = 1
    return {"input_ids": ids, "attention_mask": mask}


def no_tree(given: dict[str, Tensor], min_tokens: int = 4) -> str:
    """Returns why a batch has no tree."""
    why = prefix_tree(given, *given["input_ids"].shape, min_tokens)
    assert isinstance(why, str), f"{why.saved} tokens are shared"
    return why


@given(batches())
def test_a_tree(batch: dict[str, Tensor]) -> None:
    """For prefixes of any length, the tree has each node of a trie once, and every row is a path in it."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    tree, nodes = prefix_tree(batch, *ids.shape, 1), tokens_of(batch)
    if isinstance(tree, str):
        assert mask.sum() == len(nodes) and tree.startswith("no two rows begin alike")
        return
    first = mask.argmax(1)
    assert len(tree.taken) == len(nodes) + (first > 0).sum() and len(nodes) == mask.sum() - tree.saved
    assert rows_again(tree, ids).where(mask > 0, 0).equal(ids * mask)
    positions = tree.flat(batch)["position_ids"][0]
    assert positions[tree.places].where(mask > 0, 0).equal(torch.arange(ids.shape[1]) * mask)
    kept = (first > 0).nonzero().squeeze(1)  # the padding before the first token of these rows
    assert tree.taken[tree.places[kept, first[kept] - 1]].equal(kept * ids.shape[1] + first[kept] - 1)
    seen = path_mask(len(nodes), tree.documents, tree.parents)
    for row in range(len(ids)):
        path = tree.places[row][mask[row] > 0]
        assert all(seen[query].nonzero().flatten().equal(path[: i + 1]) for i, query in enumerate(path))


@given(batches(), st.integers(2, 6))
def test_prefixes_that_are_too_short(batch: dict[str, Tensor], min_tokens: int) -> None:
    tree = prefix_tree(batch, *batch["input_ids"].shape, min_tokens)
    if not isinstance(tree, str):
        parents = {parent for parent in tree.parents if parent is not None}
        lengths = [tree.documents[parent][1] - tree.documents[parent][0] for parent in parents]
        assert all(length >= min_tokens for length in lengths)
        again, mask = rows_again(tree, batch["input_ids"]), batch["attention_mask"]
        assert again.where(mask > 0, 0).equal(batch["input_ids"] * mask)
        assert tree.saved >= min_tokens


def test_what_is_told_of_tokens() -> None:
    """Tokens are equal if all of the model's inputs for them and for all tokens before them are equal."""
    ids = torch.arange(1, 31).expand(3, -1).clone()
    positions = torch.arange(30).expand(3, -1).clone()

    def computed(**given: Tensor) -> int:
        return len(prefix_tree({"input_ids": ids} | given, 3, 30, 4).taken)

    assert computed() == 30
    assert computed(position_ids=positions) == 30
    assert computed(position_ids=positions + torch.tensor([[0], [0], [2]])) == 60
    assert computed(position_ids=torch.stack([positions] * 3)) == 30
    axes = torch.stack([positions] * 3)
    axes[2, 1, 10:] += 5
    assert computed(position_ids=axes) == 50
    told = torch.zeros(3, 30, 2, 5)
    assert computed(per_layer_inputs=told) == 30
    told[2, 20, 1, 3] = 1e-30
    assert computed(per_layer_inputs=told) == 40


def test_why_there_is_no_tree() -> None:
    """The message is right: after changing what it names, there is a tree."""
    ids, apart = torch.arange(1, 31).expand(3, -1).clone(), torch.arange(90).view(3, 30)
    mask, positions = torch.ones_like(ids), torch.arange(30).expand(3, -1)
    assert prefix_tree({"input_ids": ids}, 3, 30, 30).saved == 60
    assert no_tree({"input_ids": ids[:1]}) == "it has one row"
    assert no_tree({"input_ids": ids}, 31) == "its rows are shorter than that"
    assert no_tree({"input_ids": apart}) == "no two rows begin alike"
    apart[1, :3] = apart[2, :3]
    assert no_tree({"input_ids": apart}) == "the longest common beginning has 3"
    assert prefix_tree({"input_ids": apart}, 3, 30, 3).saved == 3
    padded, moved = torch.stack([ids[0].roll(shift) for shift in (0, 4, 9)]), "rows begin at different positions"
    mask = mask.where(torch.arange(30) >= torch.tensor([0, 4, 9])[:, None], 0)
    assert moved in no_tree({"input_ids": padded, "attention_mask": mask})
    told = mask.cumsum(1) - 1
    assert prefix_tree({"input_ids": padded, "attention_mask": mask, "position_ids": told}, 3, 30, 4).saved > 0
    hole = torch.ones_like(ids)
    hole[1, 7] = 0
    assert no_tree({"input_ids": ids, "attention_mask": hole}) == "a row's mask has a hole"
    assert no_tree({"input_ids": ids, "position_ids": positions % 10}).startswith("positions begin anew in a row")
    for name, value in (("attention_mask", torch.ones(3, 1, 30, 30)), ("unknown", torch.zeros(7))):
        why = f"the text model was given {name} other than one value a token"
        assert no_tree({"input_ids": ids, name: value}) == why


def test_status_says_why_nothing_was_saved() -> None:
    """For the last batch, whatever came before it."""
    model, batch = sharing(build("llama")).eval(), groups()
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    one, last = {name: value[:1] for name, value in given.items()}, "in the last batch 0 of 324 tokens were reused: "
    assert "last batch" not in str(seqtile.status(model))
    cache = model(**given, use_cache=True).past_key_values
    assert last + "use_cache=True" in str(seqtile.status(model))
    model(**given)
    assert saved(model)[0] > 0 and seqtile.status(model).prefixes.reason is None
    model(**given, output_attentions=True)
    assert last + "output_attentions=True" in str(seqtile.status(model))
    model(**one)
    assert "in the last batch 0 of 54 tokens were reused: it has one row" in str(seqtile.status(model))
    model(input_ids=batch["input_ids"][:, :1], past_key_values=cache)
    assert "0 of 6 tokens were reused: a cache was given" in str(seqtile.status(model))
    model(inputs_embeds=torch.zeros(6, 54, model.config.hidden_size, requires_grad=True))
    assert last + "inputs require a gradient, each row its own" in str(seqtile.status(model))
    seqtile.share_prefixes(model, 50)
    model(**given)
    assert last + "the longest common beginning has 46" in str(seqtile.status(model))


def test_the_gradient_of_hidden_states() -> None:
    """Only its sum is known. Without sharing it can be read, as the error says."""
    model, batch = sharing(build("llama"), options={}), groups()
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def gradient() -> Tensor:
        hidden = model.model(**given, use_cache=False).last_hidden_state
        hidden.retain_grad()
        hidden.pow(2).sum().backward()
        return hidden.grad + 0

    with pytest.raises(RuntimeError, match=r"seqtile\.restore\(model\), then seqtile\.apply_seqtile\(model\) again"):
        gradient()
    seqtile.restore(model)
    seqtile.apply_seqtile(model, check=False)
    assert gradient().shape == (6, 54, model.config.hidden_size)


OPTIONS = pytest.mark.parametrize("options", [None, {}, {"layer": True}], ids=["untiled", "tiled", "layers"])


@pytest.mark.full("of a product, each value every day", but=every_value)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@OPTIONS
@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "qwen3_moe", "gemma2"])
def test_a_step(arch: str, options: dict | None, left: bool, reentrant: bool | None) -> None:
    """Loss and gradients, as exact as those of the unchanged batch."""
    plain, batch = build(arch, attn_implementation="eager" if arch == "gemma2" else "sdpa"), groups(left=left)
    if arch == "qwen3_moe":
        plain.set_experts_implementation("eager")  # the grouped product does not support float64
    # Hugging Face's eager attention computes softmax in float32, where float64's smallest number is -inf: NaN for
    # padding
    if arch == "gemma2":
        batch["labels"][3:, 9] = -100  # which padding on the right does not predict
    truth = step(copy.deepcopy(plain).double(), padded_right(batch) if arch == "gemma2" else batch)
    ours = sharing(plain, options=options)
    for model in (plain, ours):
        checkpointing(model, reentrant)
    assert_as_exact(step(ours, batch), step(plain, batch), truth)
    by_rows = arch == "gemma2" and left  # eager attention
    assert saved(ours)[0] == (0 if by_rows else batch["attention_mask"].sum() - len(tokens_of(batch)))


def of_kolibri1(cases: list[dict]) -> list[int]:
    """Not by its name in the mark: transformers 5.17 does not know it."""
    return [i for i, case in enumerate(cases) if case["model_type"] == "kolibri1"]


REFUSED_WITH_A_BATCH = {"moshi": "a window of 16 is not passed on to attention|no layout came with the tokens"}
if OLDEST:  # its recurrence gets no keyword arguments
    REFUSED_WITH_A_BATCH["nemotron_h"] = "1 of 2 layers attended over the whole sequence; leave it whole"


@pytest.mark.full("a second each", but=of_kolibri1)
@pytest.mark.parametrize("model_type", model_types())
def test_whole_layers_in_reentrant_checkpoints(model_type: str) -> None:
    try:
        plain = small_of(model_type).train()
    except Exception as error:
        pytest.skip(f"cannot be built small: {error}")
    ours, batch = copy.deepcopy(plain), groups()
    try:
        seqtile.share_prefixes(ours, min_tokens=10)
        seqtile.apply_seqtile(ours, layer=True, chunk_tokens=50)
        for model in (plain, ours):
            checkpointing(model, True)
        loss, gradients = loss_and_gradients(plain, **batch)
    except Exception as error:
        pytest.skip(f"refused, or not trained untiled either: {error}")
    if (refusal := REFUSED_WITH_A_BATCH.get(model_type)) is not None:
        with pytest.raises(ValueError, match=refusal):
            loss_and_gradients(ours, **batch)
        return
    found, of_ours = loss_and_gradients(ours, **batch)
    assert relative_error(found, loss) <= 1e-5
    assert saved(ours)[0] > 0 or model_type != "kolibri1"  # some types compute each row by itself
    largest = max(gradient.norm() for gradient in gradients.values() if gradient is not None)
    for name, gradient in gradients.items():  # of some, such as keys' biases, it is zero
        assert gradient is None or (of_ours[name] - gradient).norm() <= 1e-4 * largest, name


@pytest.mark.full("a few seconds each", but=("qwen3_next", "mamba2", "gpt_oss", "kimi_linear"))
@pytest.mark.parametrize("family", recurrences.FAMILIES)
def test_families(family: str) -> None:
    """Recurrences, convolutions, sinks and latent attention."""
    if OLDEST and family in recurrences.REFUSED_OF_OLDEST:
        pytest.skip("transformers 5.16 has no such type, or does not pass keyword arguments to its recurrences")
    plain, batch = recurrences.build(family), groups()
    loss, gradients = loss_and_gradients(plain, **batch)
    ours = sharing(plain)
    found, of_ours = loss_and_gradients(ours, **batch)
    assert relative_error(found, loss) <= 1e-5
    errors = {name: relative_error(of_ours[name], gradient) for name, gradient in gradients.items()}
    if max(errors.values()) > 1e-5:  # decays are sensitive; chunks start where documents do
        least = nudged(plain, partial(loss_and_gradients, **batch), gradients)
        floor = 1e-6 * max(gradient.norm() for gradient in gradients.values())
        allowed = {name: max(1e-5, 4 * least[name], float(floor / each.norm())) for name, each in gradients.items()}
        worst = {name: (error, allowed[name]) for name, error in errors.items() if error > allowed[name]}
        assert not worst, worst
    assert saved(ours)[0] == batch["attention_mask"].sum() - len(tokens_of(batch))


FORMS = {  # model, and which attentions support it
    "plain": (lambda: build("qwen2"), INSTALLED),
    "window": (lambda: build("mistral", sliding_window=20), INSTALLED),
    "soft cap": (lambda: build("gemma2", sliding_window=20), ("eager", "flash_attention_3", "flex_attention")),
    "sinks": (lambda: recurrences.build("gpt_oss"), ("eager", "flash_attention_3", "flex_attention")),
}


@pytest.mark.parametrize("implementation", INSTALLED)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's windows, soft caps and sinks, or a refusal by name."""
    made, having = FORMS[form]
    plain, batch = made(), groups()
    plain.config._attn_implementation = "eager"
    expected = step(plain, batch)
    plain.config._attn_implementation = implementation
    ours = sharing(plain)
    if form == "sinks" and implementation == "flex_attention":
        monkeypatch.setitem(local.ALL_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", flex_with_sinks)
    if implementation not in having:
        with pytest.raises(ValueError, match=r"sdpa has no (soft cap of scores|sinks), which this model needs"):
            step(ours, batch)
        return
    for mine, theirs in zip(step(ours, batch), expected, strict=True):
        assert relative_error(mine, theirs) <= 1e-4
    assert saved(ours)[0] > 0


def preference_loss(model: nn.Module, batch: dict[str, Tensor], reference: nn.Module) -> Tensor:
    """Like DPO's: two forwards with different batches, and one of a reference model, before the backward."""
    halves = [{name: value[half] for name, value in batch.items()} for half in (slice(0, 3), slice(3, 6))]

    def log_probs(each: nn.Module, half: dict[str, Tensor]) -> Tensor:
        logits = each(input_ids=half["input_ids"], attention_mask=half["attention_mask"], use_cache=False).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(2, half["labels"][:, 1:, None].clamp(min=0))[..., 0]
        return (chosen * (half["labels"][:, 1:] >= 0)).sum(1)

    ours = [log_probs(model, half) for half in halves]
    with torch.no_grad():
        theirs = [log_probs(reference, half) for half in halves]
    margins = (ours[0] - theirs[0]) - (ours[1] - theirs[1])
    return -nn.functional.logsigmoid(0.1 * margins).mean()


@OPTIONS
def test_forwards_before_a_backward(options: dict | None) -> None:
    """Each has its own tree, and so does a checkpoint's recomputation."""
    plain, reference, batch = build("llama"), build("llama"), groups()
    ours = sharing(plain, options=options)
    for model in (plain, ours):
        checkpointing(model, False)
    expected = step(plain, batch, lambda model, batch: preference_loss(model, batch, reference))
    shared = sharing(reference)
    found = step(ours, batch, lambda model, batch: preference_loss(model, batch, shared))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def with_images(model_type: str, other: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A row with two images twice, with different ends; `other`: the second row's second image differs."""
    model, batch = images.made(model_type)
    ids = batch["input_ids"][:1].repeat(2, 1)
    ids[:, -9:] = torch.arange(20, 29)  # random tokens would begin alike by chance
    ids[1, -9:] = ids[1, -9:].roll(1)
    patches = [4 * 8, 8 * 4]
    pixels = batch["pixel_values"][: sum(patches)]
    second = pixels.clone()
    if other:
        second[patches[0] :] += 1
    given = {"input_ids": ids, "labels": ids.masked_fill(ids < 10, -100), "pixel_values": torch.cat([pixels, second])}
    given["image_grid_thw"] = batch["image_grid_thw"][:2].repeat(2, 1)
    return model, given | {"mm_token_type_ids": (ids == images.IMAGE).long()}


@pytest.mark.full("a second each", but=("*-qwen2_5_vl", "same-qwen3_vl"))
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
@pytest.mark.parametrize("other", [False, True], ids=["same", "other"])
def test_images(model_type: str, other: bool) -> None:
    """Images are shared if their features are the same; the vision tower is trained."""
    if OLDEST and model_type in recurrences.REFUSED_OF_OLDEST:
        pytest.skip("its recurrences do not get the keyword arguments")
    plain, batch = with_images(model_type, other)
    ours = copy.deepcopy(plain)
    seqtile.share_prefixes(ours, 4)
    for mine, theirs in zip(step(ours, batch), step(plain, batch), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()) + 1e-6)
    why = "the text model was given deepstack_visual_embeds other than one value a token"
    found, by_rows = seqtile.status(ours).prefixes, model_type == "qwen3_vl"
    assert found.batch_tokens == 90 and found.reason == (why if by_rows else None)
    assert found.saved_tokens == (0 if by_rows else 20 if other else 36)


def test_values_of_tokens() -> None:
    """Logits, hidden states and router logits of all rows, however they are read; their gradients."""
    plain, batch = build("qwen3_moe"), groups()
    ours, inside = sharing(plain), batch["attention_mask"].bool()
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    asked_for = dict(output_hidden_states=True, output_router_logits=True, use_cache=False)
    mine, theirs = (model(**given, **asked_for) for model in (ours, plain))
    for a, b in zip((mine.logits, *mine.hidden_states), (theirs.logits, *theirs.hidden_states), strict=True):
        torch.testing.assert_close(a[inside] + 0, b[inside], rtol=1e-4, atol=1e-5)
    for a, b in zip(mine.router_logits, theirs.router_logits, strict=True):
        torch.testing.assert_close(a[inside.flatten()] + 0, b[inside.flatten()], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.aux_loss, theirs.aux_loss)
    for output in (mine, theirs):
        read = output.logits[inside].pow(2).mean() + output.hidden_states[1][:, 3:7].sin().mean()
        (read + output.aux_loss).backward()
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or relative_error(a.grad, b.grad) <= 1e-5), name


PADDED = {  # the first token of each row
    "none": (0,) * 6,
    "equal": (7,) * 6,
    "of each prompt": (4, 4, 4, 9, 9, 9),
    "unequal": (0, 5, 5, 5, 8, 1),
}


@pytest.mark.parametrize("told", ["mask", "positions", "both"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_labels_of_all_tokens(implementation: str, told: str) -> None:
    """A shifted loss predicts a row's first token from the padding before it, which is as without sharing."""
    plain = build("llama", attn_implementation=implementation)
    ours = sharing(plain)
    for name, starts in PADDED.items():
        for first_is_masked in (False, True):
            batch = groups()
            first, place = torch.tensor(starts)[:, None], torch.arange(54)
            batch["attention_mask"] *= place >= first
            mask = batch["attention_mask"] > 0
            batch["labels"] = batch["input_ids"].where(mask & (place >= first + first_is_masked), -100)
            if told != "mask":
                batch["position_ids"] = (place - first).where(place >= first, place)
            if told == "positions":
                del batch["attention_mask"]
            shares = told != "positions" or name == "none"
            shares &= implementation == "sdpa" or name == "none"
            for mine, theirs in zip(step(ours, batch), step(plain, batch), strict=True):
                assert relative_error(mine, theirs) <= 1e-5, (name, first_is_masked)
            assert (saved(ours)[0] > 0) == shares, (name, seqtile.status(ours).prefixes)


def test_another_attention_afterwards() -> None:
    """One chosen with set_attn_implementation computes the next forward, and stays after `restore`. sdpa and eager
    attention give padding other values, which these labels read."""
    plain, batch = build("llama"), groups(left=True)
    ours = sharing(plain)
    for name in ("eager", "sdpa", "flex_attention", "eager"):
        expected = copy.deepcopy(plain)
        expected.set_attn_implementation("sdpa" if name == "flex_attention" else name)  # which has no backward on a CPU
        for model in (ours, ours.model) if name == "sdpa" else (ours,):
            model.set_attn_implementation(name)
            for mine, theirs in zip(step(ours, batch), step(expected, batch), strict=True):
                assert relative_error(mine, theirs) <= 1e-5, name
            assert (saved(ours)[0] > 0) == (name != "eager")
    ours.set_attn_implementation("sdpa")
    seqtile.restore(ours)
    assert ours.config._attn_implementation == "sdpa"
    seqtile.share_prefixes(ours, 4)
    ours.config._attn_implementation = "of squares"
    with pytest.raises(ValueError, match="'of squares' has no mask function"):
        step(ours, batch)
    ours.set_attn_implementation("sdpa")
    assert step(ours, batch)[0].isfinite() and saved(ours)[0] > 0


def test_undone() -> None:
    plain, batch = build("llama"), groups()
    ours = sharing(plain)
    name, forward = plain.config._attn_implementation, ours.forward
    step(ours, batch)
    seqtile.restore(ours)
    assert SHARDED not in vars(ours) and ours.config._attn_implementation == name and ours.forward == forward
    for mine, theirs in zip(step(ours, batch), step(plain, batch), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
@pytest.mark.parametrize("implementation", INSTALLED)
def test_nothing_shared(implementation: str, reentrant: bool | None) -> None:
    """Batches without common prefixes, caches, generation: bitwise as without sharing, by the same functions."""
    plain, batch = build("llama"), groups()
    plain.config._attn_implementation = implementation
    ours = sharing(plain, min_tokens=50)
    for model in (plain, ours):
        checkpointing(model, reentrant)
    for mine, theirs in zip(step(ours, batch), step(plain, batch), strict=True):
        assert mine.equal(theirs)
    assert saved(ours) == (0, batch["input_ids"].numel())
    if implementation == "flash_attention_3":
        return  # its function for rows without padding has no stand-in
    generated(ours, plain, batch["input_ids"][:2, :45])


def test_flop() -> None:
    """Outside attention proportional to the tree's tokens."""
    plain, batch = build("llama"), groups(prompts=1, rows=4, shared=64, own=8)
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    inputs["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    ours = sharing(plain)
    counts = []
    for model in (plain, ours):
        with FlopCounterMode(display=False) as counter:
            model.model(**inputs).last_hidden_state.detach()
        found = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        counts.append({name: count for name, count in found.items() if "attention" not in name})
    tokens, of_tree = batch["input_ids"].numel(), batch["input_ids"].numel() - saved(ours)[0]
    assert of_tree < tokens / 2
    assert {name: count * of_tree // tokens for name, count in counts[0].items()} == counts[1]


def test_one_wait() -> None:
    """The device of the ids finds prefixes: one copy to the host has all results."""
    batch, OnDevice.waits = groups(left=True), 0
    given = {name: batch[name].as_subclass(OnDevice) for name in ("input_ids", "attention_mask")}
    assert not isinstance(prefix_tree(given, 6, 54, 4), str) and OnDevice.waits == 1


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_what_is_done_where_nothing_is_shared() -> None:
    """One comparison, however many layers there are, and none for a single row."""
    more = []
    for layers in (1, 3):
        plain, batch = build("llama", num_hidden_layers=layers), groups()
        ours, counts = sharing(plain, min_tokens=50), []
        for rows in (6, 1):
            for model in (plain, ours):
                with Operators() as operators:
                    model(**{name: value[:rows] for name, value in batch.items()}, use_cache=False)
                counts.append(operators.count)
        assert counts[2] == counts[3]
        more.append(counts[1] - counts[0])
    assert more[0] == more[1] <= 100


@pytest.mark.full("8 s; eager's masks are made as sdpa's", but=("sdpa", "flash_attention_3"))
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_3"])
def test_live_bytes_of_attention(implementation: str) -> None:
    """One more row costs its own tokens, not its whole path: keys and values of one path are gathered at a time, for
    flash attention as many as the tree has."""
    shared, own, width, peaks = 1024, 16, 32, []
    for rows in (8, 24):
        ends = [0, shared, *(shared + own * (row + 1) for row in range(rows))]
        documents, length = tuple(pairwise(ends)), ends[-1]
        q, k, v = (torch.randn(1, 1, length, width, dtype=torch.float64, requires_grad=True) for _ in range(3))
        asking = asked(implementation, (documents,), length, rank_heads(0, 1, 1, 1, ((0, length),)), None)
        asking.layout.parents = (None, *[0] * rows)
        with pytest.MonkeyPatch.context() as patch, LiveBytes() as memory:
            patch.setattr(segments, "MASK_ELEMENTS", 2**12)
            attend(asking, q, k, v).sum().backward()
        peaks.append(memory.peak)
    tokens, path = 16 * own, shared + own
    kept = 8 * width * tokens * 16  # q, k, v, outputs, their gradients, and sums
    assert peaks[1] - peaks[0] <= kept
    assert peaks[1] < 2 * 8 * width * path * 24 or implementation == "flash_attention_3", "less than all paths' keys"


@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_3"])
def test_gradients_of_shared_keys_add_up_in_float32(implementation: str) -> None:
    """In bfloat16, for a prefix that a hundred rows share: off by at most a few roundings."""
    rows, shared, own = 100, 8, 4
    ends = [0, shared, *(shared + own * (row + 1) for row in range(rows))]
    documents, parents = tuple(pairwise(ends)), (None, *[0] * rows)
    q, k, v = (torch.randn(1, 2, ends[-1], 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    asking = asked(implementation, (documents,), ends[-1], rank_heads(0, 1, 2, 2, ((0, ends[-1]),)), None, dropout=0.0)
    asking.layout.parents = parents
    upstream = torch.rand(1, ends[-1], 2, 16).bfloat16()  # of one sign: sums grow
    ours = torch.autograd.grad(attend(asking, q, k, v), v, upstream)[0][:, :, :shared]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask = path_mask(ends[-1], documents, parents)
    truth = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask).transpose(1, 2)
    expected = torch.autograd.grad(truth, wide[2], upstream.double())[0][:, :, :shared]
    assert relative_error(ours, expected) <= 2**-8


def of_model(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


def of_teacher(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Hidden states with those of a teacher that also shares prefixes, per token and as a mean."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = model.model(**given, use_cache=False).last_hidden_state
    counts, weight, head = batch["labels"] != -100, model.lm_head.weight, model.lm_head.weight.detach() * 0.5
    options = dict(mask=counts, chunk_tokens=16)
    each = seqtile.linear_divergence(hidden, weight, hidden.detach(), head, reduction="none", **options)
    return each.square().sum() + seqtile.linear_divergence(hidden, weight, hidden.detach(), head, **options)


@pytest.mark.parametrize("loss", [of_model, of_teacher])
def test_labelled_rows_alone(loss: Callable) -> None:
    """A loss of completions allocates no tensor as large as the batch's hidden states."""
    plain, batch = build("llama"), groups(prompts=1, rows=6, shared=100, own=14)
    ours = sharing(plain, options={})
    expected, found = step(plain, batch, loss), step(ours, batch, loss)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) <= 1e-5
    with LiveBytes() as memory:
        loss(ours, batch).backward()
    assert memory.largest < 4 * batch["input_ids"].numel() * plain.config.hidden_size


def test_masks_that_a_gpu_needs_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU sdpa gets causality aligned at the last key instead of a mask of queries x keys; here torch creates the
    mask."""
    plain, batch = build("llama"), groups()
    expected, kinds = step(plain, batch), set()
    monkeypatch.setattr(by_masks, "is_causal_from_the_end", lambda q, block, reach: block.is_causal(reach))
    compute = local.LocalAttention.compute

    def seen(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **others: Any) -> Tensor:
        kinds.add(type(mask))
        return compute(self, q, k, v, mask, **others)

    monkeypatch.setattr(local.LocalAttention, "compute", seen)
    for mine, theirs in zip(step(sharing(plain), batch), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert kinds == {type(None), CausalBias}


def test_refused() -> None:
    model = build("llama")
    for wrong in (0, 2.5):
        with pytest.raises(ValueError, match=f"min_tokens is {wrong}, expected"):
            seqtile.share_prefixes(model, wrong)
    model.config._attn_implementation = "of squares"
    with pytest.raises(ValueError, match="has no mask function"):
        seqtile.share_prefixes(model)
    assert SHARDED not in vars(model)
    with pytest.raises(TypeError, match="expected a Hugging Face model"):
        seqtile.share_prefixes(nn.Linear(3, 3))
    # A decoder that would number the one row's tokens by their order in it.
    bart = BartForCausalLM(BartConfig(vocab_size=99, d_model=16, decoder_layers=1, decoder_attention_heads=2))
    with pytest.raises(ValueError, match="makes its own position_ids"):
        seqtile.share_prefixes(bart)
    for model_type, named in (
        ("doge", "DogeModel has masks that"),
        ("mllama", "MllamaForCausalLM has cross-attention"),
        ("stablelm", "StableLmModel passes no keyword arguments on to its attention"),
    ):
        model = small_model(model_classes(model_type)[0], config_of(model_type))
        with pytest.raises(ValueError, match=named):
            seqtile.share_prefixes(model)
        assert SHARDED not in vars(model)


@pytest.mark.parametrize("moved", [False, True], ids=["leaf", "moved"])
def test_embeddings_that_want_a_gradient(moved: bool) -> None:
    """Each row needs its own gradient, so nothing is shared. `moved`: by as much as a leaf holds, initially zero."""
    plain, batch = build("llama"), groups()
    ours, found = sharing(plain), []
    for model in (plain, ours):
        embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
        leaf = (torch.zeros_like(embeds) if moved else embeds).requires_grad_()
        given = {name: batch[name] for name in ("attention_mask", "labels")}
        model(inputs_embeds=embeds + leaf if moved else leaf, use_cache=False, **given).loss.backward()
        found.append(leaf.grad)
    assert found[0].equal(found[1]) and saved(ours)[0] == 0
    with torch.no_grad():
        embeds = plain.get_input_embeddings()(batch["input_ids"])
        ours(inputs_embeds=embeds, attention_mask=batch["attention_mask"], use_cache=False)
    assert saved(ours)[0] > 0
