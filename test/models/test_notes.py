"""What is said, once, where a part that was asked for does nothing."""

import pytest
import torch

import seqtile
from models.layered import whole
from seqtile.models import base_model, mlp
from seqtile.models import layer as layers
from support.tiny import CHUNK, build, checkpointing

FITS, KEPT = f"a sequence fits in one chunk of {CHUNK} tokens", "activation checkpointing is off"


@pytest.mark.parametrize("head_groups", [None, 2])
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize(
    ("layer", "length", "training", "said"),
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
def test_said(
    layer: bool,
    length: int,
    training: bool,
    said: list[str],
    reentrant: bool | None,
    head_groups: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 256 tokens a layer keeps more than its weights take, with groups and without, unless it is checkpointed."""
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
