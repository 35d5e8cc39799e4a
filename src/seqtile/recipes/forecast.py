"""What `seqtile plan` says: the longest sequence with each feature on, what to turn on, and what a step holds."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from seqtile.memory import Longest, Plan, Setup, ladder, longest, plan, shape_of
from seqtile.memory.setup import GIB, TILES


@dataclass(frozen=True)
class Forecast:
    """Of a model, on given machines."""

    model: str
    rungs: list[tuple[Setup, Longest]]
    """With more and more turned on."""
    plan: Plan
    """Of the length that was asked for with the least that it needs, or of the longest that fits."""

    @cached_property
    def turn_on(self) -> list[str]:
        """What the plan needs, as lines of Python in their order; nothing if it does not fit."""
        return to_turn_on(self.plan) if self.plan.fits else []

    @cached_property
    def remedies(self) -> dict[str, int]:
        """Where the plan does not fit: the longest sequence with more on the host, and with so many GPUs that it does,
        as far as each is longer."""
        if self.plan.fits:
            return {}
        setup, best = self.rungs[-1][0], max(found.tokens for _, found in self.rungs)
        tried = []
        for more in (("optimizer",), ("optimizer", "weights")):
            offload = (*setup.offload, *(part for part in more if part not in setup.offload))
            tried.append(
                (" ".join(f"--offload {part}" for part in offload if part != "activations"), {"offload": offload})
            )
        for times in (2**power for power in range(1, 8)):
            more_gpus = {"gpus": setup.gpus * times, "sequence_parallel": setup.sequence_parallel * times}
            tried.append((f"--gpus {more_gpus['gpus']}", more_gpus))
        said = {}
        for option, changes in tried:
            try:
                tokens = longest(self.plan.shape, batch_size=self.plan.batch_size, **asdict(setup) | changes).tokens
            except ValueError:  # which this setup cannot have
                continue
            if tokens > best and not ("gpus" in changes and tokens < self.plan.seq_len):
                best = said[option] = tokens
            if "gpus" in changes and best >= self.plan.seq_len:
                break
        return said

    @cached_property
    def notes(self) -> list[str]:
        shape, found = self.plan.shape, self.plan.shape.notes
        if shape.positions is not None and self.plan.seq_len > shape.positions:
            found.append(f"it is configured for {shape.positions:,} positions at most")
        return found


def forecast(
    model: str,
    seq_len: int | None,
    batch_size: int,
    *,
    layer: bool = False,
    head_groups: int | str | None = None,
    **setup: Any,
) -> Forecast:
    """With `layer` or `head_groups` the plan has them, even where less would do. Raises ValueError as `seqtile.memory`
    does."""
    shape = shape_of(model)
    if layer or head_groups is not None:  # what cannot be is said, rather than left out
        plan(shape, seq_len=1, batch_size=batch_size, tiles=TILES, head_groups=head_groups, **setup)
    rungs = list(ladder(shape, batch_size=batch_size, head_groups=head_groups, **setup))
    wanted = [rung for rung in rungs if "layer" in rung[0].tiles or not layer]
    wanted = [rung for rung in wanted if rung[0].head_groups is not None or head_groups is None]
    if seq_len is None:
        chosen, found = max(wanted, key=lambda rung: rung[1].tokens)
        seq_len = max(found.tokens, chosen.sequence_parallel)
    else:
        chosen = next((rung for rung, found in wanted if found.tokens >= seq_len), wanted[-1][0])
    return Forecast(model, rungs, plan(shape, seq_len=seq_len, batch_size=batch_size, **asdict(chosen)))


def figures(forecast: Forecast) -> dict[str, Any]:
    """All of it, for `--json`; sizes in GiB."""
    plan = forecast.plan
    return {
        "model": forecast.model,
        "parameters": plan.shape.parameters,
        "notes": forecast.notes,
        "longest": [features(setup) | asdict(found) for setup, found in forecast.rungs],
        "plan": {
            "seq_len": plan.seq_len,
            "batch_size": plan.batch_size,
            "setup": asdict(plan.setup),
            "fits": plan.fits,
            "bound": plan.bound,
            "gpu_gib": in_gib(plan.peak.parts),
            "peak": plan.peak.name,
            "host_gib": in_gib(plan.host),
            "moments_gib": {moment.name: round(moment.bytes / GIB, 3) for moment in plan.moments},
        },
        "turn_on": forecast.turn_on,
        "remedies": forecast.remedies,
    }


def features(setup: Setup) -> dict[str, Any]:
    """What is turned on."""
    return {
        "tiled_loss": "loss" in setup.tiles,
        "sequence_parallel": setup.sequence_parallel,
        "tiled_mlp": "mlp" in setup.tiles,
        "offloaded_activations": "activations" in setup.offload,
        "liger": setup.liger,
        "tiled_layer": "layer" in setup.tiles,
        "head_groups": setup.head_groups,
    }


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    return {part: round(size / GIB, 3) for part, size in parts.items()}


def print_forecast(forecast: Forecast, console: Console) -> None:
    """As tables."""
    shape, setup = forecast.plan.shape, forecast.plan.setup
    gpus = f"{setup.gpus} GPUs, ZeRO-{setup.zero_stage}, each" if setup.gpus > 1 else "1 GPU"
    count = shape.parameters
    size = f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
    about = f"{size} parameters, {shape.layers} layers"
    console.print(f"{forecast.model}: {about}; {gpus} of {setup.gpu_memory_gib:g} GiB", highlight=False)
    for note in forecast.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(_rungs_table(forecast.rungs))
    console.print(_parts_table(forecast.plan))
    if forecast.plan.fits:
        console.print("\n".join(["Turn on:", *(f"  {line}" for line in forecast.turn_on)]), highlight=False)
        return
    console.print(f"This does not fit in {forecast.plan.bound}.", highlight=False)
    for option, tokens in forecast.remedies.items():
        console.print(f"With {option}: {tokens:,} tokens at most.", highlight=False)


def _rungs_table(rungs: list[tuple[Setup, Longest]]) -> Table:
    table = Table(title="Longest sequence, every layer checkpointed")
    table.caption = "loss, MLP, layer: tiled; groups: of heads. share: GPUs that share it. host: layer inputs there."
    table.caption += " Liger: its norms."
    for column in ("loss", "share", "MLP", "host", "Liger", "layer", "groups"):
        table.add_column(column, justify="center")
    table.add_column("tokens", justify="right")
    table.add_column("bound by")
    for setup, found in rungs:
        cells = ["x" if value is True else f"{value or ''}" for value in features(setup).values()]
        table.add_row(*cells, f"{found.tokens:,}", found.bound.removeprefix("GPU memory: "))
    return table


def _parts_table(plan: Plan) -> Table:
    table = Table(title=f"A step of {plan.batch_size} x {plan.seq_len:,} tokens at its peak: {plan.peak.name}")
    table.add_column("")
    table.add_column("GiB a GPU", justify="right")
    table.add_column("GiB a node, on the host", justify="right")
    for part, size in plan.peak.parts.items():
        held = plan.host.get(part, 0)
        if size + held >= GIB / 200:
            table.add_row(part, f"{size / GIB:.2f}", f"{held / GIB:.2f}" if held else "")
    total = f"{plan.host_bytes / GIB:.2f}" if plan.host else ""
    table.add_row("all", f"{plan.gpu_bytes / GIB:.2f}", total, style="bold")
    return table


def to_turn_on(plan: Plan) -> list[str]:
    """As lines of Python, in their order."""
    setup, shape, lines = plan.setup, plan.shape, []
    kind = shape.model_type
    known = not shape.assumed and shape.inside is None
    moved = [part for part in setup.offload if part != "activations"]
    if setup.liger:
        lines.append(f"apply_liger_kernel_to_{kind}()  # of liger_kernel.transformers, before the model is built")
    lines.append('model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flash_attention_2")')
    if setup.lora_rank is not None:
        lines.append(f'model = get_peft_model(model, LoraConfig(r={setup.lora_rank}, target_modules="all-linear"))')
    if setup.tiles and known:
        options = "" if "mlp" in setup.tiles else ", mlp=False"
        options += ", layer=True" if "layer" in setup.tiles else ""
        groups = f'"{setup.head_groups}"' if setup.head_groups == "auto" else setup.head_groups
        lines.append(f"seqtile.apply_seqtile(model{options}{f', head_groups={groups}' if groups else ''})")
    elif setup.tiles:
        lines.append("seqtile.linear_cross_entropy and seqtile.tiled by hand: see the notes")
    if setup.sequence_parallel > 1:
        lines.append(f"sp.apply_ulysses(model, sp.initialize({setup.sequence_parallel}))  # and sp's loader and loss")
    if moved:
        lines.append(f"DeepSpeed's ZeRO-{max(setup.zero_stage, 1)} with {' and '.join(moved)} offloaded to the CPU")
    elif setup.gpus > 1:
        others = ["DistributedDataParallel(model)", "DeepSpeed's ZeRO-1", "DeepSpeed's ZeRO-2"]
        lines.append((*others, "fully_shard(layer, mp_policy=...) of every layer, then of the model")[setup.zero_stage])
    if "activations" in setup.offload:
        lines.append('offload.enable(model, device="cuda")' if "weights" in moved else "offload.enable(model)")
    else:
        older = "in older transformers gradient_checkpointing_enable"
        lines.append(f'model.activation_checkpointing_enable({{"use_reentrant": False}})  # {older}')
    return lines
