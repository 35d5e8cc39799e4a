"""seqtile.fit: turns on the cheapest features with which a training step fits in memory, as `memory.plan` predicts.

memory at hand ─ choose: predict with more and more on, until it fits ─ Fit ─ apply_seqtile, offload or checkpoint
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from seqtile.attention.layout import VARLEN
from seqtile.limits import flash_limit
from seqtile.memory import FEATURES, Formula, Plan, Predictor, Setup, shape_of
from seqtile.memory.room import MARGIN, room
from seqtile.memory.setup import GIB, setup_of
from seqtile.memory.shape import NoFormula
from seqtile.models.apply import apply_seqtile, attention_refusal
from seqtile.models.find import is_checkpointed
from seqtile.models.placement import class_of
from seqtile.models.quantised import has_4_bits
from seqtile.offload import enable as enable_offload
from seqtile.offload.host_memory import available
from seqtile.renamed import enable_checkpointing
from seqtile.unwrapped import unwrapped


@dataclass(frozen=True)
class Fit:
    """The features with which a step fits. Print it to see each with its reason."""

    setup: Setup
    """The chosen `tiles`, `head_groups` and `offload`, with the setup that was planned for."""
    gpu_gib: float
    """The predicted peak of a step on a GPU."""
    lines: tuple[str, ...]
    """Each feature, on or off, and why."""
    plan: Plan | None = None
    """The step; None for a model type without a formula, which was simulated."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of `apply_seqtile`."""
        attention = {"attention": "varlen"} if self.setup.attention == "varlen" else {}
        return {"layer": "layer" in self.setup.tiles, "head_groups": self.setup.head_groups} | attention

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
    margin: float = MARGIN,
    dry_run: bool = False,
    **setup: Any,
) -> Fit:
    """Applies the cheapest of seqtile's features with which a training step fits, and prints each with the reason.

    It tries them in the order of their cost in time: attention without masks, where the model's makes some; the loss
    and the MLPs in chunks, which are always on; whole layers in chunks, layer inputs in host memory
    (`seqtile.offload`), attention in head chunks. It always checkpoints every layer.

    Args:
        model: a Hugging Face model, or PEFT's wrapper around one; LoRA is planned as if it were on every projection.
        seq_len: tokens of a sequence, over all the GPUs that share it.
        batch_size: sequences at a time.
        gpu_memory_gib: memory of a GPU, all that it has; by default what is free on this one, and what torch holds of
            it.
        host_memory_gib: memory of a node; by default what is free.
        margin: the share of a GPU's memory that is kept free, since plans may be a fifth too low.
        dry_run: True only prints, and changes nothing.
        setup: other fields of `memory.Setup`, such as rows ("packed" or "padded" sequences), dtype (by default that of
            the weights), attention (the model's), optimizer, gpus, zero_stage, sequence_parallel.

    A model type without a formula in `memory.plan` is simulated for some seconds, for one GPU and full training.

    Raises ValueError, and changes nothing: if no feature makes it fit (the message names the longest sequence that
    would fit); without a GPU or gpu_memory_gib; for a setup that cannot be planned; for what `apply_seqtile` refuses.
    """
    inner = unwrapped(model)
    defaults = {"dtype": str(inner.dtype).removeprefix("torch.")}
    defaults["attention"] = planned_attention(inner)
    defaults["gpu_memory_gib"] = room(gpu_memory_gib or gpu_memory_at_hand(), margin)
    defaults["host_memory_gib"] = host_memory_gib or host_memory_at_hand()
    if lora_ranks := [config.r for config in getattr(model, "peft_config", {}).values() if hasattr(config, "r")]:
        defaults |= {"lora_rank": max(lora_ranks), "load_in_4bit": has_4_bits(inner)}
    if "gpus" not in setup and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"gpus: {dist.get_world_size()} processes train; pass gpus, zero_stage and sequence_parallel")
    base = setup_of(defaults | setup)
    without = ("attention",) if attention_refusal(inner) else ()
    if base.rows != "plain" and base.attention in ("sdpa", "eager") and not (without or _has_formula(inner)):
        base = replace(base, attention="varlen")  # masks and scores are not simulated
    chosen = choose(_predictor(inner, base), base, seq_len, batch_size, without=without)
    chosen = replace(chosen, lines=(*chosen.lines, *_notes(chosen.plan, inner.config._attn_implementation)))
    if not dry_run:
        apply_seqtile(inner, **chosen.options)
        if chosen.offload:
            enable_offload(inner, device="cuda" if torch.cuda.is_available() else None)  # where it is going to be
        elif not is_checkpointed(inner):
            enable_checkpointing(inner)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(chosen)
    return chosen


