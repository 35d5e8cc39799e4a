"""The rows that `seqtile finetune` trains on, from text files, tables or a data set of the hub."""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset, load_dataset
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import get_dataset

from seqtile.recipes import what_is_here
from seqtile.recipes.data import counted, read_of, sequences, standard_library
from seqtile.recipes.options import Asked

TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def dataset_of(asked: Asked, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None, str]:
    """Returns the rows to train on, those to evaluate on or None, and what to say of them.

    Rows of tables, or of a data set of the hub, are as TRL takes them. Text files become rows of --seq-len tokens, all
    of which are trained. Raises ValueError for what cannot be read.
    """
    script, training = asked.script, asked.training
    names = [script.dataset_name] if script.dataset_name else asked.own.data
    if asked.mixture.datasets:
        found = get_dataset(asked.mixture)
        rows, others = (found.get(split) for split in (script.dataset_train_split, script.dataset_test_split))
        return rows, others, f"data: {counted(len(rows), 'row')}"
    paths = [Path(name) for name in names] or standard_library()
    kinds = {TABLES.get(path.suffix.lower(), "") for path in paths}
    if len(names) == 1 and not paths[0].exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", names[0]):
        with read_of(f"--data: {names[0]} of the hub", "pass files, or another name"):
            found = load_dataset(names[0], script.dataset_config, streaming=script.dataset_streaming)
        rows, others = (found.get(split) for split in (script.dataset_train_split, script.dataset_test_split))
        return rows, others, f"data: {names[0]}"
    for path in paths:
        if not path.exists():
            raise ValueError(f"--data: {path} does not exist{what_is_here(path)}; pass files, or directories of them")
    if kinds != {""}:
        if len(kinds) > 1:
            raise ValueError(f"--data: expected files of one kind, got {', '.join(sorted(map(str, paths)))}")
        with read_of(f"--data: {paths[0]}", "pass a table of one row a line"), TemporaryDirectory() as cache:
            files = list(map(str, paths))
            rows = load_dataset(*kinds, data_files=files, split="train", cache_dir=cache, keep_in_memory=True)
        if columns := _without_text(rows.column_names, training.dataset_text_field):
            expected = "expected messages, prompt with completion, or text"
            raise ValueError(f"--data: {paths[0]} has the columns {columns}, {expected}, which TRL trains")
        return rows, None, f"data: {counted(len(rows), 'row')} of {', '.join(rows.column_names)}"
    a_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
    groups = training.world_size // asked.own.sequence_parallel
    needed = training.max_steps * a_step * groups if training.max_steps > 0 else sys.maxsize // training.max_length
    found = sequences(paths, tokenizer, training.max_length, needed)
    rows = found.rows.tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows}), None, str(found)


def _without_text(columns: list[str], text: str) -> str:
    """Returns the columns, if there is nothing among them that TRL trains; else nothing."""
    known = {"messages", "text", text, "prompt", "completion", "input_ids", "conversations"}
    return "" if known & set(columns) else ", ".join(columns)
