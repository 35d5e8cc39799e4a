"""The model types of Hugging Face that have a head over a vocabulary, and the classes of each."""

from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

_MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING")


@cache
def model_types() -> tuple[str, ...]:
    """Returns every model type that `apply_seqtile_to_...` is there for: the causal language models, and the models of
    images and text."""
    names = [name for mapping in _MAPPINGS for name in getattr(modeling_auto, f"{mapping}_NAMES")]
    return tuple(sorted(dict.fromkeys(names)))


def model_classes(model_type: str) -> list[type[PreTrainedModel]]:
    """Returns the classes with a head of a model type. Raises ValueError if there is none."""
    if model_type not in model_types():
        raise ValueError(
            f"model type {model_type!r} has no head over a vocabulary in this transformers; expected a type of its "
            "causal language models or models of images and text, such as 'llama'"
        )
    config = CONFIG_MAPPING[model_type]
    found: dict[type[PreTrainedModel], None] = {}
    for mapping in _MAPPINGS:
        classes: Any = getattr(modeling_auto, mapping).get(config, ())
        found |= dict.fromkeys(classes if isinstance(classes, tuple) else (classes,))
    return list(found)
