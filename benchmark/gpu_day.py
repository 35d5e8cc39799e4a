"""What is known of a GPU, by the calls of dev/gpu_day.sh: which call comes next; a call's findings as a result file.

    python3 -m benchmark.gpu_day next
    python3 -m benchmark.gpu_day collect CALL OUT [--commit COMMIT]

`next` prints the first call without a result: one of its subjects has no figure from a GPU in benchmark/results. A
check has a figure if it compared something, right or wrong, or says why it was skipped; a benchmark if it timed
something.
`collect` writes what OUT/found.jsonl and OUT/log.txt have into OUT/results/<gpu>-<date>-<call>.json.
"""

import argparse
import datetime
import json
import re
from pathlib import Path

from benchmark.results import RESULTS, Results, Row, SubjectResults, load, save

CHECKS = ("kernels", "few steps", "long attention")
CALLS = {
    "right": CHECKS,
    "fast": ("linear_cross_entropy", "gated_mlp", "decoder_layer"),
    "long": ("model_step", "offload"),
}
"""The subjects of each call."""
OF_TESTS = re.compile(r"^=+ (.*\b(?:passed|failed|errors?)\b.* in .*?) =+$", re.M)


def has_figure(row: Row) -> bool:
    return "both_ms" in row or ("what" in row and ("error" in row or "skipped" in row))


def newest_of(subject: str, directory: Path = RESULTS) -> Results | None:
    """Returns the latest results of a GPU that have a figure of this subject."""
    found = [load(file) for file in directory.glob("*.json")]
    with_figures = [
        results
        for results in found
        if results.on_gpu and subject in results.subjects and any(map(has_figure, results.subjects[subject].rows))
    ]
    return max(with_figures, key=lambda results: results.date, default=None)


def next_call(directory: Path = RESULTS) -> str:
    """Returns the first call without a result; the last, if all have one."""
    missing = (call for call, subjects in CALLS.items() if not all(newest_of(each, directory) for each in subjects))
    return next(missing, list(CALLS)[-1])


def results_of(call: str, found: Path, log: Path, commit: str) -> Results:
    """The rows of each part of `found`, and the last line of each run of pytest in the log."""
    lines = [json.loads(line) for line in found.read_text().split("\n")[:-1]] if found.exists() else []
    parts: dict[str, list[Row]] = {}
    for line in lines:
        parts.setdefault(line.pop("part"), []).append(line)
    machine = dict(parts.pop("machine", [{}])[-1])
    for name in ("segments", "host memory"):
        machine |= {key: value for row in parts.pop(name, []) for key, value in row.items()}
    if call == "right" and log.exists():
        parts["tests"] = [{"what": "tests", "says": said} for said in OF_TESTS.findall(log.read_text(errors="replace"))]
    subjects = {name: SubjectResults(commit, 0.0, None, None, rows) for name, rows in parts.items() if rows}
    date = datetime.date.today().isoformat()
    return Results(machine.get("device", "unknown GPU"), date, call, machine=machine, subjects=subjects)


def collect(call: str, out: Path, commit: str) -> None:
    results = results_of(call, out / "found.jsonl", out / "log.txt", commit)
    if results.subjects:
        device = re.sub(r"[^a-z0-9]+", "-", results.device.lower()).strip("-")
        save(results, out / "results" / f"{device}-{results.date}-{call}.json")


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("next")
    collecting = commands.add_parser("collect")
    collecting.add_argument("call", choices=list(CALLS))
    collecting.add_argument("out", type=Path)
    collecting.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    if given.command == "next":
        print(next_call())
    else:
        collect(given.call, given.out, given.commit)


if __name__ == "__main__":
    main()
