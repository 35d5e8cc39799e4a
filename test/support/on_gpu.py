"""What tests on a GPU need, in several parallel processes (`--device cuda`, `make test-gpu`)."""

import os

import pytest
import torch
from benchmark.device import LOST, is_lost

SHARE = 0.8  # of a GPU's memory, for the tests of all processes; each also has a context of some 600 MB


def runs_on_gpu(item: pytest.Item) -> bool:
    """Returns whether a test does something else on a GPU than on a CPU: it takes the device, or needs a GPU."""
    return "device" in getattr(item, "fixturenames", ()) or "gpu" in item.keywords


def share_memory() -> None:
    """Gives each process of a run an equal part of the GPU's memory."""
    if torch.cuda.is_available() and (processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))) > 1:
        torch.cuda.set_per_process_memory_fraction(SHARE / processes)


class Failures:
    """Shows a failure when it happens, since a run may be stopped early. Ends a parallel process after a test has lost
    its GPU, so that only this test is lost."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.beside_others = "PYTEST_XDIST_WORKER" in os.environ
        self.failed = False

    @pytest.hookimpl(trylast=True)  # after the line that says FAILED
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None and not self.beside_others:
            terminal.write_line("")
            terminal.write_line(report.longreprtext)

    def pytest_runtest_logfinish(self) -> None:
        if self.failed and self.beside_others and is_lost():
            os._exit(LOST)  # an orderly end would ask the GPU; pytest-xdist starts another process
        self.failed = False
