"""The tables of options are those of the commands."""


def test_the_page_is_up_to_date() -> None:
    from dev import options

    assert options.PAGE.read_text() == options.page(), "docs/options.md is old; make table writes it"
    assert min(block.count("\n") for block in options.blocks().values()) > 5
