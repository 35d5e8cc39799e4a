"""What a mutant is: a small wrong change to the package, and the tests that should notice it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    """Below src/seqtile."""
    old: str
    """What stands there, exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files, or node ids, below test."""
    select: str = ""
    """Passed to pytest's -k."""
    interpreted: bool = False
    """Whether they run in Triton's interpreter: a kernel that nothing else runs without a GPU."""
    dist: bool = False
    """Whether the tests are those that start several processes."""
    note: str = ""
    """Why no test notices it, where that is so and right."""
