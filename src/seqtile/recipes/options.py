"""The options of `seqtile finetune`: TRL's by their own names, and a few of seqtile's. Slow to import."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from transformers.hf_argparser import HfArg
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
from yaml import YAMLError

from seqtile.memory.room import MARGIN
from seqtile.memory.setup import expect
from seqtile.recipes import DEFAULT_MODEL, TWO_TOKENS, number_or_name, source
from seqtile.recipes.data import device_of

FULL_RATE, LORA_RATE = 1e-5, 2e-4
SAME = (
    *("model_name_or_path", "dtype", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *(
        "load_in_4bit",
        "load_in_8bit",
        "data",
        "sequence_parallel",
        "max_length",
        "packing",
        "per_device_train_batch_size",
    ),
    *("gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "weight_decay", "optim", "bf16", "fp16"),
    *("assistant_only_loss", "seed"),
)
"""What a run that goes on where another was ended must have in common with it."""


@dataclass
class OwnOptions:
    """What seqtile adds to TRL's options; `seqtile finetune --help` says what each does."""

    data: list[str] = HfArg(default_factory=list, metadata={"action": "extend"})
    layer: bool = False
    head_groups: str | None = None
    offload: bool = False
    fit: bool = False
    margin: float = MARGIN
    sequence_parallel: int = 1
    compare: bool = False
    untiled: bool = False
    resume: bool = False
    merge: bool = False
    save_every: int | None = None

    @property
    def groups(self) -> int | str | None:
        """--head-groups as seqtile takes it."""
        return number_or_name(self.head_groups)

    def check(self, training: "TrainingOptions", model: "ModelOptions") -> None:
        """Raises ValueError for options that cannot work."""
        alone, length, shared_by = training.world_size == 1, training.max_length, self.sequence_parallel
        rate, every, steps = training.learning_rate, self.save_every, training.max_steps
        divides = alone or (shared_by >= 1 and training.world_size % shared_by == 0)
        for name, right, expected, got in (
            ("seq-len", length is not None and length >= 2, TWO_TOKENS, length),
            ("steps", steps == -1 or 1 <= steps < 2**31, "at least 1 and less than 2**31, or none", steps),
            ("seed", 0 <= training.seed < 2**32, "at least 0 and less than 2**32", training.seed),
            ("learning-rate", 0 < rate <= 1, "more than 0 and at most 1, AdamW's step of a weight", rate),
            ("head-groups", self.groups == "auto" or not isinstance(self.groups, str), "a number or auto", self.groups),
            ("margin", 0 <= self.margin < 1, "a share, at least 0 and less than 1", self.margin),
            ("save-every", every is None or every >= 1, "at least 1, or none", every),
            ("sequence-parallel", divides, f"a divisor of the {training.world_size} processes", shared_by),
        ):
            expect(f"--{name}", right, expected, got)
        in_bits = model.load_in_4bit or model.load_in_8bit
        start = f"start one on each GPU: torchrun --nproc-per-node {max(2, shared_by)} -m seqtile.cli finetune ..."
        chosen, on_cpu = self.fit and (self.layer or self.offload), self.offload and training.use_cpu
        for wrong, message in (
            (self.groups is not None and not self.layer, "--head-groups is for whole layers; pass --layer too"),
            (chosen, "--fit chooses --layer, --head-groups and --offload: leave these out, or --fit"),
            (alone and shared_by != 1, f"--sequence-parallel is {shared_by}, but this is one process; {start}"),
            (self.compare and not alone, "--compare needs a single process: leave it out, or start without torchrun"),
            (self.compare and self.resume, "--compare does two whole runs, and --resume continues one: leave one out"),
            (self.merge and not model.use_peft, "--merge merges an adapter, but there is none; pass --use-peft too"),
            (in_bits and not model.use_peft, "--load-in-4bit: what has few bits is not trained; pass --use-peft too"),
            (in_bits and not find_spec("bitsandbytes"), "--load-in-4bit needs bitsandbytes: pip install bitsandbytes"),
            (on_cpu, "--offload moves what checkpointing keeps off a GPU, but the device is the CPU; leave it out"),
        ):
            if wrong:
                raise ValueError(message)


@dataclass
class ModelOptions(ModelConfig):
    """TRL's options of a model."""

    model_name_or_path: str = HfArg(default=DEFAULT_MODEL, aliases=["--model"])
    dtype: str | None = None
    lora_target_modules: list[str] | None = HfArg(default_factory=lambda: ["all-linear"])
    use_bnb_nested_quant: bool = True
    lora_dropout: float = HfArg(default=0.0, help="With it MLPs and layers run in chunks instead of fused.")


