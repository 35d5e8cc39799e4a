"""The published package: one version, the files around the source, and a wheel and an sdist that work elsewhere."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import seqtile
from recipes.tiny_pretrained import save_tiny
from seqtile.recipes import TRL

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = {
    (pin := Requirement(line)).name: str(pin.specifier).removeprefix("==")
    for line in (ROOT / "dev" / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
TRAINING = """
import torch, seqtile
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=2, **shape))
seqtile.apply_seqtile(model, chunk_tokens=32)
ids, optimizer = torch.arange(100)[None] % 99, torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
print(seqtile.status(model).mlp.tiled, seqtile.__version__, seqtile.__file__)
"""


def read(name: str) -> Any:
    """Returns the content of a YAML file."""
    return yaml.safe_load((ROOT / name).read_text())


def test_the_version_stands_in_one_place_and_begins_the_changelog() -> None:
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).samefile(ROOT / "src" / "seqtile" / "__init__.py")
    assert str(Version(seqtile.__version__)) == seqtile.__version__ and "version" not in read("CITATION.cff")
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    found = [
        re.fullmatch(r"(\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)", heading).groups() for heading in headings
    ]
    versions = [Version(version) for version, _ in found]
    assert found[0][0] == seqtile.__version__ and versions == sorted(versions, reverse=True)
    assert "unreleased" not in [date for _, date in found[1:]]


def test_what_an_extra_or_a_hook_names_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = {Requirement(line).name for lines in extras.values() for line in lines}
    assert {"build", "ruff"} <= named and named - PINS.keys() == {"seqtile"}
    [ruff] = read(".pre-commit-config.yaml")["repos"]
    assert ruff["rev"] == f"v{PINS['ruff']}"


def test_the_range_of_trl() -> None:
    """Its oldest release and its newest are tested, and the next minor one is not in it."""
    [finetune] = [
        Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["finetune"] if "trl" in line
    ]
    oldest = Requirement((ROOT / "dev" / "trl-oldest.txt").read_text().splitlines()[-1])
    [first] = [Version(one.version) for one in oldest.specifier]
    newest = Version(PINS["trl"])
    bounds = {one.operator: Version(one.version) for one in finetune.specifier}
    assert finetune.specifier == SpecifierSet(TRL) and oldest.name == "trl"
    assert bounds[">="] == first and bounds["<"] == Version(f"{newest.major}.{newest.minor + 1}")
    said = f"TRL {first.major}.{first.minor} to {newest.major}.{newest.minor}"
    for page in ("trainers", "compatibility"):
        assert said in (ROOT / "docs" / f"{page}.md").read_text(), page


def test_citation() -> None:
    """The fields that the format requires, and the papers that README names."""
    found = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= found.keys() and found["license"] == "Apache-2.0"
    assert found["authors"] == [{"name": "The seqtile authors"}]
    assert all({"type", "title", "authors"} <= reference.keys() for reference in found["references"])
    papers = re.findall(r"arXiv:(\d+\.\d+)", (ROOT / "README.md").read_text())
    assert [reference["url"].removeprefix("https://arxiv.org/abs/") for reference in found["references"]] == papers


class Built(NamedTuple):
    wheel: Path
    sdist: Path
    wheel_of_tree: Path
    """The wheel built from the source tree; the other one is built from the sdist."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds with `python -m build` in its own environments, to which it installs hatchling."""
    build = (sys.executable, "-P", "-m", "build", ROOT, "--outdir")  # -P: not the directory build/
    both, tree = (tmp_path_factory.mktemp(name) for name in ("both", "tree"))
    ran(*build, both)
    ran(*build, tree, "--wheel")
    [wheel], [sdist], [of_tree] = both.glob("*.whl"), both.glob("*.tar.gz"), tree.glob("*")
    return Built(wheel, sdist, of_tree)


