"""seqtile.fit: turns on the cheapest features with which a training step fits in memory, as `memory.plan` predicts.

memory at hand ─ cheapest: plan with more and more on, until it fits ─ Fit ─ apply_seqtile, offload or checkpoint
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from seqtile.memory import OPTIMIZERS, TILES, Plan, Setup, Shape, longest, plan, shape_of
from seqtile.memory.layer import groups_of
from seqtile.memory.setup import DTYPES, GIB, NoFormula, expect, setup_of
from seqtile.models import apply_seqtile
from seqtile.models.base_model import is_checkpointed
from seqtile.models.patch import model_type_of, unwrapped
from seqtile.models.placement import is_patched_subclass
from seqtile.models.quantised import has_4_bits
from seqtile.offload import enable as enable_offload
from seqtile.offload.checkpointing import enable_checkpointing
from seqtile.offload.store import available

_FEATURES = {  # in the order of what they cost: what each adds to a Setup, and its cost
    "loss and MLPs in chunks": ({"tiles": ("loss", "mlp")}, "no more products"),
    "layers in chunks": ({"tiles": TILES}, "no more products"),
    "layer inputs in host memory": ({"offload": ("activations",)}, "copied while layers compute"),
    "attention by groups of heads": ({"head_groups": "auto"}, "1 % more products at 128K tokens"),
}


@dataclass(frozen=True)
class Fit:
    """The features with which a step fits; print it."""

    setup: Setup
    """What is on: `tiles`, `head_groups` and `offload`; and what it was planned for."""
    gpu_gib: float
    """What a step holds on a GPU at most, as predicted."""
    lines: tuple[str, ...]
    """Each feature, on or off, and why."""
    plan: Plan | None = None
    """The step; None for a model type that was simulated, having no formula."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of `apply_seqtile`."""
        return {"layer": "layer" in self.setup.tiles, "head_groups": self.setup.head_groups}

    @property
    def offload(self) -> bool:
        """True if `offload.enable` keeps the layers' inputs in host memory."""
        return "activations" in self.setup.offload

    def __str__(self) -> str:
        return "\n".join(self.lines)


def fit(
    model: nn.Module,
    *,
    seq_len: int,
    batch_size: int = 1,
    gpu_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    dry_run: bool = False,
    **setup: Any,
) -> Fit:
    """Applies the cheapest of seqtile's features with which a training step fits, and prints each with the reason.

    In the order of their cost in time: the loss and the MLPs in chunks, whole layers in chunks, the layers' inputs in
    host memory (`seqtile.offload`), attention by groups of heads. Every layer is checkpointed in any case.

    Args:
        model: a Hugging Face model, or PEFT's around one, whose LoRA is planned as if on every projection.
        seq_len: tokens of a sequence, over all the GPUs that share it.
        batch_size: sequences at a time.
        gpu_memory_gib: memory of a GPU; by default what is free on this one and what torch holds there.
        host_memory_gib: memory of a node; by default what is free.
        dry_run: True to tell only, and change nothing.
        setup: other fields of `memory.Setup`, such as dtype (by default that of the weights), optimizer, gpus,
            zero_stage, sequence_parallel.

    A model type without a formula in `memory.plan` is simulated, some seconds long: on one GPU, all of it trained.

    Raises ValueError, and changes nothing: if no feature makes it fit, with the longest sequence that would; without a
    GPU or gpu_memory_gib; for a setup that cannot be planned; and whatever `apply_seqtile` raises.
    """
    inner = unwrapped(model)
    model_type_of(inner)
    memory = {"gpu_memory_gib": gpu_memory_gib or gpu_memory_at_hand()}
    memory["host_memory_gib"] = host_memory_gib or host_memory_at_hand()
    setup = _setup_of_model(model, inner) | memory | setup
    if "gpus" not in setup and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"gpus: {dist.get_world_size()} processes train; pass gpus, zero_stage and sequence_parallel")
    try:
        found = cheapest(inner.config, seq_len=seq_len, batch_size=batch_size, **setup)
    except NoFormula as error:
        found = _simulated(inner, seq_len, batch_size, setup_of(setup), str(error))
    if not dry_run:
        _apply(inner, found)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(found)
    return found


def gpu_memory_at_hand() -> float:
    """Returns the GiB of this GPU that are free or torch's, and what CUDA has taken of it; the least of all ranks'.
    ValueError if there is none."""
    if not torch.cuda.is_available():
        raise ValueError("gpu_memory_gib: torch sees no GPU; pass the GiB of the one that it is meant for")
    free, total = torch.cuda.mem_get_info()
    return _least(min(total, free + torch.cuda.memory_reserved() + GIB) / GIB)  # a plan counts 1 GiB for CUDA


def host_memory_at_hand() -> float:
    """Returns the GiB of host memory that are free; the least of all ranks'."""
    return _least(available() / GIB)


def _least(size: float) -> float:
    """Returns the smallest of all ranks', so that all turn on the same."""
    sizes = [size]
    if dist.is_initialized():
        sizes *= dist.get_world_size()
        dist.all_gather_object(sizes, size)
    return min(sizes)


def _setup_of_model(model: nn.Module, inner: nn.Module) -> dict[str, Any]:
    ranks = [config.r for config in getattr(model, "peft_config", {}).values() if hasattr(config, "r")]
    dtype = str(inner.dtype).removeprefix("torch.")
    expect("dtype", dtype in DTYPES, f"weights in one of {', '.join(DTYPES)}", dtype)
    adapters = {"lora_rank": max(ranks), "load_in_4bit": has_4_bits(inner)} if ranks else {}
    return {"dtype": dtype} | adapters


