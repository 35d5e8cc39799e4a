"""A model and its optimizer in one process, or with weights, gradients and optimizer state spread over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from seqtile.offload.checkpoint import layers_of
from seqtile.recipes.job import Job

REMEDY = "train with a smaller --learning-rate"


def adamw(model: nn.Module, job: Job) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0, fused=True)


class Whole:
    """All of it in one process."""

    def __init__(self, model: PreTrainedModel, job: Job):
        self.model = self.unwrapped = model.to(job.device)
        self.optimizer = adamw(model, job)

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """All of them, on the first rank's host; the others take part. Raises ValueError unless they are finite."""
        weights = {}
        for name, parameter in self.unwrapped.named_parameters():
            whole = self.gathered(parameter).detach()
            if not whole.isfinite().all():
                raise ValueError(f"{name} holds nan or inf after the last step, so nothing was saved; {REMEDY}")
            if not dist.is_initialized() or dist.get_rank() == 0:
                weights[name] = whole.to("cpu", copy=True)
        return weights

    def gathered(self, parameter: nn.Parameter) -> torch.Tensor:
        """All of a parameter, on every rank."""
        return parameter


class FullyShard(Whole):
    """torch's FSDP2, layer by layer."""

    def __init__(self, model: PreTrainedModel, job: Job):
        mesh = init_device_mesh(job.device, (dist.get_world_size(),))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model, job)

    def gathered(self, parameter: DTensor) -> torch.Tensor:
        return parameter.full_tensor()


class Zero3(Whole):
    """DeepSpeed's ZeRO-3."""

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

    def gathered(self, parameter: nn.Parameter) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()


SPREADS = {"none": Whole, "fsdp2": FullyShard, "zero3": Zero3}
