"""What `seqtile plan` says: the longest sequence with each feature on, what to turn on, and what a step holds."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from seqtile.memory import Longest, Plan, Setup, ladder

GIB = 2**30
Rungs = list[tuple[Setup, Longest]]


def figures(model: str, rungs: Rungs, plan: Plan) -> dict[str, Any]:
    """All of it, for `--json`; sizes in GiB."""
    return {
        "model": model,
        "parameters": plan.shape.parameters,
        "longest": [features(setup) | asdict(longest) for setup, longest in rungs],
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
    }


def features(setup: Setup) -> dict[str, Any]:
    """What is turned on."""
    return {
        "tiled_loss": "loss" in setup.tiles,
        "sequence_parallel": setup.sequence_parallel,
        "tiled_mlp": "mlp" in setup.tiles,
        "offloaded_activations": "activations" in setup.offload,
        "liger": setup.liger,
    }


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    return {part: round(size / GIB, 3) for part, size in parts.items()}


def print_forecast(console: Console, model: str, rungs: Rungs, plan: Plan) -> None:
    """As tables."""
    shape, setup = plan.shape, plan.setup
    about = f"{shape.parameters / 1e9:.2f} billion parameters, {shape.layers} layers"
    console.print(f"{model}: {about}; {setup.gpus} x {setup.gpu_memory_gib:g} GiB, ZeRO-{setup.zero_stage}")
    console.print(_rungs_table(rungs))
    console.print(_parts_table(plan))
    console.print(_verdict(plan, rungs), highlight=False)


def _rungs_table(rungs: Rungs) -> Table:
    title = "Longest sequence, checkpointed: loss tiled, GPUs that share it, MLP tiled, layer inputs on the host, Liger"
    table = Table(title=title)
    for column in ("loss", "GPUs", "MLP", "host", "Liger"):
        table.add_column(column, justify="center")
    table.add_column("tokens", justify="right")
    table.add_column("bound by")
    for setup, longest in rungs:
        cells = [f"{value}" if type(value) is int else "x" if value else "" for value in features(setup).values()]
        table.add_row(*cells, f"{longest.tokens:,}", longest.bound.replace("memory (", "(").replace(" layer)", ")"))
    return table


def _parts_table(plan: Plan) -> Table:
    table = Table(title=f"A step of {plan.batch_size} x {plan.seq_len:,} tokens at its peak: {plan.peak.name}")
    table.add_column("")
    table.add_column("GiB a GPU", justify="right")
    table.add_column("GiB a node, on the host", justify="right")
    for part, size in plan.peak.parts.items():
        held = plan.host.get(part, 0)
        if size or held:
            table.add_row(part, f"{size / GIB:.2f}", f"{held / GIB:.2f}" if held else "")
    total = f"{plan.host_bytes / GIB:.2f}" if plan.host else ""
    table.add_row("all", f"{plan.gpu_bytes / GIB:.2f}", total, style="bold")
    return table


def _verdict(plan: Plan, rungs: Rungs) -> str:
    """What to turn on, or what might help."""
    if plan.fits:
        return "\n".join(["Turn on:", *(f"  {line}" for line in to_turn_on(plan))])
    said = f"This does not fit in {plan.bound}."
    setup = rungs[-1][0]
    for more in (("optimizer",), ("optimizer", "weights")):
        offload = tuple(dict.fromkeys((*setup.offload, *more)))
        held = asdict(setup) | {"offload": offload}
        tokens = max(longest.tokens for _, longest in ladder(plan.shape, batch_size=plan.batch_size, **held))
        if set(more) - set(setup.offload) and tokens:
            said += f" With {' '.join(f'--offload {part}' for part in more)}: {tokens:,} tokens."
    return said


def to_turn_on(plan: Plan) -> list[str]:
    """As lines of Python, in their order."""
    setup, lines = plan.setup, []
    if setup.liger:
        lines.append(f"apply_liger_kernel_to_{plan.shape.model_type}()  # of liger_kernel.transformers")
    if setup.tiles:
        lines.append(f"seqtile.apply_seqtile(model{'' if 'mlp' in setup.tiles else ', mlp=False'})")
    if setup.sequence_parallel > 1:
        lines.append(f"sp.apply_ulysses(model, sp.initialize({setup.sequence_parallel}))  # and sp's loader and loss")
    if "activations" in setup.offload:
        lines.append("offload.enable(model)  # on its GPU")
    else:
        lines.append('model.gradient_checkpointing_enable({"use_reentrant": False})')
    if setup.ranks(3) > 1:
        lines.append("fully_shard(layer) for every layer, then fully_shard(model); or ZeRO-3")
    moved = [part for part in setup.offload if part != "activations"]
    if moved:
        lines.append(f"CPU offload of {' and '.join(moved)}: DeepSpeed's, or FSDP2's CPUOffloadPolicy for both")
    return lines
