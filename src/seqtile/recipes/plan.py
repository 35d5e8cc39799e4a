"""The forecast of `seqtile plan`: the longest sequence with each feature on, what to turn on, and what a step holds."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from seqtile import memory
from seqtile.limits import flash_limit
from seqtile.memory import TILES, Formula, Longest, Plan, Setup, Shape, shape_of
from seqtile.memory.room import MARGIN, room
from seqtile.memory.setup import expect, is_count, is_size, setup_of
from seqtile.memory.shape import NoFormula
from seqtile.memory.squares import makes_squares
from seqtile.recipes import HUB_NAME, argument, hub_config, in_brief, number_or_name, option

ONLY = ("loss", "MLP", "layer", "host", "Liger")  # the columns of the table of lengths
LOADED = {"varlen": "sdpa", "flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}  # by Hugging Face's names
MIN_SHARED = 256  # tokens: the default min_tokens of `share_prefixes`


@dataclass(frozen=True)
class PlanOptions:
    """The options of `seqtile plan`. One that is named as a field of `memory.Setup` sets that field."""

    model: str = argument("A config.json, its directory, or a name on the hub; at once: " + ", ".join(memory.KNOWN))
    seq_len: int | None = option(None, "Sequence length in tokens (default: the longest that fits).")
    batch_size: int = option(1, "Sequences in a batch.")
    shared_tokens: int = option(0, "Tokens of a prefix that the sequences share, computed once; it has no labels.")
    gpus: int = option(1, "GPUs in total.")
    sequence_parallel: int | None = option(None, "GPUs that share a sequence (default: all).")
    gpu_memory_gib: float = option(80, "GiB of memory of a GPU, all that it has.", "--gpu-memory")
    margin: float = option(MARGIN, "Share of it that is kept free, since plans may be a fifth too low.")
    host_memory_gib: float = option(1900, "GiB of host memory per node.", "--host-memory")
    gpus_per_node: int = option(8, "GPUs per node.", "--gpus-per-node", "--per-node")
    flat: bool = option(False, "Take all GPUs as one node in attention: more crosses nodes, but less memory.", "--flat")
    hsdp: bool = option(False, "Shard over the GPUs of a node only, and replicate over nodes (FSDP2's HSDP).", "--hsdp")
    network: float | None = option(None, "GB/s that a node receives from others: prints how long that takes.")
    zero_stage: int = option(3, "Shards over all GPUs: 1 the optimizer, 2 also gradients, 3 also weights.")
    optimizer: str = option("adamw", "adamw (16 bytes a parameter, float32 copy included), adamw_8bit or sgd.")
    dtype: str = option("bfloat16", "Dtype of weights and activations: bfloat16, float16 or float32.")
    autocast: bool = option(False, "Float32 weights and residual stream, torch.autocast to --dtype.", "--autocast")
    lora_rank: int | None = option(None, "Rank of LoRA adapters on every projection; all else is frozen.")
    load_in_4bit: bool = option(False, "QLoRA: projections in bitsandbytes' 4 bits below adapters.", "--load-in-4bit")
    attention: str = option(
        "flash", "The model's: flash (FlashAttention), varlen (seqtile's), sdpa or eager, with masks and scores."
    )
    rows: str = option("plain", "Sequences of a batch: plain, a document each; packed, several; padded, shorter ones.")
    accumulate: bool = option(False, "Gradient accumulation: gradients of earlier batches are kept.", "--accumulate")
    offload: list[str] | None = option(None, "Keep optimizer or weights in host memory; repeat the option for both.")
    layer: bool = option(False, "Tile whole layers, needed or not.", "--layer")
    head_groups: str | None = option(None, "Head chunks in tiled layers: a number of them, or auto.")
    only: str | None = option(None, f"Turn on only these, with commas: nothing, or some of {', '.join(ONLY)}.")
    as_json: bool = option(False, "Print JSON.", "--json")

    def setup(self) -> dict[str, Any]:
        """Returns the fields of `memory.Setup` that the options set. Raises ValueError if `offload` names a part that
        cannot be offloaded."""
        setup = {field.name: getattr(self, field.name) for field in fields(Setup) if hasattr(self, field.name)}
        offload = tuple(self.offload or ())
        if unknown := [part for part in offload if part not in ("optimizer", "weights")]:
            tried = "layer inputs on the host are tried in any case, so leave activations out"
            raise ValueError(f"offload: expected some of optimizer, weights, got {', '.join(unknown)}; {tried}")
        setup["gpu_memory_gib"] = room(self.gpu_memory_gib, self.margin)
        shared_by = self.gpus if self.sequence_parallel is None else self.sequence_parallel
        setup |= {"batches": "whole", "head_groups": number_or_name(self.head_groups)}  # as `to_turn_on` says
        return setup | {"sequence_parallel": shared_by, "offload": offload}


@dataclass(frozen=True)
class PlanResult:
    """The longest sequences that fit on the given GPUs, and one planned step."""

    model: str
    gpu_memory_gib: float
    """Of a GPU; what a step may fill of it is in the plan's setup."""
    notes: list[str]
    simulated: dict[str, int]
    """For a model type without a formula: the simulated longest sequence on one GPU, by what is tiled."""
    lengths: list[tuple[Setup, Longest]] = field(default_factory=list)
    """The longest sequence with more and more features on."""
    plan: Plan | None = None
    """None for a model type that is only simulated."""
    turn_on: list[str] = field(default_factory=list)
    """Lines of Python that turn the features on, if the plan fits."""
    remedies: dict[str, int] = field(default_factory=dict)
    """If the plan does not fit: further options, and the longest sequence with each."""
    network: float | None = None
    """GB/s that a node receives from others, if that was given."""
    seq_len: int | None = None
    """The length that was asked for."""

    def fits(self, seq_len: int) -> bool:
        """Returns whether a sequence of `seq_len` tokens fits."""
        return self.plan.fits if self.plan else max(self.simulated.values(), default=0) >= seq_len


