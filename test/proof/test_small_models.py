"""The chunks of small models: long where a layer keeps nothing for the backward, short elsewhere."""

from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

import seqtile
from seqtile import rules
from seqtile.ops.gated_mlp import MLPChunk
from support.tiny import build

SHORT, LONG = 48, 100  # tokens; the width of the tiny model, and what is found by bytes


@pytest.fixture(autouse=True)
def long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MIN_CHUNK_TOKENS", 8)
    monkeypatch.setattr(rules, "CHUNK_MULTIPLE", 4)
    monkeypatch.setattr(rules, "MLP_CHUNK_BYTES", LONG * (5 * 130 + 48) * 4)


def step(model: PreTrainedModel, tokens: int, grad: bool = True) -> tuple[set[int], list[torch.Tensor]]:
    """Returns the rows of the chunks that MLPs are computed in, and the gradients."""
    rows, begin = set(), MLPChunk.__init__

    def counted(self, x: torch.Tensor, count: int, *others: object) -> None:
        rows.add(count)
        begin(self, x, count, *others)

    torch.manual_seed(0)
    ids = torch.randint(1, 200, (1, tokens))
    with patch.object(MLPChunk, "__init__", counted), torch.set_grad_enabled(grad):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if grad:
            loss.backward()
    return rows, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("reentrant", "layer", "tokens", "rows"),
    [
        (None, False, 60, {SHORT}),
        (False, False, 60, set()),
        (True, False, 60, set()),
        (False, False, 250, {LONG}),
        (True, False, 250, {LONG}),
        (None, True, 60, {SHORT}),
        (False, True, SHORT, set()),
        (False, True, 60, {60}),  # a fused layer, in one chunk
        (True, True, 250, {LONG}),
    ],
)
def test_chunks(reentrant: bool | None, layer: bool, tokens: int, rows: set[int]) -> None:
    """Of the forward and the recomputation; gradients are the untiled model's, bit by bit where MLPs run untiled."""
    untiled = build("llama").train()
    tiled = deepcopy(untiled)
    seqtile.apply_seqtile(tiled, loss=False, layer=layer, check=False)
    for model in (untiled, tiled) if reentrant is not None else ():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    (_, right), (found, ours) = step(untiled, tokens), step(tiled, tokens)
    assert found == rows
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if rows else 0, atol=1e-6 if rows else 0)
    status = seqtile.status(tiled)
    part = status.layer if layer else status.mlp
    assert part.chunk_tokens == ((SHORT,) if reentrant is None else (LONG,))
    assert part.untiled_tokens == ((SHORT,) if reentrant is None or layer else (LONG,))


def test_chunks_without_gradients() -> None:
    model = build("llama").train()
    seqtile.apply_seqtile(model, loss=False, check=False)
    assert step(model, 60, grad=False)[0] == set() and step(model, 250, grad=False)[0] == {LONG}


@pytest.mark.parametrize("layer", [False, True])
def test_layers_in_two_parts_run_untiled(layer: bool) -> None:
    """A layer of another shape than Llama's would compute more in one chunk than untiled."""
    untiled = build("gemma2").train()
    tiled = deepcopy(untiled)
    seqtile.apply_seqtile(tiled, loss=False, layer=layer, check=False)
    for model in (untiled, tiled):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with patch("seqtile.models.forward.layer.call_layer_in_chunks", side_effect=AssertionError):
        found, ours = step(tiled, 60)
    assert found == set() and all(map(torch.equal, ours, step(untiled, 60)[1]))


@pytest.mark.parametrize(("reentrant", "layer"), [(False, True), (True, False)])
def test_chunks_under_hooks_around_a_step(reentrant: bool, layer: bool) -> None:
    """A backward inherits them, as of TRL's activation offloading. With dropout, a recomputation in other chunks would
    draw other numbers."""
    model = build("llama").train()
    seqtile.apply_seqtile(model, loss=False, layer=layer, check=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert step(model, 250)[0] == {LONG}
