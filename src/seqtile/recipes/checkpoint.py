"""The checkpoint of a training run: complete or not there, and refused where the run that goes on is another one."""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException

from seqtile.recipes import checkpoint_in, free_bytes
from seqtile.recipes.data import in_brief, is_out_of_memory, read_of
from seqtile.recipes.output import places, written_beside

if TYPE_CHECKING:
    from seqtile.recipes.sharding import Training
    from seqtile.recipes.train import Run

FACTS = "run.json"
SAME = ("seq_len", "dtype", "learning_rate", "seed", "device", "sequence_parallel")
ANEW = "leave out --resume to begin anew"
REMEDY = "train with a smaller --learning-rate"
ADAMW_BYTES = 12  # of a parameter: itself and its two moments, in float32


@dataclass
class Done:
    """What a run has done so far; lists have one entry a step."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def of_every_rank(values: list[float], device: str) -> torch.Tensor:
    """Returns [ranks, len(values)]: these of every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    found = [mine]
    if dist.is_initialized():
        found = [torch.empty_like(mine) for _ in range(ranks())]
        dist.all_gather(found, mine)
    return torch.stack(found).cpu()


def save_checkpoint(training: "Training", run: "Run", done: Done, console: Console) -> None:
    """Replaces the checkpoint in --output by one of this moment, once that is complete. All ranks call this.

    Where the disk has no room for it the earlier one stays, and that is said. Raises ValueError, and saves nothing, if
    a weight is not finite.
    """
    path, after = run.job.output / "checkpoint", f"after step {len(done.losses)} of {run.job.steps}"
    shards = training.shards()
    needed = ADAMW_BYTES * sum(shard.numel() for shard in shards)
    finite = all(shard.isfinite().all() for shard in shards)
    needed, free, finite = of_every_rank([needed, free_bytes(path), finite], run.job.device).unbind(1)
    if not finite.all():
        raise ValueError(f"weights hold nan or inf {after}, so no checkpoint was saved; {REMEDY}")
    missing = needed.sum().item() - free.min().item()
    failed = f"{missing / 1e9:,.2f} GB more are needed" if missing > 0 else None
    if failed is None:
        try:
            with written_beside(path, keep=False) if rank() == 0 else nullcontext(places(path)[1]) as new:
                if dist.is_initialized():
                    dist.barrier()  # what another run left there is gone
                training.save(new)
                if rank() == 0:
                    facts = {"job": facts_of(run), "steps": run.job.steps, "done": asdict(done)}
                    (new / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        except CheckpointException as error:  # which all ranks raise alike
            failed = in_brief(cause_of(error))
    if failed is None:
        console.print(f"checkpoint {after} saved in {path}", soft_wrap=True, highlight=False)
    else:
        stays = "" if checkpoint_in(run.job.output) is None else "; the earlier one stays"
        console.print(f"note: no checkpoint {after} in {path} ({failed}){stays}", soft_wrap=True, highlight=False)


def load_checkpoint(training: "Training", run: "Run") -> Done:
    """Puts weights, optimizer and random states of the checkpoint in --output in place, and returns what was done.

    Raises OSError, not on all ranks alike, if that cannot be.
    """
    path = checkpoint_in(run.job.output)
    try:
        training.load(path)
    except (Exception, CheckpointException) as error:
        if is_out_of_memory(cause_of(error)):
            raise
        raise OSError(f"--resume: rank {rank()} cannot load {path} ({in_brief(cause_of(error))}); {ANEW}") from error
    return Done(**facts_in(path)["done"])


def cause_of(error: BaseException) -> BaseException:
    """Returns the first that a rank raised, of an exception of torch's checkpoints; of another one itself."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def facts_in(path: Path) -> dict[str, Any]:
    with read_of(f"--resume: the checkpoint in {path}", ANEW):
        return json.loads((path / FACTS).read_text(encoding="utf-8"))


def check_same(run: "Run") -> None:
    """Raises ValueError unless the checkpoint in --output is of the same job, on as many ranks, with no more steps."""
    path = checkpoint_in(run.job.output)
    facts = facts_in(path)
    here = facts_of(run, facts["steps"])
    wrong = [(name, expected, got) for name, got in here.items() if got != (expected := facts["job"].get(name))]
    if run.job.steps < facts["steps"]:
        wrong.insert(0, ("--steps of at least", facts["steps"], run.job.steps))
    for name, expected, got in wrong:
        raise ValueError(
            f"--resume: expected {name} {expected}, as {path} has it, got {got}; repeat the command that saved it, "
            "with --resume, or choose another --output to begin anew"
        )


def facts_of(run: "Run", steps: int | None = None) -> dict[str, Any]:
    """Returns what has to stay the same, as an error names it; of the data the digest of the first `steps`."""
    job, model = run.job, Path(run.job.model)
    facts = {"ranks": ranks(), "--model": str(model.resolve()) if model.exists() else job.model}
    facts |= {f"--{name.replace('_', '-')}": getattr(job, name) for name in SAME}
    facts["--shard"] = job.shard if ranks() > 1 else None
    facts["--data of SHA-256"] = sha256(run.sequences[:steps].numpy()).hexdigest()[:16]
    return facts
