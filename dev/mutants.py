"""Makes small wrong changes to the package, one at a time, and tells whether the tests notice them.

    .venv/bin/python dev/mutants.py [--only NAME ...] [--places | --check] [--full] [--jobs N]

The changes are in `mutants_list`, each with the tests that should notice it. A change is made in a copy of the source,
never in the source itself. A mutant dies where a test fails or takes too long; a module that cannot be imported, or
tests that cannot be collected, are an error of the list. Prints a table in Markdown; ends with 1 if a mutant survived,
unless the list has the reason, or if anything else is wrong.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mutants_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PACKAGE = ROOT / "src", ROOT / "src" / "seqtile"
SECONDS = 600  # of the tests of one mutant; of tests that must pass, thrice that
BROKEN = ("SyntaxError", "IndentationError", "NameError", "ImportError", "ModuleNotFoundError")
DIED, SURVIVED, ERROR = "died", "survived", "error"


@dataclass(frozen=True)
class Outcome:
    name: str
    file: str
    result: str
    test: str = ""
    """The one that failed."""
    reason: str = ""
    seconds: float = 0


@contextmanager
def changed_copy(mutant: Mutant | None) -> Iterator[Path]:
    """A folder with a copy of the source, changed if there is a mutant, that is what Python imports."""
    with tempfile.TemporaryDirectory(prefix="seqtile-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            file, text = mutant.change(PACKAGE)
            (source / "seqtile" / file).write_text(text)
        code = "import importlib.util as u; print(u.find_spec('seqtile').origin)"
        found = subprocess.check_output(
            [sys.executable, "-c", code], cwd=ROOT, env=environment(source, False), text=True
        )
        if Path(found.strip()) != source / "seqtile" / "__init__.py":
            raise RuntimeError(f"expected to import the copy in {source}, got {found.strip()}")
        yield Path(folder)


def environment(source: Path, interpreted: bool) -> dict[str, str]:
    """Examples that hypothesis found for another mutant must not help with this one: its folder is the copy's."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    found["HYPOTHESIS_STORAGE_DIRECTORY"] = str(source.parent / "hypothesis")
    return found | ({"TRITON_INTERPRET": "1"} if interpreted else {})


def command(mutant: Mutant, report: Path, full: bool) -> list[str]:
    tests = [f"test/{test}" for test in mutant.tests]
    which = "dist" if mutant.dist else "not gpu and not dist"
    options = ["-x", "-q", "-p", "no:cacheprovider", "--seed", "1", "--hypothesis-seed", "1", "-m", which]
    options += ["-k", mutant.select] if mutant.select else []
    options += ["--full"] if full else []
    return [sys.executable, "-m", "pytest", *options, "-o", "junit_family=xunit1", f"--junitxml={report}", *tests]


def outcome_of(mutant: Mutant, full: bool, change: bool = True) -> Outcome:
    """What the mutant's tests say of it; without the `change` of the source as it is."""
    begun, outcome = time.monotonic(), Outcome(mutant.name, mutant.change(PACKAGE)[0], ERROR)
    try:
        with changed_copy(mutant if change else None) as folder:
            report = folder / "report.xml"
            variables = environment(folder / "src", mutant.interpreted)
            code = run(command(mutant, report, full), variables, SECONDS if change else 3 * SECONDS)
            outcome = replace(outcome, **outcome_of_report(code, report))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        outcome = replace(outcome, reason=str(error))
    return replace(outcome, seconds=round(time.monotonic() - begun, 1))


