"""The page's tables of families and of image models over ranks."""

import re
from pathlib import Path

import pytest

from sp import image_types
from sp.images import DEALT, MODELS
from sp.recurrences import FAMILIES
from sp.steps import NOT_SPREAD

PAGE = Path(__file__).parents[2] / "docs" / "several-gpus.md"


def section(heading: str) -> tuple[str, list[str]]:
    """Returns its text, and the model types in the first column of its table."""
    text = re.split(r"\n##+ ", PAGE.read_text().partition(f"\n### {heading}")[2])[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return text, sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))


def test_families() -> None:
    """docs/several-gpus.md lists the tested families and the refused ones."""
    text, listed = section("Recurrences")
    assert listed == sorted({model_type for model_type, _ in FAMILIES.values()})
    refused = re.findall(r"`(\w+)`", text.partition("Refused, by the class's name:")[2])
    assert refused and set(refused) <= NOT_SPREAD.keys()


def test_images() -> None:
    text, listed = section("Images")
    dealt = re.findall(r"^\| `(\w+)`.* yes \|$", text, re.MULTILINE)
    assert listed == sorted(MODELS) and set(dealt) == DEALT


@pytest.mark.dist
@pytest.mark.full("two minutes: a step of every type on 1, 2 and 4 ranks")
def test_images_over_ranks() -> None:
    """The table of image types equals the result of running them."""
    assert image_types.table() in section("Images")[0]
