"""Groups of ranks."""

import pytest

from seqtile import sp


def test_without_torch_distributed() -> None:
    with pytest.raises(ValueError, match="start the script by torchrun"):
        sp.initialize(2)
