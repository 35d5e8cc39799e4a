"""The rows that `seqtile finetune` trains on, from text files, tables or a data set of the hub."""

import glob
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import get_dataset

from seqtile.recipes import HUB_NAME, check_path, read_text
from seqtile.recipes.options import FinetuneOptions
from seqtile.recipes.pretrained import read_of

TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
LISTED = 10  # skipped files, of more
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Roles of chats with `from` and `value`, and what templates call them. TRL renames the keys, not the roles."""


def dataset_of(asked: FinetuneOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None, str]:
    """Returns the rows to train on, those to evaluate on or None, and what to say of them.

    Rows of tables, or of a data set of the hub, are as TRL takes them. Text files become rows of --seq-len tokens, all
    of which are trained. Raises ValueError for what cannot be read.
    """
    script, mixture, training = asked.script, asked.mixture, asked.training
    names, said = [script.dataset_name] if script.dataset_name else asked.own.data, None
    if mixture.datasets:
        splits = get_dataset(mixture)
    elif len(names) == 1 and not Path(names[0]).exists() and HUB_NAME.fullmatch(names[0]) and "/" in names[0]:
        with read_of(f"--data: {names[0]} of the hub", "pass files, or another name"):
            splits = load_dataset(names[0], script.dataset_config, streaming=script.dataset_streaming)
    else:
        paths = [Path(name) for name in names] or standard_library()
        files = list(files_of(paths))
        tables = [file for file in files if file.suffix.lower() in TABLES]
        kinds = {TABLES[file.suffix.lower()] for file in tables}
        if len(tables) < len(files) and not set(tables) & set(paths):
            cut, lines = sequences(files, tokenizer, training.max_length)
            rows = Dataset.from_dict({"input_ids": list(cut), "labels": list(cut)})
            note = [] if names else ["note: without --data it trains on Python's standard library"]
            said = "\n".join([*note, *lines])
        elif len(tables) < len(files) or len(kinds) > 1:
            raise ValueError(f"--data: expected files of one kind, got {', '.join(sorted(map(str, paths)))}")
        else:
            with read_of(f"--data: {tables[0]}", "pass a table of one row a line"), TemporaryDirectory() as cache:
                exact = [glob.escape(str(table)) for table in tables]  # they would be patterns
                rows = load_dataset(*kinds, data_files=exact, split="train", cache_dir=cache, keep_in_memory=True)
        share = mixture.test_split_size
        splits = rows.train_test_split(share, seed=training.seed) if share else {"train": rows}
    name, test = script.dataset_train_split, script.dataset_test_split
    wanted = [name, test] if training.eval_strategy != "no" else [name]
    for split in wanted:
        if split not in splits:
            remedy = "pass --test-split-size" if split == test else "pass another --dataset-train-split"
            raise ValueError(f"--data: there is no split {split}, only {', '.join(splits)}; {remedy}")
    rows = splits[name]
    columns, source = rows.column_names or [], names[0] if names else "the data"
    known = ({"messages"}, {"conversations"}, {"input_ids"}, {training.dataset_text_field}, {"prompt", "completion"})
    if columns and not any(each <= set(columns) for each in known):
        expected = "expected messages, prompt with completion, or text"
        raise ValueError(f"--data: {source} has the columns {', '.join(columns)}, {expected}, which TRL trains")
    check_chats(next(iter(rows), {}), source, asked, tokenizer)
    length = f"{counted(len(rows), 'row')} of " if hasattr(rows, "__len__") else "a stream of "
    return rows, splits[test] if test in wanted else None, said or f"data: {length}{', '.join(columns)}"


def check_chats(row: dict[str, Any], source: str, asked: FinetuneOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the first row is a chat without a template, or with ShareGPT's roles that the template does
    not name."""
    if "input_ids" in row:  # TRL takes these, whatever else is there
        return
    template, other = str(tokenizer.chat_template or ""), asked.training.chat_template_path
    columns = [row.get(key) for key in ("messages", "conversations", "prompt", "completion")]
    messages = [each for column in columns if isinstance(column, list) for each in column if isinstance(each, dict)]
    roles = dict.fromkeys(str(each.get("role") or each.get("from")) for each in messages)
    named = [role for role in SHAREGPT if other or f"'{role}'" in template or f'"{role}"' in template]
    if unknown := [role for role in roles if role in SHAREGPT and role not in named]:
        expected = ", ".join(f"{SHAREGPT[role]} for {role}" for role in unknown)
        raise ValueError(
            f"--data: {source} has the roles {', '.join(unknown)}, which the chat template does not name; expected "
            f"{expected}: replace them in the file"
        )
    if messages and not (template or other):
        lacks = f"the tokenizer of {asked.model.model_name_or_path} has no chat template"
        raise ValueError(f"--data: {source} holds chats, but {lacks}; pass an instruct model or --chat-template-path")


def sequences(files: list[Path], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> tuple[np.ndarray, list[str]]:
    """Returns text files as sequences of `seq_len` tokens, [sequences, seq_len] int64, and lines to print: documents
    joined by the end-of-text token. Raises ValueError if not one is full."""
    ids, skipped = array("q"), []
    for file in files:
        try:
            tokens = tokenizer(read_text(file), add_special_tokens=False, verbose=False)["input_ids"]
            why = "empty" if not tokens else "a table of rows, not text" if file.suffix.lower() in TABLES else None
        except UnicodeError:
            why = "not UTF-8 text"
        except OSError as error:
            why = f"unreadable: {os.strerror(error.errno or 0)}"
        if why is None:
            ids.extend(tokens if tokenizer.eos_token_id is None else [*tokens, tokenizer.eos_token_id])
        else:
            skipped.append(f"{file} ({why})")
    if skipped and len(skipped) == len(files):
        count = counted(len(skipped), "file")
        raise ValueError(f"--data holds no UTF-8 text: {count} skipped, {skipped[0]} first; pass text files")
    if (full := len(ids) // seq_len) == 0:
        raise ValueError(
            f"--data holds {len(ids)} tokens, expected at least {seq_len}, one sequence; pass more text, or a shorter "
            "--seq-len"
        )
    read = counted(len(files) - len(skipped), "file")
    said = [f"data: {read} read, {len(ids):,} tokens: {counted(full, 'sequence')}"]
    said += [f"skipped: {file}" for file in skipped[:LISTED]]
    if (more := len(skipped) - LISTED) > 0:
        said.append(f"skipped: {counted(more, 'file')} more")
    return np.frombuffer(ids, dtype=np.int64)[: full * seq_len].reshape(full, seq_len), said


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def files_of(paths: list[Path]) -> Iterator[Path]:
    """Yields the files, and those under the directories, in sorted order. Raises ValueError for what is neither."""
    for path in paths:
        check_path("--data: ", path, "files, or directories of them")
        yield from sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def standard_library() -> list[Path]:
    """Returns the source of the running Python's standard library: a long real document that every machine has."""
    return sorted(Path(os.__file__).parent.glob("*.py"))
