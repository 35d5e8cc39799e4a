"""The memory model: predicts before a run how much memory a training step needs, and how long a sequence may be.

    plan, longest, ladder  >  Formula  >  Step (step.py)  >  Layer (layer.py)  >  Shape and Setup (shape.py, setup.py)

It imports neither torch nor transformers, and so answers at once. `simulate`, which is imported separately, handles
model types without a formula: it runs their code on tensors without data.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from seqtile.arch import ARCHS
from seqtile.memory.batch import Batch
from seqtile.memory.layer import planned_groups
from seqtile.memory.setup import OFFLOAD, OPTIMIZERS, TILES, Setup, expect, is_count, setup_of
from seqtile.memory.shape import KNOWN, Shape, shape_of
from seqtile.memory.squares import keeps_copies, makes_squares
from seqtile.memory.step import Plan, Step

__all__ = ["KNOWN", "OFFLOAD", "OPTIMIZERS", "TILES", "Longest", "Plan", "Setup", "Shape"]
__all__ += ["ladder", "longest", "plan", "shape_of"]


class Feature(NamedTuple):
    """What saves memory."""

    changes: dict[str, Any]
    """Fields of a `Setup`."""
    words: str = ""
    """The feature's name in the output of `fit`, which omits features without one."""
    cost: str = ""


GROUPS = {"tiles": TILES, "head_groups": "auto"}
FEATURES = {  # that save memory, in the order of their cost in time
    "nothing": Feature({"tiles": ()}),
    "attention": Feature({"attention": "varlen"}, "attention without masks", "no more matmuls"),
    "loss": Feature({"tiles": ("loss",)}),
    "loss, MLP": Feature({"tiles": ("loss", "mlp")}, "loss and MLPs in chunks", "no more matmuls"),
    "loss, MLP, layer": Feature({"tiles": TILES}, "layers in chunks", "no more matmuls"),
    "host": Feature({"offload": ("activations",)}, "layer inputs in host memory", "copied while layers compute"),
    "groups": Feature(GROUPS, "attention in head chunks", "1 % more matmuls at 128K tokens"),
    "Liger": Feature({"liger": True}),
}


def with_features(setup: Setup, *names: str) -> Setup:
    """Returns the setup with these features enabled. Parts that are already offloaded stay offloaded."""
    for name in names:
        changes = FEATURES[name].changes
        offload = dict.fromkeys((*changes.get("offload", ()), *setup.offload))
        setup = replace(setup, **changes | {"offload": tuple(offload)})
    return setup


def apply_options(setup: Setup) -> dict[str, Any]:
    """Returns the options of `apply_seqtile` that differ from its defaults."""
    options: dict[str, Any] = {} if "mlp" in setup.tiles else {"mlp": False}
    options |= {} if setup.tiles else {"loss": False}
    options |= {"layer": True} if "layer" in setup.tiles else {}
    options |= {"attention": "varlen"} if setup.attention == "varlen" else {}
    return options | ({"head_groups": setup.head_groups} if setup.head_groups else {})


