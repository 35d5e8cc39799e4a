"""The model of a training run and its optimizer: in this process, or sharded over the ranks by FSDP2 or ZeRO-3."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from seqtile.recipes import Job
from seqtile.recipes.checkpoint import REMEDY, rank, ranks
from seqtile.recipes.data import load_model


def model_of(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the model with its weights in float32; on ranks other than the first what they are to be received in, of
    which nothing is in memory until it is written to. Raises what `load_model` raises, on all ranks."""
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
    """Has every rank hold what the first rank's tensors do."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


class Training:
    """A model and its AdamW, whole in this process or sharded layer by layer over all ranks (torch's FSDP2).

    Not by Accelerate, which does neither on CPU ranks: there its FSDP2 is DDP, and its DeepSpeed takes each rank for
    the only one.
    """

    def __init__(self, model: PreTrainedModel, job: Job, sharded: bool):
        if sharded:
            mesh = init_device_mesh(job.device, (dist.get_world_size(),))
            layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
            for module in (*layers, model):  # whole in a rank's memory one after the other
                module.to(job.device)
                receive(parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
                fully_shard(module, mesh=mesh)
            receive(model.buffers())
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
            if rank() == 0:
                weights[name] = whole.to("cpu", copy=True)
        return weights

    def gathered(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns all of a parameter, on every rank."""
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def shards(self) -> list[torch.Tensor]:
        """Returns what this rank holds of the parameters."""
        parameters = self.unwrapped.parameters()
        return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in parameters]

    def save(self, directory: Path) -> None:
        """Saves weights, optimizer and every rank's random states in a new directory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            checkpoint.save({"training": self}, checkpoint_id=directory)

    def load(self, directory: Path) -> None:
        """Puts them back in place."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
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
        deepspeed.zero.Init(module=model, config_dict_or_path=config)  # receives one parameter after the other
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
    """Returns those of torch's generators, on the host and on the GPU that is used."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def adamw(model: PreTrainedModel, job: Job) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.0, fused=True)
