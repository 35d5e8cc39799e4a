"""The memory model: predicts before a run how much memory a training step needs, and how long a sequence may be.

    plan, longest, ladder  >  Step (step.py)  >  Layer (layer.py)  >  Shape and Setup (setup.py)

It imports neither torch nor transformers, and so answers at once. `simulate`, which is imported separately, handles
model types without a formula: it runs their code on tensors without data.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from seqtile.arch import ARCHS
from seqtile.memory.batch import Batch
from seqtile.memory.features import FEATURES, Longest, Predictor, with_features
from seqtile.memory.layer import planned_groups
from seqtile.memory.setup import KNOWN, OFFLOAD, OPTIMIZERS, TILES, Setup, Shape, expect, is_count, setup_of, shape_of
from seqtile.memory.step import Plan, Step

__all__ = ["KNOWN", "OFFLOAD", "OPTIMIZERS", "TILES", "Longest", "Plan", "Setup", "Shape"]
__all__ += ["ladder", "longest", "plan", "shape_of"]


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
    the widths (up to a tenth). It assumes that every layer is checkpointed and that attention is FlashAttention-2.
    Source: Arctic Long Sequence Training, 2.1 and 2.2, and simulations of every allocation, test/memory.

    Raises ValueError for impossible lengths, sizes and names; TypeError for an unknown field of Setup.
    """
    return Formula(shape_of(config), evaluate).predict(setup_of(setup), seq_len, batch_size)


def longest(config: Any, *, batch_size: int = 1, evaluate: bool = False, **setup: Any) -> Longest:
    """Returns the longest sequence that fits, a multiple of the number of GPUs that share it. Takes `plan`'s arguments
    except `seq_len`."""
    return Formula(shape_of(config), evaluate).longest(setup_of(setup), batch_size)


class Formula(Predictor):
    """The memory of a model of this shape, computed by `Step`; with `evaluate`, of an evaluation."""

    def __init__(self, shape: Shape, evaluate: bool = False):
        self.shape, self.notes, self.evaluate = shape, shape.notes, evaluate

    def refusal(self, name: str, setup: Setup) -> str | None:
        shape, changes = self.shape, FEATURES[name].changes
        if "layer" in changes.get("tiles", ()) and not shape.tiles_whole:
            return f"not planned for {shape.inside or shape.model_type}"
        if "head_groups" in changes and planned_groups(shape, replace(setup, **changes)) is None:
            return f"{shape.kv_heads} kv heads over {setup.sequence_parallel} GPUs make no groups"
        if setup.shared_tokens and changes.get("head_groups") == "auto":
            return "attention of shared tokens would be computed once more"
        return "Liger has no norms for it" if "liger" in changes and not shape.arch.liger else None

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
        expect("evaluate", isinstance(self.evaluate, bool), "True or False", self.evaluate)
        setup = replace(setup, accumulate=setup.accumulate and not self.evaluate)
        step = Step(shape, setup, Batch(batch_size, seq_len, shared, setup.sequence_parallel))
        moments = step.evaluation() if self.evaluate else step.moments()
        return Plan(shape, setup, seq_len, batch_size, tuple(moments), step.host())


def ladder(config: Any, *, batch_size: int = 1, **setup: Any) -> Iterator[tuple[Setup, Longest]]:
    """Yields the longest sequence for more and more features.

    First only checkpointing; then also the tiled loss, sequence parallelism, the tiled MLP, offloaded activations, and
    the last two together; the tiled MLP also with Liger's norms. This is the order of table 1 in Arctic Long Sequence
    Training. If seqtile tiles such layers, then all of these except Liger with whole layers tiled, and with groups of
    heads if the GPUs leave heads to group.

    `setup` applies to all rows. tiles, liger and offloaded activations in it raise ValueError. Its head_groups are
    those of the last row, "auto" by default."""
    groups = setup.pop("head_groups", None) or "auto"
    formula, given = Formula(shape_of(config)), setup_of(setup)
    if {"tiles", "liger"} & setup.keys() or "activations" in given.offload:
        raise ValueError("tiles, liger and offload of activations: expected none, since all are tried; use longest")
    nothing, loss, mlp, layer, host, _, liger = FEATURES
    alone = replace(given, sequence_parallel=1)
    steps = [with_features(alone, nothing), with_features(alone, loss)]
    for names in (loss,), (mlp,), (mlp, liger), (loss, host), (mlp, host), (mlp, host, liger), (layer, host):
        if not any(formula.refusal(name, given) for name in names):
            steps.append(with_features(given, *names))
    if "layer" in steps[-1].tiles:
        grouped = replace(steps[-1], head_groups=groups)
        refused = groups == "auto" and formula.refusal("groups", given)
        steps += [grouped] if planned_groups(formula.shape, grouped) is not None and not refused else []
    for step in dict.fromkeys(steps):
        yield step, formula.longest(step, batch_size)
