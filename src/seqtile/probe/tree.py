"""A process of a probe: python -m seqtile.probe.tree TREE FILE NAME..., under torchrun for two ranks.

Rank 0 appends one line of JSON per case to FILE.
"""

import json
import os
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from seqtile.probe import alone, ranks
from seqtile.probe.cases import Case


def cases_of(tree: str) -> list[Case]:
    return {"alone": alone.cases, "seqtile": ranks.seqtile_cases, "deepspeed": ranks.deepspeed_cases}[tree]()


def main(tree: str, file: str, *names: str) -> None:
    torch.set_num_threads(2 if tree == "alone" else 1)
    if tree != "alone":
        dist.init_process_group("gloo")
    if tree == "deepspeed":
        ranks.register()
    for case in cases_of(tree):
        if case.probe in names and case.absent() is None:
            row = case.run()
            if tree == "alone" or dist.get_rank() == 0:
                with open(file, "a") as rows:
                    rows.write(json.dumps(asdict(row)) + "\n")
    if tree != "alone":
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(*sys.argv[1:])
