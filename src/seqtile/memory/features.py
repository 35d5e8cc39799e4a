"""What can be turned on for a step to need less memory, in the order of what it costs; and what predicts the memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from seqtile.memory.setup import TILES, Setup


class Feature(NamedTuple):
    changes: dict[str, Any]
    """Fields of a `Setup`."""
    words: str = ""
    """What `fit` calls it, which leaves those without out."""
    cost: str = ""


FEATURES = {
    "nothing": Feature({"tiles": ()}),
    "loss": Feature({"tiles": ("loss",)}),
    "loss, MLP": Feature({"tiles": ("loss", "mlp")}, "loss and MLPs in chunks", "no more products"),
    "loss, MLP, layer": Feature({"tiles": TILES}, "layers in chunks", "no more products"),
    "host": Feature({"offload": ("activations",)}, "layer inputs in host memory", "copied while layers compute"),
    "groups": Feature({"head_groups": "auto"}, "attention by groups of heads", "1 % more products at 128K tokens"),
}


def with_feature(setup: Setup, name: str) -> Setup:
    """Returns the setup with a feature on; what is offloaded already stays so."""
    changes = FEATURES[name].changes
    return replace(setup, **changes | {"offload": (*setup.offload, *changes.get("offload", ()))})


def apply_options(setup: Setup) -> dict[str, Any]:
    """Returns the options of `apply_seqtile` that are not its defaults."""
    options: dict[str, Any] = {} if "mlp" in setup.tiles else {"mlp": False}
    options |= {"layer": True} if "layer" in setup.tiles else {}
    return options | ({"head_groups": setup.head_groups} if setup.head_groups else {})


def simulation_refusal(setup: Setup) -> str | None:
    """Says why steps of a setup are not simulated, see `simulate`, which needs torch."""
    if setup.gpus > 1 or not setup.full or setup.autocast or setup.offload:
        return "it is simulated for one GPU alone, without LoRA, autocast and offload"
    return None


class Predicted(Protocol):
    """What a step is predicted to need: a `Plan`, or what a simulation says."""

    gpu_bytes: float
    bound: str | None
    """The memory that is too small; None if all fits."""


class Predictor(Protocol):
    """The memory of the steps of one model, by formula or by simulation."""

    notes: list[str]

    def refusal(self, name: str, setup: Setup) -> str | None:
        """Says why a feature cannot be had besides this setup."""

    def predict(self, setup: Setup, seq_len: int, batch_size: int) -> Predicted:
        """Predicts a step. ValueError for what cannot be."""

    def longest(self, setup: Setup, batch_size: int) -> int:
        """Returns the tokens of the longest sequence whose step fits, 0 if there is none."""


def longest_that_fits(fits: Callable[[int], bool], limit: int = 2**40) -> int:
    """Returns the largest number below `limit` (nobody's length) that fits, 0 if none does."""
    most, too_many = 0, limit
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle) else (most, middle)
    return most