@dataclass
class TrainingOptions(SFTConfig):
    """TRL's options of training, with defaults for long sequences on one's own data."""

    output_dir: str = HfArg(default="runs/finetune", aliases=["--output"])
    max_length: int | None = HfArg(default=4096, aliases=["--seq_len", "--seq-len"])
    max_steps: int = HfArg(default=-1, aliases=["--steps"])
    num_train_epochs: float = 1.0
    per_device_train_batch_size: int = 1
    learning_rate: float | None = HfArg(default=None, help=f"{FULL_RATE:g}; {LORA_RATE:g} for adapters, by default.")
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.03
    logging_steps: float = 1
    logging_nan_inf_filter: bool = False
    save_total_limit: int | None = 1
    hub_strategy: str = "end"
    report_to: str = "none"
    run_on: str | None = HfArg(default=None, aliases=["--device"], help="cpu or cuda; by default cuda if there is one.")

    def __post_init__(self) -> None:
        self.use_cpu |= device_of(self.run_on) == "cpu"
        self.ddp_backend = self.ddp_backend or ("gloo" if self.use_cpu and self.local_rank >= 0 else None)
        self.bf16 = not (self.use_cpu or self.fp16) if self.bf16 is None else self.bf16
        self.disable_tqdm = True
        super().__post_init__()
        self._n_gpu = min(self._n_gpu, 1)  # several GPUs of one process would get a copy of the model each


@dataclass
class Asked:
    """All options of a run."""

    own: OwnOptions
    training: TrainingOptions
    model: ModelOptions
    script: ScriptArguments
    mixture: DatasetMixtureConfig

    def same(self) -> dict[str, Any]:
        """Returns `SAME`, and the number of ranks, as JSON has them."""
        parts = vars(self.model) | vars(self.training) | vars(self.own)
        return {name: parts[name] for name in SAME} | {"world_size": self.training.world_size}


class Parser(TrlParser):
    """TRL's parser, with short names in YAML too, and errors that are exceptions."""

    def __init__(self, **given: Any):
        kinds = (OwnOptions, TrainingOptions, ModelOptions, ScriptArguments, DatasetMixtureConfig)
        super().__init__(kinds, prog="seqtile finetune", allow_abbrev=False, **given)
        self.data: list[str] = []  # of the YAML file

    def error(self, message: str) -> None:
        raise ValueError(f"{message}; seqtile finetune --help names the options")

    def set_defaults_with_config(self, **options: Any) -> list[str]:
        data = options.pop("data", [])  # which --data replaces, and would be added to
        self.data = data if isinstance(data, list) else [data]
        actions = ((self._option_string_actions.get(f"--{name}"), name, value) for name, value in options.items())
        return super().set_defaults_with_config(
            **{action.dest if action else name: value for action, name, value in actions}
        )


def parsed(arguments: list[str]) -> Asked:
    """Returns the options of a command line, and of the YAML file that it names. Raises ValueError for what cannot
    work."""
    parser, named = Parser(), "--config="
    parts = [part for one in arguments for part in (one.split("=", 1) if one.startswith(named) else [one])]
    try:
        *found, unknown = parser.parse_args_and_config(parts, return_remaining_strings=True)
    except (YAMLError, IndexError, OSError) as error:
        raise ValueError(f"--config: expected a file of options in YAML ({' '.join(str(error).split())})") from error
    if unknown:
        parser.error(f"there is no option {unknown[0]}")
    asked = Asked(*found)
    own, training, model = asked.own, asked.training, asked.model
    own.data = own.data or parser.data
    if training.max_steps == -1 and not (own.data or asked.script.dataset_name or asked.mixture.datasets):
        training.max_steps = 4  # of the default data, a demonstration
    if own.untiled:
        off = dict.fromkeys(("layer", "offload", "fit", "merge", "compare"), False)
        off |= {"head_groups": None, "save_every": None}
        asked.own, training.push_to_hub = replace(own, **off), False
        own = asked.own
        training.push_to_hub = False
    if training.learning_rate is None:
        training.learning_rate = LORA_RATE if model.use_peft else FULL_RATE
    if model.dtype is None:
        model.dtype = "bfloat16" if model.use_peft and training.bf16 else "float32"
    own.check(training, model)
    source(model.model_name_or_path)
    training.save_strategy = "no" if own.save_every is None else "steps"
    training.save_steps = own.save_every or training.save_steps
    return asked
