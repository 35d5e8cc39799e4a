"""Every variant of every model type computes the same tiled, is refused by name, or fails untiled too."""

from functools import cache

import pytest
from transformers import CONFIG_MAPPING

from seqtile.models.model_types import model_classes, model_types
from seqtile.proof.sweep import DIFFERS, FAILS, REFUSED, RIGHT, Row, sweep

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def rows_of(model_type: str) -> dict[str, Row]:
    return {row.variant: row for row in sweep(model_classes(model_type)[0], CONFIG_MAPPING[model_type]())}


@pytest.mark.full("2 to 60 s each of some thirty variants")
@pytest.mark.parametrize("model_type", model_types())
def test_a_type(model_type: str) -> None:
    try:
        rows = rows_of(model_type)
    except Exception as error:  # raised by Hugging Face's code
        pytest.skip(f"cannot be built: {error}")
    if (row := rows["as it is"]).how == FAILS:
        pytest.skip(f"does not run on text alone: {row.reason}")
    assert not [row for row in rows.values() if row.how == DIFFERS]
    assert sum(row.how == RIGHT for row in rows.values()) > len(rows) // 2


@pytest.mark.full("twenty seconds of doge", but=("gpt2-*",))
@pytest.mark.parametrize(
    ("model_type", "variant", "reason"),
    [
        ("gpt2", "reorder_and_upcast_attn=True", "before it asks for an attention function"),
        ("doge", "is_moe=True", "DogeCDMoE: it fails when it is tiled"),
    ],
)
def test_what_is_refused(model_type: str, variant: str, reason: str) -> None:
    """An attention that computes everything itself, with a mask of all tokens but queries of one chunk; a mixture of
    experts that also returns routes."""
    if (row := rows_of(model_type)[variant]).how == FAILS:  # doge, in transformers 5.16
        pytest.skip(f"fails untiled: {row.reason}")
    assert row.how == REFUSED and reason in row.reason
