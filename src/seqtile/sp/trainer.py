"""Hugging Face's Trainer over ranks that share sequences."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from seqtile.sp.apply import apply_ulysses
from seqtile.sp.data import DataShardingCollator
from seqtile.sp.groups import SequenceParallel
from seqtile.sp.loss import allow_backward, reduce_loss


class SequenceParallelTrainerMixin:
    """Lets Hugging Face's Trainer, or a subclass of it, train on sequences that ranks share. Put it before Trainer,
    `class MyTrainer(SequenceParallelTrainerMixin, Trainer)`, and then `MyTrainer(..., sequence_parallel=ctx)`.

    The model's sequences are sharded over the group, its ranks draw the same samples and each keeps its own part of
    every sequence. Trainer itself counts the labels of an accumulation window over all ranks and scales every rank's
    loss by their number, which is what a shard's part of the loss needs; so training changes nothing else, and a step
    is the step of one process with `size` times fewer ranks. Evaluation reports the mean over samples of the losses of
    their batches, as one process does (samples that even out the groups' last batches are in those).

    Raises ValueError for what would mix shards up: `average_tokens_across_devices=False`, a loss function, label
    smoothing or NEFTune noise of Trainer's, evaluation with logits, and a loader that dispatches batches.
    """

    def __init__(self, *args: Any, sequence_parallel: SequenceParallel, **kwargs: Any):
        self.sequence_parallel = sequence_parallel
        super().__init__(*args, **kwargs)
        refused = {
            "average_tokens_across_devices=False": not self.args.average_tokens_across_devices,
            "compute_loss_func": self.compute_loss_func is not None,
            "label_smoothing_factor": self.label_smoother is not None,
            "compute_metrics": self.compute_metrics is not None,
            "neftune_noise_alpha": self.args.neftune_noise_alpha is not None,
            "dispatch_batches=True": self.accelerator.dispatch_batches,
        }
        if found := [name for name, is_given in refused.items() if is_given]:
            raise ValueError(
                f"{', '.join(found)}: takes a shard for a whole sequence, expected none of it; leave it out"
            )
        apply_ulysses(self.model, sequence_parallel)
        self.data_collator = DataShardingCollator(self.data_collator, sequence_parallel)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        model = super().call_model_init(*args, **kwargs)
        apply_ulysses(model, self.sequence_parallel)
        return model

    def get_train_dataloader(self) -> DataLoader:
        return self._same_samples(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._same_samples(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._same_samples(super().get_test_dataloader(*args, **kwargs))

    def _same_samples(self, loader: DataLoader) -> DataLoader:
        """Returns a loader that deals batches out to groups, where Accelerate's deals them out to ranks."""
        sampler, sp_group = loader.batch_sampler, self.sequence_parallel
        if hasattr(sampler, "num_processes"):
            sampler.num_processes, sampler.process_index = sp_group.data_parallel_size, sp_group.data_parallel_rank
            sampler.even_batches &= sp_group.data_parallel_size > 1  # one group has no other to be even with
        elif self.accelerator.num_processes > 1:
            raise ValueError(f"expected a dataset with a length, of Accelerate's sampler, got {type(sampler).__name__}")
        return loader

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        training = self.model.training
        if training and (num_items_in_batch is None or not self.model_accepts_loss_kwargs):
            raise ValueError(
                "Trainer did not count the labels of this step; expected labels, and a model with loss kwargs"
            )
        items = num_items_in_batch if training else None  # those of all groups; the batch has its own group's
        result = super().compute_loss(model, inputs, return_outputs, items, **kwargs)
        finish = allow_backward if training else reduce_loss
        if return_outputs:
            return finish(result[0], self.sequence_parallel), *result[1:]
        return finish(result, self.sequence_parallel)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self._once_a_group  # Trainer puts its own back at the end
        return super().evaluation_loop(*args, **kwargs)

    def _once_a_group(self, losses: Tensor) -> Tensor:
        """Returns the samples' losses from all groups, each from one rank of it, without those that fill up the last
        batch."""
        ranks = self.accelerator.gather(torch.full_like(losses, self.sequence_parallel.rank))
        losses = self.accelerator.gather(losses)[ranks == 0]
        state = self.accelerator.gradient_state
        return losses[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else losses

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        if not prediction_loss_only:
            raise ValueError("logits are of shards: evaluate with prediction_loss_only=True, without compute_metrics")
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
