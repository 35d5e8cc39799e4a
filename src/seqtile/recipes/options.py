"""The options of `seqtile finetune`: TRL's by their own names, and a few of seqtile's. Slow to import."""

from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers.hf_argparser import HfArg
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

from seqtile.memory.setup import expect
from seqtile.recipes import DEFAULT_MODEL, DEVICES, TWO_TOKENS, number_or_name, source

FULL_RATE, LORA_RATE = 1e-5, 2e-4


@dataclass
class OwnOptions:
    """What seqtile adds to TRL's options."""

    data: list[str] = HfArg(
        default_factory=list,
        metadata={"action": "extend"},
        help="Text files, directories of them, JSON, JSONL, CSV or Parquet files, or a data set of the hub "
        "(default: the source of Python's standard library).",
    )
    layer: bool = HfArg(default=False, help="Tile whole layers, everything except attention: longer sequences fit.")
    head_groups: str | None = HfArg(
        default=None, help="With --layer: groups of kv heads in attention: a number, or auto."
    )
    offload: bool = HfArg(default=False, help="Keep the inputs of checkpointed layers in host memory, not on the GPU.")
    fit: bool = HfArg(default=False, help="Choose the cheapest of these three with which a step fits in memory.")
    sequence_parallel: int = HfArg(default=1, help="Under torchrun: GPUs that share a sequence.")
    compare: bool = HfArg(default=False, help="Train the untiled model first, in a process of its own, and compare.")
    resume: bool = HfArg(default=False, help="Continue from the last checkpoint in --output, with the same options.")
    merge: bool = HfArg(default=False, help="With an adapter: also write the merged model, to OUTPUT/merged.")
    device: str | None = HfArg(default=None, help="cpu or cuda (default: cuda if there is one).")
    save_every: int | None = HfArg(
        default=None, help="Save a checkpoint every N steps and at the end (default: if it is ended early)."
    )
    untiled: bool = HfArg(default=False, help="Do not tile anything.")

    def check(self, training: "TrainingOptions") -> None:
        """Raises ValueError for options that cannot work."""
        groups, alone, length = number_or_name(self.head_groups), training.world_size == 1, training.max_length
        rate, every, shared_by = training.learning_rate, self.save_every, self.sequence_parallel
        expect("--seq-len", length is not None and length >= 2, TWO_TOKENS, length)
        expect("--learning-rate", 0 < rate <= 1, "more than 0 and at most 1, AdamW's step of a weight", rate)
        expect("--device", self.device in DEVICES, "cpu or cuda", self.device)
        expect("--head-groups", groups == "auto" or not isinstance(groups, str), "a number or auto", groups)
        expect("--save-every", every is None or every >= 1, "at least 1, or none", every)
        if not alone:
            divides = shared_by >= 1 and training.world_size % shared_by == 0
            ranks = f"a divisor of the {training.world_size} processes"
            expect("--sequence-parallel", divides, ranks, shared_by)
        start = f"start one on each GPU: torchrun --nproc-per-node {max(2, shared_by)} -m seqtile.cli finetune ..."
        chosen, on_cpu = self.fit and (self.layer or self.offload), self.offload and training.use_cpu
        for wrong, message in (
            (groups is not None and not self.layer, "--head-groups is for layers tiled as a whole; pass --layer too"),
            (chosen, "--fit chooses --layer, --head-groups and --offload: leave these out, or --fit"),
            (alone and shared_by != 1, f"--sequence-parallel is {shared_by}, but this is one process; {start}"),
            (self.compare and not alone, "--compare needs a single process: leave it out, or start without torchrun"),
            (self.compare and self.resume, "--compare does two whole runs, and --resume continues one: leave one out"),
            (on_cpu, "--offload moves what checkpointing keeps off a GPU, but the device is the CPU; leave it out"),
        ):
            if wrong:
                raise ValueError(message)


@dataclass
class ModelOptions(ModelConfig):
    """TRL's options of a model."""

    model_name_or_path: str = HfArg(
        default=DEFAULT_MODEL, aliases=["--model"], help=f"A local path, a hub name, or {DEFAULT_MODEL}."
    )
    dtype: str | None = HfArg(
        default=None,
        help="Dtype of the weights (default: float32; bfloat16 of a frozen base that adapters train on).",
    )
    lora_dropout: float = HfArg(
        default=0.0, help="Dropout in LoRA's adapters. With it MLPs and layers run in chunks instead of fused."
    )

    def check(self) -> None:
        """Raises ValueError for a model that is not there, or cannot be quantised."""
        source(self.model_name_or_path)
        bits = 4 if self.load_in_4bit else 8 if self.load_in_8bit else None
        if bits and find_spec("bitsandbytes") is None:
            raise ValueError(f"--load-in-{bits}bit needs bitsandbytes: pip install bitsandbytes")


