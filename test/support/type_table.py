"""Tries a model type as a small model, and writes its line of the table in docs/models.md (`make models`)."""

import copy
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

import seqtile
from seqtile.attention import segments
from seqtile.models.model_types import model_classes
from seqtile.proof import findings
from seqtile.proof.attention import LENGTH, packed_and_padded, why_masks_are_needed
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


class _Squares(TorchDispatchMode):
    """Counts the tensors of length x length that are made."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.made = length, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = op(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.made += sum(sum(size == self.length for size in x.shape) > 1 for x in tensors)
        return out


def varlen_of(model: PreTrainedModel) -> str:
    """Returns whether a small model computes attention without masks: "yes", "with masks" (the same, but other code of
    its makes a tensor of length x length), or "refused"."""
    if why_masks_are_needed(model) is not None:
        return "refused"
    model = copy.deepcopy(model)
    seqtile.apply_seqtile(model, attention="varlen", mlp=False, loss=False, check=False)
    squares = 0
    for _, inputs in packed_and_padded():
        with suppress(Exception), patch.object(segments, "MASK_ELEMENTS", 200), _Squares(LENGTH) as squares_of_batch:
            findings.gradients_of(model, inputs)
        squares += squares_of_batch.made
    return "with masks" if squares else "yes"


def row(model_type: str, found: list[Finding], shared: str, varlen: str) -> str:
    """Returns a type's line of the table."""
    cells = [f"`{model_type}`", *(_cell([one for one in found if one.part is part]) for part in findings.PROVEN_ALONE)]
    cells += ["yes" if any(one.groups for one in found) else "", shared, varlen]
    return f"| {' | '.join(cells)} |"


def _cell(found: list[Finding]) -> str:
    return ", ".join(dict.fromkeys(one.how for one in found))