def forecast(asked: PlanOptions, each: Callable[[str], None] = lambda step: None) -> PlanResult:
    """Returns the forecast for some options. Calls `each` with the name of each step of a simulation before it runs.
    With `layer`, `head_groups` or `sequence_parallel` the planned step has them, even if it fits without. Raises the
    ValueErrors of `seqtile.memory`, with the names of options instead of fields."""
    try:
        expect("network", asked.network is None or is_size(asked.network), "more than 0 GB/s", asked.network)
        each_node, known = asked.gpus_per_node, is_count(asked.gpus_per_node) and is_count(asked.gpus)
        whole = not known or asked.gpus <= each_node or asked.gpus % each_node == 0
        expect("gpus", whole, f"whole nodes of {each_node} GPUs (--per-node says how many a node has)", asked.gpus)
        return _forecast(asked, each)
    except ValueError as error:
        name, _, rest = str(error).partition(": ")
        if not rest or not hasattr(asked, name):
            raise
        raise ValueError(f"--{name.removesuffix('_gib').replace('_', '-')}: {rest}") from error


def _forecast(asked: PlanOptions, each: Callable[[str], None]) -> PlanResult:
    setup, batch_size = asked.setup(), asked.batch_size
    try:
        shape = _shape(asked.model)
    except NoFormula as error:
        simulated, notes = _simulated(asked, each)
        if not simulated:
            raise ValueError(f"{error}; and {notes[-1]}") from error
        notes.insert(0, f"{error}, so it is only simulated")
        return PlanResult(asked.model, asked.gpu_memory_gib, notes, simulated, seq_len=asked.seq_len)
    formula, in_groups = Formula(shape), setup["head_groups"] is not None
    if asked.layer or in_groups:  # raises if this model cannot have them
        whole = setup_of(setup | {"tiles": TILES})
        formula.predict(whole, asked.shared_tokens + 1, batch_size)
        if (refusal := formula.refusal("groups", whole, whole)) is not None:
            raise ValueError(f"head_groups: {refusal}")
    if asked.only is not None:
        chosen = setup_with_only(asked.only, setup, asked.layer)
        lengths = [(chosen, formula.longest(chosen, batch_size))]
    else:
        lengths = list(memory.ladder(shape, batch_size=batch_size, **setup))
    wanted = [row for row in lengths if "layer" in row[0].tiles or not asked.layer]
    wanted = [row for row in wanted if row[0].head_groups is not None or not in_groups]
    wanted = [row for row in wanted if asked.sequence_parallel in (None, row[0].sequence_parallel)]
    if (seq_len := asked.seq_len) is None:
        chosen, longest = max(wanted, key=lambda row: row[1].tokens)
        seq_len = max(longest.tokens, asked.shared_tokens + chosen.sequence_parallel)
    else:
        chosen = next((setup for setup, longest in wanted if longest.tokens >= seq_len), wanted[-1][0])
    step = formula.predict(chosen, seq_len, batch_size)
    simulated, more = _simulated(asked, each) if shape.assumed else ({}, [])
    notes = [*shape.notes, *_notes(step), *more]
    fitting = (to_turn_on(step, asked.model), {}) if step.fits else ([], remedies(lengths, step))
    return PlanResult(
        asked.model, asked.gpu_memory_gib, notes, simulated, lengths, step, *fitting, asked.network, asked.seq_len
    )


