"""Models with whole layers tiled, sequences for them, and what is compared."""

import copy

import pytest
import torch
from torch import nn

import seqtile
from seqtile.arch import ARCHS
from support.assertions import relative_error
from support.tiny import CHUNK, batch_of

LAYERED = [name for name, arch in ARCHS.items() if arch.layer]
KINDS = [pytest.param(None, id="plain"), pytest.param(False, id="ckpt"), pytest.param(True, id="reentrant")]


def whole(length: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One sequence without padding, for which attention needs no mask."""
    batch = batch_of(1, length, device)
    del batch["attention_mask"]
    return batch


def tiled_copy(model: nn.Module, head_groups: int | str | None = None) -> nn.Module:
    tiled = copy.deepcopy(model)
    seqtile.apply_seqtile(tiled, layer=True, head_groups=head_groups, chunk_tokens=CHUNK)
    return tiled


def assert_equal(ours: tuple, theirs: tuple) -> None:
    """Two results of loss_and_gradients."""
    assert relative_error(ours[0], theirs[0]) <= 1e-6
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        if gradient is None:
            assert ours[1][name] is None, name
        else:
            error = relative_error(ours[1][name], gradient)
            assert error <= 1e-5, f"{name}: relative error {error:.1e}"
