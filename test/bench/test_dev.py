"""The programs in dev run on the current package: each test starts one with a small input."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from seqtile.arch import ARCHS

ROOT = Path(__file__).parents[2]
PARTS = """
import json, sys
from pathlib import Path
import torch
from dev import models

folder = Path(sys.argv.pop())
models.PAGE, models.proof.PROVEN = folder / "page.md", folder / "proven.json"
models.model_types, models.REAL_CONFIGS = lambda: ["llama"], []
models.main()

from dev.mutants_first_step import CASES, differs, said
case = CASES["llama, layer"]
batch = case.batch()
wrong = {name: found for name, found in (("differs", differs(case, batch)), ("said", said(case, batch))) if found}

from dev.check_cuda import __main__ as check
check.DEVICE, check.TOKENS = "cpu", 200
for case in (check.loss(tokens=200, vocab=99, bias=True, class_weight=True), check.mlp(rank=8)):
    with check.CudaRules() as rules:
        case()
    wrong |= rules.broken
with check.CudaRules() as rules:
    torch.ones(2, 3).mm(torch.ones(3, 6)[:, ::2])
    torch.ones(2, 2).bfloat16().addmm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16()).sum().item()
x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, requires_grad=True)
right = torch.autograd.grad(((x * w).exp() @ w + x.sum()).sum(), (x, w))
check.backward(((x * w).exp() @ w + x.sum()).sum())
close = [bool(torch.allclose(a, b.grad)) for a, b in zip(right, (x, w))]
print(json.dumps({"wrong": wrong, "broken": list(rules.broken), "waits": dict(rules.waits), "close": close}))
"""


def ran(*command: str | Path, **variables: str) -> str:
    """Returns the output of a command that runs in the root of the repository."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | variables
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "b.py").write_text("x = 1  # one\n")
    code = '"""Docstring\nof two lines."""\n\n# a comment\nx = """1\n2"""\n\ndef f():\n    "x"\n    y()\n'
    (tmp_path / "room" / "a.py").write_text(code)
    found = [line.split() for line in ran(sys.executable, "-m", "dev.sizes", "--files", tmp_path).splitlines()]
    assert found[:2] == [["1", "b.py"], ["4", "room/a.py"]] and found[2][-3:] == ["1", "files", "top"]
    assert found[-1] == "5 lines of code in 2 files".split()


@pytest.mark.full("10 s of a process that imports everything")
def test_models_first_steps_and_check_cuda(tmp_path: Path) -> None:
    """dev/models.py proves a type as it is in the repository. The first steps report no error for a layer, and on a CPU
    none for a loss and an MLP; they report a planted error."""
    (tmp_path / "page.md").write_text("before\n<!-- types -->\nold\n<!-- end of types -->\nafter\n")
    path = os.pathsep.join(["src", "test", os.environ.get("PYTHONPATH", "")])
    *_, found = ran(sys.executable, "-c", PARTS, tmp_path, PYTHONPATH=path).splitlines()
    assert json.loads(found) == {
        "wrong": {},
        "broken": ["aten.mm.default: [3, 3] with strides (6, 2) is copied"],
        "waits": {"_local_scalar_dense": 1},
        "close": [True, True],
    }
    version = transformers.__version__
    [(_, files)] = json.loads((tmp_path / "proven.json").read_text()).items()
    known = json.loads((ROOT / "src" / "seqtile" / "models" / "proven.json").read_text())[version]
    assert files and all(set(digests.split()) <= set(known[file].split()) for file, digests in files.items())
    page = (tmp_path / "page.md").read_text()
    if f"transformers=={version}" in (ROOT / "dev" / "constraints.txt").read_text():
        [row] = re.findall(r"^\| `llama` .*", page, re.M)
        assert row in (ROOT / "docs" / "models.md").read_text().splitlines() and "old" not in page
    assert page.startswith("before\n") and page.endswith("after\n")


