"""Runs `seqtile` on a rank of torchrun, whose node takes its number for a host name. With KILLED_IN=STEP all processes
of the second node are killed in this step.

torchrun --nnodes 2 --node-rank 0 ... one_of_nodes.py finetune ...
"""

import os
import signal
import socket

import psutil

from recipes.cases import ended_in
from seqtile.cli import main


def kill_the_node() -> None:
    torchrun = psutil.Process(os.getppid())
    for process in (*torchrun.children(), torchrun):
        if process.pid != os.getpid():
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    node = os.environ["GROUP_RANK"]  # torchrun's number of the node
    socket.gethostname = lambda: f"node {node}"
    with ended_in(int(os.environ.get("KILLED_IN", 0)), kill_the_node, of_rank=int(os.environ["LOCAL_WORLD_SIZE"])):
        main()
