"""dev/gpu_day.sh uses the time of its call. It records why a step failed and continues, and keeps its results when it
is killed. The next call is the first without a result."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmark import gpu_day
from benchmark.results import Results, SubjectResults, load, save

SCRIPT = Path(__file__).parents[2] / "dev" / "gpu_day.sh"
STEPS = """
step fine 60 bash -c 'echo one; echo two; echo three; echo four'
SHOW=1 step brief 60 bash -c 'echo five; echo six'
step hangs 2 bash -c 'echo waiting; sleep 600'
step stubborn 2 bash -c 'trap "" TERM; echo deaf; while true; do sleep 600; done'
step dies 60 bash -c 'echo dying; kill -SEGV $$'
step memory 60 "$python" -c 'raise MemoryError("no room")'
step leaves 60 bash -c 'sleep 30 & echo gone'
step absent 60 there-is-no-such-command
echo '{"part": "machine"}' >"$out/found.jsonl"
end=$SECONDS
step late 60 bash -c 'echo never'
touch "$out"/results/{a,b,c,d,e,f,g}.png
"""
ENDS = {
    **dict.fromkeys(("fine", "brief", "leaves"), "ended well,"),
    **dict.fromkeys(("hangs", "stubborn"), "time was up, or it was killed, after"),
    "dies": "ended with 139 after",
    "memory": "ended with 1 after",
    "absent": "ended with 127 after",
    "late": "no",
}


def begun(tmp_path: Path, call: str, *minutes: str, python: str = sys.executable) -> tuple[subprocess.Popen, Path]:
    """Starts a call with a number or with steps, which are written to a file."""
    if "\n" in call:
        (tmp_path / "steps.sh").write_text(call)
        call = str(tmp_path / "steps.sh")
    environment = {"PYTHON": python, "WHEELS": str(tmp_path / "none"), "TMPDIR": str(tmp_path), "PATIENCE": "1"}
    command, pipe = ["bash", str(SCRIPT), str(tmp_path / "out"), call, *minutes], subprocess.PIPE
    options = {"env": os.environ | environment, "stdout": pipe, "stderr": pipe, "text": True}
    return subprocess.Popen(command, **options, start_new_session=True), tmp_path / "out"


def test_steps_that_fail(tmp_path: Path) -> None:
    process, out = begun(tmp_path, STEPS)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    summary = (out / "summary.txt").read_text()
    ends = [line.partition(": ") for line in summary.splitlines() if not line.startswith("    ")]
    assert {name: how.rpartition(" ")[0].rpartition(" ")[0] for name, _, how in ends} == ENDS
    assert printed == summary and "    two\n    three\n    four\n" in summary and "    one\n" not in summary
    assert "    six\n" in summary and "five" not in summary and "    MemoryError: no room\n" in summary
    log = (out / "log.txt").read_text()
    begun_steps = {line.split()[1].rstrip(":") for line in log.splitlines() if line.startswith("=== ")}
    assert begun_steps == ENDS.keys() - {"late"}
    assert all(word in log for word in ("one", "five", "waiting", "deaf", "dying", "no room", "gone"))
    assert "never" not in log
    found = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert found == ["found.jsonl", "log.txt", "pictures.tar.gz", "summary.txt"]


def test_a_call_that_is_killed(tmp_path: Path) -> None:
    process, out = begun(tmp_path, "step fine 60 echo one\nstep hangs 600 bash -c 'echo waiting; sleep 30'\n")
    log, until = out / "log.txt", time.time() + 600
    while time.time() < until and not (log.exists() and log.read_text().endswith("waiting\n")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    first, *said = (out / "summary.txt").read_text().splitlines()
    assert first.startswith("fine: ended well, ") and said == ["    one"]
    assert log.read_text().splitlines()[:2] == ["=== fine: echo one", "one"] and log.read_text().endswith("waiting\n")


@pytest.mark.parametrize(
    ("call", "minutes", "option", "seconds", "size"),
    [
        ("right", (), "--seconds ", 500, ""),
        ("1", ("5",), "--seconds ", 260, ""),
        ("fast", (), "--minutes ", 6.83, "first"),
        ("3", ("12",), "--minutes ", 11, "quick"),
    ],
)
def test_a_call_uses_its_time(
    call: str, minutes: tuple[str, ...], option: str, seconds: float, size: str, tmp_path: Path
) -> None:
    """If every step ends at once, the options give the last step the remaining time, except the time to finish."""
    process, out = begun(tmp_path, call, *minutes, python="true")
    assert (process.communicate(timeout=600), process.returncode) == (((out / "summary.txt").read_text(), ""), 0)
    started = re.findall("^=== .*", (out / "log.txt").read_text(), re.M)
    assert sum(f"--size {size} " in line for line in started) == bool(size)
    given = [float(found) for found in re.findall(rf"{option}([\d.]+)", "\n".join(started))]
    assert len(given) == 1 and 0.9 * seconds < given[0] <= seconds, started


@pytest.mark.parametrize(("call", "minutes"), [("4", "9"), ("2", "9.5"), ("2", "0"), ("2", "long")])
def test_what_is_refused(call: str, minutes: str, tmp_path: Path) -> None:
    process, out = begun(tmp_path, call, minutes)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and re.match("expected .*; got ", said) and not out.exists()


def made_up(directory: Path, device: str, **rows: dict) -> None:
    """Writes results with one row of each subject; underscores stand for spaces in the names of checks."""
    subjects = {name: SubjectResults("abc", 1.0, None, None, [row]) for name, row in rows.items()}
    subjects = {name.replace("_", " ") if name in CHECKS else name: found for name, found in subjects.items()}
    save(
        Results(device, "2026-01-01", "made up", subjects=subjects),
        directory / f"{len(list(directory.iterdir()))}.json",
    )


CHECKS = ("few_steps", "long_attention")
CHECKED = {"what": "a", "error": "1.0", "allowed": 2.0, "right": True}


def test_the_next_call(tmp_path: Path) -> None:
    """Figures count, also wrong ones, and what was skipped for a reason; failures and a CPU's figures do not."""
    timed, failed = {"both_ms": 1.0, "contestant": "a"}, {"what": "a", "right": False, "why": "it died"}
    right = {"kernels": CHECKED | {"right": False}, "few_steps": CHECKED}
    fast = dict.fromkeys(gpu_day.CALLS["fast"], timed)
    assert gpu_day.next_call(tmp_path) == "right"
    made_up(tmp_path, "CPU, 2 threads", **right, long_attention=CHECKED)
    made_up(tmp_path, "NVIDIA X", **right, long_attention=failed)
    made_up(tmp_path, "NVIDIA X", **fast)
    assert gpu_day.next_call(tmp_path) == "right"
    made_up(tmp_path, "NVIDIA X", long_attention={"what": "a", "skipped": "too small"})
    assert gpu_day.next_call(tmp_path) == "long"
    made_up(tmp_path, "NVIDIA X", model_step=timed | {"steps": []}, offload=timed)
    assert gpu_day.next_call(tmp_path) == "long"


