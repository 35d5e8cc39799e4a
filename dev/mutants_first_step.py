"""Says of small models, one step each, whether tiled they compute something else than untiled, and whether the first
step's comparison raises. Run by mutants.py with the changed package: python -m dev.mutants_first_step [few]

Prints a line of JSON a model: [its name, what differs in a step without the check, what the check says of that].
"""

import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))
import torch
from torch import nn

import seqtile
from models.layered import packed
from models.test_layer import PROJECTIONS, with_adapters
from models.test_layer_sharing import built
from models.test_paths import hooked, nested, of_the_mlp, pruned_head, quantised
from support.tiny import CHUNK, batch_of, build, checkpointing

Found = dict[str, torch.Tensor]
FAR = 1e-3  # of a gradient in float32; in less precision five times what that moves the untiled one


class Case(NamedTuple):
    """A model, how it is tiled, and how it is trained."""

    build: Callable[[], nn.Module]
    options: Mapping[str, Any] = MappingProxyType({})
    batch: Callable[[], dict[str, Any]] = partial(batch_of, 2, 61)
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    reentrant: bool | None = None
    main_grads: bool = False


def lora(model: nn.Module, dropout: float = 0.0) -> nn.Module:
    return with_adapters(model, dropout, PROJECTIONS).get_base_model()


def summed() -> dict[str, Any]:
    return batch_of(2, 61) | {"num_items_in_batch": torch.tensor(41)}


LAYER, GROUPS, FULL = {"layer": True}, {"layer": True, "head_groups": 2}, torch.bfloat16
PACKED = partial(packed, 20, 80)
CASES = {
    "llama": Case(partial(build, "llama")),
    "llama, layer": Case(partial(build, "llama"), LAYER),
    "llama, groups": Case(partial(build, "llama"), GROUPS),
    "llama, groups, packed": Case(partial(build, "llama"), GROUPS, PACKED),
    "llama, layer, checkpointed": Case(partial(build, "llama"), LAYER, reentrant=False),
    "llama, groups, reentrant": Case(partial(build, "llama"), GROUPS, reentrant=True),
    "llama, main_grad": Case(partial(build, "llama"), LAYER, main_grads=True),
    "llama, autocast": Case(partial(build, "llama"), LAYER, autocast=FULL),
    "llama, bfloat16": Case(partial(build, "llama"), GROUPS, dtype=FULL),
    "llama, LoRA": Case(lambda: lora(build("llama"))),
    "llama, LoRA, groups": Case(lambda: lora(build("llama")), GROUPS),
    "llama, LoRA with dropout": Case(lambda: lora(build("llama"), 1e-12), LAYER),
    "llama, LoRA merged": Case(lambda: of_the_mlp(lambda module: module.merge())(build("llama"))),
    "llama, LoRA over LoRA": Case(lambda: nested(build("llama"))),
    "llama, a hook": Case(lambda: hooked(build("llama"))),
    "llama, a pruned head": Case(lambda: pruned_head(build("llama", tie_word_embeddings=False))),
    "llama, other projections": Case(lambda: quantised(build("llama"))),
    "qwen3, groups": Case(partial(build, "qwen3"), GROUPS, summed),
    "granite": Case(partial(build, "granite"), {}, summed),
    "granite, groups": Case(partial(build, "granite", residual_multiplier=0.4), GROUPS),
    "cohere": Case(partial(build, "cohere")),
    "llama, wide, layer": Case(partial(build, "llama", hidden_size=1024), LAYER),  # programs of a norm share rows
    "gemma2, layer": Case(partial(build, "gemma2"), LAYER),
    "gemma3_text, layer": Case(partial(build, "gemma3_text"), LAYER, PACKED),
    "gemma4, layer": Case(partial(built, "gemma4"), LAYER),
    "smollm3, layer": Case(partial(build, "smollm3", no_rope_layers=[0, 1]), LAYER),
    "phi3, layer": Case(partial(build, "phi3"), LAYER),
    "olmo2, layer": Case(partial(build, "olmo2"), LAYER, PACKED),
    "qwen3_moe": Case(partial(build, "qwen3_moe")),
    "mixtral, layer": Case(partial(build, "mixtral"), LAYER),
}
FEW = ("llama", "llama, groups", "llama, wide, layer", "gemma3_text, layer")  # in Triton's interpreter


def step(model: nn.Module, batch: dict[str, Any], case: Case) -> Found:
    """Returns loss and gradients."""
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with nullcontext() if case.autocast is None else torch.autocast("cpu", case.autocast):
        loss = model(**batch).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in names.items():
        total = parameter.grad.float() if parameter.grad is not None else torch.zeros(())
        if case.main_grads:
            total = total + parameter.main_grad - 1
        found[name] = total
    return found


def prepared(case: Case, dtype: torch.dtype) -> nn.Module:
    """Returns the case's model, always the same."""
    torch.manual_seed(7)
    model = case.build().to(dtype)
    checkpointing(model, case.reentrant)
    if case.reentrant:
        model.enable_input_require_grads()
    for parameter in model.parameters() if case.main_grads else ():
        parameter.main_grad = torch.ones(parameter.shape)
    return model


def differs(case: Case, batch: dict[str, Any]) -> str:
    """Says what of a step without the check is beyond rounding, "" if nothing is."""
    layered = {"use_cache": False} if case.options.get("layer") else {}
    truth = step(prepared(case, case.dtype), batch | layered, case)
    rounded = truth
    if case.dtype != torch.float32 or case.autocast is not None:
        rounded = step(prepared(case, torch.float32), batch | layered, case._replace(autocast=None))
    tiled = prepared(case, case.dtype)
    try:
        seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK, check=False, **case.options)
        found = step(tiled, batch, case)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    whole = max(float(tensor.norm()) for tensor in truth.values())
    for name, tensor in truth.items():
        allowed = 5 * float((rounded[name].float() - tensor.float()).norm()) + FAR * float(tensor.norm())
        error = float((found[name].float() - tensor.float()).norm())
        if not error <= allowed + 1e-6 * whole:
            return f"{name} by {error / max(float(tensor.norm()), 1e-30):.1%}"
    return ""


def said(case: Case, batch: dict[str, Any]) -> str:
    """Returns what the comparison raises, or what the proof at apply leaves untiled; "" if neither says anything."""
    model = prepared(case, case.dtype)
    try:
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check="full", **case.options)
        with nullcontext() if case.autocast is None else torch.autocast("cpu", case.autocast):
            model(**batch)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return next((note for note in seqtile.status(model).notes if " is left untiled: " in note), "")


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    for name, case in CASES.items():
        if name in FEW or "few" not in sys.argv:
            torch.manual_seed(8)
            batch = case.batch()
            changed = differs(case, batch)
            print(json.dumps([name, changed, said(case, batch) if changed else ""]), flush=True)


if __name__ == "__main__":
    main()
