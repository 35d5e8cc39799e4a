"""The picture on top of README shows what is predicted today."""

from pathlib import Path

from benchmark.prediction import PICTURE, draw, longest

README = Path(__file__).parents[2] / "README.md"


def test_picture(tmp_path: Path) -> None:
    """`make table` would change nothing, and the lines are in the order of README's story."""
    found = longest()
    assert list(found.values()) == sorted(found.values())
    for tokens in found.values():
        assert f"{tokens:,} tokens" in PICTURE.read_text(), f"out of date: {found}; make table draws it"
        rounded = f"{tokens / 1e6:.1f}M" if tokens > 1e6 else f"{tokens / 1000:.0f}K"
        assert f" {rounded} " in README.read_text().replace("\n", " "), f"README does not say {rounded}"
    draw(tmp_path / "peak.svg")
    assert (tmp_path / "peak.svg").read_text() == PICTURE.read_text()
