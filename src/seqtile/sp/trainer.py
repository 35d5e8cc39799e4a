"""Trainers over ranks that share sequences: Hugging Face's Trainer, TRL's, and their subclasses.

All ranks of a group get the same batches and compute the same loss, as if they were one process. A trainer must
therefore see groups instead of ranks when it distributes samples, counts processes or gathers their values.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from transformers import set_seed

from seqtile.ops.state import exchanged, having
from seqtile.sp.apply import apply_ulysses
from seqtile.sp.groups import SequenceParallel

MODELS = ("model", "ref_model", "teacher_model")
"""The attributes of trainers that hold models."""
_sharing: ContextVar["_Groups | None"] = ContextVar("sharing", default=None)
"""The groups of the trainer whose step is running."""
_counts_ranks: ContextVar[bool] = ContextVar("counts_ranks", default=False)
"""True while DeepSpeed, which counts ranks, is configured."""


class SequenceParallelTrainerMixin:
    """Lets Hugging Face's Trainer, one of TRL's, or a subclass train on sequences that ranks share. Put it before the
    trainer, `class MyTrainer(SequenceParallelTrainerMixin, Trainer)`; then call `MyTrainer(...,
    sequence_parallel=ctx)`.

    It applies `apply_ulysses(batches="whole")` to the trainer's models, including its reference model and teacher.
    Samples per step, epochs, losses, metrics, logs and updates are those of `size` times fewer ranks. All ranks of a
    group use the completions that the group's first rank samples.

    Raises ValueError for settings that would change the result: NEFTune's noise, whose size depends on the length of a
    shard; a loader that dispatches batches; and a generation batch that does not divide among the groups.
    """

    def __init__(self, *args: Any, sequence_parallel: SequenceParallel, **kwargs: Any):
        self.sequence_parallel = sequence_parallel
        super().__init__(*args, **kwargs)
        refused = {
            "neftune_noise_alpha": self.args.neftune_noise_alpha is not None,
            "dispatch_batches=True": self.accelerator.dispatch_batches,
        }
        if found := [name for name, is_given in refused.items() if is_given]:
            raise ValueError(
                f"{', '.join(found)}: expected none over ranks that share sequences, where it would change the result"
            )
        self.accelerator.dataloader_config.dispatch_batches = False  # Accelerate dispatches a stream's if None is given
        for model in (getattr(self, name, None) for name in MODELS):
            if isinstance(model, nn.Module):
                apply_ulysses(self.accelerator.unwrap_model(model), sequence_parallel, batches="whole")
        if hasattr(super(), "_generate"):
            set_seed(self.args.seed + sequence_parallel.data_parallel_rank)
            for kind in type(self).__mro__:
                _gather_by_groups(sys.modules[kind.__module__])

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._groups = _Groups(self.sequence_parallel)
        self._groups.take(self.accelerator)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        model = super().call_model_init(*args, **kwargs)
        apply_ulysses(model, self.sequence_parallel, batches="whole")
        return model

    def get_train_dataloader(self) -> DataLoader:
        """Returns the trainer's loader; TRL's sampler is told how many completions the groups generate at a time."""
        of_ranks, size = getattr(self.args, "generation_batch_size", None), self.sequence_parallel.size
        if of_ranks is None:
            return super().get_train_dataloader()
        if of_ranks % (size * self.num_generations):
            raise ValueError(
                f"generation_batch_size is {of_ranks} over all ranks, expected a multiple of {size} ranks per sequence "
                f"times {self.num_generations} generations; set steps_per_generation or per_device_train_batch_size"
            )
        with exchanged([(vars(self.args), "generation_batch_size", of_ranks // size)]):
            return super().get_train_dataloader()

    def get_total_train_batch_size(self, *args: Any) -> int:
        return super().get_total_train_batch_size(*args) // self.sequence_parallel.size

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with having(_sharing, self._groups):
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        with having(_sharing, self._groups):
            return super().prediction_step(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Overrides TRL's method: returns the completions that the first rank of the group has sampled."""
        found, device = [super()._generate(*args, **kwargs)], self.accelerator.device
        dist.broadcast_object_list(found, group=self.sequence_parallel.group, group_src=0, device=device)
        return found[0]


class _Groups:
    """The groups of ranks that share sequences, for code that counts processes."""

    def __init__(self, sp_group: SequenceParallel):
        self.sp_group = sp_group
        places: list = [None] * dist.get_world_size()
        dist.all_gather_object(places, (sp_group.data_parallel_rank, sp_group.rank))
        self.first_ranks = [places.index((group, 0)) for group in range(sp_group.data_parallel_size)]
        """The first rank of each group."""

    def once_a_group(self, gathered: Any) -> Any:
        """Returns the parts of the groups' first ranks from gathered tensors [ranks * n, ...]."""
        ranks = dist.get_world_size()
        return tree_map_only(Tensor, lambda x: x.unflatten(0, (ranks, -1))[self.first_ranks].flatten(0, 1), gathered)

    def take(self, accelerator: Any) -> None:
        """Makes an Accelerator count groups instead of processes. Raises ValueError if it does not see all processes,
        because then nothing averages gradients."""
        seen, ranks = accelerator.num_processes, dist.get_world_size()
        if seen != ranks:
            raise ValueError(
                f"the trainer sees {seen} of {ranks} ranks, expected all, whose gradients it averages; start it with "
                'torchrun or accelerate launch, on CPUs with ddp_backend="gloo" or ACCELERATE_USE_CPU=true'
            )
        groups = self

        class OfGroups(type(accelerator)):
            @property
            def num_processes(self) -> int:
                return super().num_processes if _counts_ranks.get() else groups.sp_group.data_parallel_size

            @property
            def process_index(self) -> int:
                return super().process_index if _counts_ranks.get() else groups.sp_group.data_parallel_rank

            def gather(self, tensor: Any) -> Any:
                return groups.once_a_group(super().gather(tensor))

            def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
                found, ranks = super().reduce(tensor, reduction, scale), dist.get_world_size()
                times = ranks // groups.sp_group.data_parallel_size  # the ranks of one replica
                return tree_map_only(Tensor, lambda x: x / times, found) if reduction == "sum" else found

            def _prepare_deepspeed(self, *args: Any) -> Any:
                with having(_counts_ranks, True):
                    return super()._prepare_deepspeed(*args)

            def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
                with having(_counts_ranks, False):
                    return super().prepare_data_loader(*args, **kwargs)

        accelerator.__class__ = OfGroups


def _gather_by_groups(module: Any) -> None:
    """Makes Accelerate's gathering functions, as imported by `module`, take values once per group while a step of such
    a trainer runs."""
    from accelerate import utils

    for name, by_groups in (("gather", _gather), ("gather_object", _gather_object)):
        if vars(module).get(name) is (original := getattr(utils, name)):
            setattr(module, name, wraps(original)(partial(by_groups, original)))


def _gather(original: Callable, tensor: Any) -> Any:
    groups = _sharing.get()
    return original(tensor) if groups is None else groups.once_a_group(original(tensor))


def _gather_object(original: Callable, objects: Any) -> Any:
    groups = _sharing.get()
    return original(objects if groups is None or groups.sp_group.rank == 0 else [])