def simulation_refusal(setup: Setup) -> str | None:
    """Says why steps of a setup cannot be simulated, see `simulate`, which needs torch; None if they can."""
    if setup.gpus > 1 or not setup.full or setup.autocast or setup.offload or setup.shared_tokens or setup.accumulate:
        return "it is simulated only for one GPU, without LoRA, autocast, offload, accumulation and shared tokens"
    if setup.attention == "eager" or (setup.attention == "sdpa" and setup.rows != "plain"):
        got = f"{setup.attention} for {setup.rows} rows, whose masks and scores are not simulated"
        return f"attention: expected flash or varlen, got {got}"
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

    def refusal(self, name: str, setup: Setup, before: Setup) -> str | None:
        """Says why the setup `before` cannot have this feature, or needs none; None if it can. `setup` has it."""

    def predict(self, setup: Setup, seq_len: int, batch_size: int) -> Plan | Predicted:
        """Predicts a step. Raises ValueError for an impossible one."""

    def longest(self, setup: Setup, batch_size: int) -> Longest:
        """Returns the longest sequence that fits: a multiple of the number of GPUs that share it, and longer than the
        shared prefix."""
        size = setup.sequence_parallel

        def bound(tokens: int) -> str | None:  # per GPU
            return self.predict(setup, tokens * size, batch_size).bound

        least = setup.shared_tokens // size
        lengths = range(least + 1, 2**40 // size)  # no sequence is as long as the last
        most = least + bisect_left(lengths, True, key=lambda tokens: bound(tokens) is not None)
        return Longest(most * size if most > least else 0, bound(most + 1) or "nothing")

    def turned_on(
        self, base: Setup, names: Iterable[str] = FEATURES, host: bool = True
    ) -> Iterator[tuple[str, Setup, str | None]]:
        """Turns on one feature after the other, in the order of their cost in time, beside those of `base`; `host`:
        False to leave layer inputs where they are. Yields each feature's name, the setup with it, and None; or the
        setup without it, and why it is left out."""
        setup = replace(base, tiles=(), head_groups=None)
        for name in names:
            more = with_features(setup, name)
            if name == "groups" and base.head_groups is not None:
                more = replace(more, head_groups=base.head_groups)
            kept = name == "host" and not host
            refusal = "what is trained is in host memory" if kept else self.refusal(name, more, setup)
            setup = more if refusal is None else setup
            yield name, setup, refusal


class Formula(Predictor):
    """The memory of a model of this shape, computed by `Step`; with `evaluate`, of an evaluation."""

    def __init__(self, shape: Shape, evaluate: bool = False):
        self.shape, self.notes, self.evaluate = shape, shape.notes, evaluate

    def refusal(self, name: str, setup: Setup, before: Setup) -> str | None:
        shape, layer = self.shape, "layer" in setup.tiles
        if name == "attention":
            return None if makes_squares(shape, before) else f"{before.attention} makes none here"
        if name == "Liger":
            return None if shape.arch.liger and not layer else "Liger has no norms for it, or chunks need none"
        if layer and not shape.tiles_whole:
            return f"not planned for {shape.inside or shape.model_type}"
        if setup.head_groups is not None and planned_groups(shape, setup) is None:
            return f"{shape.kv_heads} kv heads over {setup.sequence_parallel} GPUs make no groups"
        again = "shared tokens" if setup.shared_tokens else "length x length" if makes_squares(shape, setup) else ""
        again = again or (f"{setup.rows} rows in {setup.dtype}" if keeps_copies(setup) else "")
        refused = again and setup.head_groups == "auto"
        return f"attention of {again} would be computed once more" if refused else None

    def predict(self, setup: Setup, seq_len: int, batch_size: int) -> Plan:
        shape = self.shape
        if setup.lora_rank is not None and shape.experts:
            raise ValueError("lora_rank: adapters of a mixture of experts are not planned; expected None")
        expect("autocast", not (setup.autocast and shape.experts), "False for a mixture of experts", True)
        if "layer" in setup.tiles and not shape.tiles_whole:
            kind = shape.model_type if shape.inside is None else f"{shape.model_type} in {shape.inside}"
            known = ", ".join(name for name, arch in ARCHS.items() if arch.layer)
            raise ValueError(
                f"model type {kind}: whole layers are not planned; expected one of {known}, or tiles without layer"
            )
        expect("seq_len", is_count(seq_len), "a positive int", seq_len)
        expect("batch_size", is_count(batch_size), "a positive int", batch_size)
        if shared := setup.shared_tokens:
            expect("shared_tokens", shared < seq_len, f"fewer than the {seq_len:,} tokens of a sequence", shared)
            expect("batch_size", batch_size > 1, "2 or more sequences, which begin with shared_tokens", batch_size)
            asked = "a number, since attention of shared tokens by groups is computed once more in the backward"
            expect("head_groups", setup.head_groups != "auto", asked, setup.head_groups)
        is_repeated = setup.head_groups == "auto" and (makes_squares(shape, setup) or keeps_copies(setup))
        asked = f"a number, or attention other than {setup.attention} for {setup.rows} rows in {setup.dtype}"
        expect("head_groups", not is_repeated, asked, setup.head_groups)
        expect("evaluate", isinstance(self.evaluate, bool), "True or False", self.evaluate)
        setup = replace(setup, accumulate=setup.accumulate and not self.evaluate)
        step = Step(shape, setup, Batch(batch_size, seq_len, shared, setup.sequence_parallel))
        moments = step.evaluation() if self.evaluate else step.moments()
        network = None if self.evaluate else step.network
        return Plan(shape, setup, seq_len, batch_size, tuple(moments), step.host(), network)


def plan(config: Any, *, seq_len: int, batch_size: int = 1, evaluate: bool = False, **setup: Any) -> Plan:
    """Predicts the memory of a training step, from a model's configuration alone.

    Args:
        config: a Hugging Face config, a dict of one, the path of a config.json, or a name in `memory.KNOWN`.
        seq_len: tokens per sequence, over all the GPUs that share it.
        batch_size: sequences per step; with `shared_tokens`, completions of one prompt, 2 or more.
        evaluate: predict an evaluation between two steps instead: `model.eval()` under `torch.no_grad()`, reading only
            the loss. With an untiled loss this includes the cache that the model's config enables. Trainer sets
            `use_cache` to False, so there it has no cache.
        setup: the fields of `memory.Setup`, such as gpus, sequence_parallel, zero_stage, tiles, offload.

    The plan counts tensors as torch allocates them, 1 GiB for CUDA and 1 GiB for NCCL. It does not count memory lost to
    fragmentation, the temporaries of an unfused optimizer, and FSDP2's padding if the number of GPUs does not divide
    the widths (up to a tenth). It assumes that every layer is checkpointed. `attention` and `rows` say which attention
    computes which sequences; by default FlashAttention-2, which needs no mask for any.
    Source: Arctic Long Sequence Training, 2.1 and 2.2, and simulations of every allocation, test/memory.

    Raises ValueError for impossible lengths, sizes and names; TypeError for an unknown field of Setup.
    """
    return Formula(shape_of(config), evaluate).predict(setup_of(setup), seq_len, batch_size)


def longest(config: Any, *, batch_size: int = 1, evaluate: bool = False, **setup: Any) -> Longest:
    """Returns the longest sequence that fits, a multiple of the number of GPUs that share it. Takes `plan`'s arguments
    except `seq_len`."""
    return Formula(shape_of(config), evaluate).longest(setup_of(setup), batch_size)


def ladder(config: Any, *, batch_size: int = 1, **setup: Any) -> Iterator[tuple[Setup, Longest]]:
    """Yields the longest sequence for more and more features, in the order of their cost in time, as `seqtile.fit`
    turns them on.

    First only checkpointing; then attention without masks, where the setup's makes some; then also the loss in chunks,
    the MLPs, whole layers, sequence parallelism, layer inputs in host memory, and attention in head chunks.
    Features that the model or the setup cannot have are left out. If whole layers are, then the last is Liger's norms,
    where Liger has some for the model.

    `setup` applies to all rows. tiles, liger and offloaded activations in it raise ValueError. Its head_groups are
    those of the last row, "auto" by default."""
    formula, base = Formula(shape_of(config)), setup_of({"tiles": TILES} | setup)  # without, no head_groups are taken
    if {"tiles", "liger"} & setup.keys() or "activations" in base.offload:
        raise ValueError("tiles, liger and offload of activations: expected none, since all are tried; use longest")
    rows = [(name, row) for name, row, refusal in formula.turned_on(base) if refusal is None]
    tiled = [row for name, row in rows if FEATURES[name].changes.keys() <= {"tiles", "attention"}]
    alone = [replace(row, sequence_parallel=1) for row in tiled]
    for row in dict.fromkeys([*alone, *(row for _, row in rows[len(tiled) - 1 :])]):
        yield row, formula.longest(row, batch_size)