def test_wheels(tmp_path: Path) -> None:
    """The pinned wheels are the tested ones."""
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    script = ROOT / "dev" / "wheels.sh"
    asked = ran("bash", script, tmp_path / "wheels", "3.12", PATH=f"{tmp_path}:{os.environ['PATH']}", QUACK="1").split()
    pins = set((ROOT / "dev" / "constraints.txt").read_text().split())
    names = {pin.partition("==")[0] for pin in pins}
    assert (tmp_path / "wheels").is_dir() and asked[asked.index("--python-version") + 1] == "3.12"
    peers = {pin for pin in pins if pin.startswith(("liger", "deepspeed"))}
    assert len(peers) == 2 and peers | {"pytest-xdist", "quack-kernels"} <= set(asked)
    assert not [each for each in asked if "==" in each and each not in pins and each.partition("==")[0] in names]


OF_LIGER = """
import pytest
import torch
import torch.nn.functional as F
from liger_kernel.ops import LigerSiLUMulFunction
from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy
from liger_kernel.transformers.swiglu import *
from transformers import MixtralConfig

CONFIG = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
CONFIG._experts_implementation, CONFIG.mlp_bias, CONFIG.mlp_multipliers = "eager", False, (1.0, 1.0)


@pytest.mark.parametrize("name", ["LigerSwiGLUMLP", "LigerPhi3SwiGLUMLP", "LigerFalconH1SwiGLUMLP"])
def test_mlps(name):
    mlp, x = globals()[name](CONFIG), torch.randn(50, 8)
    fused = mlp.gate_up_proj.weight.chunk(2) if "Phi3" in name else (mlp.gate_proj.weight, mlp.up_proj.weight)
    expected = F.linear(F.silu(F.linear(x, fused[0])) * F.linear(x, fused[1]), mlp.down_proj.weight)
    torch.testing.assert_close(mlp(x[None])[0], expected)
    torch.testing.assert_close(LigerSiLUMulFunction.apply(x, 2 * x), F.silu(x) * 2 * x)


def test_experts():
    experts, x, scores = LigerExperts(CONFIG), torch.randn(1000, 8), torch.rand(1000, 2)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    gate, up = (torch.einsum("td,efd->tef", x, half) for half in experts.gate_up_proj.chunk(2, 1))
    y = torch.einsum("tef,edf->ted", F.silu(gate) * up, experts.down_proj)
    expected = (y[:, 1] * scores[:, :1]) + (y[:, 3] * scores[:, 1:])
    found = experts(x, torch.tensor([1, 3]).expand(1000, 2), scores)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_losses():
    x, weight, target = torch.randn(30, 8, requires_grad=True), torch.randn(20, 8), torch.randint(0, 20, (30,))
    expected = F.cross_entropy(x @ weight.T, target)
    for found in (liger_fused_linear_cross_entropy(x, weight, target), liger_cross_entropy(x @ weight.T, target)):
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(loss, x, retain_graph=True) for loss in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_wrong():
    assert False, "a reason"


def test_legacy_function():
    raise AssertionError
"""
OF_DEEPSPEED = """
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, sequence_tiled_compute
from unit.common import DistributedTest


class TestTiles(DistributedTest):
    world_size = 1

    def test_same(self):
        layer, x = torch.nn.Linear(4, 4), torch.randn(1, 12, 4)
        given, params = (12, 3, {"x": x}, {"factor": 2}, "x"), list(layer.parameters())
        found = sequence_tiled_compute(lambda x, factor: layer(x) * factor, *given, params)
        torch.testing.assert_close(found, 2 * layer(x))
        torch.testing.assert_close(TiledMLP.apply(lambda self, x: self(x), layer, x, 3, params), layer(x))
"""
OF_QUACK = """
import pytest
import torch
from quack.linear_cross_entropy import chunked_linear_cross_entropy, linear_cross_entropy_func_ref


@pytest.mark.parametrize("d", [8, 10_000])
def test_same(d):
    x, weight = torch.randn(40, d, device="cuda"), torch.randn(30, d, device="cuda")
    target = torch.randint(0, 30, (40,), device="cuda")
    assert d <= 256  # cut down
    found = chunked_linear_cross_entropy(x, weight, target, chunk_size=16)
    torch.testing.assert_close(found, linear_cross_entropy_func_ref(x, weight, None, target))
"""
OF_HUGGING_FACE = """
import seqtile
import torch
from tests.generation.test_utils import GenerationTesterMixin


def ids_tensor(shape, vocab_size):
    return torch.randint(0, vocab_size, shape)


class ModelTesterMixin:
    def test_tiled(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = self.all_model_classes[1](config).train()
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        assert all(p.grad is not None for p in model.parameters()) or not self.test_all_params_have_gradient
        assert seqtile.status(model).layer.tiled == 2
"""
UTILS = {"liger_kernel-0/test/utils.py": "supports_bfloat16 = None", "liger_kernel-0/test/__init__.py": ""}
LAYERED = sum(arch.layer for arch in ARCHS.values())
SUITES = {  # for dev/peers_tests.py: made-up test files, and how many tests end in which way
    "Liger: SwiGLU": (
        UTILS | {"liger_kernel-0/test/transformers/test_swiglu.py": OF_LIGER},
        {"passed": 5, "failed": 1, "not run": 1},
    ),
    "DeepSpeed: tiled compute": (
        {"DeepSpeed/tests/unit/ulysses_alst/test_tiled_compute.py": OF_DEEPSPEED},
        {"passed": 1},
    ),
    "QuACK: linear cross-entropy": ({"quack-0/tests/test_linear_cross_entropy.py": OF_QUACK}, {"passed": 2}),
    "Hugging Face: models, groups": (
        {"transformers-0/tests/__init__.py": "", "transformers-0/tests/test_modeling_common.py": OF_HUGGING_FACE},
        {"passed": LAYERED},
    ),
}


