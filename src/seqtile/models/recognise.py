"""Recognises what a forward computes by its source code, whatever its class and the names of its parts.

    def forward(self, x):                                    form    self.w2(F.silu(self.w1(x)) * self.w3(x))
        gate = F.silu(self.w1(x))              ──────>       pattern self.down(F.silu(self.gate(x)) * self.up(x))
        return self.w2(gate * self.w3(x))                    names   gate: w1, up: w3, down: w2

It looks at the code that runs, so a replaced or decorated function is never mistaken for the original. An MLP is
recognised by its form. The source of a layer, of its attention, of the rotary embedding and of its norms is compared
with that of the few models that the tests hold `seqtile.ops.decoder_layer` against.
"""

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.models.functions import behind_renaming, code_of, defining_path, named
from seqtile.models.placement import computed_forward, original_forward


class Gated(NamedTuple):
    """The names of the parts in the forward of a gated MLP, down(activation(gate(x)) * up(x))."""

    gate: str
    up: str | None
    """None if the projection `gate` computes both, gate before up."""
    down: str
    module: str | None
    """The activation, a submodule of the MLP; None if the forward names a function."""
    activation: str | None = None
    """The activation's name in `gated_mlp`; None where a submodule says it."""

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of gate, up, unless gate contains it, and down."""
        return (self.gate, self.down) if self.up is None else (self.gate, self.up, self.down)


_HALF = "self.gate(x).chunk(2, dim=-1)"
_PATTERNS = {  # of a form -> the activation, where it is a function
    "self.down(self.act(self.gate(x)) * self.up(x))": None,
    f"self.down(self.act({_HALF}[0]) * {_HALF}[1])": None,
    "self.down(F.silu(self.gate(x)) * self.up(x))": "silu",
}
_LIGER = "liger_kernel.transformers"
_LIGERS = {  # where one of Liger's forwards was written, which call its kernels
    f"{_LIGER}.geglu.LigerGEGLUMLP.forward": Gated("gate_proj", "up_proj", "down_proj", None, "gelu_tanh"),
    f"{_LIGER}.swiglu.LigerPhi3SwiGLUMLP.forward": Gated("gate_up_proj", None, "down_proj", None, "silu"),
    f"{_LIGER}.swiglu.LigerQwen3MoeSwiGLUMLP.forward": Gated("gate_proj", "up_proj", "down_proj", None, "silu"),
    f"{_LIGER}.swiglu.LigerSwiGLUMLP.forward": Gated("gate_proj", "up_proj", "down_proj", None, "silu"),
}


def gated_form(forward: Callable) -> Gated | None:
    """Returns the names of the parts in an MLP's forward that `gated_mlp` computes; None for any other forward. Not to
    be traced by a compiler, which cannot read source."""
    if (path := defining_path(forward)) in _LIGERS:
        return _LIGERS[path]
    ours = {"F": F, "nn": nn}  # what the patterns mean by these names
    code = code_of(forward)
    if not path or code is None or any(forward.__globals__.get(name, ours[name]) is not ours[name] for name in ours):
        return None
    return _form_of(code)


@cache
def _form_of(code: CodeType) -> Gated | None:
    for pattern, activation in _PATTERNS.items():
        if (names := names_in(code, pattern)) is not None:
            return Gated(names["gate"], names.get("up"), names["down"], names.get("act"), activation)
    return None


class AttentionForm(NamedTuple):
    """What an attention of Llama's shape does besides projections, rotary embedding and attention."""

    windows: bool = False
    """It passes a sliding window to the attention function."""
    head_norms: bool = False
    """It has norms of queries and keys, shared by all heads."""
    rotary_switch: str | None = None
    """Its attribute that says whether it has a rotary embedding."""
    eager: Any = None
    """Hugging Face's eager attention in its file."""


class LayerForm(NamedTuple):
    """A layer of Llama's shape, and its differences from Llama's."""

    attention: AttentionForm
    residual_scale: str | None
    """The layer's attribute that multiplies the outputs of attention and MLP before they are added."""
    mlp: Any = None
    """The names of its MLP's parts, if the layer is fused."""


_ATTENTIONS = {
    "llama.modeling_llama.LlamaAttention": AttentionForm(),
    "mistral.modeling_mistral.MistralAttention": AttentionForm(windows=True),
    "qwen2.modeling_qwen2.Qwen2Attention": AttentionForm(windows=True),
    "qwen3.modeling_qwen3.Qwen3Attention": AttentionForm(windows=True, head_norms=True),
    "smollm3.modeling_smollm3.SmolLM3Attention": AttentionForm(windows=True, rotary_switch="use_rope"),
}
_LAYERS = {
    "llama.modeling_llama.LlamaDecoderLayer": None,
    "granite.modeling_granite.GraniteDecoderLayer": "residual_multiplier",
}


def layer_form_of(layer: nn.Module) -> LayerForm | str:
    """Returns the form of a layer of Llama's shape; for any other layer says what differs."""
    layers, attentions = _known()
    source = source_of(_unwrapped(original_forward(layer)))
    if source not in layers:
        return "its forward is not that of Llama's layers"
    attention = layer.self_attn
    forward = computed_forward(attention)
    if (attention_source := source_of(forward)) not in attentions:
        return f"its attention's forward, {named(forward)}, is not Llama's"
    names = forward.__globals__
    if names.get("ALL_ATTENTION_FUNCTIONS") is not ALL_ATTENTION_FUNCTIONS:
        return "its attention looks its function up in a table of its own"
    form = attentions[attention_source]._replace(eager=names["eager_attention_forward"])
    return LayerForm(form, layers[source])


def is_llamas_rotary(function: Any) -> bool:
    """Returns whether a rotary embedding is Llama's, or Liger's kernel of it."""
    if defining_path(function) == "liger_kernel.transformers.rope.liger_rotary_pos_emb":
        return True
    if source_of(function) != _in_llama("apply_rotary_pos_emb"):
        return False
    return source_of(function.__globals__.get("rotate_half")) == _in_llama("rotate_half")


def is_llamas_norm(forward: Any) -> bool:
    """Returns whether a norm's forward is that of Llama's RMSNorm."""
    return source_of(forward) == _in_llama("LlamaRMSNorm.forward")


def _unwrapped(forward: Any) -> Any:
    """Returns a layer's forward inside Hugging Face's wrappers for checkpointing; each subclass (FSDP2's) adds one."""
    while defining_path(forward).startswith("transformers.modeling_layers.") and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return behind_renaming(forward)


@cache
def _in_llama(name: str) -> str:
    return source_in_file("transformers.models.llama.modeling_llama", name)


@cache
def _known() -> tuple[dict[str, str | None], dict[str, AttentionForm]]:
    """Returns the layers and the attentions by their source."""

    def source(name: str) -> str:
        module, _, cls = name.rpartition(".")
        return source_in_file(f"transformers.models.{module}", f"{cls}.forward")

    layers = {source(name): scale for name, scale in _LAYERS.items()}
    return layers, {source(name): form for name, form in _ATTENTIONS.items()}


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


def _expression_of(code: CodeType) -> ast.expr | None:
    """Inlines a function without branches to one expression in x, y and z, its arguments in order; else None."""
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
    form = _expression_of(code)
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
