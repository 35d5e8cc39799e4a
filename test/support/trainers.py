"""Runs a short training with Hugging Face's Trainer or one of TRL's, and compares two of them."""

from typing import NamedTuple

import torch
from transformers import Trainer

from support.assertions import relative_error

OPTIONS = {"learning_rate": 1.0, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0}
OPTIONS |= {"logging_steps": 1, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}


class Run(NamedTuple):
    losses: torch.Tensor
    """Of each step, then of the evaluation."""
    moved: dict[str, torch.Tensor]
    """The changes of the weights in all steps together."""


def run(trainer: Trainer) -> Run:
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    return Run(torch.tensor(losses), {name: p.detach() - start[name] for name, p in trained.items()})


def assert_same_training(ours: Run, theirs: Run, each: float = 1e-3) -> None:
    """Compares the losses, all changes together, and those of each weight. Gradients through attention's softmax
    cancel, so 1 draw in 100 of a small adapter of queries differs by more than 1e-4."""
    assert len(theirs.losses) > 2 and ours.moved.keys() == theirs.moved.keys()
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=1e-4)
    for name, moved in theirs.moved.items():
        error = relative_error(ours.moved[name], moved)
        assert moved.norm() > 0 and error <= each, (name, error)
    whole = [torch.cat([moved.flatten() for moved in run.moved.values()]) for run in (ours, theirs)]
    assert relative_error(*whole) <= 3e-5