def test_functions_that_stand_in() -> None:
    apple = runpy.run_path(str(ROOT / "dev" / "peers_shims" / "cut_cross_entropy.py"))
    e, c, targets = torch.randn(40, 8), torch.randn(30, 8), torch.randint(0, 30, (40,))
    torch.testing.assert_close(apple["loss"](e, c, targets), F.cross_entropy(e @ c.T, targets))
    shifted = apple["loss"](e[None], c, targets[None], softcap=2.0, shift=True)
    torch.testing.assert_close(shifted, F.cross_entropy(2 * torch.tanh(e[:-1] @ c.T / 2), targets[1:]))
    torch.testing.assert_close(apple["log_sum_exp"](e, c), (e @ c.T).logsumexp(1))


@pytest.mark.full("10 s each of a process that imports another package")
@pytest.mark.parametrize("suite", SUITES)
def test_peers(suite: str, tmp_path: Path) -> None:
    """Made-up tests run with stand-ins, even if the real packages are not installed."""
    files, counts = SUITES[suite]
    for name, text in files.items():
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (before := tmp_path / "before.json").write_text(json.dumps({suite: [{"test": "gone", "outcome": "passed"}]}))
    options = ("--files", tmp_path, "--json", tmp_path / "found.json", "--before", before)
    printed = ran(sys.executable, "dev/peers_tests.py", *options, suite)
    tests = json.loads((tmp_path / "found.json").read_text())[suite]
    found = Counter(test["outcome"] for test in tests)
    assert found == counts, tests
    numbers = " | ".join(str(found[outcome]) for outcome in ("passed", "failed", "skipped", "not run"))
    assert f"| {suite} | {numbers} |" in printed and "not now: 1\ngone\n" in printed
    assert ("failed, 1: AssertionError: a reason" in printed) == ("failed" in counts)
