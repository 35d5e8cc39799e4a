"""The options of `seqtile finetune`: TRL's by their own names, and a few of seqtile's. Slow to import."""

import json
from argparse import Action
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from transformers.hf_argparser import HfArg, string_to_bool
from transformers.trainer_utils import SaveStrategy
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
from yaml import YAMLError

from seqtile.memory.room import MARGIN
from seqtile.memory.setup import expect
from seqtile.recipes import DEFAULT_MODEL, TWO_TOKENS, in_brief, number_or_name, resolve_model
from seqtile.recipes.pretrained import device_of

FULL_RATE, LORA_RATE = 1e-5, 2e-4
MAY_DIFFER = (
    *("output_dir", "max_steps", "resume", "compare", "merge", "margin", "fit", "layer", "head_groups", "offload"),
    *("run_name", "run_on", "use_cpu", "disable_tqdm", "ddp_backend", "model_init_kwargs", "chat_template_path"),
    *("logging", "log_", "save", "eval", "report", "push", "hub", "dataloader", "do_", "local_rank", "per_node"),
)
"""How options begin in which a run that goes on where another was ended may differ from it."""
SET_BY_TORCHRUN = "--local-rank"
OTHER_NAMES = {  # usual elsewhere -> TRL's
    "--lr": "--learning-rate",
    "--epochs": "--num-train-epochs",
    "--batch-size": "--per-device-train-batch-size",
}


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
    per_node: int | None = None
    compare: bool = False
    untiled: bool = False
    resume: bool = False
    merge: bool = False

    @property
    def groups(self) -> int | str | None:
        """--head-groups as seqtile takes it."""
        return number_or_name(self.head_groups)

    def check(self, training: "TrainingOptions", model: "ModelOptions") -> None:
        """Raises ValueError for options that cannot work."""
        alone, length, shared_by = training.world_size == 1, training.max_length, self.sequence_parallel
        rate, steps, batch = training.learning_rate, training.max_steps, training.per_device_train_batch_size
        epochs, batches = training.num_train_epochs, training.gradient_accumulation_steps
        divides, per_node = alone or (shared_by >= 1 and training.world_size % shared_by == 0), self.per_node
        is_share = per_node is None or (per_node >= 1 and not (shared_by % per_node and per_node % shared_by))
        for name, right, expected, got in (
            ("seq-len", length is not None and length >= 2, TWO_TOKENS, length),
            ("steps", steps == -1 or 1 <= steps < 2**31, "at least 1 and less than 2**31, or none", steps),
            ("seed", 0 <= training.seed < 2**32, "at least 0 and less than 2**32", training.seed),
            ("learning-rate", 0 < rate <= 1, "more than 0 and at most 1, AdamW's step of a weight", rate),
            ("head-groups", self.groups == "auto" or not isinstance(self.groups, str), "a number or auto", self.groups),
            ("hub-strategy", training.hub_strategy == "end", "end, since checkpoints are moved", training.hub_strategy),
            ("margin", 0 <= self.margin < 1, "a share, at least 0 and less than 1", self.margin),
            ("num-train-epochs", 0 < epochs < 2**31, "more than 0", epochs),
            ("per-device-train-batch-size", batch >= 1, "at least 1", batch),
            ("gradient-accumulation-steps", batches >= 1, "at least 1", batches),
            ("sequence-parallel", divides, f"a divisor of the {training.world_size} processes", shared_by),
            ("per-node", is_share, f"a divisor or a multiple of the {shared_by} that share a sequence", per_node),
        ):
            expect(f"--{name}", right, expected, got)
        in_bits = "--load-in-4bit" if model.load_in_4bit else "--load-in-8bit" if model.load_in_8bit else ""
        start = f"start one on each GPU: torchrun --nproc-per-node {max(2, shared_by)} -m seqtile.cli finetune ..."
        chosen, on_cpu = self.fit and (self.layer or self.offload), self.offload and training.use_cpu
        for wrong, message in (
            (self.groups is not None and not self.layer, "--head-groups is for whole layers; pass --layer too"),
            (chosen, "--fit chooses --layer, --head-groups and --offload: leave these out, or --fit"),
            (alone and shared_by != 1, f"--sequence-parallel is {shared_by}, but this is one process; {start}"),
            (per_node and shared_by == 1, "--per-node is for --sequence-parallel; pass that too, or leave it out"),
            (self.compare and not alone, "--compare needs a single process: leave it out, or start without torchrun"),
            (self.compare and self.resume, "--compare does two whole runs, and --resume continues one: leave one out"),
            (self.merge and not model.use_peft, "--merge merges an adapter, but there is none; pass --use-peft too"),
            (in_bits and not model.use_peft, f"{in_bits}: what has few bits is not trained; pass --use-peft too"),
            (in_bits and not find_spec("bitsandbytes"), f"{in_bits} needs bitsandbytes: pip install bitsandbytes"),
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
    save_strategy: str = "no"
    save_steps: float = HfArg(default=0, aliases=["--save_every", "--save-every"])
    save_total_limit: int | None = 1
    hub_strategy: str = "end"
    report_to: str = "none"
    run_on: str | None = HfArg(default=None, aliases=["--device"], help="cpu or cuda; by default cuda if there is one.")

    def __post_init__(self) -> None:
        self.use_cpu |= device_of(self.run_on) == "cpu"
        self.ddp_backend = self.ddp_backend or ("gloo" if self.use_cpu and self.local_rank >= 0 else None)
        self.bf16 = not (self.use_cpu or self.fp16) if self.bf16 is None else self.bf16
        expect("--save-every", self.save_steps >= 0, "at least 1, or none", self.save_steps)
        self.save_strategy = "steps" if self.save_steps and self.save_strategy == "no" else self.save_strategy
        self.save_steps = self.save_steps or 500  # which is not read then
        self.disable_tqdm = True
        super().__post_init__()
        self._n_gpu = min(self._n_gpu, 1)  # several GPUs of one process would get a copy of the model each


@dataclass
class FinetuneOptions:
    """All options of a run."""

    own: OwnOptions
    training: TrainingOptions
    model: ModelOptions
    script: ScriptArguments
    mixture: DatasetMixtureConfig

    def hub_options(self) -> dict[str, Any]:
        """Returns what `from_pretrained` is to be told of where a model comes from."""
        return {"revision": self.model.model_revision, "trust_remote_code": self.training.trust_remote_code}

    def fixed_options(self, rows: int | None) -> dict[str, Any]:
        """Returns what a run that goes on where another was ended has in common with it, as JSON has it."""
        parts = self.training.to_dict()
        for options in (self.model, self.script, self.mixture, self.own):
            parts |= asdict(options)
        parts |= {"rows": rows, "world_size": self.training.world_size}
        return {name: value for name, value in parts.items() if not name.startswith(MAY_DIFFER)}


class Parser(TrlParser):
    """TRL's parser, with short names in YAML too, and errors that are exceptions."""

    def __init__(self, **others: Any):
        kinds = (OwnOptions, TrainingOptions, ModelOptions, ScriptArguments, DatasetMixtureConfig)
        super().__init__(kinds, prog="seqtile finetune", allow_abbrev=False, **others)
        self.data: list[str] = []  # of the YAML file

    def error(self, message: str) -> None:
        raise ValueError(f"{message}; seqtile finetune --help names the options")

    def set_defaults_with_config(self, **options: Any) -> list[str]:
        data = options.pop("data", [])  # which --data replaces, and would be added to
        self.data = list(map(str, data)) if isinstance(data, list) else [str(data)]
        known = {name: action for name, action in self._option_string_actions.items() if action.dest != "help"}
        by_field = {}
        for name, value in options.items():
            action = known.get(f"--{name}")
            by_field[action.dest if action else str(name)] = value if action is None else self._as_given(action, value)
        return super().set_defaults_with_config(**by_field)

    def _as_given(self, action: Action, value: Any) -> Any:
        """Returns a value of YAML as the command line gives it. Raises ValueError for one of another kind."""
        listed = action.nargs in ("+", "*")
        if value is None or (isinstance(value, list) and listed):
            return value
        if isinstance(value, list) or (
            isinstance(value, dict) and action.dest not in TrainingOptions._VALID_DICT_FIELDS
        ):
            self.error(f"--config: expected one value for {action.dest}, got {value!r:.60}")
        if isinstance(value, dict):
            return json.dumps(value)
        value = "no" if value is False and action.type is not string_to_bool else str(value)
        return [value] if listed else value


def parsed(arguments: list[str]) -> FinetuneOptions:
    """Returns the options of a command line, and of the YAML file that it names. Raises ValueError for what cannot
    work."""
    parser, named = Parser(), "--config="
    parts = [part for one in arguments for part in (one.split("=", 1) if one.startswith(named) else [one])]
    try:
        *options, unknown = parser.parse_args_and_config(parts, return_remaining_strings=True)
    except (YAMLError, IndexError, OSError, UnicodeError) as error:
        raise ValueError(f"--config: expected a file of options in YAML ({in_brief(error)})") from error
    if unknown:
        known = [name for name in parser._option_string_actions if "_" not in name and name != SET_BY_TORCHRUN]
        name = unknown[0].partition("=")[0].replace("_", "-")
        close = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, known, 1, cutoff=0.75)
        parser.error(f"there is no option {unknown[0]}{f', did you mean {close[0]}?' if close else ''}")
    asked = FinetuneOptions(*options)
    own, training, model = asked.own, asked.training, asked.model
    own.data = own.data or parser.data
    if training.max_steps == -1 and not (own.data or asked.script.dataset_name or asked.mixture.datasets):
        training.max_steps = 4  # of the default data, a demonstration
    if own.untiled:
        off = dict.fromkeys(("layer", "offload", "fit", "merge", "compare"), False)
        asked.own = own = replace(own, head_groups=None, **off)
        training.push_to_hub, training.save_strategy = False, SaveStrategy.NO
    if training.learning_rate is None:
        training.learning_rate = LORA_RATE if model.use_peft else FULL_RATE
    if model.dtype is None:
        model.dtype = "bfloat16" if model.use_peft and training.bf16 else "float32"
    own.check(training, model)
    if training.metric_for_best_model and training.save_total_limit == 1:
        training.save_total_limit = 2  # the best, and the last to go on from
    if asked.mixture.test_split_size and training.eval_strategy == "no":
        raise ValueError("--test-split-size sets rows aside to evaluate on; pass --eval-strategy steps or epoch, too")
    resolve_model(model.model_name_or_path)
    return asked