def test_what_a_call_found(tmp_path: Path) -> None:
    """One result file of the machine, the checks and the tests' last lines; a half-written line is left out."""
    rows = [{"part": "machine", "device": "NVIDIA X"}, {"part": "host memory", "out_gbs": 50.0}]
    rows += [{"part": "kernels"} | CHECKED]
    (tmp_path / "found.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"part": "ker')
    (tmp_path / "log.txt").write_text("== alone\n=== 2 failed, 30 passed in 12.00s (0:00:12) ===\n")
    gpu_day.collect("right", tmp_path, "abc+")
    (file,) = (tmp_path / "results").iterdir()
    found = load(file)
    assert re.fullmatch(r"nvidia-x-\d{4}-\d\d-\d\d-right.json", file.name) and found.on_gpu
    assert found.machine == {"device": "NVIDIA X", "out_gbs": 50.0}
    assert {name: subject.rows for name, subject in found.subjects.items()} == {
        "kernels": [CHECKED],
        "tests": [{"what": "tests", "says": "2 failed, 30 passed in 12.00s (0:00:12)"}],
    }
    assert found.subjects["kernels"].commit == "abc+"


@pytest.mark.full(
    "a minute each of processes that import everything; checks run in test_gpu_checks, benchmarks in make bench-smoke"
)
@pytest.mark.parametrize("call", gpu_day.CALLS)
def test_a_rehearsal(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a call ends well without a GPU, at tiny size, and its subjects are in the results."""
    monkeypatch.setenv("SIZE", "tiny")
    process, out = begun(tmp_path, call)
    printed, _ = process.communicate(timeout=1200)
    ends = [line for line in printed.splitlines() if re.match(r"[\w, ]+: (ended|time)", line)]
    assert process.returncode == 0 and len(ends) >= 1 and all(": ended well" in line for line in ends), printed
    subjects = {name for file in (out / "results").glob("*.json") for name in load(file).subjects}
    assert subjects.issuperset(gpu_day.CALLS[call])
    assert len([file for file in out.rglob("*") if file.is_file()]) <= 8
