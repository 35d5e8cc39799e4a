"""What a short training by Hugging Face's Trainer, or one of TRL's, does to a model."""

from typing import NamedTuple

import torch
from transformers import Trainer

from support.assertions import relative_error

OPTIONS = {"learning_rate": 1.0, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0}
OPTIONS |= {"logging_steps": 1, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}


class Run(NamedTuple):
    losses: torch.Tensor
    """Of every step, then in evaluation."""
    moved: dict[str, torch.Tensor]
    """How far the weights were moved, in every step together."""


def run(trainer: Trainer) -> Run:
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    return Run(torch.tensor(losses), {name: p.detach() - start[name] for name, p in trained.items()})


def assert_same_training(ours: Run, theirs: Run, each: float = 1e-3) -> None:
    """The losses, all moves together, and those of each weight: a gradient through attention's softmax cancels, so that
    of a small adapter of queries 1 draw in 100 is beyond 1e-4."""
    assert len(theirs.losses) > 2 and ours.moved.keys() == theirs.moved.keys()
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=1e-4)
    for name, moved in theirs.moved.items():
        error = relative_error(ours.moved[name], moved)
        assert moved.norm() > 0 and error <= each, (name, error)
    whole = [torch.cat([moved.flatten() for moved in run.moved.values()]) for run in (ours, theirs)]
    assert relative_error(*whole) <= 3e-5