def _notes(step: Plan) -> list[str]:
    """Says what is to be known of the planned step."""
    notes, shape = [], step.shape
    if shape.positions is not None and step.seq_len > shape.positions:
        notes.append(f"it is configured for {shape.positions:,} positions at most")
    limit = flash_limit(LOADED[step.setup.attention], step.heads_at_once, shape.head_dim)
    return notes + ([limit[1]] if limit is not None and step.seq_len >= limit[0] else [])


def _shape(model: str) -> Shape:
    """Returns the shape of a known name or a config.json, here or on the hub, which is asked last."""
    try:
        return shape_of(model)
    except ValueError as error:
        if not isinstance(error.__cause__, FileNotFoundError) or not HUB_NAME.fullmatch(model):
            raise
        return shape_of(hub_config(model, str(error)))


def setup_with_only(words: str, fields: dict[str, Any], layer: bool) -> Setup:
    """Returns the setup with only the features that `words` name. Raises ValueError for an unknown word."""
    named = {word.strip().lower() for word in words.split(",")} - {"nothing"}
    if unknown := named - {word.lower() for word in ONLY}:
        raise ValueError(f"only: expected nothing, or some of {', '.join(ONLY)}, got {', '.join(sorted(unknown))}")
    tiles = tuple(part for part in TILES if part in named or (layer and part == "layer"))
    offload = (*(["activations"] if "host" in named else []), *fields["offload"])
    return setup_of(fields | {"tiles": tiles, "liger": "liger" in named, "offload": offload})


def _simulated(asked: PlanOptions, each: Callable[[str], None]) -> tuple[dict[str, int], list[str]]:
    """Runs the code of a model without a formula on tensors without data. Returns its longest sequences, and notes."""
    setup = setup_of(asked.setup())
    if (refusal := memory.simulation_refusal(setup)) is not None:
        return {}, [refusal]
    from seqtile.memory.simulate import Simulation  # slow: torch
    from seqtile.recipes.check import class_and_config

    lengths: dict[str, int] = {}
    try:
        predictor = Simulation(*class_and_config(asked.model), setup, each)
        for name, chosen, refusal in predictor.turned_on(setup):
            if refusal is None:
                lengths[name] = predictor.longest(chosen, asked.batch_size).tokens
    except Exception as error:  # the model's own code may raise anything on tensors without data
        return lengths, [f"it cannot be simulated: {in_brief(error)}"]
    return lengths, predictor.notes


def remedies(lengths: list[tuple[Setup, Longest]], plan: Plan) -> dict[str, int]:
    """Returns the longest sequence with more offloaded, and with enough GPUs for `plan` to fit, if it is longer."""
    setup, best = lengths[-1][0], max(longest.tokens for _, longest in lengths)
    tried: dict[str, dict[str, Any]] = {} if setup.flat else {"--flat": {"flat": True}}
    tried |= {
        "--offload optimizer": {"offload": (*setup.offload, "optimizer")},
        "--offload optimizer --offload weights": {"offload": (*setup.offload, "optimizer", "weights")},
    }
    for times in (2, 4, 8, 16, 32, 64, 128):
        gpus, shared_by = setup.gpus * times, setup.sequence_parallel * times
        tried[f"--gpus {gpus}"] = {"gpus": gpus, "sequence_parallel": shared_by}
    longer = {}
    for name, changes in tried.items():
        with suppress(ValueError):  # this setup cannot have it
            tokens = Formula(plan.shape).longest(replace(setup, **changes), plan.batch_size).tokens
            if tokens > best and ("gpus" not in changes or tokens >= plan.seq_len):
                best = longer[name] = tokens
            if best >= plan.seq_len and "gpus" in changes:
                break
    return longer


