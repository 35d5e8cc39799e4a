"""Ranks that stay: processes that are started once, and run one case after the other.

    pool.run(function, *arguments)  ->  what each rank returned, or a RankError with what each rank says

A rank that waits for another for ever ends by itself after `CASE_LIMIT` and says where it waited. After a failure the
next case gets new ranks, and so does one behind a case that changes its process (`leaves_traces`).
"""

import faulthandler
import importlib
import importlib.util
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from filelock import FileLock
from torch.distributed import TCPStore

from support.launch import ENVIRONMENT, IMPORTED, prepare

CASE_LIMIT = 300  # seconds, a thousand times what a case takes on an idle machine
GRACE = 5  # seconds for the others to fail, or to end, once one has failed


class RankError(AssertionError):
    """What went wrong in a case, rank by rank."""


class Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection
    file: Path
    """Where its output goes, with .out and .err behind it."""


class Pool:
    """`count` ranks with a process group of gloo's, DeepSpeed's where that is asked for."""

    def __init__(self, count: int, deepspeed: bool = False, case_limit: float = CASE_LIMIT):
        self.count, self._deepspeed, self._case_limit = count, deepspeed, case_limit
        self._ranks: list[Rank] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, leaves_traces: bool = False) -> list[Any]:
        """Returns what function(*arguments) returns on each rank. The function is found by its name, and the arguments
        and what it returns are pickled.

        Raises RankError if it raises on a rank, or if a rank ends; then, and where it `leaves_traces` in its process,
        the next call starts new ranks.
        """
        with FileLock(_lock()):  # ranks that wait for each other take the time of all cores
            if not self._ranks:
                self._start()
            answers: dict[int, tuple[bool, Any]] = {}
            try:
                for rank in self._ranks:
                    rank.pipe.send((function, arguments))
                self._collect(answers)
                if any(not well for well, _ in answers.values()):
                    raise RankError(self._report(answers))
            finally:
                if leaves_traces or len(answers) < self.count or any(not well for well, _ in answers.values()):
                    self.close()
            return [answers[i][1] for i in range(self.count)]

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([name for name in IMPORTED if importlib.util.find_spec(name.partition(".")[0])])
        with patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
        self._folder, self._store = tempfile.TemporaryDirectory(), store
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared |= {"WORLD_SIZE": str(self.count), "LOCAL_WORLD_SIZE": str(self.count), "TORCHELASTIC_RUN_ID": "test"}
        for i in range(self.count):
            ours, theirs = context.Pipe()
            file, own = Path(self._folder.name) / str(i), {"RANK": str(i), "LOCAL_RANK": str(i)}
            process = context.Process(
                target=_serve, args=(theirs, str(file), shared | own, self._deepspeed, self._case_limit)
            )
            process.start()
            theirs.close()
            self._ranks.append(Rank(process, ours, file))

    def _collect(self, answers: dict[int, tuple[bool, Any]]) -> None:
        """Receives an answer from each rank; once one has failed, for `GRACE` seconds more."""
        last = None
        while waiting := [i for i in range(self.count) if i not in answers]:
            left = None if last is None else last - time.monotonic()
            if left is not None and left <= 0:
                return self._where_they_wait(waiting, answers)
            ready = connection.wait([self._ranks[i].pipe for i in waiting], timeout=left)
            for i in waiting:
                if self._ranks[i].pipe in ready:
                    answers[i] = self._answer(i)
                    if not answers[i][0] and last is None:
                        last = time.monotonic() + GRACE
        return None

    def _answer(self, i: int) -> tuple[bool, Any]:
        try:
            return self._ranks[i].pipe.recv()
        except (EOFError, ConnectionError):
            self._ranks[i].process.join()
            return False, f"it ended with exit code {self._ranks[i].process.exitcode}"

    def _where_they_wait(self, waiting: Sequence[int], answers: dict[int, tuple[bool, Any]]) -> None:
        for i in waiting:
            os.kill(self._ranks[i].process.pid, signal.SIGUSR1)  # writes its stack
            answers[i] = False, "it still waits"
        time.sleep(0.5)

    def _report(self, answers: dict[int, tuple[bool, Any]]) -> str:
        texts = []
        for i, (well, answer) in sorted(answers.items()):
            written = self._ranks[i].file.with_suffix(".err").read_text()[-4000:]
            texts.append(f"rank {i}: {'well' if well else answer}" + ("" if well else f"\n{written}"))
        return "\n".join(texts)

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.pipe.close()
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._store = None


def _lock() -> Path:
    return Path(tempfile.gettempdir()) / f"ranks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}.lock"


def _serve(pipe: Connection, file: str, environment: dict[str, str], deepspeed: bool, case_limit: float) -> None:
    """Runs what comes through the pipe, until that is closed."""
    prepare(file, environment)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    import torch
    import torch.distributed as dist

    if deepspeed:
        importlib.import_module("deepspeed").init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(case_limit, exit=True)
        torch.manual_seed(0)
        try:
            answer = True, function(*arguments)
        except BaseException:  # pytest's own Failed among them
            answer = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
