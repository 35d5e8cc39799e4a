"""The programs in dev run on the current package: each test starts one with a small input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parents[2]
PARTS = """
import json, sys
from pathlib import Path
import torch
from dev import models

folder = Path(sys.argv.pop())
models.PAGE, models.proven.PROVEN = folder / "page.md", folder / "proven.json"
models.proven.PROVEN_ATTENTION = folder / "proven_attention.json"
models.proven.PROVEN_ATTENTION.write_text("{}")
models.model_types, models.REAL_CONFIGS = lambda: ["llama"], []
models.main()

wrong = {}
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
def test_models_and_check_cuda(tmp_path: Path) -> None:
    """dev/models.py proves a type as it is in the repository. On a CPU the rules of CUDA report no error for a loss and
    an MLP, and report a planted one."""
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
    for name in ("proven.json", "proven_attention.json"):
        [(_, files)] = json.loads((tmp_path / name).read_text()).items()
        known = json.loads((ROOT / "src" / "seqtile" / "proof" / name).read_text())[version]
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


@pytest.mark.parametrize("folder", ["benchmark", "dev"])
def test_every_file_is_described(folder: str) -> None:
    """The folder's README names each file, or the folder that it is in."""
    page = (ROOT / folder / "README.md").read_text()
    kinds = (".py", ".sh", ".txt", ".json")
    files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    named = {name.rstrip("/") for name in re.findall(r"`([\w./-]+)`", page)} | {"README.md"}
    assert len(files) > 20 and not [file for file in files if not {str(file), *map(str, file.parents)} & named]
