"""The proof that a tiled part computes what it computes untiled: on a small model of the same class, part by part.

    small model, float64, untiled  ─> loss, gradients: the truth
    small model, float32, untiled  ─> how far from it one may be
    small model, float32, one part tiled by 7 tokens  ─> no farther, or that part is refused

What was proven before a release is remembered by the file that holds the classes; where that has not changed by a
byte, nothing is run.
"""

import copy
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedConfig, PreTrainedModel

from seqtile.models.forms import code_of
from seqtile.models.parts import BASE, EXPERTS, LAYER, LOSS, MLP, NORM, Part
from seqtile.models.placement import Options, is_patched_subclass, place
from seqtile.models.small import WORDS, small_config, small_model
from seqtile.models.way_taken import WayTaken

CHUNK = 7
_LIBRARIES = ("torch", "liger_kernel", "peft", "bitsandbytes", "torchao")
PROVEN = Path(__file__).with_name("proven.json")
_ALONE = (LOSS, MLP, EXPERTS, LAYER)
_WITH_LAYERS = (NORM, BASE)
Gradients = dict[str, torch.Tensor]
"""By the names of the parameters; "loss" is the loss itself."""


def unproven(model: PreTrainedModel) -> Callable[[Part, nn.Module], str | None]:
    """Returns a function that says why a module of `model` is not to be tiled as a part: it differs tiled, or nothing
    shows that it does not."""

    def reason_of(part: Part, module: nn.Module) -> str | None:
        cls = _own_class(module)
        inside = module.modules() if part is LAYER else [module]
        if part in _WITH_LAYERS or all(_is_known(_own_class(one)) for one in inside):
            return None
        proof = _proof_of(_classes_of(model)[0], _Key(model.config))
        if isinstance(proof, str):
            return f"it could not be proven on a small model of its class: {proof}"
        return proof.get((part.option, cls), "a small model of its class has no such module to prove it on")

    return reason_of


class Finding(NamedTuple):
    """What was found of the modules of one class that are tiled as one part."""

    part: Part
    cls: type
    modules: int
    """How many of them the model has."""
    called: str | None
    """Why they are called chunk by chunk; None if their weights are read."""
    groups: bool
    """True if they are layers whose attention can be computed by groups of heads, and computes the same."""
    refusal: str | None
    """Why they must stay untiled: what differs when they are tiled; None if nothing does."""
    error: float
    """The largest error of the loss or of a weight's gradient, relative to its norm, against the model in float64; NaN
    if it fails."""
    untiled_error: float
    """That of the untiled model."""


def findings(model: PreTrainedModel) -> Iterator[Finding]:
    """Tiles each part of a small float32 model that can be tiled, one class after the other, and yields what comes of
    it."""
    plain = _gradients(copy.deepcopy(model))  # some code leaves tensors of a graph on its modules, not to be copied
    try:
        truth = _gradients(copy.deepcopy(model).double())
    except (RuntimeError, ValueError, TypeError):  # some code computes in float32 whatever it is given
        truth = plain
    for part in _ALONE:
        tileable = [module for module in part.modules(model) if part.refusal(module) is None]
        for cls, modules in _by_class(tileable).items():
            refusal, error = _difference(model, part, cls, Options(chunk_tokens=CHUNK, check=False), plain, truth)
            called, groups = None, False
            if refusal is None:
                called = part.verdict(modules[0]).reason
            if part is LAYER and refusal is None and called is None:
                grouped = Options(layer=True, head_groups=2, chunk_tokens=CHUNK, check=False)
                groups = _difference(model, part, cls, grouped, plain, truth)[0] is None
            yield Finding(part, cls, len(modules), called, groups, refusal, error, _worst(plain, plain, truth)[1])


def _by_class(modules: list[nn.Module]) -> dict[type, list[nn.Module]]:
    found: dict[type, list[nn.Module]] = {}
    for module in modules:
        found.setdefault(_own_class(module), []).append(module)
    return found


def _difference(
    model: nn.Module, part: Part, cls: type, options: Options, plain: Gradients, truth: Gradients
) -> tuple[str | None, float]:
    """Says what differs when the modules of a class are tiled as a part, None if nothing does; and by how much."""
    try:
        tiled = tiled_copy(model, part, cls, options)
        with WayTaken(_modules_of(tiled, part, cls), CHUNK) as way:
            found = _gradients(tiled)
    except Exception as error:  # whatever it is that this model's code does not bear
        return f"it fails when it is tiled: {type(error).__name__}: {str(error)[:200]}", math.nan
    refusal, error = _worst(found, plain, truth)
    return refusal or way.refusal, error


