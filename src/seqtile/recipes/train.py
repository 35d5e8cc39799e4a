"""One training run: the model and its optimizer, in this process or sharded over the ranks, step by step until it is
saved."""

import ctypes
import io
import math
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import seqtile
from seqtile import offload, sp
from seqtile.recipes import Job, number_or_name
from seqtile.recipes.data import load_model
from seqtile.recipes.output import RunResult, save_model

MIB = 2**20
REMEDY = "train with a smaller --learning-rate"


@dataclass(frozen=True)
class Run:
    """A training run, as it is handed to the process that does it."""

    job: Job
    config: PreTrainedConfig
    sequences: torch.Tensor
    """[steps, groups, seq_len] token ids."""
    tiled: bool
    save_to: Path | None = None
    tokenizer: Path | None = None
    """A directory whose files are saved with the model."""


def train(run: Run, ctx: sp.SequenceParallel | None = None) -> RunResult:
    """Trains all parameters with AdamW over a run's sequences, under activation checkpointing.

    In one process there is one group; with `ctx` each data-parallel group of ranks trains on its sequence of a step and
    each rank on its part of that, and weights, gradients and optimizer state are sharded over all ranks. Losses are
    means over the groups, peaks those of the rank that needs most.

    In bfloat16 the model and its loss run under autocast; weights, gradients and optimizer state are float32.
    Saves the trained model to `run.save_to`, if given, or to a temporary directory if that fails.
    Ctrl-C, once it trains, ends it after the step at hand: the result has fewer steps, and they are saved. On ranks it
    is enough that one of them gets it.

    Raises ValueError once a loss or weight is not finite; nothing is saved then.
    """
    torch.manual_seed(run.job.seed)
    if run.job.device == "cpu":
        return_freed_memory()
    else:  # tensors of other sizes a layer, a chunk and a step do not leave the memory in pieces
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    by_blocks = run.tiled and ctx is None and has_square_mask(run.config, run.job.seq_len)
    console = Console(quiet=ctx is not None and dist.get_rank() > 0)
    with sequence_group(run.job) if by_blocks else nullcontext(ctx) as group:
        with console.status(f"{'seqtile' if run.tiled else 'untiled'}: loading"):
            training = loaded(run, group)
        interrupts = []  # whoever started this process may still kill it
        before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
        try:
            result = take_steps(training, run, group, interrupts, console)
            if run.save_to is None or not (weights := training.weights()):  # the main process has them
                return result
            with redirect_stderr(io.StringIO()):  # Hugging Face has bars of its own
                saved = save_model(training.unwrapped, weights, run.tokenizer, run.save_to)
            return replace(result, saved=str(saved))
        finally:
            signal.signal(signal.SIGINT, before)


def has_square_mask(config: PreTrainedConfig, seq_len: int) -> bool:
    """Returns whether Hugging Face would build a mask of length x length in one process: for windows shorter than the
    sequence, or capped scores. Sequence parallelism, also of one process, attends by blocks."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    windowed = window is not None and window < seq_len and "sliding_attention" in kinds
    return windowed or getattr(config, "attn_logit_softcapping", None) is not None


@contextmanager
def sequence_group(job: Job) -> Iterator[sp.SequenceParallel]:
    """Yields the ranks that share a sequence with this one, of those that torchrun started; without it this process
    alone.

    Raises ValueError if they cannot be so many.
    """
    backend = "nccl" if job.device == "cuda" else "gloo"
    if job.device == "cuda":
        torch.cuda.set_device(job.local_rank or 0)
    alone = job.local_rank is None
    dist.init_process_group(backend, **({"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}))
    try:
        ctx = sp.initialize(job.sequence_parallel)
    except ValueError as error:
        raise ValueError(f"--sequence-parallel: {error}") from error
    yield ctx
    dist.barrier()
    dist.destroy_process_group()


def loaded(run: Run, ctx: sp.SequenceParallel | None) -> "Training":
    """Returns the model and its optimizer, ready to be trained."""
    job = run.job
    with redirect_stderr(io.StringIO()):
        model = load_model(job.model, run.config).train()
    if run.tiled:
        seqtile.apply_seqtile(model, layer=job.layer, head_groups=number_or_name(job.head_groups))
    if ctx is not None:
        sp.apply_ulysses(model, ctx)
    sharded = ctx is not None and dist.get_world_size() > 1
    training = Zero3(model, job) if sharded and job.shard == "zero3" else Training(model, job, sharded)
    if job.offload:
        offload.enable(model, tokens=math.ceil(job.seq_len / (1 if ctx is None else ctx.size)))
    else:  # by the name that the installed transformers has for it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return training


class Training:
    """A model and its AdamW, whole in this process or sharded layer by layer over all ranks (torch's FSDP2).

    Not by Accelerate, which does neither on CPU ranks: there its FSDP2 is DDP, and its DeepSpeed takes each rank for
    the only one.
    """

    def __init__(self, model: PreTrainedModel, job: Job, sharded: bool):
        if sharded:
            mesh = init_device_mesh(job.device, (dist.get_world_size(),))
            layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
            for module in (*layers, model):
                fully_shard(module, mesh=mesh)
        self.model = self.unwrapped = model.to(job.device)
        self.optimizer = adamw(model, job)

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns all of them on the main process's host, and none elsewhere. Raises ValueError unless they are
        finite."""
        weights = {}
        for name, parameter in self.unwrapped.named_parameters():
            whole = self.gathered(parameter).detach()
            if not whole.isfinite().all():
                raise ValueError(f"{name} holds nan or inf after the last step, so nothing was saved; {REMEDY}")
            if not dist.is_initialized() or dist.get_rank() == 0:
                weights[name] = whole.to("cpu", copy=True)
        return weights

    def gathered(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns all of a parameter, on every rank."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


class Zero3(Training):
    """The same, sharded by DeepSpeed's ZeRO-3."""

    def __init__(self, model: PreTrainedModel, job: Job):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # DeepSpeed clips to a norm of 1 unless told not to
            "torch_autocast": {"enabled": job.dtype == "bfloat16", "dtype": "bfloat16"},
        }
        deepspeed.zero.Init(module=model, config_dict_or_path=config)  # else all of it goes to every GPU first
        self.unwrapped = model
        self.model, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, job), config=config)

    def update(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)
        self.model.step()

    def gathered(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()


def adamw(model: PreTrainedModel, job: Job) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0, fused=True)


