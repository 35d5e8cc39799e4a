"""Tables in Markdown, and blocks of pages that are written by a command: what stands between two comments."""

import textwrap


def fill(text: str, indent: str = "") -> str:
    """Returns a paragraph in lines of at most 130 characters, all but the first indented. A link with hyphens stays
    whole, and a per cent sign behind its number: at the beginning of a line it would make that a comment."""
    filled = textwrap.fill(text.replace(" %", "\0%"), 130, subsequent_indent=indent, break_on_hyphens=False)
    return filled.replace("\0%", " %")


def rewritten(text: str, name: str, block: str) -> str:
    """Returns a page's text with another block between `<!-- name -->` and `<!-- end of name -->`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{block}\n\n{end}{after}"


def table(rows: list[list[str]], words: int = 1, aligned: bool = False) -> str:
    """Markdown; the first row is the header, the first columns are words and the others figures. `aligned`: with
    spaces, for a terminal."""
    rows = [rows[0], ["---"] * words + ["---:"] * (len(rows[0]) - words), *rows[1:]]
    if aligned:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        ways = "<" * words + ">" * (len(widths) - words)
        rows = [[f"{cell:{way}{width}}" for cell, way, width in zip(row, ways, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
