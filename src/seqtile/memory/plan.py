"""What a training step will need, and the longest sequence that fits, before either runs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from seqtile.memory.config import shape_of
from seqtile.memory.layer import Parts
from seqtile.memory.setup import GIB, TILES, Setup, setup_of
from seqtile.memory.shape import Shape
from seqtile.memory.step import Moment, Step
from seqtile.memory.tiled_layer import check_layer, groups_of

LIGER = ("gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3")
LIGER += ("qwen3_moe", "smollm3")  # the model types that it has norms for
LIMIT = 2**40  # tokens: nobody's length


@dataclass(frozen=True)
class Plan:
    """A step's memory: on one GPU at every moment at which it may peak, and in the host memory of a node."""

    shape: Shape
    setup: Setup
    seq_len: int
    batch_size: int
    moments: tuple[Moment, ...]
    """In the order of a step."""
    host: Parts
    """Bytes by what they are for: inputs, optimizer, weights."""

    @property
    def peak(self) -> Moment:
        """The moment with most bytes; its `parts` are the breakdown."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def gpu_bytes(self) -> int:
        return self.peak.bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def bound(self) -> str | None:
        """What does not fit; None if all does."""
        if self.gpu_bytes > self.setup.gpu_memory_gib * GIB:
            states = sum(self.peak.parts[part] for part in ("weights", "optimizer", "reserved"))
            too_much = states > self.setup.gpu_memory_gib * GIB
            return f"GPU memory: {'weights and optimizer' if too_much else self.peak.name.split(', ')[0]}"
        if self.host_bytes > self.setup.host_memory_gib * GIB:
            return "host memory"
        return None

    @property
    def fits(self) -> bool:
        return self.bound is None

    def __str__(self) -> str:
        lines = [f"{part:<14}{size / GIB:>9.2f} GiB" for part, size in self.peak.parts.items() if size]
        verdict = "fits" if self.fits else f"does not fit in {self.bound}"
        lines.append(f"{'on a GPU':<14}{self.gpu_bytes / GIB:>9.2f} of {self.setup.gpu_memory_gib:g} GiB: {verdict}")
        lines.append(f"most at: {self.peak.name}")
        lines += [f"{f'{part}, host':<18}{size / GIB:>9.2f} GiB a node" for part, size in self.host.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Longest:
    tokens: int
    """0 if not even a token for every GPU of a sequence fits."""
    bound: str
    """What a longer one would not fit in."""

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, bound by {self.bound}"


def plan(config: Any, *, seq_len: int, batch_size: int = 1, **setup: Any) -> Plan:
    """The memory of a training step, from a model's configuration alone.

    Args:
        config: a Hugging Face config, a dict of one, the path of a config.json, or a name in `memory.KNOWN`.
        seq_len: tokens of a sequence, over all the GPUs that share it.
        batch_size: sequences at a time.
        setup: the fields of `memory.Setup`: gpus, sequence_parallel, zero_stage, tiles, offload, ...

    Counted are tensors, as torch allocates them, with 1 GiB for CUDA and 1 GiB for NCCL; not what the allocator loses
    to fragmentation, nor temporaries of an optimizer that is not fused, nor (up to a tenth) what FSDP2 pads on GPUs
    whose number does not divide the widths. Every layer is checkpointed and attention is FlashAttention-2. Source:
    Arctic Long Sequence Training, 2.1 and 2.2, and simulations of every allocation, test/memory.

    Raises ValueError for lengths, sizes and names that cannot be; TypeError for a name that is no field of Setup.
    """
    return _plan(shape_of(config), setup_of(setup), seq_len, batch_size)


def longest(config: Any, *, batch_size: int = 1, **setup: Any) -> Longest:
    """The longest sequence that fits, of `plan`'s arguments without `seq_len`; a multiple of the GPUs that share it."""
    return _longest(shape_of(config), setup_of(setup), batch_size)


def ladder(config: Any, *, batch_size: int = 1, **setup: Any) -> Iterator[tuple[Setup, Longest]]:
    """The longest sequence with more and more turned on: nothing but checkpointing, then the tiled loss, sequence
    parallelism, the tiled MLP, offloaded activations, both; the last two with the MLP also with Liger's norms.
    Source of this order: Arctic Long Sequence Training, table 1.
    Then all of these, but Liger, with the layer tiled, if seqtile tiles such layers; with groups of heads besides,
    unless the sequence is shared.

    `setup` is what all have: neither tiles nor liger nor offloaded activations, for which it raises ValueError; its
    head_groups are those of the last rung, "auto" by default."""
    groups = setup.pop("head_groups", None) or "auto"
    shape, last = shape_of(config), setup_of(setup)
    if {"tiles", "liger"} & setup.keys() or "activations" in last.offload:
        raise ValueError("tiles, liger and offload of activations: expected neither, since all are tried; use longest")
    others = tuple(last.offload)
    first = replace(last, tiles=(), sequence_parallel=1, liger=False, offload=others)
    shared = replace(first, tiles=("loss",), sequence_parallel=last.sequence_parallel)
    steps = [
        first,
        replace(first, tiles=("loss",)),
        shared,
        replace(shared, tiles=("loss", "mlp")),
        replace(shared, tiles=("loss", "mlp"), liger=True),
        replace(shared, offload=("activations", *others)),
        replace(shared, tiles=("loss", "mlp"), offload=("activations", *others)),
        replace(shared, tiles=("loss", "mlp"), offload=("activations", *others), liger=True),
    ]
    if shape.tiles_whole:
        steps.append(replace(shared, tiles=TILES, offload=("activations", *others)))
        if groups_of(shape, replace(steps[-1], head_groups=groups)) is not None:
            steps.append(replace(steps[-1], head_groups=groups))
    for step in dict.fromkeys(step for step in steps if shape.model_type in LIGER or not step.liger):
        yield step, _longest(shape, step, batch_size)


def _plan(shape: Shape, setup: Setup, seq_len: int, batch_size: int) -> Plan:
    if setup.lora_rank is not None and shape.experts:
        raise ValueError("lora_rank: adapters of a mixture of experts are not planned; expected None")
    check_layer(shape, setup)
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a positive int, got {value!r}")
    tokens = -(-seq_len // setup.sequence_parallel) * batch_size
    step = Step(shape, setup, tokens)
    return Plan(shape, setup, seq_len, batch_size, tuple(step.moments()), step.host())


def _longest(shape: Shape, setup: Setup, batch_size: int) -> Longest:
    size = setup.sequence_parallel
    fits, too_long = 0, LIMIT // size  # tokens of a GPU
    while too_long - fits > 1:
        tokens = (fits + too_long) // 2
        if _plan(shape, setup, tokens * size, batch_size).fits:
            fits = tokens
        else:
            too_long = tokens
    return Longest(fits * size, _plan(shape, setup, too_long * size, batch_size).bound or "nothing")
