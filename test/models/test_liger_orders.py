"""Liger-Kernel and seqtile in every order, each in a process of its own: Liger cannot be taken off one.

Every case asks what really runs, whether `status` says so, whether one call of `apply_seqtile(model)` mends what Liger
took back, whether loss and gradients are those of an untouched Hugging Face model, and what `restore` leaves.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from support.tiny import broken_interpreter

pytest.importorskip("liger_kernel")
pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(200)

WORKER = Path(__file__).with_name("liger_orders_worker.py")
SEQTILE, LIGER, HF = "seqtile", "liger_kernel", "transformers"
TOOK = "liger_kernel took it back"

# "build" a model; "liger" or "seqtile" on the classes; "liger model" or "seqtile model" on that model, where Liger also
# exchanges the MLP and norm classes. Then: who computes loss, MLPs and norms of that model, who those of one that is
# built after all, and what status says of a part that seqtile was applied to and does not run.
ORDERS = {
    "liger, seqtile, build": [(SEQTILE, SEQTILE, LIGER), (SEQTILE, SEQTILE, LIGER), None],
    "seqtile, liger, seqtile, build": [(SEQTILE, SEQTILE, LIGER), (SEQTILE, SEQTILE, LIGER), None],
    "liger, build, seqtile": [(SEQTILE, LIGER, LIGER), (SEQTILE, SEQTILE, LIGER), LIGER],
    "liger, build, seqtile model": [(SEQTILE, SEQTILE, LIGER), (LIGER, LIGER, LIGER), None],
    "build, liger model, seqtile": [(LIGER, LIGER, LIGER), (SEQTILE, SEQTILE, LIGER), LIGER],
    "build, liger model, seqtile model": [(SEQTILE, SEQTILE, LIGER), (HF, LIGER, LIGER), None],
    "seqtile, build, liger": [(LIGER, SEQTILE, HF), (LIGER, LIGER, LIGER), TOOK],
    "seqtile, build, liger model": [(LIGER, LIGER, LIGER), (SEQTILE, LIGER, LIGER), TOOK],
    "build, seqtile model, liger": [(SEQTILE, SEQTILE, HF), (LIGER, LIGER, LIGER), None],
    "build, seqtile model, liger model": [(LIGER, LIGER, LIGER), (HF, LIGER, LIGER), TOOK],
}
OTHERS = [("mistral", "seqtile, build, liger"), ("qwen3", "seqtile, build, liger model")]


def lifetime(fixture_name: str, config: pytest.Config) -> str:
    return "module" if config.getoption("--device") == "cpu" else "function"


@pytest.fixture(scope=lifetime)
def run(device: str) -> Iterator[Callable[..., str]]:
    """Runs a case of the worker, for its traceback, "" if all is right: in a fork of one process or, on a GPU, anew."""
    if device == "cpu" and (why := broken_interpreter()):
        pytest.skip(why)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(WORKER), device], text=True, env=environment, **pipes) as process:

        def run(*case: object) -> str:
            print(json.dumps([*case, torch.initial_seed()]), file=process.stdin, flush=True)
            line = process.stdout.readline()
            return json.loads(line) if line else "the process ended without an answer"

        yield run
        process.kill()


DAILY = ("llama-liger, seqtile, build", "*build, liger model, seqtile", "mistral-*", "*liger, build, seqtile model")


@pytest.mark.full("2 s each; every answer of status and every way back are among these", but=DAILY)
@pytest.mark.parametrize(("arch", "operations"), [*(("llama", order) for order in ORDERS), *OTHERS])
def test_order(arch: str, operations: str, run: Callable[..., str]) -> None:
    assert run("order", arch, operations, *ORDERS[operations]) == ""


@pytest.mark.full("2 s each", but=("model",))
@pytest.mark.parametrize("target", ["classes", "model"])
def test_trainer_takes_both_back(target: str, run: Callable[..., str]) -> None:
    assert run("train", "llama", target, None, [LIGER, LIGER, LIGER], TOOK) == ""


@pytest.mark.full("2 s each", but=("llama-classes",))
@pytest.mark.parametrize(("arch", "target"), [("llama", "classes"), ("llama", "model"), ("mistral", "classes")])
def test_trainer_leaves_both(arch: str, target: str, run: Callable[..., str]) -> None:
    config = {"swiglu": False, "fused_linear_cross_entropy": False}
    assert run("train", arch, target, config, [SEQTILE, SEQTILE, LIGER], None) == ""


def test_two_architectures(run: Callable[..., str]) -> None:
    assert run("two", "llama", "mistral") == ""
