"""A pytest plugin that runs another project's test files with seqtile in the place of what they test.

`--peer liger` imports `peers_shims.liger`, which may have
    install(mode): called before the test files are imported,
    REPLACED: {module: {name: value}}: names that get a value in a test file (its stem) or an importable module,
    AT_MOST: {parameter: number}: larger sizes that tests are parametrised with are cut down to it,
    LEFT_OUT: [(pattern, why)]: tests that are not run, by a regular expression found in their ids,
    KNOWN: [(pattern, why)]: why a test fails, by a regular expression found in its id and message,
    prepare(module, mode): called for every test file once it is imported.
"""

import json
import re
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peer", required=True, help="the module of this package that stands in")
    parser.addoption("--peer-mode", default="", help="what of seqtile is applied to models")
    parser.addoption("--peer-report", type=Path, required=True, help="where a line of JSON goes for every test")
    parser.addoption("--peer-seconds", type=float, default=600, help="tests that would begin later are not run")


def pytest_configure(config: pytest.Config) -> None:
    shim = import_module(f"peers_shims.{config.getoption('--peer')}")
    if hasattr(shim, "install"):
        shim.install(config.getoption("--peer-mode"))
    config.pluginmanager.register(Peer(shim, config), "peer")


class Peer:
    def __init__(self, shim: ModuleType, config: pytest.Config):
        self.shim, self.mode = shim, config.getoption("--peer-mode")
        self.report: Path = config.getoption("--peer-report")
        self.report.write_text("")
        self.deadline = time.monotonic() + config.getoption("--peer-seconds")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        modules = {item.module for item in items}
        for module in modules:
            if hasattr(self.shim, "prepare"):
                self.shim.prepare(module, self.mode)
        for name, values in getattr(self.shim, "REPLACED", {}).items():
            owners = [module for module in modules if module.__name__.rpartition(".")[2] == name]
            for owner in owners if name.startswith("test_") else [import_module(name)]:
                replace(owner, values)
        for item in items:
            sizes = item.callspec.params if hasattr(item, "callspec") else {}
            for name, limit in getattr(self.shim, "AT_MOST", {}).items():
                if isinstance(sizes.get(name), int):
                    sizes[name] = min(sizes[name], limit)
            for pattern, why in getattr(self.shim, "LEFT_OUT", []):
                if re.search(pattern, item.nodeid):
                    item.add_marker(pytest.mark.skip(reason=f"not run: {why}"), append=False)
                    break

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.deadline:
            pytest.skip("not run: the time for this suite was over")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "context") and report.outcome != "failed":  # a part of a test
            return
        if report.when == "call" or report.outcome != "passed":
            self.write(report.nodeid, report.outcome, message_of(report), getattr(report, "wasxfail", None))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", f"not collected: {message_of(report)}")

    def write(self, test: str, outcome: str, message: str, xfail: str | None = None) -> None:
        if outcome == "skipped" and message.startswith("not run: "):
            outcome, message = "not run", message.removeprefix("not run: ")
        elif xfail is not None and outcome == "skipped":
            message = f"expected by the suite to fail: {xfail}"
        known = [why for pattern, why in getattr(self.shim, "KNOWN", []) if re.search(pattern, f"{test}\n{message}")]
        line = {"test": test, "outcome": outcome, "message": message, "why": (known or [None])[0]}
        with self.report.open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def replace(owner: ModuleType, values: dict[str, Any]) -> None:
    """AttributeError if the name is not there: the suite has changed, and would be tested instead of seqtile."""
    for name, value in values.items():
        getattr(owner, name)
        setattr(owner, name, value)


def message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason of a skip; of a failure the first line of what was raised."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:300]
