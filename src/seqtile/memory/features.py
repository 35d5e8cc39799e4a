"""The features that save memory, in the order of their cost, and the interface that predicts a step's memory with
them."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from seqtile.memory.setup import TILES, Setup
from seqtile.memory.step import Plan


class Feature(NamedTuple):
    changes: dict[str, Any]
    """Fields of a `Setup`."""
    words: str = ""
    """The feature's name in the output of `fit`, which omits features without one."""
    cost: str = ""


GROUPS = {"tiles": TILES, "head_groups": "auto"}
FEATURES = {
    "nothing": Feature({"tiles": ()}),
    "loss": Feature({"tiles": ("loss",)}),
    "loss, MLP": Feature({"tiles": ("loss", "mlp")}, "loss and MLPs in chunks", "no more matrix products"),
    "loss, MLP, layer": Feature({"tiles": TILES}, "layers in chunks", "no more matrix products"),
    "host": Feature({"offload": ("activations",)}, "layer inputs in host memory", "copied while layers compute"),
    "groups": Feature(GROUPS, "attention by groups of heads", "1 % more matrix products at 128K tokens"),
    "Liger": Feature({"liger": True}),
}


def with_features(setup: Setup, *names: str) -> Setup:
    """Returns the setup with these features enabled. Parts that are already offloaded stay offloaded."""
    for name in names:
        changes = FEATURES[name].changes
        setup = replace(setup, **changes | {"offload": (*changes.get("offload", ()), *setup.offload)})
    return setup


def apply_options(setup: Setup) -> dict[str, Any]:
    """Returns the options of `apply_seqtile` that differ from its defaults."""
    options: dict[str, Any] = {} if "mlp" in setup.tiles else {"mlp": False}
    options |= {"layer": True} if "layer" in setup.tiles else {}
    return options | ({"head_groups": setup.head_groups} if setup.head_groups else {})


def simulation_refusal(setup: Setup) -> str | None:
    """Says why steps of a setup cannot be simulated, see `simulate`, which needs torch; None if they can."""
    if setup.gpus > 1 or not setup.full or setup.autocast or setup.offload or setup.shared_tokens or setup.accumulate:
        return "it is simulated only for one GPU, without LoRA, autocast, offload, accumulation and shared tokens"
    return None


class Predicted(NamedTuple):
    """The memory of a simulated step. A formula returns a `Plan`, which has the same fields."""

    gpu_bytes: float
    bound: str | None
    """The memory that is too small; None if all fits."""


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits."""

    tokens: int
    """0 if not even one token per GPU of a sequence fits."""
    bound: str
    """The memory that a longer sequence would exceed."""

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, bound by {self.bound}"


class Predictor(Protocol):
    """Predicts the memory of one model's steps, by formula or by simulation."""

    notes: list[str]

    def refusal(self, name: str, setup: Setup) -> str | None:
        """Says why a feature cannot be added to this setup; None if it can."""

    def predict(self, setup: Setup, seq_len: int, batch_size: int) -> Plan | Predicted:
        """Predicts a step. Raises ValueError for an impossible one."""

    def longest(self, setup: Setup, batch_size: int) -> Longest:
        """Returns the longest sequence that fits: a multiple of the number of GPUs that share it, and longer than the
        shared prefix."""
        size = setup.sequence_parallel

        def bound(tokens: int) -> str | None:  # per GPU
            return self.predict(setup, tokens * size, batch_size).bound

        least, too_many = setup.shared_tokens // size, 2**40 // size  # longer than any sequence
        most = least
        while too_many - most > 1:
            middle = (most + too_many) // 2
            most, too_many = (middle, too_many) if bound(middle) is None else (most, middle)
        return Longest(most * size if most > least else 0, bound(most + 1) or "nothing")
