"""Selects a few tokens of a batch, around the places where something changes: ends of prompts, documents, padding."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from seqtile.protocols import LAYOUT, SHARDED

TOKENS, FEWEST = 28, 6
IGNORED = -100
MADE_UP = f"its own tokens, fewer than {FEWEST} a row"
_OF_IMAGES = re.compile("pixel|image|video|audio|feature|input_values|grid")  # and sounds
# Arguments that belong to the whole batch or a cache: a model computes them anew for the shorter batch.
_OF_THE_WHOLE = {"cache_position", "logits_to_keep", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


class TrialBatch(NamedTuple):
    """A forward's arguments, cut to a few tokens."""

    inputs: dict[str, Any]
    shape: torch.Size
    """Rows, and tokens per row."""
    left_out: list[str]
    """The arguments without a token dimension, such as images."""


def trial_batch(model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> TrialBatch:
    """Returns the arguments of `forward`, a plain function, cut to at most `TOKENS` tokens of its first and last row.

    A batch without labels gets its own tokens as labels, if the forward takes labels. A batch with fewer than `FEWEST`
    tokens a row is replaced by a made-up one.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if value is not None and name not in _OF_THE_WHOLE}
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if is_made_up := tokens is None or tokens.shape[1] < FEWEST:
        tokens = torch.arange(3, 3 + TOKENS, device=next(model.parameters()).device)[None]
        given = {LAYOUT: given[LAYOUT]} if LAYOUT in given else {}
        given |= {"input_ids": tokens}
    rows = torch.tensor(sorted({0, tokens.shape[0] - 1}))
    columns = _columns(given, tokens.shape[1])
    cut = {name: _cut(name, value, rows, columns, tokens.shape[:2]) for name, value in given.items()}
    inputs = {name: value for name, value in cut.items() if value is not None}
    sharded = vars(model).get(SHARDED)
    if LAYOUT in inputs or (sharded is not None and sharded.sp_group.size > 1 and not sharded.takes_whole):
        # A rank's tokens as a part of one sequence, without a mask.
        sp_group = sharded.sp_group
        own = sp_group.nodes.tokens_of(sp_group.rank, sp_group.size * len(columns))
        positions = torch.cat([torch.arange(*run, device=tokens.device) for run in own])
        inputs["position_ids"] = positions.expand_as(inputs.get("position_ids", positions[None])).contiguous()
        inputs.pop("attention_mask", None)
    if "labels" in names:
        _add_labels(inputs)
    left_out = [MADE_UP] if is_made_up else [name for name in cut if cut[name] is None]
    return TrialBatch(inputs, torch.Size((len(rows), len(columns))), left_out)


def _add_labels(inputs: dict[str, Any]) -> None:
    """Adds labels unless some token has one."""
    if any(name in inputs and bool((inputs[name][..., 1:] != IGNORED).any()) for name in ("labels", "shift_labels")):
        return
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    words = tokens if not tokens.is_floating_point() else torch.arange(tokens.shape[1], device=tokens.device) + 3
    inputs["labels"] = words.expand(tokens.shape[:2]).contiguous()
    if "shift_labels" in inputs:
        inputs["shift_labels"] = inputs["labels"].roll(-1, 1)


def _columns(given: dict[str, Any], length: int) -> torch.Tensor:
    """Returns the columns to keep, sorted: around the first end of a prompt, of a document, and of padding."""
    places = list(_boundaries(given, length))
    width = TOKENS // max(1, len(places))
    starts = [max(0, min(place - width // 2, length - width)) for place in places]
    kept = {column for start in starts for column in range(start, min(start + width, length))}
    rest = (column for column in range(length) if column not in kept)
    kept |= {column for column, _ in zip(rest, range(min(TOKENS, length) - len(kept)), strict=False)}
    return torch.tensor(sorted(kept))


def _boundaries(given: dict[str, Any], length: int) -> Iterator[int]:
    """Yields the first column at which labels begin or end, positions restart, and padding begins or ends."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.dim() >= 2}
    said = {name: value for name, value in tensors.items() if value.shape[-1] == length}
    steady = []  # tensors whose neighbouring columns differ only at a boundary
    if (labels := said.get("labels", said.get("shift_labels"))) is not None:
        steady.append(labels != IGNORED)
    if (positions := said.get("position_ids")) is not None:
        steady.append(positions - torch.arange(length, device=positions.device))
    if (mask := said.get("attention_mask")) is not None and mask.dim() == 2:
        steady.append(mask)
    for value in steady:
        found = (value[..., 1:] != value[..., :-1]).flatten(0, -2).any(0).nonzero()
        if len(found):
            yield int(found[0]) + 1


def _cut(name: str, value: Any, rows: torch.Tensor, columns: torch.Tensor, shape: tuple[int, int]) -> Any:
    """Returns an argument cut to these rows and columns; None for a tensor that has none of such a batch."""
    if isinstance(value, dict):
        return {key: _cut(name, inner, rows, columns, shape) for key, inner in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    of_rows, of_tokens = 0, [1]
    if name.endswith("position_ids"):  # [B, S], or of several axes [3, B, S]
        of_rows, of_tokens = -2, [-1]
    elif name == "attention_mask" and value.dim() > 2:  # [B, 1, S, S], or of keys alone [B, 1, 1, S]
        of_tokens = [-1] if value.shape[-2] == 1 else [-1, -2]
    is_cut = value.dim() > 1 and value.shape[of_rows] in (1, shape[0]) and not _OF_IMAGES.search(name)
    if not is_cut or any(value.shape[dim] != shape[1] for dim in of_tokens):
        return None
    cut = value.detach()
    for dim in of_tokens:
        cut = cut.index_select(dim, columns.to(value.device))
    return cut.index_select(of_rows, rows.to(value.device)) if value.shape[of_rows] == shape[0] else cut
