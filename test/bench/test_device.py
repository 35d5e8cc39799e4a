"""What the benchmarks say of the machine; and a GPU that torch cannot use, with a script in place of nvidia-smi."""

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmark import describe_machine, device, process, run
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU_TESTS = Path(__file__).parents[2] / "dev" / "gpu_tests.py"
NVIDIA_SMI = """#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4b1c)" ;;
  *) echo 550.54.15 ;;
esac
"""


@pytest.fixture
def with_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nvidia-smi"
    file.write_text(NVIDIA_SMI)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def too_old() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")


def without_cuda() -> None:
    raise AssertionError("Torch not compiled with CUDA enabled")


@pytest.mark.parametrize(
    ("init", "cuda", "said"),
    [(too_old, "13.0", r"too old \(found version 12040\)\. .*for CUDA 13\.0"), (without_cuda, None, "CUDA.*for CPUs")],
)
def test_a_gpu_that_torch_cannot_use(
    init: Callable[[], None], cuda: str | None, said: str, with_nvidia_smi: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """make bench stops, unless it is asked for what runs on a CPU."""
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    bench = partial(run.main, subjects="none", memory_limit=None, directory=None, minutes=None, commit="")
    for size in ("", "quick"):
        with pytest.raises(SystemExit, match=f"H100 80GB HBM3, .*{said}.* is 550.54.15, .*--index-url.*BENCH=cpu"):
            bench(size=size)
    for size in ("cpu", "small", "smoke"):
        with pytest.raises(run.typer.BadParameter, match="got none"):  # it goes on
            bench(size=size)


@pytest.mark.parametrize("of_cpu", [False, True])
def test_the_tests_on_a_gpu_that_torch_cannot_use(
    of_cpu: bool, with_nvidia_smi: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """make test-gpu stops, unless it is asked for a CPU."""
    commands = []
    monkeypatch.setattr(sys, "argv", ["dev.gpu_tests", *["--device=cpu"] * of_cpu])
    monkeypatch.setattr(process, "end_by_signals", lambda: None)
    monkeypatch.setattr(process, "run_until", lambda command, *args, **environment: commands.append(command) or 0)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(GPU_TESTS), run_name="__main__")
    assert [("--device=cpu" in command) for command in commands] == [True, True] * of_cpu
    assert end.value.code == 0 if of_cpu else "--index-url" in end.value.code


def test_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what chooses the kernels of torch; its keys are those of a GPU, with "none" where there is nothing."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    monkeypatch.setenv("TORCH_HOME", "/home/someone/torch")
    monkeypatch.setenv("MY_TOKEN", "1")
    found = device.description()
    assert found["environment"]["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"
    assert not {"TORCH_HOME", "MY_TOKEN"} & found["environment"].keys()
    if not torch.cuda.is_available():
        assert {found[key] for key in ("cudnn", "cuda", "driver_version")} == {"none"}
        assert found["sdpa"] == "flash_attention"  # torch's for CPUs
    with sdpa_kernel(SDPBackend.MATH):
        assert device.sdpa_choice() == "math"


def test_a_process_that_imports_torch_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def run(*args: object, timeout: float, **options: object) -> None:
        limits.append(timeout)
        raise OSError

    monkeypatch.setattr(device, "DEVICE", "cuda")
    monkeypatch.setattr(device.subprocess, "run", run)
    assert (
        device.output("nvidia-smi") is None
        and device.name() == "unknown GPU"
        and describe_machine.expandable_segments() == "no"
    )
    assert limits == [30, 120, 120]
