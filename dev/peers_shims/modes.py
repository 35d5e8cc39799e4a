"""What of seqtile is applied to models: the modes in which suites that train models are run."""

from typing import Any

from seqtile.arch import ARCHS

MODES: dict[str, dict[str, Any] | None] = {
    "untiled": None,
    "mlp": {},
    "layer": {"layer": True},
    "groups": {"layer": True, "head_groups": 2},
}


def architectures(mode: str = "mlp") -> list[str]:
    """The model types to which a mode can be applied."""
    return [name for name, arch in ARCHS.items() if arch.layer or mode in ("untiled", "mlp")]
