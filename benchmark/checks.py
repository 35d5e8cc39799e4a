"""Checks of what a device computes: each finding is printed and appended to a file as a line of JSON, at once."""

import argparse
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmark.device import free_memory, is_lost
from benchmark.errors import FLOOR, relative_error
from benchmark.rows import append


class Check(NamedTuple):
    """A comparison: right if the error is at most what is allowed."""

    what: str
    error: float
    allowed: float


Findings = Iterator[Check | dict[str, Any]]
"""Comparisons, and rows of figures that nothing judges."""


def check_beside_torch(what: str, ours: torch.Tensor, same_dtype: torch.Tensor, truth: torch.Tensor) -> Check:
    """Right is at most twice as far from the truth as torch in the same dtype."""
    return Check(what, relative_error(ours, truth), 2 * relative_error(same_dtype, truth) + FLOOR)


def run_check(name: str, findings: Callable[[], Findings], note: Callable[[dict[str, Any]], None]) -> bool:
    """Returns whether all is right; an exception is a result like any other."""
    right = True
    try:
        for found in findings():
            if isinstance(found, dict):
                print(", ".join(f"{key}: {value}" for key, value in found.items()), flush=True)
                note(found)
                continue
            what, error, allowed = found
            good = error <= allowed  # NaN is wrong
            right &= good
            print(f"{'right' if good else 'WRONG'}  {what}: {error:.1e}, allowed {allowed:.1e}", flush=True)
            note({"what": what, "error": repr(error), "allowed": allowed, "right": good})
    except Exception as error:
        print(f"FAILED {name}", flush=True)
        traceback.print_exc()
        note({"what": name, "right": False, "why": f"{type(error).__name__}: {error}"[:400]})
        right = False
    return right


def file_argument(about: str | None) -> Path | None:
    """Returns the file that the command line names."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    return parser.parse_args().file


def for_json(value: Any) -> Any:
    """Returns what JSON can hold: infinities and NaN as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return [for_json(each) for each in value] if isinstance(value, list | tuple) else value


def run_checks(part: str, checks: dict[str, Callable[[], Findings]], file: Path | None) -> None:
    """Runs every check, and exits: with 0 if all is right. What was found goes into `file` as lines of this part."""
    torch.manual_seed(0)

    def note(row: dict[str, Any]) -> None:
        if file:
            append(file, {"part": part} | {key: for_json(value) for key, value in row.items()})

    wrong = []
    for name, findings in checks.items():
        wrong += [] if run_check(name, findings, note) else [name]
        if is_lost():
            sys.exit(f"{name} took the device with it")
        free_memory()
    sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)
