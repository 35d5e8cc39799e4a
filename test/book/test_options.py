"""The tables of options are those of the commands."""

from dev import options


def test_the_page_is_up_to_date() -> None:
    assert options.PAGE.read_text() == options.page(), "docs/api.md is old; make table writes it"
    assert min(block.count("\n") for block in options.blocks().values()) > 5
