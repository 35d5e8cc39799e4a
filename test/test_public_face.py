"""What editors and type checkers read of the package, `__init__.pyi`, is what it has."""

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import seqtile
from seqtile.arch import ARCHS
from seqtile.models import ENTRIES

STUB = Path(seqtile.__file__).with_suffix(".pyi")
FACE = runpy.run_path(str(STUB))
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


def test_the_names_of_the_package() -> None:
    """All that are written by hand, and of the functions by model type those of the types that can be planned."""
    named = {name for name in FACE if name.startswith("apply_seqtile_to_")}
    assert {f"apply_seqtile_to_{model_type}" for model_type in ARCHS} <= named <= set(ENTRIES)
    assert set(FACE["__all__"]) == set(seqtile.__all__) - set(ENTRIES) | named
    for name in set(seqtile.__all__) - set(ENTRIES):
        assert FACE[name] is getattr(seqtile, name), name


def test_signatures() -> None:
    """All functions by model type have the arguments of one."""
    for name in ENTRIES:
        assert inspect.signature(FACE["apply_seqtile_to_llama"]) == inspect.signature(getattr(seqtile, name)), name


def test_the_arguments_are_explained() -> None:
    """Once, with the words of the package."""
    llama = "apply_seqtile_to_llama"
    assert inspect.getdoc(FACE[llama]) == inspect.getdoc(getattr(seqtile, llama))


def test_a_type_checker_finds_what_is_wrong(tmp_path: Path) -> None:
    """And nothing else. Torch is not followed, which would take a minute."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*,triton.*]\nfollow_imports = skip\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--hide-error-context",
        "script.py",
    ]
    variables = os.environ | {"PYTHONPATH": str(STUB.parents[1])}
    found = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)
    assert [line for line in found.stdout.splitlines() if ": error:" in line] == ERRORS, found.stdout + found.stderr


def test_every_name_is_on_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    for name in set(seqtile.__all__) - set(ENTRIES):
        assert f":: {name}\n" in page or f"seqtile.{name}" in page, name
