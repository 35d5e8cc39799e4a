"""Tests attention without masks on a small model of the same class, against its own attention with masks.

small model, float32, eager attention, packed or padded rows  ─> loss, gradients
the same, embeddings changed by one bit  ─> the size of rounding errors
the same without masks  ─> within what difference.py allows, or refused
"""

import copy
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from seqtile.models.varlen import choose_varlen, keep_chosen, kind_refusal
from seqtile.proof.difference import brief, difference
from seqtile.proof.findings import EPS, Inputs, gradients_of
from seqtile.proof.small import WORDS

LENGTH = 73
_EDGES = (0, 1, 9, 40, 60, LENGTH)


def why_masks_are_needed(model: PreTrainedModel) -> str | None:
    """Says why the attention of a small model's class must not be computed without masks: what differs. None if nothing
    does."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    if (reason := kind_refusal(model)) is not None:
        return reason
    without = copy.deepcopy(model)
    choose_varlen(without)
    failure = "it calls nothing"
    compared = False
    keep_chosen(model)
    for kind, inputs in packed_and_padded():
        plain = partial(gradients_of, model, inputs)
        try:
            expected = plain()
        except Exception as error:  # of Hugging Face's code, which may raise anything
            failure = brief(error)
            continue
        compared = True
        try:
            found = gradients_of(without, inputs)
        except Exception as error:  # likewise, of a mask that it reads
            return f"of {kind} rows it fails without masks: {brief(error)}"
        differs = difference(expected, found, expected, EPS)
        if differs is not None:  # compare with the size of rounding errors
            differs = difference(expected, found, plain(nudge=EPS), EPS)
        if differs is not None:
            return f"{differs.said} without masks, of {kind} rows"
    return None if compared else f"a small model of its class runs on neither packed nor padded text ({failure})"


def packed_and_padded() -> Iterator[tuple[str, Inputs]]:
    """Yields what a batch is, and model inputs of [1 or 2, 73] random tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        ids = torch.randint(5, WORDS - 5, (2, LENGTH))
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(_EDGES)])[None]
    mask = torch.ones_like(ids)
    mask[0, :17] = mask[1, 60:] = 0
    later = positions + 7 * (torch.arange(LENGTH) >= _EDGES[3])  # a document that does not begin at 0
    for kind, inputs in (
        ("packed", {"input_ids": ids[:1], "position_ids": positions, "labels": ids[:1]}),
        ("packed", {"input_ids": ids, "position_ids": torch.cat([positions, later]), "labels": ids}),
        ("padded", {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}),
    ):
        yield kind, inputs | {"use_cache": False}  # with one, Hugging Face's masks forget the documents
