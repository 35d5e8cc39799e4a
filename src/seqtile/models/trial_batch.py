"""A few tokens of a batch, around the places where something changes: the ends of prompts, documents and padding."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from seqtile.protocols import SHARDED

TOKENS, ROWS, FEWEST = 28, 2, 6
IGNORED = -100
# Of the whole batch, or of a cache: a model finds them anew in a shorter one.
_OF_THE_WHOLE = {"cache_position", "logits_to_keep", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


class TrialBatch(NamedTuple):
    """What a forward is called with, cut to a few tokens."""

    inputs: dict[str, Any]
    shape: torch.Size
    """Rows, and tokens of each."""
    left_out: list[str]
    """The tensors that have no tokens, such as images."""


def trial_batch(model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> TrialBatch:
    """Returns at most `TOKENS` tokens of at most `ROWS` rows of what `forward` (a plain function) is called with.

    A batch without labels gets its own words as labels; one of less than `FEWEST` tokens a row is made up.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    given = {
        name: value for name, value in (dict(zip(names, args, strict=False)) | kwargs).items() if value is not None
    }
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if tokens is None or tokens.shape[1] < FEWEST:
        return _made_up(model)
    rows = torch.tensor(sorted({0, tokens.shape[0] - 1})[:ROWS])
    columns = _columns(given, tokens.shape[1])
    inputs, left_out = {}, []
    for name, value in given.items():
        if name in _OF_THE_WHOLE:
            continue
        cut = _cut(value, rows, columns, tokens.shape[:2])
        if cut is None:
            left_out.append(name)
        else:
            inputs[name] = cut
    if (sharded := vars(model).get(SHARDED)) is not None and sharded.sp_group.size > 1 and "position_ids" in inputs:
        inputs = _as_one_sequence(inputs, len(columns), sharded.sp_group.rank)
    _add_labels(inputs)
    return TrialBatch(inputs, torch.Size((len(rows), len(columns))), left_out)


def _as_one_sequence(inputs: dict[str, Any], tokens: int, rank: int) -> dict[str, Any]:
    """Returns a rank's share of what ranks keep of a sequence, as a sequence of its own: without gaps, and no mask."""
    positions = torch.arange(rank * tokens, (rank + 1) * tokens, device=inputs["position_ids"].device)
    inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    return inputs | {"position_ids": positions.expand_as(inputs["position_ids"]).contiguous()}


def _made_up(model: nn.Module) -> TrialBatch:
    ids = torch.arange(3, 3 + TOKENS, device=next(model.parameters()).device)[None]
    return TrialBatch({"input_ids": ids, "labels": ids}, ids.shape, [])


def _add_labels(inputs: dict[str, Any]) -> None:
    """Sees to it that some tokens of each batch are to be predicted."""
    for name in ("labels", "shift_labels"):
        if name in inputs and bool((inputs[name][..., 1:] != IGNORED).any()):
            return
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    words = tokens if not tokens.is_floating_point() else torch.arange(tokens.shape[1], device=tokens.device) + 3
    labels = words.expand(tokens.shape[:2]).contiguous()
    inputs["labels"] = labels
    if "shift_labels" in inputs:
        inputs["shift_labels"] = labels.roll(-1, 1)


def _columns(given: dict[str, Any], length: int) -> torch.Tensor:
    """Returns which columns to keep, in their order: about the first end of a prompt, of a document and of padding."""
    places = [place for place in _boundaries(given, length) if place is not None]
    width = TOKENS // max(1, len(places))
    kept = {column for place in places for column in _window(place, width, length)}
    rest = (column for column in range(length) if column not in kept)
    kept |= {column for column, _ in zip(rest, range(min(TOKENS, length) - len(kept)), strict=False)}
    return torch.tensor(sorted(kept))


def _window(place: int, width: int, length: int) -> range:
    start = max(0, min(place - width // 2, length - width))
    return range(start, min(start + width, length))


def _boundaries(given: dict[str, Any], length: int) -> Iterator[int | None]:
    """Yields the first column at which labels begin or end, positions restart, and padding begins or ends."""
    labels = given.get("labels", given.get("shift_labels"))
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if _has_columns(labels, length):
        valid = labels != IGNORED
        yield _first(valid[..., 1:] != valid[..., :-1])
    if _has_columns(positions, length):
        yield _first(positions[..., 1:] != positions[..., :-1] + 1)
    if _has_columns(mask, length) and mask.dim() == 2:
        yield _first(mask[..., 1:] != mask[..., :-1])


def _has_columns(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[-1] == length


def _first(changes: torch.Tensor) -> int | None:
    """Returns the first column behind a change in any row."""
    found = changes.flatten(0, -2).any(0).nonzero()
    return int(found[0]) + 1 if len(found) else None


def _cut(value: Any, rows: torch.Tensor, columns: torch.Tensor, shape: tuple[int, int]) -> Any:
    """Returns a value of those rows and columns; None for a tensor that has no row a token."""
    batch, length = shape
    if isinstance(value, dict):
        return {name: _cut(inner, rows, columns, shape) for name, inner in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    rows, columns = rows.to(value.device), columns.to(value.device)
    if value.dim() >= 3 and value.shape[-2:] == (length, length):
        cut = value.index_select(-1, columns).index_select(-2, columns)
        return cut.index_select(0, rows) if cut.shape[0] == batch else cut
    if value.dim() >= 2 and value.shape[-1] == length:
        cut = value.index_select(-1, columns)
        return cut.index_select(-2, rows) if cut.shape[-2] == batch else cut
    if value.dim() >= 3 and value.shape[1] == length:
        cut = value.detach().index_select(1, columns)
        return cut.index_select(0, rows) if cut.shape[0] == batch else cut
    return None
