"""Counts the files of the package, or of FOLDER, and their lines of code: no blank line, comment or docstring; and
the pages and words of the book.

python -m dev.sizes [--files] [FOLDER]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "seqtile"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Returns the numbers of all lines that a docstring stands on: of a module, class or function, or of a field."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def lines_of_code(text: str) -> int:
    """Returns how many lines hold code; each line of a string that spans several counts."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def words_of(page: str) -> int:
    """Returns the words of a page, with its code and tables, without what commands write or hidden blocks hold."""
    page = re.sub(r"<!-- ([^>\n]+) -->\n(?s:.*?)<!-- end of \1 -->", "", page)
    page = re.sub(r"<!--(?s:.*?)-->", "", page)
    return len(re.findall(r"\S*\w\S*", page))


def book() -> dict[str, int]:
    """Returns the words of each page of docs/ but the API's; what `contributing` includes is counted with it."""
    found = {page.stem: words_of(page.read_text()) for page in sorted((ROOT / "docs").glob("*.md"))}
    found["contributing"] += words_of((ROOT / "CONTRIBUTING.md").read_text())
    return {page: words for page, words in found.items() if page != "api"}


def main() -> None:
    folder = Path(next((argument for argument in sys.argv[1:] if not argument.startswith("--")), SOURCE))
    files = {path.relative_to(folder): lines_of_code(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    lines_in, counts = Counter(), Counter()
    for path, lines in files.items():
        name = path.parts[0] if len(path.parts) > 1 else "top"
        lines_in[name] += lines
        counts[name] += 1
        if "--files" in sys.argv:
            print(f"{lines:6}  {path}")
    for name in lines_in:
        print(f"{lines_in[name]:6} lines of code in {counts[name]:3} files  {name}")
    print(f"{sum(files.values()):6} lines of code in {len(files):3} files")
    if folder == SOURCE:
        print(f"{sum(book().values()):6} words in {len(book()):3} pages")


if __name__ == "__main__":
    main()