def cheapest(config: Any, *, seq_len: int, batch_size: int = 1, host: bool = True, **setup: Any) -> Fit:
    """Returns the cheapest features with which `memory.plan` of these arguments fits; `host`: False to leave layer
    inputs where they are. ValueError, with the longest sequence that fits, if none do."""
    shape, chosen = shape_of(config), replace(setup_of(setup), tiles=(), head_groups=None)
    if shape.assumed:
        raise NoFormula(f"model type {shape.model_type} has no formula in seqtile.memory")
    tries = []
    for name, (changes, _) in _FEATURES.items():
        if (reason := _reason_against(name, shape, chosen, host)) is not None:
            tries.append(_Try(name, reason))
            continue
        offloaded = {"offload": (*chosen.offload, "activations")} if "offload" in changes else {}
        chosen = replace(chosen, **changes | offloaded)
        step = plan(shape, seq_len=seq_len, batch_size=batch_size, **vars(chosen))
        most = longest(shape, batch_size=batch_size, **vars(chosen)).tokens
        tries.append(_Try(name, step.bound, chosen, step.gpu_bytes / GIB, most))
    found = _first_that_fits(tries, seq_len, shape.notes)
    return replace(found, plan=plan(shape, seq_len=seq_len, batch_size=batch_size, **vars(found.setup)))


class _Try(NamedTuple):
    """A feature, with those before it on."""

    name: str
    against: str | None
    """Why it cannot be had, or the memory that is too small with it; None if a step fits."""
    setup: Setup | None = None
    gpu_gib: float = 0
    longest: int = 0


def _reason_against(name: str, shape: Shape, chosen: Setup, host: bool) -> str | None:
    """Says why a feature cannot be had."""
    if name == "layer inputs in host memory":
        return None if host else "what is trained is in host memory"
    if name != "loss and MLPs in chunks" and not shape.tiles_whole:
        return f"not planned for {shape.inside or shape.model_type}"
    if name == "attention by groups of heads" and groups_of(shape, replace(chosen, head_groups="auto")) is None:
        return f"{shape.kv_heads} kv heads over {chosen.sequence_parallel} GPUs make no groups"
    return None


def _first_that_fits(tries: list[_Try], seq_len: int, notes: list[str]) -> Fit:
    """Returns the first with which a step fits. ValueError, with the longest sequence that fits, if none does."""
    lines, found = [f"seqtile.fit, for {seq_len:,} tokens:"], None
    for tried in tries:
        if found is not None:
            lines.append(f"  off  {tried.name}: not needed")
        elif tried.setup is None:
            lines.append(f"  off  {tried.name}: {tried.against}")
        else:
            bound = (tried.against or "fits").partition(":")[0]
            verdict = f"more than {bound}" if tried.against else bound
            held = f"{tried.gpu_gib:.1f} of {tried.setup.gpu_memory_gib:.1f} GiB, {verdict}"
            lines.append(f"  on   {tried.name} ({_FEATURES[tried.name][1]}): {held}")
            found = tried if tried.against is None else None
    if found is None:
        most = max(tried.longest for tried in tries)
        remedies = "LoRA, an 8-bit optimizer, weights or optimizer on the host, or more GPUs, see seqtile plan"
        expected = f"expected at most {most:,} tokens" if most else "weights and optimizer alone are too large"
        said = f"seq_len: {expected}, got {seq_len:,}; to train longer sequences: {remedies}"
        raise ValueError("\n".join([said, *lines]))
    return Fit(found.setup, found.gpu_gib, (*lines, *(f"  note: {note}" for note in notes)))


def _simulated(model: nn.Module, seq_len: int, batch_size: int, given: Setup, why: str) -> Fit:
    """Does as `cheapest`, by running the model's own code without data."""
    from seqtile.recipes.simulate import simulations

    if given.gpus > 1 or not given.full or given.offload:
        raise ValueError(f"{why}; it is simulated for one GPU alone, without LoRA, weights and optimizer on the GPU")
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights)
    master = 4 if given.bytes < 4 and given.optimizer == "adamw" else 0
    held = GIB + trained * (given.bytes + OPTIMIZERS[given.optimizer] + master)
    cls = next(cls for cls in type(model).__mro__ if not is_patched_subclass(cls))
    tries = []
    for simulation in simulations(cls, model.config, getattr(torch, given.dtype), lambda step: None):
        if name := {"loss, MLP": "loss and MLPs in chunks", "loss, MLP, layer": "layers in chunks"}.get(
            simulation.tiled
        ):
            setup = replace(given, **_FEATURES[name][0])
            size = (held + simulation.bytes_of(seq_len * batch_size)) / GIB
            most = simulation.longest(given.gpu_memory_gib * GIB - held, batch_size)
            tries.append(_Try(name, None if most >= seq_len else "GPU memory", setup, size, most))
    tries += [_Try(name, "not simulated") for name in list(_FEATURES)[2:]]
    return _first_that_fits(tries, seq_len, [f"{why}: simulated with its own code"])


def _apply(model: nn.Module, found: Fit) -> None:
    apply_seqtile(model, **found.options)
    if found.offload:
        enable_offload(model)
    elif not is_checkpointed(model):
        enable_checkpointing(model)
