import json

import pytest
import torch
from benchmark import loss_curves


@pytest.mark.parametrize("run", ["tiled", "permuted 2"])
def test_every_run_is_the_same_training(run: str) -> None:
    untiled, found = (loss_curves.curve(name, "float32", steps=3, tokens=512) for name in ("untiled", run))
    assert untiled[2] < untiled[0]
    assert found == pytest.approx(untiled, rel=1e-5)


def test_channels_are_permuted() -> None:
    """Permuted channels change the weights but not the function."""
    plain, permuted = (loss_curves.model_of(name).double() for name in ("untiled", "permuted 1"))
    assert all(not a.equal(b) for a, b in zip(plain.parameters(), permuted.parameters(), strict=True) if a.dim() == 2)
    ids = loss_curves.text(100)[None]
    torch.testing.assert_close(permuted(ids).logits, plain(ids).logits, rtol=0, atol=1e-6)  # norms in float32


@pytest.mark.parametrize("dtype", loss_curves.DTYPES)
def test_tiled_is_about_as_near_as_another_order_of_summation(dtype: str) -> None:
    """In the committed run of 1.08 million tokens."""
    curves = json.loads(loss_curves.FILE.read_text())["curves"][dtype]
    assert all(len(losses) == loss_curves.STEPS and losses[-1] < losses[0] / 2 for losses in curves.values())
    tiled, *permuted = (loss_curves.apart(curves, run) for run in ("tiled", *loss_curves.PERMUTED))
    mean, largest = (max(found[at] for found in permuted) for at in (0, 1))
    assert tiled[0] <= 2 * mean and tiled[1] <= 2 * largest
    assert abs(tiled[2]) <= mean, "the tiled loss is neither above nor below"
