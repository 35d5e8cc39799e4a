"""Tries a model type as a small model, and writes its line of the table in docs/models.md (`make models`)."""

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

import seqtile
from seqtile.models.model_types import model_classes
from seqtile.proof import findings
from seqtile.proof.findings import Finding
from seqtile.proof.small import WORDS, small_model
from support.tiny import loss_and_gradients


def config_of(model_type: str, said: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Returns the default config of a model type, with the fields in `said` changed."""
    return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(said or {}))


def found_in(model_type: str, said: dict[str, Any] | None = None) -> list[Finding] | str:
    """Returns the findings for a model type; if it cannot be tried, says why."""
    try:
        return list(findings.findings(small_model(model_classes(model_type)[0], config_of(model_type, said))))
    except Exception as error:  # of Hugging Face's code, which may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def sharing_of(model_type: str) -> str:
    """Returns whether rows of a model type share prefixes: "yes", "refused", "no" (each row is computed by itself) or
    "differs"; "" if the model does not run on padded rows of text."""
    model = small_model(model_classes(model_type)[0], config_of(model_type)).eval()  # without dropout
    shared = copy.deepcopy(model)
    ids = torch.randint(5, WORDS - 9, (4, 30), generator=torch.Generator().manual_seed(0))
    ids[:2, :20], ids[2:, :15] = ids[0, :20].clone(), ids[2, :15].clone()
    mask = torch.ones_like(ids)
    mask[1, 26:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
    try:
        loss, gradients = loss_and_gradients(model, **batch)
    except Exception:  # of Hugging Face's code, which may raise anything
        return ""
    try:
        seqtile.share_prefixes(shared, min_tokens=10)
    except ValueError:
        return "refused"
    try:
        other, found = loss_and_gradients(shared, **batch)
    except ValueError as error:  # known only with the length: a window that a model does not pass on
        return "refused" if "a window of" in str(error) else "differs"
    if (saved := seqtile.status(shared).prefixes.saved_tokens) != 35:
        return "no" if saved == 0 else "differs"
    gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    largest = max(gradient.norm() for gradient in gradients.values())
    errors = [(found[name] - gradient).norm() / largest for name, gradient in gradients.items()]
    return "yes" if max([*errors, abs(other - loss) / loss]) < 1e-5 else "differs"


def row(model_type: str, found: list[Finding], shared: str) -> str:
    """Returns a type's line of the table."""
    cells = [f"`{model_type}`", *(_cell([one for one in found if one.part is part]) for part in findings.PROVEN_ALONE)]
    cells += ["yes" if any(one.groups for one in found) else "", shared]
    return f"| {' | '.join(cells)} |"


def _cell(found: list[Finding]) -> str:
    return ", ".join(dict.fromkeys(one.how for one in found))
