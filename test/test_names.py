"""The names of the package, each imported when it is first used."""

import subprocess
import sys

import pytest

import seqtile
from seqtile.models import ENTRIES


def test_all_of_them() -> None:
    names = seqtile.__all__
    assert set(ENTRIES) < set(names) <= set(dir(seqtile)) and len(set(names)) == len(names)
    for name in names:
        assert getattr(seqtile, name) is not None
    assert seqtile.apply_seqtile_to_llama is ENTRIES["apply_seqtile_to_llama"]
    with pytest.raises(AttributeError, match="module 'seqtile' has no attribute 'apply_seqtile_to_vit'"):
        seqtile.apply_seqtile_to_vit  # noqa: B018


def test_nothing_is_loaded_before() -> None:
    script = "import sys, seqtile; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600).stdout == "[]\n"
    script = "from seqtile import *; print(apply_seqtile_to_qwen3.__name__, tiled.__name__, sp.__name__)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600).stdout
    assert found == "apply_seqtile_to_qwen3 tiled seqtile.sp\n"
