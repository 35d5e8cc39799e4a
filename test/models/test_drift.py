"""The code that the tiled forwards stand in for is the code they were written for."""

import ast
import inspect
import textwrap

import pytest

import seqtile.models.causal_lm
from seqtile.models.arch import ARCHS
from tiny import CLASSES, build


def body_of(function) -> list[str]:
    """The statements of a function, without annotations and docstring."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("_")
    statements = tree.body[1:] if ast.get_docstring(tree) else tree.body
    return [ast.unparse(statement) for statement in statements]


LOGITS = {  # what an architecture does to its logits, and a field of its Arch names
    "softcap": (
        "if self.config.{0} is not None:\n    logits = logits / self.config.{0}\n    logits = torch.tanh(logits)\n"
        "    logits = logits * self.config.{0}"
    ),
    "logit_scale": "logits = logits * self.{0}",
    "logit_divisor": "logits = logits / self.config.{0}",
}


@pytest.mark.parametrize("arch", CLASSES)
def test_causal_lm_forward(arch: str) -> None:
    """One forward for all architectures stands or falls with their being the same, but for what Arch names."""
    body = body_of(ARCHS[arch].causal_lm.forward)
    for field, statement in LOGITS.items():
        if name := getattr(ARCHS[arch], field):
            body.remove(statement.format(name))
    body = [
        line.replace(
            "logits, labels, self.vocab_size,", "logits=logits, labels=labels, vocab_size=self.config.vocab_size,"
        )
        for line in body
    ]
    assert body == body_of(ARCHS["llama"].causal_lm.forward)
    text = "\n".join(body)
    assert "outputs: _ = self.model(" in text
    assert "self.lm_head(" in text and "self.loss_function(logits=logits, labels=labels," in text
    assert body[-1].startswith("return CausalLMOutputWithPast(loss=loss, logits=logits,")


@pytest.mark.parametrize("arch", CLASSES)
def test_causal_lm_arguments(arch: str) -> None:
    theirs = list(inspect.signature(ARCHS[arch].causal_lm.forward).parameters)
    tree = ast.parse(inspect.getsource(seqtile.models.causal_lm))
    ours = next(node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "forward")
    assert [argument.arg for argument in ours.args] + ["kwargs"] == [*theirs[:-1], "skip_logits", "kwargs"]


@pytest.mark.parametrize("arch", CLASSES)
def test_mlp_forward(arch: str) -> None:
    mlp = getattr(ARCHS[arch].modeling, ARCHS[arch].mlp_name)
    body = body_of(mlp.forward)
    if hasattr(build(arch).model.layers[0].mlp, "gate_up_proj"):
        assert body == [
            "up_states = self.gate_up_proj(hidden_states)",
            "gate, up_states = up_states.chunk(2, dim=-1)",
            "up_states = up_states * self.activation_fn(gate)",
            "return self.down_proj(up_states)",
        ]
    else:
        assert body == [
            "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
            "return down_proj",
        ]
