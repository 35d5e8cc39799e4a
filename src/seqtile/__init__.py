"""seqtile: the loss and the MLP of Hugging Face models, in memory that does not grow with sequence length.

Names are imported when they are first used: `import seqtile` loads neither torch nor transformers. Type checkers and
editors read them in `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_SUBPACKAGES = ("integrations", "memory", "models", "modules", "offload", "sp")
_NAMES = {
    "LossMetrics": "seqtile.ops.head.cross_entropy",
    "LowRank": "seqtile.ops.linear",
    "TokenValues": "seqtile.ops.head.log_probs",
    "apply_seqtile": "seqtile.models.apply",
    "evaluate": "seqtile.evaluation",
    "fit": "seqtile.fitting",
    "gated_mlp": "seqtile.ops.gated_mlp",
    "linear_cross_entropy": "seqtile.ops.head.cross_entropy",
    "linear_divergence": "seqtile.ops.head.divergence",
    "linear_log_probs": "seqtile.ops.head.log_probs",
    "linear_topk_divergence": "seqtile.ops.head.topk",
    "restore": "seqtile.models.apply",
    "share_prefixes": "seqtile.sp.apply",
    "status": "seqtile.models.status",
    "tiled": "seqtile.ops.tiled",
    "tokenwise": "seqtile.declared",
    "use_triton": "seqtile.kernels.dispatch",
}


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"seqtile.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    if name == "__all__":
        return [*_NAMES, *_SUBPACKAGES, *_entries()]
    if name.startswith("apply_seqtile_to_") and name in _entries():
        return _entries()[name]
    raise AttributeError(f"module 'seqtile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def _entries() -> dict[str, Any]:
    """apply_seqtile_to_llama and so on: one for each model type with a head over a vocabulary."""
    return import_module("seqtile.models.apply").ENTRIES
