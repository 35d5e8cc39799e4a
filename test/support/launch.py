"""Several real processes: ranks, forked from a process that has imported already what would take each of them seconds,
or whatever torchrun starts. TRITON_INTERPRET is for them what it is here."""

import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import connection, forkserver, get_context, set_start_method
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from filelock import FileLock
from torch.distributed import TCPStore

TIME_LIMIT = 1500  # seconds of one start: ranks that wait for each other end sooner, by the limits of their own
IMPORTED = (  # by the process that ranks are forked from: nothing that is patched, nor what knows Triton's interpreter
    "accelerate",
    "deepspeed",
    "peft",
    "pytest",
    "torch._inductor.compile_fx",  # what flex attention imports
    "torch.distributed.fsdp",
    "transformers.generation",
    "transformers.integrations.moe",
    "transformers.trainer",
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Ended(NamedTuple):
    """How a rank ended, and what it printed."""

    code: int
    out: str
    err: str


def ranks(count: int, target: str, *arguments: str) -> str:
    """What `count` ranks print that call `target`, such as "sp.worker:main"; a failure of theirs is this test's, their
    last words included."""
    found = ended(count, target, *arguments)
    out = "".join(rank.out for rank in found)
    assert not any(rank.code for rank in found), out[-3000:] + "".join(rank.err[-6000:] for rank in found)
    return out


def ended(count: int, target: str, *arguments: str, together: bool = True) -> list[Ended]:
    """The same, as it comes; with `together` the first rank that fails ends the others. While some ranks run, those of
    other workers of pytest-xdist wait: ranks that wait for each other take the time of all cores."""
    with FileLock(Path(tempfile.gettempdir()) / f"ranks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}.lock"):
        return _ended(count, target, arguments, together)


def _ended(count: int, target: str, arguments: Sequence[str], together: bool) -> list[Ended]:
    context = get_context("forkserver")
    context.set_forkserver_preload([name for name in IMPORTED if importlib.util.find_spec(name.partition(".")[0])])
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun has one: no port is guessed
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "test"}
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / str(rank) for rank in range(count)]
        own = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        running = [
            context.Process(target=_rank, args=(str(file), mine, target, *arguments))
            for file, mine in zip(files, own, strict=True)
        ]
        try:
            for process in running:
                process.start()
            _wait([process.sentinel for process in running], running if together else [])
        finally:
            for process in running:
                process.kill()
                process.join()
        texts = [[file.with_suffix(kind).read_text() for kind in (".out", ".err")] for file in files]
        return [Ended(process.exitcode, *text) for process, text in zip(running, texts, strict=True)]


def _wait(sentinels: list[int], together: list) -> None:
    """Until all have ended, or one of `together` has failed."""
    while sentinels:
        gone = connection.wait(sentinels, timeout=TIME_LIMIT)
        if not gone or any(process.exitcode for process in together):
            return
        sentinels = [each for each in sentinels if each not in gone]


def _rank(file: str, environment: dict[str, str], target: str, *arguments: str) -> None:
    prepare(file, environment)
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)


def prepare(file: str, environment: dict[str, str]) -> None:
    """Makes a rank of a forked process, whose output goes to `file`, with .out and .err behind it."""
    for kind, descriptor in ((".out", 1), (".err", 2)):
        opened = os.open(file + kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
    os.environ |= environment
    gc.freeze()  # what all ranks have in common is not searched for garbage again and again
    set_start_method(None, force=True)  # of a DataLoader's workers: not the one that this process was started by
    if "deepspeed" in sys.modules:  # it would compile collectives for inference in C++: 40 s on a new machine
        sys.modules["deepspeed"].ops.__compatible_ops__ = {}


def interruptible(command: list[str]) -> list[str]:
    """The same, for which Ctrl-C is what it is in a terminal, also where whoever started the tests ignores it."""
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", start, *command]


def torchrun_command(ranks: int, *command: str | Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, *map(str, command)]


def torchrun(ranks: int, *command: str | Path) -> str:
    """What the ranks print; a failure of theirs is this test's, their last words included."""
    result = subprocess.run(
        torchrun_command(ranks, *command),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout
