"""docs/compatibility.md lists the tested orders of Liger and seqtile."""

from pathlib import Path

from models import liger_orders


def test_the_page_has_every_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert liger_orders.table() in page, f"docs/compatibility.md is out of date; expected\n{liger_orders.table()}"
