"""Long documents: text files, one after the other, cut into sequences of exactly the length asked for."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase


def standard_library() -> tuple[Path, ...]:
    """The source of the running Python's standard library: a long real document that every machine has."""
    return tuple(sorted(Path(os.__file__).parent.glob("*.py")))


def read_texts(paths: tuple[Path, ...]) -> Iterator[str]:
    """The texts of the files, and of the files under the directories, in sorted order; what is not UTF-8 is skipped."""
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if text and "\0" not in text:
                yield text


def sequences(paths: tuple[Path, ...], tokenizer: PreTrainedTokenizerBase, seq_len: int, count: int) -> torch.Tensor:
    """[count, seq_len] int64 token ids: documents joined by the end-of-text token, read no further than needed.

    If the text ends before `count` sequences are full, the full ones are repeated. ValueError if not one is full.
    """
    ids: list[int] = []
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in read_texts(paths):
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + separator
        if len(ids) >= count * seq_len:
            break
    full = min(count, len(ids) // seq_len)
    if full == 0:
        raise ValueError(
            f"--data holds {len(ids)} tokens, expected at least {seq_len}, one sequence; pass more text, or a shorter "
            "--seq-len"
        )
    rows = torch.tensor(ids[: full * seq_len], dtype=torch.int64).view(full, seq_len)
    return rows[torch.arange(count) % full]
