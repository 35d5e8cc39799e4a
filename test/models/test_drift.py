"""The Hugging Face code for which `decoder_layer` and the tiled loss were written has not changed.

All other code is recognised by its source when it is met. What norms and the rotary embedding compute is compared in
test_layer_gradients.py.
"""

import ast
import inspect

import pytest
from transformers.loss import loss_utils

from seqtile.models.recognise import _ATTENTIONS, _LAYERS, source_in_file


def lines_of(name: str) -> list[str]:
    module, _, cls = name.rpartition(".")
    return source_in_file(f"transformers.models.{module}", f"{cls}.forward").split("\n")


def test_the_loss() -> None:
    """Hugging Face's loss shifts, flattens, and calls torch's cross-entropy in float32."""
    functions = (loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy)
    text = "\n".join(ast.unparse(ast.parse(inspect.getsource(inspect.unwrap(function)))) for function in functions)
    for part in (
        "logits = logits.float()",
        "labels = nn.functional.pad(labels, (0, 1), value=ignore_index)",
        "shift_labels = labels[..., 1:].contiguous()",
        "fixed_cross_entropy(logits, shift_labels, num_items_in_batch, ignore_index, **kwargs)",
        "reduction = 'sum' if num_items_in_batch is not None else 'mean'",
        "nn.functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=reduction)",
        "loss = loss / num_items_in_batch",
    ):
        assert part in text, part


@pytest.mark.parametrize("name", _LAYERS)
def test_layer_forward(name: str) -> None:
    """A layer of Llama's shape runs norm, attention, norm, MLP in sequence."""
    lines = lines_of(name)
    if scale := _LAYERS[name]:
        assert sum(line.count(f" * self.{scale}") for line in lines) == 2
        lines = [line.replace(f" * self.{scale}", "") for line in lines]
    assert [line for line in lines if "hidden_states = " in line and "self_attn" not in line] == [
        "hidden_states = self.input_layernorm(hidden_states)",
        "hidden_states = residual + hidden_states",
        "hidden_states = self.post_attention_layernorm(hidden_states)",
        "hidden_states = self.mlp(hidden_states)",
        "hidden_states = residual + hidden_states",
    ]


@pytest.mark.parametrize("name", _ATTENTIONS)
def test_attention_forward(name: str) -> None:
    """It uses only attributes that a tiled layer supports."""
    text, form = "\n".join(lines_of(name)), _ATTENTIONS[name]
    used = {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "config", "layer_idx"}
    known |= {"training", "attention_dropout", "scaling"}
    more = {"q_norm", "k_norm"} if form.head_norms else set()
    more |= {form.rotary_switch} if form.rotary_switch else set()
    assert used - {"sliding_window"} == known | more
    assert ("sliding_window=" in text) == form.windows