@dataclass
class TrainingOptions(SFTConfig):
    """TRL's options of training, with defaults for long sequences on one's own data."""

    output_dir: str = HfArg(default="runs/finetune", aliases=["--output"], help="Directory of model and checkpoints.")
    max_length: int | None = HfArg(default=4096, aliases=["--seq_len", "--seq-len"], help="Tokens a sequence at most.")
    max_steps: int = HfArg(default=-1, aliases=["--steps"], help="Training steps in total (default: by epochs).")
    num_train_epochs: float = HfArg(default=1.0, help="Passes over the data.")
    per_device_train_batch_size: int = HfArg(default=1, help="Sequences of a step on each GPU, or group of GPUs.")
    learning_rate: float | None = HfArg(
        default=None, help=f"Largest learning rate (default: {FULL_RATE:g}; {LORA_RATE:g} for adapters)."
    )
    lr_scheduler_type: str = HfArg(default="cosine", help="The learning rate's schedule.")
    warmup_steps: float = HfArg(default=0.03, help="Steps, or a share of them, in which the rate rises.")
    logging_steps: float = HfArg(default=1, help="A line every so many steps.")
    logging_nan_inf_filter: bool = HfArg(default=False, help="Leave losses that are not finite out of the mean.")
    save_total_limit: int | None = HfArg(default=1, help="Checkpoints that are kept.")
    report_to: str = HfArg(default="none", help="Where else losses are reported, such as wandb or tensorboard.")

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        self.bf16 = not (self.use_cpu or self.fp16) if self.bf16 is None else self.bf16
        self.disable_tqdm = True
        self.has_own_rate = self.learning_rate is not None
        self.learning_rate = self.learning_rate if self.has_own_rate else FULL_RATE
        super().__post_init__()


@dataclass
class Asked:
    """All options of a run."""

    own: OwnOptions
    training: TrainingOptions
    model: ModelOptions
    script: ScriptArguments
    mixture: DatasetMixtureConfig

    def figures(self) -> dict[str, Any]:
        """Returns what two runs must have in common for one to go on where the other was ended."""
        of_model = asdict(self.model)
        trained = {name: getattr(self.training, name) for name in SAME}
        return {
            **trained,
            **{k: of_model[k] for k in OF_MODEL},
            "data": list(map(str, self.own.data)),
            "sequence_parallel": self.own.sequence_parallel,
            "world_size": self.training.world_size,
        }


SAME = (
    *("learning_rate", "seed", "max_length", "packing", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("weight_decay", "optim", "bf16", "fp16", "lr_scheduler_type", "assistant_only_loss"),
)
OF_MODEL = (
    "model_name_or_path",
    "dtype",
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "load_in_4bit",
    "load_in_8bit",
)


class Parser(TrlParser):
    """TRL's parser, whose errors are exceptions."""

    def __init__(self, **given: Any):
        kinds = (OwnOptions, TrainingOptions, ModelOptions, ScriptArguments, DatasetMixtureConfig)
        super().__init__(kinds, prog="seqtile finetune", allow_abbrev=False, **given)

    def error(self, message: str) -> None:
        raise ValueError(f"{message}; seqtile finetune --help names the options")


def parsed(arguments: list[str], on_ranks: bool = False) -> Asked:
    """Returns the options of a command line, and of the YAML file that it names, of one process or of one of the ranks
    that torchrun started. Raises ValueError for what cannot work."""
    device = named(arguments, "device")
    if device == "cpu":
        arguments = [*arguments, "--use_cpu", *(("--ddp_backend", "gloo") if on_ranks else ())]
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no GPU; use --device cpu")
    parser = Parser()
    own, training, model, script, mixture, unknown = parser.parse_args_and_config(
        arguments, return_remaining_strings=True
    )
    if unknown:
        parser.error(f"there is no option {unknown[0]}")
    if own.untiled:
        own = replace(own, layer=False, head_groups=None, offload=False, fit=False, merge=False)
    if model.use_peft and not training.has_own_rate:
        training.learning_rate = LORA_RATE
    if model.dtype is None:
        model.dtype = "bfloat16" if (model.use_peft or model.load_in_4bit) and training.bf16 else "float32"
    asked = Asked(own, training, model, script, mixture)
    own.check(training)
    model.check()
    training.save_strategy = "no" if own.save_every is None else "steps"
    training.save_steps = own.save_every or training.save_steps
    return asked


def named(arguments: list[str], option: str) -> str | None:
    """Returns the value of an option that takes one, if a command line has it."""
    names = {f"--{option}", f"--{option.replace('_', '-')}"}
    for i, argument in enumerate(arguments):
        name, is_joined, value = argument.partition("=")
        if name in names:
            return value if is_joined else next(iter(arguments[i + 1 :]), None)
    return None
