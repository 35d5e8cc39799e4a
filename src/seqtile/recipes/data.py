"""A pretrained model, all of it or an error, and long documents as sequences of its tokens."""

import io
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from seqtile.memory.simulate import quiet
from seqtile.recipes import hub_config, in_brief, source, what_is_here

logger = logging.get_logger(__name__)

NAMED = 3  # weights that an error names, of those that are missing
LISTED = 10  # skipped files, of more


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory was short: torch's exception for a GPU, its message for the host, or what
    is received of a process that was killed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | EOFError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def device_of(asked: str | None) -> str:
    """Returns the device of --device, by default a GPU if there is one. Raises ValueError if it does not exist."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no GPU; use --device cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def read_of(what: str, remedy: str = "get its files again") -> Iterator[None]:
    """Turns what is raised inside, where files are read, to a ValueError that says what they hold and what to do."""
    try:
        with redirect_stderr(io.StringIO()):  # Hugging Face has bars of its own
            yield
    except Exception as error:  # safetensors, tokenizers, pickle, json: each has classes of its own, or none
        if is_out_of_memory(error):
            raise
        why = in_brief(error)
        if "trust_remote_code" in str(error):
            why = "it brings code of its own, which this command does not run"
            remedy = "read that code, then load the model in Python with trust_remote_code=True"
        raise ValueError(f"{what} cannot be loaded ({why}); {remedy}") from error


def load_config(model: str, asked_by: str = "--model") -> PreTrainedConfig:
    """Returns the configuration of `model`. Raises ValueError, of the option or argument that asked for it, if neither
    a path nor the hub has it."""
    name, options = source(model)
    try:
        if not Path(name).exists():
            hub_config(name)
    except Exception as error:  # of whichever HTTP library huggingface_hub is built on, and its own
        raise ValueError(
            f"{asked_by}: there is no directory {name} here{what_is_here(Path(name))}; and as a hub name it was not "
            f"found or the hub could not be reached ({in_brief(error)})"
        ) from error
    with read_of(f"{asked_by}: the configuration of {model}"):
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **options)


def load_tokenizer(model: str, asked_by: str = "--model") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of `model`. Raises ValueError if its files cannot be read."""
    name, options = source(model)
    with read_of(f"{asked_by}: the tokenizer of {model}"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)


