"""The list of mutants matches the source, and a mutant's place is found again after code moves."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
OLD = "class Loss:\n    def step(self, x):\n        total = scaled(x, by=2)\n        return total\n"
MOVED = "class Loss:\n    def step(self, x):\n        if x:\n            total = scaled(\n  x,\n  by=2,\n)\n"


@pytest.fixture(scope="module")
def mutant() -> ModuleType:
    spec = spec_from_file_location("mutant", ROOT / "dev" / "mutants_list" / "mutant.py")
    module = sys.modules["mutant"] = module_from_spec(spec)  # dataclass resolves annotations there
    spec.loader.exec_module(module)
    return module


@pytest.mark.full("5 s, of a tool")
def test_every_place_is_there() -> None:
    found = subprocess.run([sys.executable, ROOT / "dev" / "mutants.py", "--places"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.parametrize("text", [OLD, MOVED], ids=["as it is", "moved, indented and wrapped"])
def test_a_place(text: str, mutant: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def step(self, x):\n    total = scaled(x, by=2)\n")
    (tmp_path / "somewhere.py").write_text(text)
    one = mutant.Mutant("a scale", "Loss.step", "total = scaled(x, by=2)", "total = x\ntotal += 1", ("none.py",))
    file, changed = one.change(tmp_path)
    indentation = text[: text.index("total")].rsplit("\n", 1)[1]
    assert file == "somewhere.py" and f"\n{indentation}total = x\n{indentation}total += 1\n" in changed
    assert "scaled" not in changed


@pytest.mark.parametrize("text", ["", OLD.replace("scaled(x", "scaled(xs"), OLD + OLD])
def test_a_place_that_is_not_there_once(text: str, mutant: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "somewhere.py").write_text(text)
    one = mutant.Mutant("a scale", "Loss.step", "total = scaled(x, by=2)", "total = x", ("none.py",))
    with pytest.raises(ValueError, match=f"a scale: expected .* once in Loss.step: {2 * (text == OLD + OLD)} times"):
        one.change(tmp_path)
