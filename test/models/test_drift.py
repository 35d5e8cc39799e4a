"""The code that the tiled forwards stand in for is the code they were written for."""

import ast
import inspect
import textwrap
import types

import pytest

from seqtile.arch import ARCHS
from seqtile.models.loss import tiled_loss_forward
from seqtile.models.placement import Options
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


BALANCE = [  # what a mixture of experts adds: a loss that balances them
    "output_router_logits = output_router_logits if output_router_logits is not None else "
    "self.config.output_router_logits",
    "aux_loss = None",
    "if output_router_logits:\n    aux_loss = load_balancing_loss_func(outputs.router_logits, self.num_experts, "
    "self.num_experts_per_tok, attention_mask)\n    if labels is not None:\n"
    "        loss += self.router_aux_loss_coef * aux_loss.to(loss.device)",
]


def without_balance(body: list[str]) -> list[str]:
    for statement in BALANCE:
        body.remove(statement)
    text = "\n\n".join(body)
    for theirs, ours in (
        (", output_router_logits=output_router_logits", ""),
        ("MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss", "CausalLMOutputWithPast(loss=loss"),
        (", router_logits=outputs.router_logits", ""),
    ):
        assert text.count(theirs) == 1, theirs
        text = text.replace(theirs, ours)
    return text.split("\n\n")


@pytest.mark.parametrize("arch", CLASSES)
def test_causal_lm_forward(arch: str) -> None:
    """One forward for all architectures stands or falls with their being the same, but for what Arch names."""
    body = body_of(ARCHS[arch].causal_lm.forward)
    if ARCHS[arch].routed:
        body = without_balance(body)
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
    """The tiled forward gives what it is passed by position the names that Hugging Face's has for it."""
    *names, rest = list(inspect.signature(ARCHS[arch].causal_lm.forward).parameters)
    common = ["self", "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels"]
    assert names == [*common, "use_cache", *["output_router_logits"] * ARCHS[arch].routed, "logits_to_keep"]
    assert rest == "kwargs"

    def original(self: object, **inputs: object) -> tuple:
        return tuple(inputs.items())

    original.__signature__ = inspect.signature(ARCHS[arch].causal_lm.forward)
    forward = tiled_loss_forward(ARCHS[arch], Options(), original)
    found = forward(types.SimpleNamespace(training=False), *names[1:])
    assert found == tuple(zip(names[1:], names[1:], strict=True))


@pytest.mark.parametrize("arch", CLASSES)
def test_mlp_forward(arch: str) -> None:
    if "MLP" not in ARCHS[arch].mlps:
        pytest.skip("has no dense MLP")
    body = body_of(getattr(ARCHS[arch].modeling, f"{ARCHS[arch].prefix}MLP").forward)
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


LAYERED = [name for name, arch in ARCHS.items() if arch.layer]


@pytest.mark.parametrize("arch", LAYERED)
def test_layer_forward(arch: str) -> None:
    """A layer that is tiled whole is Llama's, but for what its Arch names."""
    body = body_of(ARCHS[arch].layer_class.forward)
    if scale := ARCHS[arch].residual_scale:
        assert sum(line.count(f" * self.{scale}") for line in body) == 2
        body = [line.replace(f" * self.{scale}", "") for line in body]
    assert body == body_of(ARCHS["llama"].layer_class.forward)
    assert [line for line in body if "hidden_states = " in line and "self_attn" not in line] == [
        "hidden_states = self.input_layernorm(hidden_states)",
        "hidden_states = residual + hidden_states",
        "hidden_states = self.post_attention_layernorm(hidden_states)",
        "hidden_states = self.mlp(hidden_states)",
        "hidden_states = residual + hidden_states",
    ]


@pytest.mark.parametrize("arch", LAYERED)
def test_attention_forward(arch: str) -> None:
    """Of itself it uses what a tiled layer knows of, and nothing else."""
    forward = getattr(ARCHS[arch].modeling, f"{ARCHS[arch].prefix}Attention").forward
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "config", "layer_idx"}
    known |= {"training", "attention_dropout", "scaling"}
    assert used >= known
    assert used - known <= {"q_norm", "k_norm", "use_rope", "sliding_window"}
    text = inspect.getsource(forward)
    assert ("sliding_window=" in text) == ARCHS[arch].windows
    assert list(inspect.signature(forward).parameters) == [
        *("self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs")
    ]