def run(arguments: list[str], variables: dict[str, str], seconds: int) -> int | None:
    """The exit status; None if it took too long. Its own processes end with it."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(arguments, cwd=ROOT, env=variables, **quiet) as process:
        try:
            return process.wait(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def outcome_of_report(code: int | None, report: Path) -> dict[str, str]:
    """Of an Outcome what pytest's exit status and report tell."""
    if code is None:
        return {"result": DIED, "reason": "by its time limit"}
    if code == 0:
        return {"result": SURVIVED}
    if code < 0:
        return {"result": DIED, "reason": f"by a crash, signal {-code}"}
    if not report.exists():
        return {"result": ERROR, "reason": f"pytest ended with {code} and without a report"}
    cases = [(case, found) for case in ElementTree.parse(report).iter("testcase") for found in case]
    cases = [(case, found) for case, found in cases if found.tag in ("failure", "error")]
    if not cases:
        return {"result": ERROR, "reason": f"pytest ended with {code}, and no test failed"}
    case, found = cases[0]
    reason = (found.get("message") or "").strip().splitlines() or [""]
    honest = found.tag == "failure" and not reason[0].startswith(BROKEN)
    test = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
    return {"result": DIED if honest else ERROR, "test": test, "reason": reason[0][:300]}


def outcomes_of(mutants: list[Mutant], jobs: int, full: bool, change: bool) -> list[Outcome]:
    """Returns the outcomes in the order of the mutants; prints each as soon as it is known."""
    found: dict[str, Outcome] = {}
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(outcome_of, mutant, full, change) for mutant in mutants]):
            outcome = future.result()
            found[outcome.name] = outcome
            print(f"{outcome.result:<8} {outcome.seconds:5.0f} s  {outcome.name}", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[mutant.name] for mutant in mutants]


def test_files_of(mutants: Iterable[Mutant]) -> list[Mutant]:
    """One for each file of tests, as it is asked for: what has to pass while nothing is changed."""
    kinds = {
        (test, mutant.select, mutant.interpreted, mutant.dist): mutant for mutant in mutants for test in mutant.tests
    }
    found = []
    for (test, select, interpreted, _), mutant in kinds.items():
        name = f"{test}{f' -k {select}' if select else ''}{', interpreted' if interpreted else ''}"
        found.append(replace(mutant, name=name, tests=(test,)))
    return found


def selected(only: list[str] | None) -> list[Mutant]:
    """Those of which a part of the name is given; all if none is."""
    names = [mutant.name for mutant in MUTANTS]
    if len(set(names)) < len(names):
        raise ValueError("two mutants have one name")
    for mutant in MUTANTS:
        mutant.change(PACKAGE)
    found = [mutant for mutant in MUTANTS if only is None or any(part in mutant.name for part in only)]
    if not found:
        raise ValueError(f"no mutant has {' or '.join(only)} in its name")
    return found


def table(outcomes: list[Outcome]) -> str:
    notes = {mutant.name: mutant.note for mutant in MUTANTS}
    lines = ["| Mutant | File | Result | By | Seconds |", "| --- | --- | --- | --- | ---: |"]
    for one in outcomes:
        by = (one.test.removeprefix("test/") or one.reason or notes.get(one.name, "")).replace("|", "\\|")
        lines.append(f"| {one.name} | {one.file} | {one.result} | {by} | {one.seconds:.0f} |")
    counts = ", ".join(
        f"{sum(one.result == result for one in outcomes)} {result}" for result in (DIED, SURVIVED, ERROR)
    )
    return "\n".join([*lines, "", f"{len(outcomes)} mutants: {counts}; {sum(one.seconds for one in outcomes):.0f} s"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants that have one of these in their name")
    parser.add_argument("--check", action="store_true", help="run the tests, each file once, with nothing changed")
    parser.add_argument("--places", action="store_true", help="only see that what each changes is there, once")
    parser.add_argument("--full", action="store_true", help="run every case of the tests")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    mutants = selected(options.only)
    if options.places:
        return 0
    if options.check:
        outcomes = outcomes_of(test_files_of(mutants), options.jobs, options.full, change=False)
        outcomes = [replace(one, result="passed" if one.result == SURVIVED else "FAILED") for one in outcomes]
        print("\n".join(f"{one.result} {one.seconds:5.0f} s  {one.name} {one.test} {one.reason}" for one in outcomes))
        return int(any(one.result != "passed" for one in outcomes))
    outcomes = outcomes_of(mutants, options.jobs, options.full, change=True)
    print(table(outcomes))
    excused = {mutant.name for mutant in mutants if mutant.note}
    wrong = [one for one in outcomes if one.result == ERROR or (one.result == SURVIVED and one.name not in excused)]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
