"""Long documents: text files, one after the other, cut into sequences of exactly the length asked for."""

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from seqtile.recipes.tokens import tokens_of


def standard_library() -> tuple[Path, ...]:
    """The source of the running Python's standard library: a long real document that every machine has."""
    return tuple(sorted(Path(os.__file__).parent.glob("*.py")))


@dataclass(frozen=True)
class Sequences:
    """What to train on, and how much text it was cut from; prints as one line."""

    rows: torch.Tensor  # [count, seq_len] int64 token ids
    files: int
    skipped: int  # files that are not UTF-8 text, as far as they were read
    tokens: int  # of what was read

    def __str__(self) -> str:
        count, seq_len = self.rows.shape
        full = self.tokens // seq_len
        read = f"data: {counted(self.files, 'file')} read, {self.tokens:,} tokens"
        if self.skipped:
            read += f" ({counted(self.skipped, 'file')} skipped as not UTF-8 text)"
        if full >= count:
            return f"{read}; enough for {counted(count, 'sequence')}, one a step"
        return (
            f"{read}; the text fills {counted(full, 'sequence')}: {count:,} steps go over it {count / full:.1f} times"
        )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class NotText(ValueError):
    """A file holds zero bytes: it is binary, though it may be UTF-8."""


def files_of(paths: tuple[Path, ...]) -> Iterator[Path]:
    """The files, and those under the directories, in sorted order."""
    for path in paths:
        yield from sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def file_tokens(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The token ids of a text file, some at a time, then the end-of-text token if there were any; it is read no further
    than they need. UnicodeDecodeError or NotText once it turns out to be no text."""

    def read(characters: int) -> str:
        text = opened.read(characters)
        if "\0" in text:
            raise NotText
        return text

    found = False
    with file.open(encoding="utf-8") as opened:
        for ids in tokens_of(read, tokenizer):
            found = found or bool(ids)
            yield ids
    if found and tokenizer.eos_token_id is not None:
        yield [tokenizer.eos_token_id]


def sequences(paths: tuple[Path, ...], tokenizer: PreTrainedTokenizerBase, seq_len: int, count: int) -> Sequences:
    """`count` sequences of `seq_len` tokens: documents joined by the end-of-text token, read no further than needed.

    If the text ends before `count` sequences are full, the full ones are repeated. ValueError if not one is full.
    """
    ids = array("q")
    files = skipped = 0
    for file in files_of(paths):
        before = len(ids)
        try:
            for more in file_tokens(file, tokenizer):
                ids.extend(more)
                if len(ids) >= count * seq_len:
                    break
            files += 1
        except (UnicodeDecodeError, NotText):
            del ids[before:]
            skipped += 1
        if len(ids) >= count * seq_len:
            break
    if skipped and not files:
        raise ValueError(f"--data holds no UTF-8 text: {counted(skipped, 'file')} skipped; pass text files")
    full = min(count, len(ids) // seq_len)
    if full == 0:
        raise ValueError(
            f"--data holds {len(ids)} tokens, expected at least {seq_len}, one sequence; pass more text, or a shorter "
            "--seq-len"
        )
    rows = torch.frombuffer(ids, dtype=torch.int64)[: full * seq_len].view(full, seq_len)
    return Sequences(rows[torch.arange(count) % full], files, skipped, len(ids))
