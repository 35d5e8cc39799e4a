"""Writes the tables of options in docs/api.md, from what `--help` prints of `seqtile finetune` and from the fields
of the other commands' options: python -m dev.options"""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from benchmark.markdown import rewritten, table
from typer.testing import CliRunner

from seqtile.cli import app
from seqtile.recipes import CheckOptions, EvaluateOptions
from seqtile.recipes.plan import PlanOptions

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
OPTION = re.compile(r" +(--[\w-]+) {2,}(\S.*)")  # a line of --help; what follows further right goes on with it


def blocks() -> dict[str, str]:
    found = {"finetune": of_finetune(CliRunner().invoke(app, ["finetune", "--help"]).output)}
    for kind in (PlanOptions, EvaluateOptions, CheckOptions):
        found[kind.__name__.removesuffix("Options").lower()] = of_fields(kind)
    return found


def of_finetune(help: str) -> str:
    rows: list[tuple[str, str]] = []
    for line in help.splitlines():
        if option := OPTION.fullmatch(line):
            rows.append((option[1], option[2].strip()))
        elif rows and re.match(" {8}", line):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
    return shown(rows)


def of_fields(kind: type) -> str:
    rows: list[tuple[str, str]] = []
    for field in fields(kind):
        option = field.metadata["typer"]
        about, name = option.help.rstrip("."), (option.param_decls or (f"--{field.name.replace('_', '-')}",))[0]
        if field.default is MISSING:
            name = field.name.upper()
        elif field.default is True:
            name += f", --no-{field.name}"
        elif not isinstance(field.default, bool) and field.default is not None:
            about += f" ({field.default})"
        rows += [] if option.hidden else [(name, about)]
    return shown(rows)


def shown(rows: list[tuple[str, str]]) -> str:
    """Options in a text are code, whose hyphens stay two."""
    cells = [[f"`{name}`", re.sub(r"--[\w-]+", r"`\g<0>`", about)] for name, about in rows]
    return table([["option", "what it does"], *cells], words=2)


def page() -> str:
    text = PAGE.read_text()
    for name, block in blocks().items():
        text = rewritten(text, name, block)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
