"""What a mutant is: a small wrong change to the package, and the tests that should notice it.

The place of a change is a function and a piece of its text, so that it is found again when code moves to another file,
is indented otherwise, or is wrapped over other lines.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    name: str
    function: str
    """Its qualified name, `Class.method`; "" for what is in no function. No file: wherever under src/seqtile it is."""
    old: str
    """What stands there, in this function of one file exactly once, spaces and line breaks aside."""
    new: str
    tests: tuple[str, ...]
    """Files, or node ids, below test."""
    select: str = ""
    """Passed to pytest's -k."""
    interpreted: bool = False
    """Whether they run in Triton's interpreter: a kernel that nothing else runs without a GPU."""
    dist: bool = False
    """Whether the tests are those that start several processes."""
    note: str = ""
    """Why no test notices it, where that is so and right."""

    def change(self, source: Path) -> tuple[str, str]:
        """The file to be changed, below `source`, and its whole changed text. ValueError if the place is not there
        exactly once, or the new text is no Python."""
        found = []
        for file in sorted(source.rglob("*.py")):
            text = file.read_text()
            for start, stop in spans(text).get(self.function, ()):
                found += [
                    (file, text, start + one.start(), start + one.end()) for one in self._places(text[start:stop])
                ]
        if len(found) != 1:
            files = ", ".join(str(file.relative_to(source)) for file, *_ in found)
            where = f"{self.function or 'the source'}: {len(found)} times {files}"
            raise ValueError(f"{self.name}: expected {self.old!r} once in {where}; mend the list")
        [(file, text, start, stop)] = found
        name = str(file.relative_to(source))
        changed = text[:start] + self._indented(text[text.rfind("\n", 0, start) + 1 : start]) + text[stop:]
        try:
            compile(changed, name, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return name, changed

    def _places(self, text: str) -> list[re.Match]:
        """Where the old text is; between two of its words is a space or more, between other signs any or none."""
        pattern = ""
        for last, sign in zip(["", *(signs := re.findall(r"\w+|[^\w\s]", self.old))], signs, strict=False):
            between = r"\s+" if re.match(r"\w", last) and re.match(r"\w", sign) else r"\s*" if last else ""
            comma = r",?\s*" if sign in ")]}" and last not in ("", ",") else ""
            pattern += between + comma + re.escape(sign)
        before, after = (r"\b" if re.match(r"\w", sign) else "" for sign in (signs[0], signs[-1]))
        return list(re.finditer(before + pattern + after, text))

    def _indented(self, before: str) -> str:
        """The new text, of which further lines are indented as the first one's place is."""
        own = self.old[: len(self.old) - len(self.old.lstrip(" "))]
        there = before if not before.strip() else own
        first, *rest = self.new.removeprefix(own).rstrip("\n").split("\n")
        return "\n".join([first, *(there + line.removeprefix(own) if line else line for line in rest)])


@cache
def spans(text: str) -> dict[str, list[tuple[int, int]]]:
    """Where each function of a file is, by its qualified name; "" is the whole file."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found: dict[str, list[tuple[int, int]]] = {"": [(0, len(text))]}

    def walk(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{path}.{child.name}" if path else child.name
                if isinstance(child, ast.FunctionDef):
                    first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                    found.setdefault(name, []).append((starts[first - 1], starts[child.end_lineno]))
                walk(child, name)
            else:
                walk(child, path)

    walk(ast.parse(text), "")
    return found
