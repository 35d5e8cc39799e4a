"""The picture on top of README shows what is predicted today."""

from pathlib import Path

from benchmark.prediction import PICTURE, draw, longest


def test_picture(tmp_path: Path) -> None:
    """`make table` would change nothing, and the lines are in the order of README's story."""
    found = longest()
    assert list(found.values()) == sorted(found.values())
    for tokens in found.values():
        assert f"{tokens:,} tokens" in PICTURE.read_text(), f"out of date: {found}; make table draws it"
    draw(tmp_path / "peak.svg")
    assert (tmp_path / "peak.svg").read_text() == PICTURE.read_text()
