"""Long documents: text files, one after the other, cut into sequences of exactly the length asked for."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase


def standard_library() -> tuple[Path, ...]:
    """The source of the running Python's standard library: a long real document that every machine has."""
    return tuple(sorted(Path(os.__file__).parent.glob("*.py")))


@dataclass(frozen=True)
class Sequences:
    """What to train on, and how much text it was cut from; prints as one line."""

    rows: torch.Tensor  # [count, seq_len] int64 token ids
    files: int
    skipped: int  # files that are not UTF-8 text
    tokens: int

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


def read_texts(paths: tuple[Path, ...]) -> Iterator[str | None]:
    """The texts of the files, and of the files under the directories, in sorted order; None for what is not UTF-8."""
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                yield None
            else:
                yield None if "\0" in text else text


def sequences(paths: tuple[Path, ...], tokenizer: PreTrainedTokenizerBase, seq_len: int, count: int) -> Sequences:
    """`count` sequences of `seq_len` tokens: documents joined by the end-of-text token, read no further than needed.

    If the text ends before `count` sequences are full, the full ones are repeated. ValueError if not one is full.
    """
    ids: list[int] = []
    files = skipped = 0
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in read_texts(paths):
        if text is None:
            skipped += 1
            continue
        files += 1
        if text:
            ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + separator
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
    rows = torch.tensor(ids[: full * seq_len], dtype=torch.int64).view(full, seq_len)
    return Sequences(rows[torch.arange(count) % full], files, skipped, len(ids))
