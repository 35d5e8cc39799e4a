"""What `seqtile plan` prints of a forecast: its tables, or JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from seqtile.memory import Longest, Plan, Setup
from seqtile.memory.setup import GIB
from seqtile.recipes.plan import PlanResult

UNITS = ((1e9, 2, "billion"), (1e6, 0, "million"), (1e3, 0, "thousand"), (1, 0, ""))  # of a model's parameters


def figures(forecast: PlanResult) -> dict[str, Any]:
    """Returns the forecast for `--json`; sizes in GiB."""
    names = ("model", "notes", "turn_on", "remedies", "simulated")
    values = {"predicted": True} | {name: getattr(forecast, name) for name in names}
    if (plan := forecast.plan) is not None:
        values["parameters"] = plan.shape.parameters
        values["longest"] = [features(setup) | asdict(longest) for setup, longest in forecast.lengths]
        values["plan"] = {name: getattr(plan, name) for name in ("seq_len", "batch_size", "fits", "bound")}
        values["plan"] |= {"setup": asdict(plan.setup), "peak": plan.peak.name}
        values["plan"] |= {"gpu_gib": in_gib(plan.peak.parts), "host_gib": in_gib(plan.host)}
        values["plan"]["node_receives_gb"] = plan.network and {
            part: round(size / 1e9, 3) for part, size in plan.network._asdict().items()
        }
        if plan.network and forecast.network:
            values["plan"]["node_receives_seconds"] = round(plan.network.all / 1e9 / forecast.network, 3)
        values["plan"]["moments_gib"] = in_gib({moment.name: moment.bytes for moment in plan.moments})
    return values


def features(setup: Setup) -> dict[str, Any]:
    """Returns the features and their values in a setup."""
    return {
        "tiled_loss": "loss" in setup.tiles,
        "tiled_mlp": "mlp" in setup.tiles,
        "tiled_layer": "layer" in setup.tiles,
        "sequence_parallel": setup.sequence_parallel,
        "offloaded_activations": "activations" in setup.offload,
        "head_groups": setup.head_groups,
        "liger": setup.liger,
        "attention": setup.attention,
    }


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    return {part: round(size / GIB, 3) for part, size in parts.items()}


def print_forecast(forecast: PlanResult, console: Console) -> None:
    """Prints the forecast as tables, if any sequence fits, then what to turn on, or what would help if it does not
    fit."""
    plan, shown = forecast.plan, [title_of(forecast), *(f"note: {note}" for note in forecast.notes)]
    if forecast.simulated:
        shown.append(simulated_table(forecast.simulated, None if plan else forecast.seq_len))
    if plan is not None and any(longest.tokens for _, longest in forecast.lengths):
        shown += [lengths_table(forecast.lengths, plan.setup), parts_table(plan)]
    if plan is not None and plan.network is not None:
        shown.append(across_nodes(plan, forecast.network))
    elif plan is not None and forecast.network is not None:
        one = plan.setup.gpus <= plan.setup.gpus_per_node
        why = "all GPUs are on one node" if one else "nodes have unequal numbers of the GPUs that share a sequence"
        shown.append(f"No bytes across nodes are counted: {why}.")
    if plan is not None and plan.fits:
        shown += [] if needs_seqtile(plan.setup) or forecast.seq_len is None else [not_needed(plan.seq_len)]
        shown += ["Turn on:", *(f"  {line}" for line in forecast.turn_on)]
    elif plan is not None:
        shown.append(f"This is predicted not to fit in {plan.bound}.")
        shown += [f"With {option}: {tokens:,} tokens at most." for option, tokens in forecast.remedies.items()]
    elif (seq_len := forecast.seq_len) is not None:
        if not forecast.fits(seq_len):
            shown.append("This is predicted not to fit in GPU memory.")
        elif forecast.simulated.get("nothing", 0) >= seq_len:
            shown.append(not_needed(seq_len))
    console.print(*shown, sep="\n")


def needs_seqtile(setup: Setup) -> bool:
    """Returns whether a setup has any feature of seqtile."""
    moved = "activations" in setup.offload or setup.sequence_parallel > 1
    return bool(setup.tiles or setup.attention == "varlen" or setup.shared_tokens or moved)


def not_needed(tokens: int) -> str:
    return f"seqtile is not needed: {tokens:,} tokens are predicted to fit without it, with every layer checkpointed."


def title_of(forecast: PlanResult) -> str:
    if (plan := forecast.plan) is None:
        return forecast.model
    setup, count, card = plan.setup, plan.shape.parameters, forecast.gpu_memory_gib
    gpus = f"{setup.gpus} GPUs, ZeRO-{setup.zero_stage}, each" if setup.gpus > 1 else "1 GPU"
    size = next(f"{count / one:,.{digits}f} {unit}".rstrip() for one, digits, unit in UNITS if count >= one)
    kept = f", {setup.gpu_memory_gib:g} for a step" if setup.gpu_memory_gib < card else ""
    return f"{forecast.model}: {size} parameters, {plan.shape.layers} layers; {gpus} of {card:g} GiB{kept}"


def across_nodes(plan: Plan, rate: float | None) -> str:
    """Says what a node receives from others in a step, and how long that takes at `rate` GB/s."""
    found = plan.network
    flat = f" ({found.flat / 1e9:,.1f} with heads over all GPUs)" if found.attention < found.flat else ""
    text = f"A node receives {found.all / 1e9:,.1f} GB from others in a step: {found.attention / 1e9:,.1f} of attention"
    text += f"{flat}, {found.weights / 1e9:,.1f} of weights and gradients"
    text += "" if rate is None else f"; {found.all / 1e9 / rate:,.2f} s at {rate:g} GB/s"
    return f"{text}. This is arithmetic, not measured."


def simulated_table(lengths: dict[str, int], seq_len: int | None = None) -> Table:
    """The row that `seq_len` tokens need is marked."""
    first = next((tiled for tiled, tokens in lengths.items() if seq_len is not None and tokens >= seq_len), None)
    columns = ("tiled", Column("tokens", justify="right", no_wrap=True))
    table = Table(*columns, title="Longest sequence, predicted by a simulation")
    table.caption = "On one GPU, every layer checkpointed, FlashAttention."
    table.caption += "" if first is None else f" *: enough for {seq_len:,} tokens."
    for tiled, tokens in lengths.items():
        table.add_row(tiled, f"{'* ' if tiled == first else ''}{tokens:,}")
    return table


def lengths_table(lengths: list[tuple[Setup, Longest]], planned: Setup) -> Table:
    named = ("loss", "MLP", "layer", "share", "host", "groups", "Liger", "attention")
    named = named if len({setup.attention for setup, _ in lengths}) > 1 else named[:-1]
    columns = [Column(name, justify="center") for name in named]
    columns += [Column("tokens", justify="right", no_wrap=True), Column("bound by")]
    said = planned.attention if "attention" not in named else "as below"
    title = f"Longest sequence, predicted, every layer checkpointed; {planned.rows} rows, attention: {said}"
    table = Table(*columns, title=title)
    table.caption = "loss, MLP, layer: tiled; groups: head chunks; share: GPUs per sequence;\n"
    table.caption += "host: layer inputs offloaded; Liger: its norms."
    fitting = [row for row in lengths if row[1].tokens]
    if len(fitting) < len(lengths):
        table.caption += f"\nNothing fits in the {len(lengths) - len(fitting)} setups that are left out."
    for setup, longest in fitting:
        values = list(features(setup).values())[: len(named)]
        cells = ["x" if value is True else f"{value or ''}" for value in values]
        mark = "* " if setup == planned else ""  # of the step that the next table has
        table.add_row(*cells, f"{mark}{longest.tokens:,}", longest.bound.removeprefix("GPU memory: "))
    return table


def parts_table(plan: Plan) -> Table:
    columns = (Column(name, justify="right") for name in ("GiB a GPU", "GiB a node, on the host"))
    shared = f", of which {plan.setup.shared_tokens:,} are shared," if plan.setup.shared_tokens else ""
    title = f"* A step of {plan.batch_size} x {plan.seq_len:,} tokens{shared} at its predicted peak: {plan.peak.name}"
    table = Table("", *columns, title=title)
    sizes = {part: (size, plan.host.get(part, 0)) for part, size in plan.peak.parts.items()}
    for part, (size, held) in (sizes | {"all": (plan.gpu_bytes, plan.host_bytes)}).items():
        if size + held >= GIB / 200:
            table.add_row(part, f"{size / GIB:.2f}", f"{held / GIB:.2f}" if held else "")
    table.rows[-1].style = "bold"
    return table
