"""make bench: runs every benchmark, keeps its JSON under benchmark/results, prints the table. BENCH=smoke is tiny."""

import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from benchmark.table import RESULTS, print_table


def main() -> int:
    smoke = os.environ.get("BENCH") == "smoke"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    file = f"{name.lower().replace(' ', '-')}-{datetime.date.today().isoformat()}.json"
    directory = Path(tempfile.mkdtemp()) if smoke else RESULTS
    directory.mkdir(exist_ok=True)
    benches = sorted(str(path) for path in Path(__file__).parent.glob("bench_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *benches]
    command += ["-o", "timeout=1800", "--benchmark-disable-gc", f"--benchmark-json={directory / file}"]
    command += ["--size=smoke"] if smoke else []
    code = subprocess.run(command).returncode
    if code == 0:
        print_table(directory / file)
    return code


if __name__ == "__main__":
    sys.exit(main())
