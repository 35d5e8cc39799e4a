"""dev/gpu_day.sh notes what a step dies of and goes on, and leaves what it has when it is killed itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
STEPS = """
step fine 60 bash -c 'echo one; echo two; echo three; echo four'
SHOW=1 step brief 60 bash -c 'echo five; echo six'
step hangs 2 bash -c 'echo waiting; sleep 600'
step stubborn 2 bash -c 'trap "" TERM; echo deaf; while true; do sleep 600; done'
step dies 60 bash -c 'echo dying; kill -SEGV $$'
step memory 60 "$python" -c 'raise MemoryError("no room")'
step leaves 60 bash -c 'sleep 30 & echo gone'
step absent 60 there-is-no-such-command
echo '{"part": "probe"}' >"$out/found.jsonl"
end=$SECONDS
step late 60 bash -c 'echo never'
touch "$out"/results/{a,b,c,d,e,f,g}.png
"""


def begun(tmp_path: Path, steps: str) -> tuple[subprocess.Popen, Path]:
    file, out = tmp_path / "steps.sh", tmp_path / "out"
    file.write_text(steps)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "WHEELS": str(tmp_path / "none"),
        "TMPDIR": str(tmp_path),
        "PATIENCE": "1",
    }
    command = ["bash", str(ROOT / "dev" / "gpu_day.sh"), str(out), str(file)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    return process, out


def test_steps_that_fail(tmp_path: Path) -> None:
    process, out = begun(tmp_path, STEPS)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    summary = (out / "summary.txt").read_text()
    ends = [line for line in summary.splitlines() if not line.startswith("    ")]
    words = {line.partition(":")[0]: line.partition(": ")[2].rpartition(" ")[0].rpartition(" ")[0] for line in ends}
    assert words == {
        "fine": "ended well,",
        "brief": "ended well,",
        "hangs": "time was up, or it was killed, after",
        "stubborn": "time was up, or it was killed, after",
        "dies": "ended with 139 after",
        "memory": "ended with 1 after",
        "leaves": "ended well,",
        "absent": "ended with 127 after",
        "late": "no",
    }
    assert printed == summary and "    two\n    three\n    four\n" in summary and "    one\n" not in summary
    assert "    six\n" in summary and "five" not in summary and "    MemoryError: no room\n" in summary
    log = (out / "log.txt").read_text()
    assert [line.split()[1].rstrip(":") for line in log.splitlines() if line.startswith("=== ")] == list(words)[:-1]
    assert (
        all(word in log for word in ("one", "five", "waiting", "deaf", "dying", "no room", "gone"))
        and "never" not in log
    )
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
