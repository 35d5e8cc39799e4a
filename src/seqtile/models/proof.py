"""The proof that a tiled part computes what it computes untiled: on a small model of the same class, part by part.

    small model, float64, untiled  ─> loss, gradients: the truth
    small model, float32, untiled  ─> how far from it one may be
    small model, float32, one part tiled by 7 tokens  ─> no farther, or that part is refused

What was proven before a release is remembered by the file that holds the classes and by what the config says besides
sizes; where neither has changed, nothing is run. What somebody put into the model is in no small model, see
replaced.py.
"""

import copy
import hashlib
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

from seqtile.models.parts import BASE, EXPERTS, LAYER, LOSS, MLP, NORM, Part
from seqtile.models.placement import Options, original_forward, place
from seqtile.models.replaced import (
    Made,
    class_of,
    classes_of,
    homes_of,
    inside_wrappers,
    is_of_library,
    mixing_reason,
    modules_by_place,
)
from seqtile.models.small import WORDS, config_of_all_kinds, meaning_of_config, small_model, unfilled
from seqtile.models.way_taken import WayTaken

CHUNK = 7
_UNPROVABLE = "it could not be proven on a small model of its class"
PROVEN = Path(__file__).with_name("proven.json")
_ALONE = (LOSS, MLP, EXPERTS, LAYER)
_WITH_LAYERS = (NORM, BASE)
Gradients = dict[str, torch.Tensor]
"""By the names of the parameters; "loss" is the loss itself."""


def unproven(model: PreTrainedModel) -> Callable[[Part, nn.Module], str | None]:
    """Returns a function that says why a module of `model` is not to be tiled as a part: it differs tiled, or nothing
    shows that it does not."""
    origin = _origin_of(model)
    places = {module: place for place, module in modules_by_place(model)}
    sizes = {size for size in vars(model.config.get_text_config()).values() if type(size) is int and 1 < size < 2**20}
    tried: dict[Callable, str | None] = {}

    def reason_of(part: Part, module: nn.Module) -> str | None:
        if part not in _ALONE:
            return None
        if isinstance(origin, str):
            return f"{_UNPROVABLE}: {origin}"
        homes = set()
        if part is LOSS:  # the model's own forward runs, as it is, and gives a chunk to its head
            homes, module = homes_of(model), model.get_output_embeddings()
        root = inside_wrappers(module)
        for at, function, is_replaced in origin.made.inside(places.get(root, "?"), root, origin.other_homes):
            if not is_replaced:
                homes |= homes_of(function)
                continue
            if function not in tried:
                tried[function] = mixing_reason(function, sizes)
            if (reason := tried[function]) is not None:
                itself = function is root and part is not LOSS
                return f"{'it' if itself else 'its ' + at.rpartition('.')[2]} {reason}"
        if all(map(origin.is_known, homes)):
            return None
        proof = _proof_of(origin.model_class, _Key(model.config))
        if isinstance(proof, str):  # this config's small model does not run; another's may have
            of_any = all(origin.is_known(home, of_any_config=True) for home in homes)
            return None if of_any else f"{_UNPROVABLE}: {proof}"
        cls = class_of(model if part is LOSS else module)
        return proof.get((part.option, cls), "a small model of its class has no such module to prove it on")

    return reason_of


class _Origin(NamedTuple):
    """What a model's class makes of its config, but for the sizes."""

    model_class: type[PreTrainedModel]
    made: Made
    meaning: str | None
    """Of the config; None where the class calls Liger's kernels, which run on no CPU: what is remembered of its file
    holds for any."""

    @property
    def other_homes(self) -> tuple[str, ...]:
        """The Python modules whose classes are expected, too: a model may be older than Liger's classes in its file."""
        return (self.model_class.__module__,) if self.meaning is None else ()

    def is_known(self, home: str, of_any_config: bool = False) -> bool:
        """Says if what a Python module holds was proven, or is of a library of layers that treat every token alike."""
        if home.split(".")[0] == "torch" or is_of_library(home):
            return True
        meanings = _proven().get(fingerprint(home), ())
        return self.meaning in meanings or ((of_any_config or self.meaning is None) and bool(meanings))


def _origin_of(model: PreTrainedModel) -> _Origin | str:
    """Returns it of a model's class, or of the first that this is derived from and that can be made of a config alone;
    why there is none if there is none."""
    first, *bases = classes_of(model)
    found = "it is no model of Hugging Face's"
    for cls in (first, *(base for base in bases if "forward" in vars(base))):
        if not issubclass(cls, PreTrainedModel):
            continue
        try:
            small = _small_config_of(cls, _Key(model.config))
            with _disable_current_modes():
                made = Made(unfilled(cls, small))
            return _Origin(cls, made, None if _calls_liger(cls) else digest(small))
        except Exception as error:  # of a model's own code, which may raise anything
            found = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def _calls_liger(model_class: type) -> bool:
    """Says if Liger has exchanged a class's forward, or what stands beside it."""
    things = [original_forward(model_class), *vars(sys.modules[model_class.__module__]).values()]
    things += [base for thing in things if isinstance(thing, type) for base in thing.__mro__]
    return any(str(getattr(thing, "__module__", None)).startswith("liger_kernel.") for thing in things)


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
    plain = gradients_of(copy.deepcopy(model))  # some code leaves tensors of a graph on its modules, not to be copied
    try:
        truth = gradients_of(copy.deepcopy(model).double())
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
            yield Finding(part, cls, len(modules), called, groups, refusal, error, worst(plain, plain, truth)[1])


def _by_class(modules: list[nn.Module]) -> dict[type, list[nn.Module]]:
    found: dict[type, list[nn.Module]] = {}
    for module in modules:
        found.setdefault(class_of(module), []).append(module)
    return found


def _difference(
    model: nn.Module, part: Part, cls: type, options: Options, plain: Gradients, truth: Gradients
) -> tuple[str | None, float]:
    """Says what differs when the modules of a class are tiled as a part, None if nothing does; and by how much."""
    try:
        tiled = tiled_copy(model, part, cls, options)
        with WayTaken(_modules_of(tiled, part, cls), CHUNK) as way:
            found = gradients_of(tiled)
    except Exception as error:  # whatever it is that this model's code does not bear
        return f"it fails when it is tiled: {type(error).__name__}: {str(error)[:200]}", math.nan
    refusal, error = worst(found, plain, truth)
    return refusal or way.refusal, error


def _modules_of(model: nn.Module, part: Part, cls: type) -> list[nn.Module]:
    """Returns the modules of a class that can be tiled as a part."""
    modules = [module for module in part.modules(model) if class_of(module) is cls]
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


def worst(tiled: Gradients, plain: Gradients, truth: Gradients) -> tuple[str | None, float]:
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


def some_words() -> dict[str, Any]:
    """Returns what a model is called with: a few random words, some of them not to be predicted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        ids = torch.randint(5, WORDS - 5, (2, 3 * CHUNK + 2))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def gradients_of(model: PreTrainedModel, inputs: dict[str, Any] | None = None) -> Gradients:
    """Returns the loss of what a model is called with, and the gradients of its parameters and of inputs that require
    one."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        inputs = some_words() if inputs is None else inputs
        loss = model.train()(**inputs).loss
        named = dict(model.named_parameters()) | inputs
        named = {name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}
    return {"loss": loss.detach()} | gradients


class _Key:
    """A config as a key of a cache."""

    def __init__(self, config: PreTrainedConfig):
        self.config = config
        self._text = json.dumps(config.to_dict(), sort_keys=True, default=str)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Key) and self._text == other._text


@cache
def _small_config_of(model_class: type[PreTrainedModel], key: _Key) -> PreTrainedConfig:
    with _disable_current_modes():
        return config_of_all_kinds(model_class, key.config)


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


@cache
def fingerprint(module: str) -> str:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or not path.endswith(".py"):
        return ""
    return f"{Path(path).stem} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"


def digest(small: PreTrainedConfig) -> str:
    return hashlib.sha256(meaning_of_config(small).encode()).hexdigest()[:8]


@cache
def _proven() -> dict[str, set[str]]:
    """Returns the files that were proven, of all releases of transformers, and of which configs."""
    known: dict[str, set[str]] = {}
    for files in (json.loads(PROVEN.read_text()) if PROVEN.exists() else {}).values():
        for file, digests in files.items():
            known.setdefault(file, set()).update(digests.split())
    return known