def _notes(plan: Plan | None, attention: str) -> list[str]:
    """Says that the backward of this attention is wrong at the planned length as installed."""
    limit = plan and flash_limit(attention, plan.heads_at_once, plan.shape.head_dim)
    return [f"  note: {limit[1]}"] if limit and plan.seq_len >= limit[0] else []


def planned_attention(model: nn.Module) -> str:
    """Returns the name that plans have for the attention of a Hugging Face model; "flash" for any without masks."""
    name = model.config._attn_implementation
    return "varlen" if name.startswith(VARLEN) else name if name in ("sdpa", "eager") else "flash"


def gpu_memory_at_hand() -> float:
    """Returns the GiB of this GPU that are free, torch's or taken by CUDA: the least of all ranks. Raises ValueError if
    there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("gpu_memory_gib: torch sees no GPU; pass the GiB of the GPU that you plan for")
    free, total = torch.cuda.mem_get_info()
    at_hand = min(total, free + torch.cuda.memory_reserved() + GIB) / GIB  # a plan counts 1 GiB for CUDA
    return gather_numbers(at_hand).min().item()


def host_memory_at_hand() -> float:
    """Returns the GiB of free host memory: the least of all ranks, so that all turn on the same features."""
    return gather_numbers(available() / GIB).min().item()


def gather_numbers(*numbers: float) -> torch.Tensor:
    """Returns these numbers of every rank: [ranks, len(numbers)], float64."""
    gathered = [numbers]
    if dist.is_initialized():
        gathered = [numbers] * dist.get_world_size()
        dist.all_gather_object(gathered, numbers)
    return torch.tensor(gathered, dtype=torch.float64)


def on_any_rank(happened: bool) -> bool:
    """Returns whether something happened on this rank or on another one."""
    return bool(gather_numbers(happened).any())


def formula_of(config: Any) -> Formula:
    """Returns the formula of a model's memory. NoFormula if there is none for its type."""
    formula = Formula(shape_of(config))
    if formula.shape.assumed:
        raise NoFormula(f"model type {formula.shape.model_type} has no formula in seqtile.memory")
    return formula


def _has_formula(model: nn.Module) -> bool:
    try:
        formula_of(model.config)
    except NoFormula:
        return False
    return True


def _predictor(model: nn.Module, setup: Setup) -> Predictor:
    """Returns the formula of a model's memory, or what simulates it. ValueError for what neither can predict."""
    try:
        return formula_of(model.config)
    except NoFormula as no_formula:
        from seqtile.memory.simulate import Simulation  # which takes seconds to import

        try:
            simulation = Simulation(class_of(model), model.config, setup)
        except ValueError as error:
            raise ValueError(f"{no_formula}; {error}") from error
        simulation.notes = [f"{no_formula}: simulated with its own code"]
        return simulation


def choose(
    predictor: Predictor,
    base: Setup,
    seq_len: int,
    batch_size: int = 1,
    host: bool = True,
    without: tuple[str, ...] = (),
) -> Fit:
    """Returns the first features, in the order of their cost, with which a step is predicted to fit. ValueError, with
    the longest sequence that fits, if none do.

    Args:
        host: False to leave layer inputs where they are.
        without: features that are not to be turned on.
    """
    lines, tried, step = [f"seqtile.fit, for {seq_len:,} tokens, predicted:"], [], None
    offered = [name for name, feature in FEATURES.items() if feature.words and name not in without]
    for name, setup, refusal in predictor.turned_on(base, offered, host):
        words, cost = FEATURES[name].words, FEATURES[name].cost
        if step is not None and step.bound is None and "mlp" in tried[-1].tiles:
            refusal = "not needed"
        if refusal is not None:
            lines.append(f"  off  {words}: {refusal}")
            continue
        tried.append(setup)
        step = predictor.predict(setup, seq_len, batch_size)
        verdict = "fits" if step.bound is None else f"more than {step.bound.partition(':')[0]}"
        held = f"{step.gpu_bytes / GIB:.1f} of {setup.gpu_memory_gib:.1f} GiB, {verdict}"
        lines.append(f"  on   {words} ({cost}): {held}")
    if step.bound is not None:
        most = max(predictor.longest(setup, batch_size).tokens for setup in tried)
        remedies = "LoRA, an 8-bit optimizer, weights or optimizer on the host, or more GPUs, see seqtile plan"
        expected = f"expected at most {most:,} tokens" if most else "weights and optimizer alone are too large"
        said = f"seq_len: {expected}, got {seq_len:,}; to train longer sequences: {remedies}"
        raise ValueError("\n".join([said, *lines]))
    lines += [f"  note: {note}" for note in predictor.notes]
    return Fit(tried[-1], step.gpu_bytes / GIB, tuple(lines), step if isinstance(step, Plan) else None)