def _modules_of(model: nn.Module, part: Part, cls: type) -> list[nn.Module]:
    """Returns the modules of a class that can be tiled as a part."""
    modules = [module for module in part.modules(model) if _own_class(module) is cls]
    return [module for module in modules if part.refusal(module) is None]


def tiled_copy(model: PreTrainedModel, part: Part, cls: type, options: Options) -> PreTrainedModel:
    """Returns a copy of a model, the modules of a class tiled as a part."""
    tiled, classes = copy.deepcopy(model), {}
    with_it = _WITH_LAYERS if part is LAYER else ()
    found = [(part, module) for module in _modules_of(tiled, part, cls)]
    found += [(other, module) for other in with_it for module in other.modules(tiled)]
    for one, module in found:
        one.check(module, options)
        place(module, partial(one.tiled_forward, options), options, classes)
    return tiled


def _worst(tiled: Gradients, plain: Gradients, truth: Gradients) -> tuple[str | None, float]:
    """Says which gradient is wrong, and by how much, None if none is; and returns the largest relative error."""
    if missing := plain.keys() - tiled.keys():
        return f"{min(missing)} gets no gradient when it is tiled", math.nan
    whole = max(float(tensor.double().norm()) for tensor in truth.values())
    errors, wrong = {}, []
    for name, true in truth.items():
        error, allowed = (float((found[name].double() - true.double()).norm()) for found in (tiled, plain))
        size = float(true.double().norm())
        if not error <= 4 * allowed + 1e-4 * size + 1e-7 * whole:
            wrong.append(name)
        errors[name] = error / size if size > 1e-6 * whole else 0.0
    if not wrong:
        return None, max(errors.values())
    name = max(wrong, key=errors.__getitem__)
    what = "the loss" if name == "loss" else f"the gradient of {name}"
    return f"{what} differs by {errors[name]:.1%} when it is tiled", errors[name]


def _gradients(model: PreTrainedModel) -> Gradients:
    """Returns the loss of a few random words, some of them not to be predicted, and its gradients."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        ids = torch.randint(5, WORDS - 5, (2, 3 * CHUNK + 2))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
        loss = model.train()(input_ids=ids, labels=labels, use_cache=False).loss
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
    return {"loss": loss.detach()} | gradients


class _Key:
    """A config as a key of a cache: equal to another that makes the same small model."""

    def __init__(self, config: PreTrainedConfig):
        self.config = config
        self._text = json.dumps(small_config(config).to_dict(), sort_keys=True, default=str)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Key) and self._text == other._text


@cache
def _proof_of(model_class: type[PreTrainedModel], key: _Key) -> dict[tuple[str, type], str | None] | str:
    """Returns why modules must stay untiled, by part and class; why nothing could be shown if the model cannot be made
    small, or does not run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is small is slower on many
    try:
        with _disable_current_modes(), torch.device("cpu"):  # a simulation's tensors have no values
            model = small_model(model_class, key.config)
            return {(found.part.option, found.cls): found.refusal for found in findings(model)}
    except Exception as error:  # of a model's own code, which may raise anything
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        torch.set_num_threads(threads)


def _own_class(module: nn.Module) -> type:
    """Returns the class that has the forward that a module runs untiled; FSDP2 derives classes without one, around
    whose forward Hugging Face puts no more than it had."""
    classes = [cls for cls in _classes_of(module) if "forward" in vars(cls)]
    code = code_of(inspect.unwrap(classes[0].forward))
    return [cls for cls in classes if code_of(inspect.unwrap(cls.forward)) is code][-1]


def _classes_of(module: nn.Module) -> list[type]:
    """Returns a module's class and what it is derived from, beneath what a tiled module is given."""
    classes = list(type(module).__mro__)
    tiled = [i for i, cls in enumerate(classes) if is_patched_subclass(cls)]
    return classes[max(tiled, default=-1) + 1 :]


def _is_known(cls: type) -> bool:
    """Says if the file of a class is one that was proven, or of a library of layers that treat every token alike."""
    module = cls.__module__
    layers = module.split(".")[0] in _LIBRARIES or (module.startswith("transformers.") and ".models." not in module)
    return layers or fingerprint(module) in _proven()


@cache
def fingerprint(module: str) -> str:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or not path.endswith(".py"):
        return ""
    return f"{Path(path).stem} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"


@cache
def _proven() -> frozenset[str]:
    """Returns the files that were proven, of all releases of transformers."""
    known = json.loads(PROVEN.read_text()) if PROVEN.exists() else {}
    return frozenset(name for names in known.values() for name in names)
