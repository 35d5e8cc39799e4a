"""A pool of ranks: processes that are started once and run one case after the other.

    pool.run(function, *arguments)  ->  what each rank returned; or raises RankError with each rank's error

A rank that hangs ends after `CASE_LIMIT` and says where it waited. After a failure, or a case that changes its process
(`leaves_traces`), the next case gets new ranks.

An idle rank takes about 55 MB; of its resident 460 MB it shares 400 with the process from which all ranks are forked.
Only one pool has ranks at a time, at most four: 0.7 GB while tests use it.
"""

import faulthandler
import gc
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, forkserver, get_context, set_start_method
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from filelock import FileLock
from torch.distributed import TCPStore

CASE_LIMIT = 300  # seconds, a hundred times what a case takes on an idle machine
GRACE = 30  # seconds for the other ranks to fail or end once one has failed
IMPORTED = (  # before ranks are forked: nothing that is patched, nor that knows Triton's interpreter
    "accelerate", "deepspeed", "peft", "pytest", "torch._inductor.compile_fx", "torch.distributed.fsdp",
    "transformers.generation", "transformers.integrations.moe", "transformers.trainer",
)  # fmt: skip
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class RankError(AssertionError):
    """The errors of a case, rank by rank."""


class Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection
    errors: Path
    """The file of its stderr."""


class Pool:
    """`count` ranks with a gloo process group. If `kind` contains "zero", DeepSpeed starts the group; if it contains
    "own", each case starts its own."""

    def __init__(self, count: int, kind: str = "", case_limit: float = CASE_LIMIT):
        self.count, self._kind, self._case_limit = count, kind, case_limit
        self._ranks: list[Rank] = []
        self._stores: list[TCPStore] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *arguments: Any, leaves_traces: bool = False) -> list[Any]:
        """Calls function(*arguments) on each rank and returns the results. The function is found by its name; arguments
        and results are pickled.

        Raises RankError if the function raises on a rank, or if a rank ends. After that, or with `leaves_traces`, the
        next call starts new ranks.
        """
        run_id, well = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid()), False
        with FileLock(Path(tempfile.gettempdir()) / f"ranks-{run_id}.lock"):  # even waiting ranks slow down all others
            if not self._ranks:
                self._start()
            own = self._new_store() if "own" in self._kind else {}
            try:
                for rank in self._ranks:
                    rank.pipe.send((function, arguments, own))
                answers = self._collect()
                well = all(fine for fine, _ in answers.values())
                if not well:
                    raise RankError(self._report(answers))
                return [answers[i][1] for i in range(self.count)]
            finally:
                if leaves_traces or not well:
                    self.close()

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.pipe.close()
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
        self._ranks, self._stores = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _new_store(self) -> dict[str, str]:
        """Starts a store, as torchrun does, so that no port is guessed."""
        self._stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        return {"MASTER_PORT": str(self._stores[-1].port)}

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([name for name in IMPORTED if importlib.util.find_spec(name.partition(".")[0])])
        with patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory()
        shared = {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test"}
        shared |= {"WORLD_SIZE": str(self.count), "LOCAL_WORLD_SIZE": str(self.count), **self._new_store()}
        for i in range(self.count):
            (ours, theirs), file = context.Pipe(), f"{self._folder.name}/{i}"
            environment = shared | {"RANK": str(i), "LOCAL_RANK": str(i)}
            arguments = (theirs, file, environment, self._kind, self._case_limit)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self._ranks.append(Rank(process, ours, Path(f"{file}.err")))

    def _collect(self) -> dict[int, tuple[bool, Any]]:
        """Returns whether each rank succeeded, and its answer. Once one has failed, the others have `GRACE` seconds."""
        answers: dict[int, tuple[bool, Any]] = {}
        last = None
        while waiting := [i for i in range(self.count) if i not in answers]:
            left = None if last is None else max(0, last - time.monotonic())
            ready = connection.wait([self._ranks[i].pipe for i in waiting], timeout=left)
            if not ready:
                for i in waiting:
                    os.kill(self._ranks[i].process.pid, signal.SIGUSR1)  # makes it write its stack
                    answers[i] = False, "it still waits"
                time.sleep(0.5)
            for i in waiting:
                if self._ranks[i].pipe in ready:
                    answers[i] = self._answer(self._ranks[i])
                    if not answers[i][0] and last is None:
                        last = time.monotonic() + GRACE
        return answers

    def _answer(self, rank: Rank) -> tuple[bool, Any]:
        try:
            return rank.pipe.recv()
        except (EOFError, ConnectionError):
            rank.process.join()
            return False, f"it ended with exit code {rank.process.exitcode}"

    def _report(self, answers: dict[int, tuple[bool, Any]]) -> str:
        said = {i: "well" if well else answer for i, (well, answer) in sorted(answers.items())}
        written = {i: "" if answers[i][0] else "\n" + self._ranks[i].errors.read_text()[-4000:] for i in said}
        return "\n".join(f"rank {i}: {said[i]}{written[i]}" for i in said)


def _serve(pipe: Connection, file: str, environment: dict[str, str], kind: str, case_limit: float) -> None:
    """Runs the functions that come through the pipe until it is closed. Writes output to `file`.out and .err."""
    for end, descriptor in ((".out", 1), (".err", 2)):
        os.dup2(os.open(file + end, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ |= environment
    gc.freeze()  # garbage collection skips what all ranks share
    set_start_method(None, force=True)  # for a DataLoader's workers: not this process's own method
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that started the tests may ignore it
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    import torch
    import torch.distributed as dist

    if "deepspeed" in sys.modules:  # it would compile collectives for inference in C++: 40 s on a new machine
        sys.modules["deepspeed"].ops.__compatible_ops__ = {}
    if "own" not in kind:
        (importlib.import_module("deepspeed").init_distributed if "zero" in kind else dist.init_process_group)("gloo")
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, own = pipe.recv()
        except EOFError:
            return
        os.environ |= own
        faulthandler.dump_traceback_later(case_limit, exit=True)
        torch.manual_seed(0)
        try:
            answer = True, function(*arguments)
        except BaseException:  # pytest's Failed is no Exception
            answer = False, traceback.format_exc()
        if "own" in kind and dist.is_initialized():
            gc.collect()  # a DDP that outlives its group may wait for gloo's thread, which waits for Python's lock
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
