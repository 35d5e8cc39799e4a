"""Says which parts of a model are proven: by the table proven.json, or on a small model of the same class.

The table lists what was proven before a release: hashes of the files that define the classes, and of their configs
without sizes; dev/models.py writes it. If both hashes are listed, nothing runs, else findings.py makes the proof. The
small model does not contain what a user puts into a model, see known.py in models.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedConfig, PreTrainedModel

from seqtile.models.known import HUGGING_FACE, is_of_library
from seqtile.models.parts import ATTENTION, LOSS, Part
from seqtile.models.placement import class_of, classes_of, homes_of
from seqtile.proof.attention import why_masks_are_needed
from seqtile.proof.difference import brief
from seqtile.proof.findings import PROVEN_ALONE, findings
from seqtile.proof.small import config_of_all_kinds, meaning_of_config, small_model

_UNPROVABLE = "it could not be proven on a small model of its class"
PROVEN = Path(__file__).with_name("proven.json")
PROVEN_ATTENTION = Path(__file__).with_name("proven_attention.json")


def unproven(model: PreTrainedModel) -> Callable[[Part, nn.Module], str | None]:
    """Returns a function that says why a module of `model` must not be tiled as a part: it computes something else when
    tiled, or nothing proves that it does not. The function returns None if the module may be tiled."""
    origin = _origin_of(model)

    def reason_of(part: Part, module: nn.Module) -> str | None:
        if part not in (*PROVEN_ALONE, ATTENTION):
            return None
        if isinstance(origin, str):
            return f"{_UNPROVABLE}: {origin}"
        if part is ATTENTION:
            known = all(origin.is_known(home, PROVEN_ATTENTION) for home in own_homes(model))
            return None if known else _attention_proof_of(origin.model_class, _Key(model.config))
        homes = set()
        if part is LOSS:  # the model's own forward runs unchanged; only its head runs in chunks
            homes, module = homes_of(model), model.get_output_embeddings()
        homes |= own_homes(module)
        if all(map(origin.is_known, homes)):
            return None
        proof = _proof_of(origin.model_class, _Key(model.config))
        if isinstance(proof, str):  # this config's small model does not run, as with Liger on a CPU; another's may have
            of_any = all(origin.is_known(home, of_any_config=True) for home in homes)
            return None if of_any else f"{_UNPROVABLE}: {proof}"
        cls = class_of(model if part is LOSS else module)
        return proof.get((part.option, cls), "a small model of its class has no such module to prove it on")

    return reason_of


def own_homes(module: nn.Module) -> set[str]:
    """Returns the Python modules of Hugging Face's that hold the classes and forwards of a module and those in it."""
    homes = set().union(*map(homes_of, module.modules()))
    return {home for home in homes if home.split(".")[0] in HUGGING_FACE}


class _Origin(NamedTuple):
    """The model that a class builds from its config, sizes aside."""

    model_class: type[PreTrainedModel]
    meaning: str
    """The hash of the config without sizes."""

    def is_known(self, home: str, table: Path = PROVEN, of_any_config: bool = False) -> bool:
        """Returns whether a Python module is proven in a table, or holds none of a model's own code."""
        package, *path = home.split(".")
        if package == "torch" or is_of_library(home) or (package == "transformers" and "models" not in path):
            return True
        meanings = _proven(table).get(fingerprint(home), ())
        return self.meaning in meanings or (of_any_config and bool(meanings))


def _origin_of(model: PreTrainedModel) -> _Origin | str:
    """Returns the origin of a model: from its class, or from the first base class that can be built from a config
    alone. If there is none, returns why."""
    first, *bases = classes_of(model)
    found = "it is no model of Hugging Face's"
    for cls in (first, *(base for base in bases if "forward" in vars(base))):
        if not issubclass(cls, PreTrainedModel):
            continue
        try:
            with _disable_current_modes():
                return _Origin(cls, digest(_small_config_of(cls, _Key(model.config))))
        except Exception as error:  # the model's own code may raise anything
            found = brief(error)
    return found


class _Key(str):
    """A config as a cache key: its text, with the config as an attribute."""

    config: PreTrainedConfig

    def __new__(cls, config: PreTrainedConfig) -> "_Key":
        key = super().__new__(cls, json.dumps(config.to_dict(), sort_keys=True, default=str))
        key.config = config
        return key


@cache
def _small_config_of(model_class: type[PreTrainedModel], key: _Key) -> PreTrainedConfig:
    return config_of_all_kinds(model_class, key.config)


@cache
def _proof_of(model_class: type[PreTrainedModel], key: _Key) -> dict[tuple[str, type], str | None] | str:
    """Returns why modules must stay untiled, by part and class. If the small model cannot be built or run, returns
    why."""
    try:
        with _one_thread(), _disable_current_modes(), torch.device("cpu"):  # tensors of a simulation have no values
            model = small_model(model_class, key.config)
            return {(found.part.option, found.cls): found.refusal for found in findings(model)}
    except Exception as error:  # the model's own code may raise anything
        return brief(error)


@cache
def _attention_proof_of(model_class: type[PreTrainedModel], key: _Key) -> str | None:
    """Returns why attention must keep its masks; None if it computes the same without."""
    try:
        with _one_thread(), _disable_current_modes(), torch.device("cpu"):
            return why_masks_are_needed(small_model(model_class, key.config))
    except Exception as error:  # the model's own code may raise anything
        return f"{_UNPROVABLE}: {brief(error)}"


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models are slower on many threads
    try:
        yield
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
def _proven(table: Path) -> dict[str, set[str]]:
    """Returns the hashes of proven files, for all releases of transformers, each with the hashes of its configs."""
    known: dict[str, set[str]] = {}
    for files in json.loads(table.read_text()).values():
        for file, digests in files.items():
            known.setdefault(file, set()).update(digests.split())
    return known
