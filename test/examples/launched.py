"""Runs examples/eight_gpus.py on a rank that `accelerate launch` started, on a CPU; the first rank writes its figures.

Accelerate has no FSDP on CPUs, so it is told that they are GPUs. What it then does is its own."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from support.small_example import LENGTH, figures, run

model, documents, output, rate = sys.argv[1:]
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    dist.init_process_group("gloo")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
names = run("eight_gpus", model, documents, LENGTH=LENGTH, learning_rate=rate)
if names["ctx"].rank == 0:
    state, status = names["trainer"].accelerator.state, names["status"]
    found = {"figures": figures(names), "kind": state.distributed_type.value, "ranks": names["ctx"].size}
    Path(output).write_text(json.dumps(found | {"layers": status.layer.tiled, "reason": status.layer.reason}))
