"""The state of a training run: model and optimizer, in this process or sharded over the ranks by FSDP2 or ZeRO-3; and
its checkpoint, which is either complete or absent, and from which only the same run can resume."""

import io
import json
import math
import warnings
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import seqtile
from seqtile import offload, sp
from seqtile.fitting import of_every_rank
from seqtile.models.find import experts_in
from seqtile.offload.checkpointing import layers_of
from seqtile.ops.chunks import resolve_chunk_tokens
from seqtile.recipes import Job, checkpoint_in, free_bytes, number_or_name, places
from seqtile.recipes.data import in_brief, is_out_of_memory, load_model, read_of
from seqtile.recipes.output import RunResult, written_beside
from seqtile.renamed import enable_checkpointing

RUN = "run.json"
MUST_MATCH = ("seq_len", "dtype", "learning_rate", "seed", "device", "sequence_parallel")
RESTART_HINT = "leave out --resume to start over"
REMEDY = "train with a smaller --learning-rate"
ADAMW_BYTES = 12  # per parameter: itself and its two moments, in float32


@dataclass(frozen=True)
class Run:
    """A training run, as passed to the process that does it."""

    job: Job
    config: PreTrainedConfig
    sequences: torch.Tensor
    """[steps, groups, seq_len] token ids."""
    tiled: bool
    save_to: Path | None = None
    tokenizer: Path | None = None
    """A directory whose files are saved with the model."""


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model_of(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the model with float32 weights. On ranks other than the first they are uninitialised, and take no memory
    until they are written to. Raises the errors of `load_model`, on all ranks."""
    failed: list[Exception | None] = [None]
    if rank() == 0:
        try:
            model = load_model(name, config)
        except Exception as error:
            failed = [error]
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = model.to_empty(device="cpu")
        model.tie_weights()
    if ranks() > 1:
        dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]
    return model


def receive(tensors: Iterable[torch.Tensor]) -> None:
    """Copies the first rank's tensors to all ranks."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


class Training:
    """A model and its AdamW, whole in this process or sharded layer by layer over all ranks (torch's FSDP2).

    It does not use Accelerate, whose FSDP2 on CPU ranks is DDP, and whose DeepSpeed there takes each rank for the
    only one.
    """

    def __init__(self, model: PreTrainedModel, job: Job):
        if ranks() > 1:
            mesh = init_device_mesh(job.device, (ranks(),))
            for module in (*layers_of(model), model):  # a rank holds one of them whole at a time
                module.to(job.device)
                receive(parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
                fully_shard(module, mesh=mesh)
            receive(model.buffers())
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process
        self.model = self.unwrapped = model.to(job.device)
        self.optimizer = adamw(model, job)

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns all weights on the CPU of the main process, none on other ranks. Raises ValueError unless they are
        finite."""
        weights = {}
        for name, parameter in self.unwrapped.named_parameters():
            whole = self.gathered(parameter).detach()
            if not whole.isfinite().all():
                raise ValueError(f"{name} holds nan or inf after the last step, so nothing was saved; {REMEDY}")
            if rank() == 0:
                weights[name] = whole.to("cpu", copy=True)
        return weights

    def gathered(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns the whole parameter, on every rank."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def shards(self) -> list[torch.Tensor]:
        """Returns this rank's part of each parameter."""
        parameters = self.unwrapped.parameters()
        return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]

    def save(self, directory: Path) -> None:
        """Saves weights, optimizer and every rank's random states in a new directory."""
        checkpoint.save({"training": self}, checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        """Restores what `save` saved."""
        checkpoint.load({"training": self}, checkpoint_id=directory)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "random": {str(rank()): random_states()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        set_random_states(state["random"][str(rank())])


class Zero3(Training):
    """The same, sharded by DeepSpeed's ZeRO-3."""

    def __init__(self, model: PreTrainedModel, job: Job):
        import deepspeed

        warnings.filterwarnings("ignore", module="torch.distributed", category=FutureWarning)  # two a step
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # DeepSpeed clips to a norm of 1 unless told not to
            "torch_autocast": {"enabled": job.dtype == "bfloat16", "dtype": "bfloat16"},
        }
        deepspeed.zero.Init(module=model, config_dict_or_path=config)  # receives one parameter at a time
        self.unwrapped = model
        self.model, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, job), config=config)
        receive(model.buffers())

    def update(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)
        self.model.step()

    def gathered(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def shards(self) -> list[torch.Tensor]:
        return [parameter.ds_tensor for parameter in self.unwrapped.parameters()]

    def save(self, directory: Path) -> None:
        states = {"random": random_states()}
        self.model.save_checkpoint(str(directory), tag="zero3", client_state=states, save_latest=False)

    def load(self, directory: Path) -> None:
        found, states = self.model.load_checkpoint(str(directory), tag="zero3")
        if found is None:
            raise ValueError("files are missing")
        set_random_states(states["random"])


def random_states() -> list[torch.Tensor]:
    """Returns the states of torch's random generators, of the CPU and of the GPU in use."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def adamw(model: PreTrainedModel, job: Job) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0, fused=True)


def loaded(run: Run, ctx: sp.SequenceParallel | None) -> Training:
    """Returns the model and its optimizer, ready for training."""
    job = run.job
    with redirect_stderr(io.StringIO()):
        model = model_of(job.model, run.config).train()
    if run.tiled:
        # On a CPU nothing waits for Python, and short chunks show what tiling saves; those of experts stay long.
        short = job.device == "cpu" and not experts_in(model)
        chunk_tokens = resolve_chunk_tokens(None, model.config.get_text_config().hidden_size) if short else None
        groups = number_or_name(job.head_groups)
        seqtile.apply_seqtile(model, layer=job.layer, head_groups=groups, chunk_tokens=chunk_tokens)
    if ctx is not None:
        sp.apply_ulysses(model, ctx, batches="whole")
    training = (Zero3 if ranks() > 1 and job.shard == "zero3" else Training)(model, job)
    if job.offload:
        offload.enable(model, tokens=math.ceil(job.seq_len / job.sequence_parallel))
    else:
        enable_checkpointing(model)
    return training


def save_checkpoint(training: Training, run: Run, done: RunResult, console: Console) -> None:
    """Saves a checkpoint in --output, which replaces the earlier one once it is complete. All ranks call this.

    If the disk has no room, the earlier one stays, and a note says so. Raises ValueError, and saves nothing, if a
    weight is not finite.
    """
    path, after = run.job.output / "checkpoint", f"after step {len(done.losses)} of {run.job.steps}"
    shards = training.shards()
    needed = ADAMW_BYTES * sum(shard.numel() for shard in shards)
    finite = all(shard.isfinite().all() for shard in shards)
    needed, free, finite = of_every_rank(needed, free_bytes(path), finite).unbind(1)
    if not finite.all():
        raise ValueError(f"weights hold nan or inf {after}, so no checkpoint was saved; {REMEDY}")
    missing = needed.sum().item() - free.min().item()
    failed = f"{missing / 1e9:,.2f} GB more are needed" if missing > 0 else None
    if failed is None:
        try:
            with written_beside(path, keep=False) if rank() == 0 else nullcontext(places(path)[1]) as new:
                if dist.is_initialized():
                    dist.barrier()  # the first rank has removed what an earlier run left there
                training.save(new)
                if rank() == 0:
                    saved = {"job": resume_key(run), "steps": run.job.steps, "done": asdict(done)}
                    (new / RUN).write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
        except CheckpointException as error:  # all ranks raise it
            failed = in_brief(cause_of(error))
    if failed is None:
        console.print(f"checkpoint {after} saved in {path}")
    else:
        stays = "" if checkpoint_in(run.job.output) is None else "; the earlier one stays"
        console.print(f"note: no checkpoint {after} in {path} ({failed}){stays}")


def load_checkpoint(training: Training, run: Run) -> RunResult:
    """Loads weights, optimizer and random states from the checkpoint in --output, and returns its results so far.

    Raises OSError if that fails, which may be on some ranks alone.
    """
    path = checkpoint_in(run.job.output)
    try:
        training.load(path)
    except (Exception, CheckpointException) as error:
        if is_out_of_memory(cause := cause_of(error)):
            raise
        raise OSError(f"--resume: rank {rank()} cannot load {path} ({in_brief(cause)}); {RESTART_HINT}") from error
    return RunResult(**run_saved_in(path)["done"])


def cause_of(error: BaseException) -> BaseException:
    """Returns the first error that a rank raised inside a CheckpointException of torch's; any other error itself."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def run_saved_in(path: Path) -> dict[str, Any]:
    with read_of(f"--resume: the checkpoint in {path}", RESTART_HINT):
        return json.loads((path / RUN).read_text(encoding="utf-8"))


def check_same(run: Run) -> None:
    """Raises ValueError unless the checkpoint in --output is of this job, on as many ranks, with no more --steps."""
    path = checkpoint_in(run.job.output)
    saved = run_saved_in(path)
    key, steps = resume_key(run, saved["steps"]), run.job.steps
    wrong = [(name, expected, got) for name, got in key.items() if got != (expected := saved["job"].get(name))]
    if steps < saved["steps"]:
        wrong.insert(0, ("--steps of at least", saved["steps"], steps))
    for name, expected, got in wrong:
        raise ValueError(
            f"--resume: expected {name} {expected}, as in {path}, got {got}; repeat the command that saved it, "
            "with --resume, or choose another --output to start over"
        )


def resume_key(run: Run, steps: int | None = None) -> dict[str, Any]:
    """Returns what must be the same to resume, by the names that errors use; of the data a digest of `steps` steps."""
    job, model = run.job, Path(run.job.model)
    key = {"ranks": ranks(), "--model": str(model.resolve()) if model.exists() else job.model}
    key |= {f"--{name.replace('_', '-')}": getattr(job, name) for name in MUST_MATCH}
    data = sha256(run.sequences[:steps].numpy()).hexdigest()[:16]
    return key | {"--shard": job.shard if ranks() > 1 else None, "--data of SHA-256": data}
