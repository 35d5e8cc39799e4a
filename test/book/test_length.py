"""README is read in three minutes, the book in an afternoon."""

from dev import sizes


def test_readme_and_book() -> None:
    assert len((sizes.ROOT / "README.md").read_text().splitlines()) <= 90
    assert len(sizes.book()) <= 25 and sum(sizes.book().values()) <= 25_000
