"""The page's table of families that are spread over ranks."""

import re
from pathlib import Path

from sp.recurrences import FAMILIES
from sp.steps import NOT_SPREAD


def test_the_pages_table() -> None:
    """docs/sequence-parallelism.md lists the families that are tested, and those that are refused."""
    page = (Path(__file__).parents[2] / "docs" / "sequence-parallelism.md").read_text()
    section = page.partition("## Recurrences")[2].partition("\n## ")[0]
    listed = [
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(listed) == sorted({model_type for model_type, _ in FAMILIES.values()})
    refused = re.findall(r"`(\w+)`", section.partition("Refused, by the class's name:")[2])
    assert refused and set(refused) <= NOT_SPREAD.keys()