def load_model(model: str, config: PreTrainedConfig, asked_by: str = "--model") -> PreTrainedModel:
    """Returns the model of `source(model)`, its weights in float32, ready to be trained and saved.

    Raises ValueError unless the files hold all of them in the shapes that its configuration asks for: transformers
    draws the others at random. Warns if they hold more.
    """
    name, options = source(model)
    options["trust_remote_code"] = False
    if "gguf_file" in options:
        options["quantization_config"] = unpacked()
    options |= {"config": config, "dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with read_of(f"{asked_by}: the weights of {model}", "get its files again, config.json too"), quiet():
        loaded, found = AutoModelForCausalLM.from_pretrained(name, **options)
    wrong, missing, unused = "", sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    if found["mismatched_keys"]:
        weight, here, expected = min(found["mismatched_keys"])
        wrong = f"{weight} of {model} has shape {list(here)}, but its config.json asks for {list(expected)};"
    elif missing:
        wrong = f"the weights of {model} lack {some(missing)}; get its files again, or"
    if wrong:
        raise ValueError(f"{asked_by}: {wrong} pass a model whose weights and config.json belong together")
    if unused:
        logger.warning(f"note: {asked_by}: config.json of {model} leaves out some of its weights: {some(unused)}")
    return loaded


def unpacked() -> Any:
    """Returns the configuration with which a GGUF file's weights are loaded as plain ones, as transformers 5.16 always
    does: there None."""
    return transformers.GgufConfig(dequantize=True) if hasattr(transformers, "GgufConfig") else None


def some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def standard_library() -> list[Path]:
    """Returns the source of the running Python's standard library: a long real document that every machine has."""
    return sorted(Path(os.__file__).parent.glob("*.py"))


@dataclass(frozen=True)
class Sequences:
    """Sequences to train on, and how much text they were cut from; prints as one line."""

    rows: torch.Tensor
    """[count, seq_len] int64 token ids."""
    files: int
    skipped: dict[Path, str]
    """Why each of these files was, as far as they were read."""
    tokens: int
    """All that were read."""
    needed: int
    """Sequences that the run takes."""

    def __str__(self) -> str:
        full = len(self.rows)
        lines = [f"data: {counted(self.files, 'file')} read, {self.tokens:,} tokens: {counted(full, 'sequence')}"]
        if full < self.needed < 2**31:
            times = f"each comes {self.needed / full:.1f} times on average"
            lines.append(f"data repeats: {self.needed:,} sequences are needed, so {times}")
        lines += [f"skipped: {file} ({why})" for file, why in list(self.skipped.items())[:LISTED]]
        if (more := len(self.skipped) - LISTED) > 0:
            lines.append(f"skipped: {counted(more, 'file')} more")
        return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sequences(paths: list[Path], tokenizer: PreTrainedTokenizerBase, seq_len: int, count: int) -> Sequences:
    """Returns `count` sequences of `seq_len` tokens: documents joined by the end-of-text token, read no further than
    needed.

    If the text ends before `count` sequences are full, the full ones are repeated. Raises ValueError if not one is.
    """
    ids = array("q")
    files, skipped = 0, {}
    for file in files_of(paths):
        if len(ids) >= count * seq_len:
            break
        before = len(ids)
        try:
            for more in file_tokens(file, tokenizer):
                ids.extend(more)
                if len(ids) >= count * seq_len:
                    break
            why = None if len(ids) > before else "empty"
        except UnicodeError:
            why = "not UTF-8 text"
        except OSError as error:
            why = f"unreadable: {os.strerror(error.errno or 0)}"
        if why is None:
            files += 1
        else:
            del ids[before:]
            skipped[file] = why
    if skipped and not files:
        first = "{} ({})".format(*next(iter(skipped.items())))
        raise ValueError(
            f"--data holds no UTF-8 text: {counted(len(skipped), 'file')} skipped, {first} first; pass text files"
        )
    full = min(count, len(ids) // seq_len)
    if full == 0:
        raise ValueError(
            f"--data holds {len(ids)} tokens, expected at least {seq_len}, one sequence; pass more text, or a shorter "
            "--seq-len"
        )
    rows = torch.frombuffer(ids, dtype=torch.int64)[: full * seq_len].view(full, seq_len)
    return Sequences(rows, files, skipped, len(ids), count)


def files_of(paths: list[Path]) -> Iterator[Path]:
    """Yields the files, and those under the directories, in sorted order."""
    for path in paths:
        yield from sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def file_tokens(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yields the token ids of a text file, some at a time, then the end-of-text token if there were any; the file is
    read no further than they need. Raises UnicodeError once it turns out to be no text."""

    found = False
    with file.open(encoding="utf-8-sig") as opened:  # a byte order mark is no text
        for ids in tokens_of(partial(read_text, opened), tokenizer):
            found = found or bool(ids)
            yield ids
    if found and tokenizer.eos_token_id is not None:
        yield [tokenizer.eos_token_id]


def read_text(opened: TextIO, characters: int = -1) -> str:
    """Returns the next characters of a file, by default all. Raises UnicodeError if it turns out to be no text."""
    text = opened.read(characters)
    if "\0" in text:
        raise UnicodeError("zero bytes: it is binary, though it may be UTF-8")
    return text


def tokens_of(
    read: Callable[[int], str], tokenizer: PreTrainedTokenizerBase, piece: int = 2**16, overlap: int = 2**12
) -> Iterator[list[int]]:
    """Yields the token ids of the text that `read(characters)` goes through, some at a time: those that the whole text
    would give, in memory for a piece, of so many characters; at most two pieces more are read.

    What a tokenizer makes of a place depends on the text around it, so pieces overlap. A piece and the next are joined
    in the middle of what they share if they have the same tokens in the middle half of it; else the piece is made
    longer, in the end as long as the text. A tokenizer that does not tell where its tokens are gets the whole text.

        piece     |---------------------------|
        next                    |---------------------------|
        the same                   |--------|
        joined                         ^
    """
    if not tokenizer.is_fast:
        yield tokenizer(read(-1), add_special_tokens=False, verbose=False)["input_ids"]
        return
    start = joined = 0  # of the piece, and of its tokens that were not given out yet, in the text
    text = read(piece)
    tokens = tokens_at(start, text, tokenizer)
    step = piece - overlap
    while more := read(step):
        next_start = start + len(text) - overlap
        next_text = text[-overlap:] + more
        next_tokens = tokens_at(next_start, next_text, tokenizer)
        middle = range(next_start + overlap // 4, next_start + 3 * overlap // 4)
        ends, begins = ([token for token in some if token[1] in middle] for some in (tokens, next_tokens))
        if ends == begins != []:
            end = next_start + overlap // 2
            yield [token for token, begin, _ in tokens if joined <= begin < end]
            start, joined, text, tokens, step = next_start, end, next_text, next_tokens, piece - overlap
        else:
            text += more
            tokens, step = tokens_at(start, text, tokenizer), len(text)
    yield [token for token, begin, _ in tokens if begin >= joined]


def tokens_at(start: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int, int]]:
    """Returns the tokens of a piece of text that starts at `start`: ids, and where in the text each starts and ends."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [(token, start + begin, start + end) for token, (begin, end) in pairs]