def to_turn_on(plan: Plan, model: str = "...") -> list[str]:
    """Returns a script that turns the features of a plan on, in order, for the model of this name or path. What a
    line of Python cannot say, such as DeepSpeed's configuration, is a comment."""
    setup, path = plan.setup, model.removesuffix("config.json").rstrip("/") or "."
    each, dtype, stage = min(setup.gpus, setup.gpus_per_node), f"torch.{setup.dtype}", setup.zero_stage
    nodes = f" --nnodes {-(-setup.gpus // each)} ..." if setup.gpus > each else ""
    several, shared_by, quantised = setup.gpus > 1, setup.sequence_parallel, setup.load_in_4bit
    on_host, moved = "activations" in setup.offload, [part for part in setup.offload if part != "activations"]
    sharded = several and stage == 3 and not moved and not quantised  # by FSDP2
    flat = f", per_node={shared_by}" if setup.flat and shared_by > setup.gpus_per_node else ""
    hsdp = sharded and setup.hsdp and setup.gpus > each
    mesh, over = f"({setup.gpus},)", ""
    if hsdp:
        mesh, over = f'({setup.gpus // each}, {each}), mesh_dim_names=("dp_replicate", "dp_shard")', ", mesh=mesh"
    liger = f"apply_liger_kernel_to_{plan.shape.model_type}"
    four_bits = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype={dtype}'
    by_flash = setup.attention == "flash" and makes_squares(plan.shape, replace(setup, attention="sdpa"))
    name = LOADED[setup.attention] if by_flash or setup.attention == "eager" else "sdpa"  # by FlashAttention, too
    loaded = json.dumps(path) + (f', attn_implementation="{name}"' if name != "sdpa" else "")
    applied = setup.tiles or setup.attention == "varlen"
    loaded += ", dtype=torch.float32" if sharded and setup.full else ""
    loaded += ", quantization_config=four_bits" if quantised else ""
    tiled = "".join(f", {name}={value!r}" for name, value in memory.apply_options(setup).items()).replace("'", '"')
    adapters = f'LoraConfig(r={setup.lora_rank}, target_modules="all-linear")'
    least = f", min_tokens={setup.shared_tokens}" if setup.shared_tokens < MIN_SHARED else ""
    policy = "" if setup.autocast else f", mp_policy=MixedPrecisionPolicy({dtype}, torch.float32)"
    by_other = f"DeepSpeed's ZeRO-{stage}" if stage else "DistributedDataParallel(model)"
    older = "in older transformers gradient_checkpointing_enable"
    lines = (
        (several, f"# torchrun{nodes} --nproc-per-node {each} this_script.py"),
        (several or quantised, "import torch"),
        (applied or setup.shared_tokens, "import seqtile"),
        (on_host, "from seqtile import offload"),
        (shared_by > 1, "from seqtile import sp"),
        (not setup.full, "from peft import LoraConfig, get_peft_model"),
        (quantised, "from transformers import BitsAndBytesConfig"),
        (True, "from transformers import AutoModelForCausalLM"),
        (sharded, "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"),
        (several, f'{"mesh = " * hsdp}torch.distributed.init_device_mesh("cuda", {mesh})  # starts the process group'),
        (setup.liger, f"from liger_kernel.transformers import {liger}", f"{liger}()  # before the model is built"),
        (quantised, f"four_bits = BitsAndBytesConfig({four_bits}, bnb_4bit_use_double_quant=True)"),
        (True, f"model = AutoModelForCausalLM.from_pretrained({loaded}).train()"),
        (not setup.full, f"model = get_peft_model(model, {adapters})"),
        (applied, f"seqtile.apply_seqtile(model{tiled})"),
        (setup.shared_tokens, f"seqtile.share_prefixes(model{least})"),
        (shared_by > 1, f'sp.apply_ulysses(model, sp.initialize({shared_by}{flat}), batches="whole")'),
        (moved, f"# DeepSpeed's ZeRO-{max(stage, 1)} with {' and '.join(moved)} offloaded to the CPU"),
        (sharded, "for module in (*model.get_decoder().layers, model):", f"    fully_shard(module{policy}{over})"),
        (several and not moved and not sharded, f"# {by_other}"),
        (on_host, 'offload.enable(model, device="cuda")'),  # wherever the model is yet
        (not on_host, f'model.activation_checkpointing_enable({{"use_reentrant": False}})  # {older}'),
        (setup.autocast, f'# each forward under torch.autocast("cuda", {dtype}); the weights are float32'),
    )
    return [line for wanted, *said in lines if wanted for line in said]
