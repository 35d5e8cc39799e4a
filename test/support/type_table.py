"""What is found of a model type built small, and its line in the table of docs/models.md (`make models`)."""

import copy
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from seqtile.models import proof
from seqtile.models.model_types import model_classes
from seqtile.models.proof import Finding
from seqtile.models.small import small_model


def config_of(model_type: str, said: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Returns the config of a model type that is the default but for what is said."""
    return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(said or {}))


def found_in(model_type: str, said: dict[str, Any] | None = None) -> list[Finding] | str:
    """Returns what was found of a model type; why it cannot be tried out if it cannot."""
    try:
        return list(proof.findings(small_model(model_classes(model_type)[0], config_of(model_type, said))))
    except Exception as error:  # of Hugging Face's code, which may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def row(model_type: str, found: list[Finding]) -> str:
    """Returns a type's line of the table."""
    cells = [f"`{model_type}`", *(_cell([one for one in found if one.part is part]) for part in proof.PROVEN_ALONE)]
    cells.append("yes" if any(one.groups for one in found) else "")
    return f"| {' | '.join(cells)} |"


def _cell(found: list[Finding]) -> str:
    words = ["refused" if one.refusal else "chunked" if one.chunked else "fused" for one in found]
    return ", ".join(dict.fromkeys(words))
