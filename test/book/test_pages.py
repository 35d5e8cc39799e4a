"""Every block of README and of the pages in docs/ runs, every link is valid, and every message that a page explains
exists in the code."""

import ast
import builtins
import multiprocessing
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import tomllib
import typer
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from book.page import HIDDEN, ROOT, Block, blocks_of, run_python
from seqtile.cli import app, signature_of
from seqtile.recipes import EvaluateOptions
from seqtile.recipes.options import Parser

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
COMMANDS = [(page, block) for page in PAGES for block in blocks_of(page.read_text()) if block.language == "bash"]
QUICK = [page.name for page in PAGES if page.name != "trainers.md"]
SCRIPTS = (".py", ".sh")
FRAGMENTS = {
    "attention",
    "evaluation",
    "layers",
    "losses",
    "models",
    "planning",
    "quickstart",
}
FRAGMENTS |= {"several-gpus", "trainers", "troubleshooting", "your-case"}
"""Pages with blocks that readers put into their own scripts."""
SILENT = {"text", "{toctree}", "{eval-rst}", "{include}", "toml", "yaml", ""}  # languages that cannot be run


def name_of(value: Path | Block) -> str:
    return value.name if isinstance(value, Path) else f"line {value.line}"


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Processes that have imported everything, one per page, so that a page's changes to classes affect no other
    page."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["book.page", "trl", "peft"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'test'}:{ROOT / 'src'}")  # of the server, which begins with the first task
        with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as executor:
            yield executor


@pytest.mark.full("5 s and more each of trainers; test/models trains with them", but=QUICK)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python(page: Path, processes: ProcessPoolExecutor) -> None:
    blocks = blocks_of(page.read_text())
    assert {block.language for block in blocks} <= {"python", "bash"} | SILENT
    if any(block.language == "python" for block in blocks):
        error = processes.submit(run_python, page).result()
        assert error is None, error


def undefined(page: Path) -> set[str]:
    """Returns the names that a page's Python blocks read before any block defines them, except hidden blocks."""
    text, known, missing = page.read_text(), set(dir(builtins)), set()
    for block in blocks_of(text):
        if block.language == "python" and text.splitlines()[block.line - 1] != HIDDEN:
            nodes = list(ast.walk(ast.parse(block.text)))
            names = [node for node in nodes if isinstance(node, ast.Name)]
            known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            known |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
            missing |= {node.id for node in names} - known
    return missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_are_defined(page: Path) -> None:
    assert bool(undefined(page)) == (page.stem in FRAGMENTS), undefined(page)


@pytest.mark.parametrize(("page", "block"), COMMANDS, ids=name_of)
def test_commands(page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if block.text.startswith("#!"):  # a whole script, which test/recipes/test_several_nodes.py runs
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=\S*", words[0]):  # environment variables
            words.pop(0)
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    """Raises AssertionError if a command cannot run as written: an unknown command, option, target or file."""
    match words:
        case ["make", *targets]:
            known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
            targets = [target for target in targets if "=" not in target]
            assert set(targets) <= known, f"make has no {set(targets) - known}"
        case ["seqtile", "finetune", *options] | ["torchrun", _, _, "-m", "seqtile.cli", "finetune", *options]:
            parsed_job(options)
        case ["seqtile", "evaluate", *options] | ["torchrun", _, _, "-m", "seqtile.cli", "evaluate", *options]:
            parsed_evaluation(options)
        case ["seqtile", "check", model_type]:  # takes half a minute; test/recipes/test_check.py runs it
            assert model_type in CONFIG_MAPPING, f"no model type {model_type}"
        case ["seqtile", "probe", *options]:  # a minute; test/probe runs it. Unknown options are found before --help
            assert CliRunner().invoke(app, ["probe", *options, "--help"]).exit_code == 0
        case ["seqtile", *arguments]:
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output
        case ["pip" | "python3" | "python", *rest] if "install" in rest:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for found in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                assert set(found.split(",")) <= extras.keys(), f"no extra {found}"
        case ["python", "-m", "pytest", file, *_]:
            assert (ROOT / file).exists(), f"no {file}"
        case ["python" | "python3", "-m", module, *_]:
            path = ROOT / Path(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"no {module}"
        case ["python" | "python3", file, *_] | ["torchrun", _, _, file, *_] | [file, *_] if file.endswith(SCRIPTS):
            assert (ROOT / file).exists(), f"no {file}"
        case ["accelerate", "launch", "--config_file", config, "-m", "seqtile.cli", "finetune", *options]:
            assert (ROOT / config).exists(), f"no {config}"
            parsed_job(options)
        case ["accelerate", "launch", "--config_file", config, file, *_]:
            assert (ROOT / config).exists() and (ROOT / file).exists(), f"no {config} or no {file}"
        case ["source" | "git" | "cd", *_] | ["torchrun", "--nnodes", *_]:  # recipes/test_several_nodes.py runs it
            pass
        case _:
            raise AssertionError(f"an unknown command: {shlex.join(words)}")


def parsed_job(options: list[str]) -> None:
    """Raises ValueError unless `seqtile finetune` knows these options."""
    *_, unknown = Parser().parse_args_and_config(
        [str(ROOT / word) if word.startswith("examples/") else word for word in options], return_remaining_strings=True
    )
    assert not unknown, unknown


def parsed_evaluation(options: list[str]) -> None:
    """Raises AssertionError unless `seqtile evaluate` accepts these options."""
    seen, command = [], typer.Typer()

    def parse(**values: object) -> None:
        seen.append(values)

    parse.__signature__ = signature_of(EvaluateOptions)
    command.command()(parse)
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0 and seen, result.output


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_line_is_shown(page: Path) -> None:
    """The site leaves out lines that begin with %."""
    assert not re.findall(r"^\s*%.*", page.read_text(), re.M)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page: Path) -> None:
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{target} leads nowhere"
        if anchor and path.suffix == ".md":
            included = re.findall(r"^```{include} (\S+)$", path.read_text(), re.M)
            texts = [file.read_text() for file in (path, *(path.parent / name for name in included))]
            headings = [heading for text in texts for heading in re.findall(r"^#+ (.+)$", text, re.M)]
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}: no such heading"


def strings_of(source: str) -> Iterator[str]:
    """Yields every string of a file, with `…` for formatted values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_quoted_messages_are_raised() -> None:
    """docs/troubleshooting.md quotes them word for word."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = re.findall(r"^### `(.+)`$", text, re.M)
    messages = "\n".join(text for file in (ROOT / "src").rglob("*.py") for text in strings_of(file.read_text()))
    quoted = {*explained, *re.findall(r"`([^`\n]*…[^`\n]+)`", text)}
    assert len(explained) >= 20
    assert not [each for each in quoted if not re.search(rf"(?<!\w){re.escape(each)}(?!\w)", messages)]
