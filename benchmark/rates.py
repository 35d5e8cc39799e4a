"""The rates at which `predicted_times` prices operations: about what an H200 reaches."""

from typing import NamedTuple


class Rates(NamedTuple):
    flops: float = 750e12
    """FLOP a second, of matmuls."""
    bytes: float = 4.2e12
    """Bytes a second, read and written."""

    def seconds(self, flops: float, moved: float) -> float:
        """Predicts the time of an operation; `moved` are the bytes that no product hides."""
        return flops / self.flops + moved / self.bytes


H200 = Rates()
