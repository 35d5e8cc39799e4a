"""Batches whose rows share prefixes, and a step of a model that computes prefixes once, against one that does not."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import seqtile
from seqtile import sp
from seqtile.attention.heads import Rows
from seqtile.protocols import SHARDED
from seqtile.sp.prefixes import PrefixTree
from sp import recurrences
from sp.attentions import install
from sp.over_ranks import Traffic, assert_same_gradients, by_first_rank, context
from sp.whole import own_loss
from support.assertions import relative_error
from support.tiny import build, checkpointing, loss_and_gradients

VOCAB = 120
Batch = dict[str, Tensor]


def groups(prompts: int = 2, rows: int = 3, shared: int = 40, own: int = 14, left: bool = False) -> Batch:
    """Rows of several prompts with completions of unequal lengths, one pair of which shares 6 more tokens. Padding
    after completions and, if `left`, before every second prompt's rows; all tokens then have labels, so that padding
    predicts the first."""
    ids = torch.randint(5, VOCAB, (prompts * rows, shared + own))
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, : 0 if left else shared] = -100
    ids[:, 0] = ids[:, shared] = ids[:, shared + 6] = torch.randperm(VOCAB - 5)[: len(ids)] + 5  # which part rows
    for first in range(0, len(ids), rows):
        ids[first : first + rows, :shared] = ids[first, :shared].clone()
        if left and first % (2 * rows):
            mask[first : first + rows, :9] = 0
            labels[first : first + rows, :9] = -100
    ids[1, shared : shared + 6] = ids[0, shared : shared + 6]
    for row in range(len(ids)):
        if cut := 3 * (row % 4):
            mask[row, -cut:], labels[row, -cut:] = 0, -100
    labels = labels.where(labels < 0, ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def padded_right(batch: Batch) -> Batch:
    """The same rows with the padding on the left moved to the right."""
    shifts = [int(mask.long().argmax()) for mask in batch["attention_mask"]]
    return {
        name: torch.stack([row.roll(-shift) for row, shift in zip(value, shifts, strict=True)])
        for name, value in batch.items()
    }


def tokens_of(batch: Batch) -> set[tuple[int, ...]]:
    """Returns the trie of the rows: for each node the tokens up to it, and their start."""
    found = set()
    for row, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True):
        places = [i for i, is_there in enumerate(mask) if is_there]
        path = [places[0], *(row[i] for i in places)]
        found |= {tuple(path[:n]) for n in range(2, len(path) + 1)}
    return found


def path_mask(length: int, documents: Rows, parents: Sequence[int | None] = (), window: int | None = None) -> Tensor:
    """[length, length], True where a query sees a key, from the definition: the keys on the query's path, in order."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    paths: list[list[int]] = []
    for (start, stop), parent in zip(documents, parents or [None] * len(documents), strict=True):
        paths.append([*(() if parent is None else paths[parent]), *range(start, stop)])
        places = torch.arange(len(paths[-1]))
        distance = places[start - stop :, None] - places
        seen[start:stop, paths[-1]] = (distance >= 0) & (distance < (window or length))
    return seen


def rows_again(tree: PrefixTree, ids: Tensor) -> Tensor:
    """Returns the batch's ids, reconstructed from the one row."""
    return tree.flat({"input_ids": ids})["input_ids"][0][tree.places]


def saved(model: nn.Module) -> tuple[int, int]:
    """Returns the number of tokens that were not recomputed, and the total."""
    prefixes = seqtile.status(model).prefixes
    return prefixes.saved_tokens, prefixes.batch_tokens


def sharing(model: nn.Module, min_tokens: int = 4, options: dict | None = None) -> nn.Module:
    """A copy that shares prefixes of rows."""
    found = copy.deepcopy(model)
    if options is not None:
        seqtile.apply_seqtile(found, chunk_tokens=16, check=False, **options)
    seqtile.share_prefixes(found, min_tokens)
    return found


def step(model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], Tensor] | None = None) -> list[Tensor]:
    """The loss, and the gradients of all parameters."""
    model.zero_grad()
    value = model(**batch, use_cache=False).loss if loss is None else loss(model, batch)
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_as_exact(ours: list[Tensor], plain: list[Tensor], truth: list[Tensor]) -> None:
    """Asserts that errors against a float64 reference are at most twice those of the untouched model."""
    for mine, theirs, true in zip(ours, plain, truth, strict=True):
        assert (mine is None) == (true is None)
        if true is not None:
            floor = 2e-6 * max(
                float(true.norm()), 1e-3 * max(float(each.norm()) for each in truth[1:] if each is not None)
            )
            assert (mine.double() - true).norm() <= 2 * (theirs.double() - true).norm() + floor


