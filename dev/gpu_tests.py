"""make test-gpu: what a GPU can break, on the GPU at hand and with the Python at hand; meant for 5 minutes on an H100.

    PYTHONPATH=src python3 -m dev.gpu_tests [--seconds S] [--workers N] [--device cpu] [OPTION OF PYTEST ...]

First several processes beside each other; then by themselves, in one process, the tests that measure memory or the
host or take much of the GPU. `test/support/on_gpu.py` and marks beside the tests say which tests and cases these are.
A failure is shown when it happens. What is not over in its time is interrupted, and says what has failed.
"""

import argparse
import os
import sys
import time

from benchmark.device import unusable_gpu
from benchmark.process import end_by_signals, run_until

FOLDERS = ("kernels", "ops", "attention", "modules", "models", "proof", "sp", "offload", "memory")
SECONDS = 300.0
OF_ALONE = 75.0  # of them, for the tests by themselves
SHORT = 120.0  # all of less than that is for these: eight processes would do little but start
PATIENCE = 20.0  # seconds to say what has failed, once interrupted
SIDE_BY_SIDE, ALONE = "not dist and not alone", "alone and not dist"


def options(marks: str, device: str) -> list[str]:
    """What pytest is asked for. A test that hangs ends its process, which pytest-xdist starts anew."""
    found = ["-v", "--tb=short", "--maxfail=25", "-p", "no:cacheprovider", f"--device={device}", "-m", marks]
    found += ["-o", "timeout=150", "-o", "timeout_method=thread"]
    return found + [f"test/{folder}" for folder in FOLDERS]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    given, of_pytest = parser.parse_known_args()
    if given.device == "cuda" and (why := unusable_gpu()):
        sys.exit(f"{why}. To run the tests on the CPU, add --device=cpu")
    end_by_signals()
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))}
    environment |= {"PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # not a pool for each process
    end, codes = time.time() + given.seconds, []
    phases = [(SIDE_BY_SIDE, given.workers, OF_ALONE), (ALONE, 1, 0)]
    for marks, workers, left in phases if given.seconds >= SHORT else phases[1:]:
        print(f"== {marks}", flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options(marks, given.device),
            "-n",
            str(workers),
            "--dist",
            "worksteal",
        ]
        seconds = max(1.0, end - left - time.time())
        # In these hundreds of shapes cuDNN would build a plan for each, in each process; alone it computes as it will.
        without_cudnn = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"} if marks == SIDE_BY_SIDE else {}
        codes.append(run_until([*command, *of_pytest], seconds, PATIENCE, **environment, **without_cudnn))
    sys.exit(f"pytest ended with {codes}" if any(codes) else 0)


if __name__ == "__main__":
    main()
