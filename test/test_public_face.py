"""The names of the package are imported on first use. Editors and type checkers read the same names in `__init__.pyi`.
All of them work without Triton."""

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import seqtile
from seqtile.arch import ARCHS
from seqtile.models.apply import ENTRIES

STUB = Path(seqtile.__file__).with_suffix(".pyi")
FACE = runpy.run_path(str(STUB))
BY_HAND = set(seqtile.__all__) - set(ENTRIES)
SCRIPT = """\
from torch import nn
import seqtile

def tile(model: nn.Module) -> None:
    seqtile.apply_seqtile_to_llama(chunk_tokens="x")
    seqtile.apply_seqtile_to_llama(model, chunks=1024)
    seqtile.apply_seqtile_to_llama(model, mlp=False, head_groups="auto", chunk_tokens=1024)
    seqtile.apply_seqtile_to_qwen3(layer=True)
    seqtile.apply_seqtile_to_xlstm(model)
    seqtile.offload.disable()
    print(seqtile.status(model), seqtile.memory.plan, seqtile.__version__)
"""
ERRORS = [
    'script.py:5: error: Argument "chunk_tokens" to "apply_seqtile_to_llama" has incompatible type "str"; '
    'expected "int | None"  [arg-type]',
    'script.py:6: error: Unexpected keyword argument "chunks" for "apply_seqtile_to_llama"  [call-arg]',
]
WITHOUT_TRITON = """
import sys
import seqtile
assert not {"torch", "transformers", "triton"} & sys.modules.keys()
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
import torch
from seqtile.kernels.dispatch import triton_serves
assert not triton_serves(torch.zeros(1))
hidden, weight = torch.randn(63, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
target = torch.randint(0, 50, (63,))
loss = seqtile.linear_cross_entropy(hidden, weight, target, chunk_tokens=16)
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, target))
loss.backward()
gate, up, down = (torch.randn(shape, requires_grad=True) for shape in ((12, 8), (12, 8), (8, 12)))
seqtile.gated_mlp(hidden, gate, up, down, chunk_tokens=16).sum().backward()
assert all(weight.grad is not None for weight in (gate, up, down))
"""


def test_all_names() -> None:
    assert set(ENTRIES) < set(seqtile.__all__) <= set(dir(seqtile)) and len(set(seqtile.__all__)) == len(
        seqtile.__all__
    )
    exec("from seqtile import *", found := {})
    assert set(seqtile.__all__) <= found.keys() and None not in found.values()
    assert seqtile.apply_seqtile_to_llama is ENTRIES["apply_seqtile_to_llama"]
    with pytest.raises(AttributeError, match="module 'seqtile' has no attribute 'apply_seqtile_to_vit'"):
        seqtile.apply_seqtile_to_vit  # noqa: B018


def test_nothing_is_loaded_before_and_triton_never_needed() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr


def test_the_stub() -> None:
    """Contains all handwritten names and one function per plannable model type. All of these functions have the same
    arguments, explained once, in the package's words."""
    named = {name for name in FACE if name.startswith("apply_seqtile_to_")}
    assert {f"apply_seqtile_to_{model_type}" for model_type in ARCHS} <= named <= set(ENTRIES)
    assert set(FACE["__all__"]) == BY_HAND | named
    for name in BY_HAND:
        assert FACE[name] is getattr(seqtile, name), name
    llama = FACE["apply_seqtile_to_llama"]
    for name in ENTRIES:
        assert inspect.signature(llama) == inspect.signature(getattr(seqtile, name)), name
    assert inspect.getdoc(llama) == inspect.getdoc(seqtile.apply_seqtile_to_llama)


@pytest.mark.full("5 s of mypy")
def test_a_type_checker_finds_what_is_wrong(tmp_path: Path) -> None:
    """It finds these errors and no others. It does not follow torch, which would take a minute."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*,triton.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", "--hide-error-context", "script.py"]
    variables = os.environ | {"PYTHONPATH": str(STUB.parents[1])}
    found = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)
    assert [line for line in found.stdout.splitlines() if ": error:" in line] == ERRORS, found.stdout + found.stderr


def test_every_name_is_on_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    for name in BY_HAND:
        assert f":: {name}\n" in page or f"seqtile.{name}" in page, name
