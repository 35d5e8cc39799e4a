"""What is said, once, where a part that was asked for does nothing, and what status says of layers."""

import pytest
import torch
from torch import nn

import seqtile
from models.layered import in_groups, whole
from seqtile.models import base_model, mlp
from seqtile.models import layer as layers
from support.choice import every_value
from support.tiny import CHUNK, batch_of, build, checkpointing

FITS, KEPT = f"a sequence fits in one chunk of {CHUNK} tokens", "activation checkpointing is off"


@pytest.mark.full("of 28 models", but=every_value)
@in_groups
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize(
    "case",
    [
        (False, CHUNK + 1, True, []),
        (False, CHUNK, True, [FITS]),
        (False, CHUNK, False, []),
        (True, CHUNK, True, [FITS]),
        (True, CHUNK + 1, True, []),
        (True, 256, True, [KEPT]),
        (True, 256, False, []),
    ],
)
def test_said(case: tuple, reentrant: bool | None, head_groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 tokens a layer keeps more than its weights take, with groups and without, unless it is checkpointed."""
    layer, length, training, said = case
    found: list[str] = []
    for room in (base_model, layers, mlp):
        monkeypatch.setattr(room.logger, "warning_once", found.append)
    model = build("llama", intermediate_size=70)
    seqtile.apply_seqtile(model, layer=layer, head_groups=head_groups if layer else None, chunk_tokens=CHUNK)
    checkpointing(model, reentrant)
    with torch.set_grad_enabled(training):
        model(**whole(length))
    said = [text for text in said if text != KEPT or reentrant is None]
    assert [[text in message for text in said] for message in dict.fromkeys(found)] == [[True]] * len(said)


def test_status_text() -> None:
    model = build("llama")
    assert seqtile.status(model).layer is None
    assert str(seqtile.status(model)).endswith("loss  not tiled: transformers\n  mlp   not tiled: transformers")
    seqtile.apply_seqtile(model, layer=True, head_groups=2, chunk_tokens=CHUNK)
    text = str(seqtile.status(model))
    assert "  layer seqtile, 50 tokens a chunk, 2 of 2 fused, attention by 2 groups of heads\n" in text
    assert "a sequence of at most 50 tokens fits in a chunk: its MLPs and layers run untiled" in text
    assert "activation checkpointing is off, so every layer keeps what its attention saves as well as its input" in text
    checkpointing(model, False)
    assert "checkpointing is off" not in str(seqtile.status(model))
    checkpointing(model, None)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    why = "attention by groups of heads reads its weights, and its activation is GELU"
    assert f"REFUSES: {why}" in str(seqtile.status(model).layer)
    with pytest.raises(ValueError, match=why):
        model(**batch_of(1, 101))