def ran(*command: object, cwd: Path | None = None) -> str:
    """Returns the output of a command without this environment's Python settings. If the command fails, the test
    fails."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") if cwd else ()
    variables = {name: value for name, value in os.environ.items() if name not in hidden} | {"HF_HUB_OFFLINE": "1"}
    found = subprocess.run([str(part) for part in command], cwd=cwd, env=variables, capture_output=True, text=True)
    assert found.returncode == 0, f"{command}\n{found.stdout[-3000:]}{found.stderr[-6000:]}"
    return found.stdout


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.full("minutes: an empty environment, to which pip brings torch")
def test_wheel_and_sdist_hold_what_they_should(built: Built) -> None:
    name = f"seqtile-{seqtile.__version__}"
    assert built.wheel.name == f"{name}-py3-none-any.whl" and built.sdist.name == f"{name}.tar.gz"
    files = wheel_files(built.wheel)
    assert files == wheel_files(built.wheel_of_tree)
    source = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*.py*") if file.suffix != ".pyc"}
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    about = {f"{name}.dist-info/{part}" for part in about} | {"seqtile/py.typed"}
    about |= {"seqtile/models/known_layers.txt", "seqtile/proof/proven.json", "seqtile/proof/proven_attention.json"}
    assert files.keys() == source | about and "seqtile/__init__.pyi" in files
    assert f"\nVersion: {seqtile.__version__}\n" in files[f"{name}.dist-info/METADATA"].decode()

    with tarfile.open(built.sdist) as archive:
        held = {member.name.removeprefix(f"{name}/") for member in archive.getmembers() if member.isfile()}
    folders = ("src", "test", "benchmark", "dev", "docs", "examples", ".github")
    needed = {str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).rglob("*.*")}
    needed = {file for file in needed if file.endswith((".py", ".pyi", ".md", ".sh", ".txt", ".yml", ".svg"))}
    alone = {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "SECURITY.md", "Makefile"}
    alone |= {"pyproject.toml", ".ci/run", ".pre-commit-config.yaml"}
    assert (needed | alone) - held == set()
    own = {file for file in held if file.split("/")[0] not in folders} - alone
    assert own == {"PKG-INFO", ".gitignore"} and not [file for file in held if file.endswith(".pyc")]


@pytest.mark.full("minutes: an empty environment, to which pip brings torch")
def test_wheel_installed_into_an_empty_environment(built: Built, tmp_path: Path) -> None:
    """As users install it: without the source tree and without the Hub."""
    environment, away = tmp_path / "venv", tmp_path / "away"
    away.mkdir()
    ran(sys.executable, "-m", "venv", environment, cwd=away)
    python, command = environment / "bin" / "python", environment / "bin" / "seqtile"
    constraints = ROOT / "dev" / "constraints.txt"
    ran(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{built.wheel}[demo]", cwd=away)

    assert ran(command, "--version", cwd=away) == f"seqtile {seqtile.__version__}\n"
    found = json.loads(ran(command, "plan", "meta-llama/Llama-3.1-8B", "--gpus", 8, "--json", cwd=away))
    lengths = [step["tokens"] for step in found["longest"]]
    assert max(lengths) > 1_000_000 > min(lengths) > 10_000
    *losses, about = ran(python, "-c", TRAINING, cwd=away).splitlines()
    assert [float(loss) for loss in losses] == sorted(map(float, losses), reverse=True) and len(losses) == 5
    tiled, version, place = about.split(" ", 2)
    assert (tiled, version) == ("2", seqtile.__version__) and Path(place).is_relative_to(environment)

    save_tiny(away / "model")
    (away / "text.txt").write_text("The same sentence, again and again. " * 400)
    options = ("--seq-len", 2500, "--steps", 3, "--learning-rate", 0.01, "--output", "runs")
    ran(command, "finetune", "--model", "model", "--data", "text.txt", *options, cwd=away)
    report = json.loads((away / "runs" / "report.json").read_text())["runs"]["seqtile"]
    assert report["loss"][2] < report["loss"][0] and "tokens a chunk, 2 of 2 fused" in report["status"]
