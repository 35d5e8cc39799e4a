"""Merges the rows of a batch that share prefixes into one row, which holds each prefix once.

    rows [B, S]    P P P P a a .      one row [1, T]    P P P P | a a | b b b | c c
                   P P P P b b b      documents         0         1    2        3
                   c c . . . . .      continues         -         0    0        -

A document continues the document that its row shares with other rows. Its tokens keep their positions. Only attention
and recurrences need to know of this, see segments.py; everything else computes each token by itself. Tokens of several
rows are equal if all inputs of the text model are equal for them and for all tokens before them.

Of padding on the left each row keeps the last token, behind all documents: a shifted loss predicts the row's first
token from it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from seqtile.attention.heads import Rows
from seqtile.sp.same_batch import bits, token_hashes
from seqtile.sp.shards import sequence_dim

_COMPARED = 2**24  # pairs of tokens that are compared at once


class PrefixTree(NamedTuple):
    """A batch's tokens in one row, with each prefix once."""

    documents: Rows
    """The [start, stop) of each document in the one row; documents that continue it follow it."""
    parents: tuple[int | None, ...]
    """For each document, the one that it continues."""
    taken: Tensor
    """[T]: for each token of the one row, its index in the flattened batch; on the CPU."""
    places: Tensor
    """[B, S]: for each token of the batch, its index in the one row, 0 for padding that is not in it; on the CPU."""
    saved: int
    """The number of tokens saved."""
    last_position: int
    """The largest position of the batch, padding included."""

    def flat(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the batch's arguments [B, S, ...] as those of the one row [1, T, ...], without the mask."""
        rows, length = self.places.shape
        found = {name: value for name, value in given.items() if name != "attention_mask"}
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        taken = self.taken.to(device, non_blocking=True)
        for name, value in found.items():
            if (dim := sequence_dim(name, value, rows, length)) is not None:
                whole = value.expand(*value.shape[: dim - 1], rows, *value.shape[dim:])
                found[name] = whole.flatten(dim - 1, dim).index_select(dim - 1, taken).unsqueeze(dim - 1)
        if "position_ids" not in found:
            found["position_ids"] = (taken % length)[None]
        return found


def prefix_tree(
    given: Mapping[str, Any], rows: int, length: int, min_tokens: int, averages_padding: bool = False
) -> PrefixTree | str:
    """Returns the tree of a batch of [rows, length] tokens from the text model's arguments. If there is none, returns
    why: no rows share the first `min_tokens` tokens, a mask has a hole, or an argument has no known token dimension.
    `averages_padding`: attention gives padding the mean of its row's values, so no two rows share it.

    One wait for the device. Allocates up to 2^24 comparisons at a time, 8 bytes per token for each argument, and while
    it hashes an argument of several values per token 24 MiB.
    """
    if rows < 2:
        return "it has one row"
    if length < min_tokens:
        return "its rows are shorter than that"
    if unknown := [name for name, value in given.items() if not _is_known(name, value, rows, length)]:
        return f"the text model was given {unknown[0]} other than one value a token"
    of_tokens = {name: value for name, value in given.items() if sequence_dim(name, value, rows, length) is not None}
    mask = of_tokens.pop("attention_mask", None)
    keys = [key for name, value in of_tokens.items() for key in _keys(name, value, rows)]
    if (positions := of_tokens.get("position_ids")) is None:
        positions = torch.arange(length, device=keys[0].device).expand(rows, -1)
        keys.append(positions)
    last_position, has_hole, begins_anew, is_moved, *of_rows = _compared(keys, mask, positions).tolist()
    if has_hole or begins_anew:
        return "a row's mask has a hole" if has_hole else "positions begin anew in a row, as in packed documents"
    first, tokens, common = of_rows[:rows], of_rows[rows : 2 * rows], of_rows[2 * rows :]
    padded = [row for row in range(rows) if tokens[row] and first[row]]
    if padded and averages_padding:
        return "its attention gives padding on the left the mean of a row's values"
    found = _Growing(first, tokens, [common[i * rows : (i + 1) * rows] for i in range(rows)], length, min_tokens)
    found.grow([row for row in range(rows) if tokens[row]], 0, None)
    if (saved := sum(tokens) - found.length) == 0:
        longest = max(common[i * rows + j] for i in range(rows) for j in range(i))
        why = f"the longest common beginning has {longest}" if longest else "no two rows begin alike"
        return why + "; rows begin at different positions, as behind unequal padding on the left" * is_moved
    last = torch.tensor([first[row] - 1 for row in padded], dtype=torch.long)
    found.places[padded, last] = found.length + torch.arange(len(padded))
    taken = torch.cat([*found.taken, length * torch.tensor(padded, dtype=torch.long) + last])
    return PrefixTree(tuple(found.documents), tuple(found.parents), taken, found.places, saved, last_position)


def _is_known(name: str, value: Any, rows: int, length: int) -> bool:
    """Returns whether an argument has token values in a known dimension, or contains no tensor."""
    if sequence_dim(name, value, rows, length) is not None:
        return name != "attention_mask" or value.shape == (rows, length)
    return not any(isinstance(each, Tensor) for each in tree_leaves(value))


def _keys(name: str, value: Tensor, rows: int) -> list[Tensor]:
    """Returns integers [B, S] that are equal for tokens with equal values of an argument."""
    if name == "position_ids" and value.dim() == 3:
        return [axis.expand(rows, -1) for axis in value]
    value = bits(value).expand(rows, *value.shape[1:])
    return [value] if value.dim() == 2 else [token_hashes(value)]


def _compared(keys: list[Tensor], mask: Tensor | None, positions: Tensor) -> Tensor:
    """Returns the largest position; whether a mask has a hole, whether positions restart within a row, and whether rows
    start at different positions; each row's start and number of tokens; and the common prefix length of each pair of
    rows."""
    rows, length = keys[0].shape
    valid = torch.ones_like(keys[0], dtype=torch.bool) if mask is None else mask.bool()
    first, tokens = valid.int().argmax(1), valid.sum(1)
    has_hole = ((tokens > 0) & (length - valid.flip(1).int().argmax(1) - first != tokens)).any()
    of_text = (positions if positions.dim() == 2 else positions[0]).expand(rows, -1)
    begins_anew = ((of_text[:, 1:] != of_text[:, :-1] + 1) & valid[:, 1:] & valid[:, :-1]).any()
    begins_anew &= positions.dim() == 2 or len(positions) == 4  # of four axes the first is the text's
    starts = of_text.gather(1, first[:, None])
    place = torch.arange(length, device=first.device)
    from_first = (first[:, None] + place).clamp(max=length - 1)
    aligned = [key.gather(1, from_first) for key in keys]
    common, step = [], max(1, _COMPARED // (rows * length))
    for start in range(0, rows, step):
        some = slice(start, start + step)
        differs = place >= torch.minimum(tokens[some, None], tokens)[..., None]
        for key in aligned:
            differs |= key[some, None] != key
        common.append(F.pad(differs, (0, 1), value=True).int().argmax(2).flatten())
    facts = positions.max(), has_hole, begins_anew, (starts != starts[0]).any(), first, tokens, *common
    return torch.cat([each.flatten().to(torch.int64) for each in facts])


class _Growing:
    """A tree under construction, from the common prefix lengths of all pairs of rows."""

    def __init__(self, first: list[int], tokens: list[int], common: list[list[int]], length: int, min_tokens: int):
        self.first, self.tokens, self.common, self.min_tokens = first, tokens, common, min_tokens
        self.documents: list[tuple[int, int]] = []
        self.parents: list[int | None] = []
        self.taken: list[Tensor] = []
        self.places = torch.zeros(len(tokens), length, dtype=torch.long)
        self.length = 0
        """Tokens of the one row."""

    def grow(self, rows: list[int], depth: int, parent: int | None) -> None:
        """Adds the tokens of `rows` from `depth` on; the rows share all tokens before it."""
        while rows:
            head = rows[0]
            alike = [row for row in rows if row == head or self.common[head][row] >= depth + self.min_tokens]
            stop = min((self.common[head][row] for row in alike[1:]), default=self.tokens[head])
            start, self.length = self.length, self.length + stop - depth
            self.documents.append((start, self.length))
            self.parents.append(parent)
            begin = head * self.places.shape[1] + self.first[head]
            self.taken.append(torch.arange(begin + depth, begin + stop))
            for row in alike:
                own = self.first[row]
                self.places[row, own + depth : own + stop] = torch.arange(start, self.length)
            if len(alike) > 1:
                self.grow([row for row in alike if self.tokens[row] > stop], stop, len(self.documents) - 1)
            rows = [row for row in rows if row not in alike]
