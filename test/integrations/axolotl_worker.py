"""Trains with Axolotl, as its command does, once per YAML file, and prints the results as JSON."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


def in_this_process(method: Callable) -> Callable:
    """A method of a data set without the processes that it would start, each of which imports everything for 5 s."""
    return lambda data, *args, **given: method(data, *args, **given | {"num_proc": None})


def main(paths: list[str]) -> None:
    from datasets import Dataset

    for name in ("map", "filter", "save_to_disk"):
        setattr(Dataset, name, in_this_process(getattr(Dataset, name)))
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    import seqtile
    from seqtile.unwrapped import unwrapped

    for path in paths:
        try:
            cfg = load_cfg(path)
            if "RANK" in os.environ:
                cfg.device_map = "cpu"  # where Axolotl puts each rank on a GPU
            model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
        except ValueError as error:
            say({"error": str(error)})
            continue
        status = seqtile.status(model)
        base = unwrapped(model)
        found = {
            "kind": [
                str(trainer.accelerator.distributed_type),
                type(trainer.model_wrapped).__name__,
                type(trainer.accelerator).__mro__[1].__name__,
            ],
            "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "moved": sum(
                float(weight.double().square().sum()) for weight in model.parameters() if weight.requires_grad
            ),
            "tiled": [status.loss.tiled, status.mlp.tiled, status.layer.tiled if status.layer else 0],
            "groups": status.layer.head_groups if status.layer else None,
            "saved": status.prefixes.saved_tokens if status.prefixes else None,
            "checkpointed": any(layer.gradient_checkpointing for layer in base.model.layers),
        }
        say(found)


def say(found: dict) -> None:
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":  # Axolotl starts processes
    sys.path.insert(0, str(HERE / "stand_ins"))
    main(sys.argv[1:])
