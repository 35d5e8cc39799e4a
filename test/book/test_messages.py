"""The messages that docs/troubleshooting.md explains are those of the code, word for word."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
EXPLAINED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def strings_of(source: str) -> Iterator[str]:
    """Yields every string of a file, with `…` in the place of what is formatted into it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def messages() -> list[str]:
    return [text for file in sorted((ROOT / "src").rglob("*.py")) for text in strings_of(file.read_text())]


@pytest.mark.parametrize("quoted", dict.fromkeys([*EXPLAINED, *re.findall(r"`([^`\n]*…[^`\n]+)`", PAGE)]))
def test_a_quoted_message_is_raised(quoted: str, messages: list[str]) -> None:
    assert any(re.search(rf"(?<!\w){re.escape(quoted)}(?!\w)", text) for text in messages), "no such message in src"


def test_the_commonest_are_explained() -> None:
    assert len(EXPLAINED) >= 20
