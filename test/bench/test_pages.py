"""The pages show plans and results exactly as `make table` writes them."""

import shutil
from pathlib import Path

from benchmark import pages, plans, prediction


def test_make_table_changes_nothing(tmp_path: Path) -> None:
    shown = {*pages.PAGES.values(), *plans.PAGES.values(), prediction.PICTURE}
    for name in shown:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pages.ROOT / name, tmp_path / name)
    pages.write(tmp_path)
    for name in shown:
        assert (tmp_path / name).read_text() == (pages.ROOT / name).read_text(), f"{name} is old; make table writes it"


def test_the_picture_tells_readmes_story() -> None:
    """Each line of the picture ends further right than the previous one."""
    found = list(prediction.longest().values())
    assert found == sorted(found)
