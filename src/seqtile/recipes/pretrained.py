"""Loads a pretrained model, all of it or an error, and its configuration and tokenizer."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from seqtile.memory.setup import expect
from seqtile.memory.simulate import quiet
from seqtile.recipes import hint_for_missing, hub_config, in_brief, resolve_model
from seqtile.recipes.memory import is_out_of_memory

logger = logging.get_logger(__name__)

NAMED = 3  # weights that an error names, of those that are missing


def device_of(asked: str | None) -> str:
    """Returns the device of --device, by default a GPU if there is one. Raises ValueError if it does not exist."""
    expect("--device", asked in (None, "cpu", "cuda"), "cpu or cuda", asked)
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
        last = error
        while last.__cause__ is not None:
            last = last.__cause__
        why = in_brief(last)
        if "trust_remote_code" in str(error):
            why = "it brings code of its own, which this command does not run"
            remedy = "read that code, then load the model in Python with trust_remote_code=True"
        raise ValueError(f"{what} cannot be loaded ({why}); {remedy}") from error


def load_config(model: str, asked_by: str = "--model", **options: Any) -> PreTrainedConfig:
    """Returns the configuration of `model`; `options` are those of `from_pretrained`. Raises ValueError, of the option
    or argument that asked for it, if neither a path nor the hub has it."""
    name, file = resolve_model(model)
    if not Path(name).exists():
        hub_config(name, f"{asked_by}: there is no directory {name} here{hint_for_missing(Path(name))}")
    with read_of(f"{asked_by}: the configuration of {model}"):
        return AutoConfig.from_pretrained(name, **{"trust_remote_code": False} | file | options)


def load_tokenizer(model: str, asked_by: str = "--model", **options: Any) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of `model`; `options` as above. Raises ValueError if its files cannot be read, or if
    neither a path nor the hub has the model."""
    load_config(model, asked_by, **options)
    name, file = resolve_model(model)
    with read_of(f"{asked_by}: the tokenizer of {model}"):
        return AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False} | file | options)


def load_model(model: str, asked_by: str = "--model", **options: Any) -> PreTrainedModel:
    """Returns the model, ready to be trained and saved, by default in float32; `options` as above.

    Raises ValueError unless the files hold all weights in the shapes that its configuration asks for: transformers
    draws the others at random. Warns if they hold more.
    """
    name, file = resolve_model(model)
    options = {"dtype": torch.float32, "trust_remote_code": False} | file | options
    if file and hasattr(transformers, "GgufConfig"):  # 5.16 decodes these weights in any case
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    shared = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    config = load_config(model, asked_by, **shared)
    options |= {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with read_of(f"{asked_by}: the weights of {model}", "get its files again, config.json too"), quiet():
        loaded, info = AutoModelForCausalLM.from_pretrained(name, **options)
    wrong, missing, unused = "", sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if info["mismatched_keys"]:
        weight, here, expected = min(info["mismatched_keys"])
        wrong = f"{weight} of {model} has shape {list(here)}, but its config.json asks for {list(expected)};"
    elif missing:
        wrong = f"the weights of {model} lack {listed(missing)}; get its files again, or"
    if wrong:
        raise ValueError(f"{asked_by}: {wrong} pass a model whose weights and config.json belong together")
    if unused:
        logger.warning(f"note: {asked_by}: config.json of {model} leaves out some of its weights: {listed(unused)}")
    return loaded


def listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
