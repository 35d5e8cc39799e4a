"""Recognises what a forward computes by its source code, whatever its class and the names of its parts.

    def forward(self, x):                                    form    self.w2(F.silu(self.w1(x)) * self.w3(x))
        gate = F.silu(self.w1(x))              ──────>       pattern self.down(F.silu(self.gate(x)) * self.up(x))
        return self.w2(gate * self.w3(x))                    names   gate: w1, up: w3, down: w2

It looks at the code that runs, so a replaced or decorated function is never mistaken for the original.
"""

import ast
import copy
import inspect
import re
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any


def behind_renaming(function: Any) -> Any:
    """Returns the function behind Hugging Face's decorator that renames an argument, which computes the same."""
    while type(function) is FunctionType and function.__globals__.get("__name__") == "transformers.utils.deprecation":
        function = function.__wrapped__
    return function


def unbound(function: Any) -> Any:
    """Returns the function of a bound method. An object that only looks like a method, such as a proxy, stays."""
    return function.__func__ if type(function) is MethodType else function


def code_of(function: Any) -> CodeType | None:
    """Returns the code that a plain function or a method runs; None of anything else."""
    function = unbound(function)
    return function.__code__ if type(function) is FunctionType else None


def source_of(function: Any) -> str | None:
    """Returns the text of a function's body without docstring and annotations; None if there is none to be read."""
    code = code_of(function)
    return None if code is None else _source_of(code)


@cache
def _source_of(code: CodeType) -> str | None:
    function = _parsed(code)
    return None if function is None else _body_text(function)


def source_in_file(module: str, name: str) -> str:
    """Like `source_of`, but reads the module's file, so that later replacements do not matter. `name` is a function or
    Class.method."""
    *owner, function = name.split(".")
    body = _file(module).body
    if owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner[0]).body
    return _body_text(_plain(next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function)))


@cache
def _file(module: str) -> ast.Module:
    return ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8"))


def _body_text(function: ast.FunctionDef) -> str:
    return "\n".join(ast.unparse(statement) for statement in function.body)


def _form_of(code: CodeType) -> ast.expr | None:
    """Returns what a function of straight-line code returns, as one expression of its arguments, which are called x, y
    and z in their order; None of any other function."""
    function = _parsed(code)
    if function is None:
        return None
    arguments = [argument.arg for argument in function.args.args if argument.arg != "self"]
    values: dict[str, ast.expr] = dict(zip(arguments, (ast.Name(name) for name in "xyz"), strict=False))
    if len(arguments) > 3:
        return None
    for statement in function.body:
        match statement:
            case ast.Return(value=ast.expr() as value):
                return _Inlined(values).visit(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _Inlined(values).visit(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                value = _Inlined(values).visit(value)
                for i, target in enumerate(targets):
                    if not isinstance(target, ast.Name):
                        return None
                    values[target.id] = ast.Subscript(value, ast.Constant(i))
            case _:
                return None
    return None


def names_in(code: CodeType, pattern: str) -> dict[str, str] | None:
    """Returns what a function calls the attributes of self that `pattern` names, such as {"down": "w2"}, if its form is
    that pattern; None if it is not. The factors of a product may stand in either order."""
    form = _form_of(code)
    matches = (each.fullmatch(ast.unparse(form)) for each in _patterns(pattern)) if form is not None else ()
    return next((match.groupdict() for match in matches if match is not None), None)


@cache
def _patterns(pattern: str) -> list[re.Pattern[str]]:
    """Returns regular expressions for the text of a form: the pattern, and the pattern with the factors of a product
    exchanged. self.down(x) becomes self.(?P<down>\\w+)(x), and where it appears again self.(?P=down)(x)."""
    tree, found = ast.parse(pattern, mode="eval"), []
    products = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)]
    for product in (None, *products):
        if product is not None:
            product.left, product.right = product.right, product.left
        first, *rest = re.split(r"self\\\.(\w+)", re.escape(ast.unparse(tree)))
        for i, (name, text) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
            first += rf"self\.(?P={name})" if name in rest[: 2 * i : 2] else rf"self\.(?P<{name}>\w+)"
            first += text
        found.append(re.compile(first))
    return found


def _parsed(code: CodeType) -> ast.FunctionDef | None:
    try:  # of the code, since inspect would look behind a decorator's wrapper
        function = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.name != code.co_name:
        return None
    return _plain(function)


def _plain(function: ast.FunctionDef) -> ast.FunctionDef:
    """Returns a function whose body has no docstring and no annotations of variables."""
    function = copy.deepcopy(function)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    function.body = [_Plain().visit(statement) for statement in function.body]
    return function


class _Plain(ast.NodeTransformer):
    """Drops the annotations of variables, and writes torch.nn.functional as F."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        return node if node.value is None else ast.Assign([node.target], node.value, lineno=node.lineno)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if ast.unparse(node.value) in ("nn.functional", "torch.nn.functional"):
            return ast.Attribute(ast.Name("F"), node.attr)
        self.generic_visit(node)
        return node


class _Inlined(ast.NodeTransformer):
    """Replaces variables by their expressions."""

    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)