def over_ranks(arch: str, options: dict | None, implementation: str | None, sp_first: bool) -> None:
    """A step of two groups' rows over ranks, and the effect of undoing either patch."""
    install()
    ctx = context()
    torch.manual_seed(1)
    if arch in recurrences.FAMILIES:
        one = recurrences.build(arch, **recurrences.at_least_a_head_each(arch, ctx.size))
    else:
        one = build(arch, num_key_value_heads=1)
    if implementation == "eager":  # gives padding other values than the rest
        one.set_attn_implementation("eager")
    many, batch = copy.deepcopy(one), groups(left=True)
    expected = by_first_rank(loss_and_gradients, one, **batch)
    many.config._attn_implementation = implementation or one.config._attn_implementation
    asked = many.config._attn_implementation
    if sp_first:
        sp.apply_ulysses(many, ctx, batches="whole")
    seqtile.share_prefixes(many, 4)
    if not sp_first:
        sp.apply_ulysses(many, ctx, batches="whole")
    if options is not None:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options, check=False)
    checkpointing(many, False)
    with Traffic() as traffic:
        loss = many(**batch).loss
    loss.backward()
    assert relative_error(loss.detach(), expected[0]) <= 1e-5
    step = partial(loss_and_gradients, **batch)
    times = 4 if arch in recurrences.FAMILIES else 2  # a recurrence's chunks start where documents do
    assert_same_gradients(many, expected[1], step, one, f"{arch} {options} {implementation}", times)
    tokens = len(tokens_of(batch))
    by_rows = asked == "eager" and arch != "gpt_oss"  # with padding on the left
    assert saved(many) == (0 if by_rows else batch["attention_mask"].sum() - tokens, batch["input_ids"].numel())
    if ctx.size > 1 and arch == "llama" and not by_rows:  # a layer sends only the tree's tokens
        tokens += 3  # of padding
        per_token = traffic.sent[0] / (-(-tokens // ctx.size) * one.config.head_dim * 4)
        assert per_token <= one.config.num_attention_heads + 2 * ctx.size
    log_probs = by_first_rank(lambda: own_loss(one, batch).detach())
    assert torch.allclose(own_loss(many, batch), log_probs, rtol=1e-5)
    if implementation == "flash_attention_3":
        return  # Hugging Face asks whether it is installed
    sp.restore(many)
    with torch.no_grad():
        assert torch.allclose(many(**batch).loss, expected[0], rtol=1e-5) and (saved(many)[0] > 0) != by_rows
    seqtile.restore(many)
    assert SHARDED not in vars(many) and many.config._attn_implementation == asked


def other_batches() -> None:
    """Ranks with different trees: refused on every rank, and the next forward is right."""
    ctx, model = context(), build("llama")
    seqtile.share_prefixes(model, 4)
    sp.apply_ulysses(model, ctx, batches="whole")
    batch = groups(prompts=1 + ctx.rank)
    with pytest.raises(ValueError, match=r"batches of different shapes|hold different batches"):
        model(**batch)
    batch = by_first_rank(groups)
    assert model(**batch).loss.isfinite()


def shown_unequally() -> None:
    """Tokens that show one rank's rows several times and few of the other's: ranks gather equally many rows."""
    ctx, one = context(), build("llama")
    ids, mask = torch.randint(5, VOCAB, (4, 20)), torch.ones(4, 20, dtype=torch.long)
    ids[2:, :14], mask[1:, 16:] = ids[1, :14].clone(), 0  # the second rank's 20 rows: 14 + 3 x 2
    ids[1:, 14] = torch.arange(5, 8)
    shown = mask.bool()
    shown[0, :-1] = False
    seqtile.share_prefixes(many := copy.deepcopy(one), 4)
    sp.apply_ulysses(many, ctx, batches="whole")

    def doubled(model: nn.Module) -> Tensor:
        return (model.model(input_ids=ids, attention_mask=mask).last_hidden_state[shown] * 2).cumsum(0).detach()

    assert relative_error(doubled(many), by_first_rank(doubled, one)) <= 1e-5