def take_steps(
    training: Training, run: Run, ctx: sp.SequenceParallel | None, interrupts: list[int], console: Console
) -> RunResult:
    """Trains on a sequence after the other until none is left or a rank was interrupted; prints a line a step, or a bar
    where `console` is a terminal."""
    job, name = run.job, "seqtile" if run.tiled else "untiled"
    columns = (TextColumn("{task.description:<17}"), BarColumn(bar_width=12), MofNCompleteColumn())
    figures = TextColumn("{task.fields[figures]}")
    losses, seconds = [], []
    with Progress(*columns, figures, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{name}: training", total=job.steps, figures="")
        for batch in run.sequences:
            start = time.perf_counter()
            loss = loss_of(training.model, batch, job, ctx)
            training.update(loss)
            ranks = sp_attention([loss.item(), bool(interrupts), peak_mib(job.device)], job.device)
            losses.append(ranks[:, 0].mean().item())  # alike on every rank of a group
            peak = ranks[:, 2].max().item()
            seconds.append(time.perf_counter() - start)
            said = f"loss {losses[-1]:.4f}  {batch.numel() / seconds[-1]:,.0f} tokens/s  peak {peak:,.0f} MiB"
            progress.update(bar, advance=1, figures=said)
            if not console.is_terminal:
                console.print(f"{name}: step {len(losses)}/{job.steps}  {said}", highlight=False, soft_wrap=True)
            if not math.isfinite(losses[-1]):
                first = "before any update, so --model's weights or --dtype are to blame; pass others"
                why = f"after {losses[-2]:.4f}; {REMEDY}" if len(losses) > 1 else first
                raise ValueError(f"the loss of step {len(losses)} is {losses[-1]}, {why}; nothing was saved")
            if ranks[:, 1].any():
                break
        again = None
        if run.tiled and job.compare:
            with torch.no_grad():
                again = loss_of(training.model, run.sequences[0], job, ctx).item()
    rate = len(losses) * run.sequences[0].numel() / sum(seconds)
    note = no_layer_tiled(training.unwrapped, job, ctx) if run.tiled else None
    status = note or str(seqtile.status(training.unwrapped) if run.tiled else "untiled")
    return RunResult(losses, seconds, rate, peak, status, again, note=note)


def loss_of(model: torch.nn.Module, batch: torch.Tensor, job: Job, ctx: sp.SequenceParallel | None) -> torch.Tensor:
    """Returns the loss of this group's sequence of `batch` [groups, seq_len]."""
    with torch.autocast(job.device, torch.bfloat16, enabled=job.dtype == "bfloat16"):
        if ctx is None:
            ids = batch.to(job.device)
            return model(input_ids=ids, labels=ids, use_cache=False).loss
        ids = batch[ctx.data_parallel_rank, None]
        shard = {name: value.to(job.device) for name, value in sp.shard({"input_ids": ids, "labels": ids}, ctx).items()}
        return sp.reduce_loss(model(**shard, use_cache=False).loss, ctx)


def sp_attention(values: list[float], device: str) -> torch.Tensor:
    """Returns [ranks, len(values)]: these of every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    found = [mine]
    if dist.is_initialized():
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
    return torch.stack(found).cpu()


def no_layer_tiled(model: PreTrainedModel, job: Job, ctx: sp.SequenceParallel | None) -> str | None:
    """Returns that no layer was tiled, and why, where the sequence, or a rank's part of it, is no longer than a
    chunk."""
    status = seqtile.status(model)
    sizes = [tokens for part in (status.mlp, status.layer) if part is not None for tokens in part.chunk_tokens]
    tokens = math.ceil(job.seq_len / (1 if ctx is None else ctx.size))
    if not sizes or tokens > min(sizes):
        return None
    tokens_are = f"{tokens:,} tokens are no more than a chunk of {min(sizes):,}"
    return f"no layer was tiled, since {tokens_are}; pass a longer --seq-len"


def return_freed_memory() -> None:
    """Makes glibc give every freed tensor back to the system at once, so that the resident set is what is in use.

    By default it keeps blocks of up to 32 MiB, a tensor of 8,192 tokens here, and fragments: twice the memory in use.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        m_mmap_threshold = -3  # malloc.h
        mallopt(m_mmap_threshold, MIB)


def peak_mib(device: str) -> float:
    """Returns the peak memory of this process: allocated on the GPU, or the resident set on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    if sys.platform == "linux":  # not ru_maxrss: a new process begins with its parent's
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
