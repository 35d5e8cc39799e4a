"""What every public function makes of the model that it is given."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def unwrapped(model: Any, other: str = "") -> PreTrainedModel:
    """Returns a Hugging Face model itself, without PEFT's wrapper; a TypeError if it is none. `other`: what else to do
    with a module that is none."""
    inner = model.get_base_model() if isinstance(model, nn.Module) and hasattr(model, "get_base_model") else model
    if isinstance(inner, PreTrainedModel):
        return inner
    if isinstance(inner, nn.Module):
        remedy = (
            "pass the model itself, not a wrapper around it (.module of DDP and DeepSpeed, ._orig_mod of torch.compile)"
        )
        remedy += other
    else:
        name = repr(str(inner)) if isinstance(inner, str | Path) else "..."
        remedy = f"load it first with AutoModelForCausalLM.from_pretrained({name})"
    got = f"the class {inner.__name__}" if isinstance(inner, type) else f"a {type(inner).__name__}"
    raise TypeError(f"expected a Hugging Face model, got {got}; {remedy}")
