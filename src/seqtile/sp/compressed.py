"""Keys and values of latent attention (MLA), sent compressed if that takes fewer bytes than sending them by heads.

Such an attention makes the keys and values of all heads from one latent [B, 1, S, R] and one rotary part [B, 1, S, P]
per token, in its method `expand_kv`. Over ranks, every rank receives the latents and rotary parts of the whole sequence
once, and expands them for its own heads. Source: DeepSeek-V2 (arXiv:2405.04434, 2.1).
"""

import copy
import inspect

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seqtile.ops.state import Overridden
from seqtile.sp.groups import SequenceParallel

_PARTS = ("kv_b_proj", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_heads")


def is_latent(module: nn.Module) -> bool:
    """Returns whether a module is a Hugging Face attention that expands latents in this way."""
    known = type(module).__module__.startswith("transformers.models.") and "expand_kv" not in vars(module)
    method = getattr(type(module), "expand_kv", None)
    if not known or method is None or not all(hasattr(module, part) for part in _PARTS):
        return False
    return list(inspect.signature(method).parameters) == ["self", "kv_nope", "k_rot"]


class CompressedKeys:
    """Replaces an attention's `expand_kv`."""

    def __init__(self, module: nn.Module, sp_group: SequenceParallel):
        self.module, self.sp_group = module, sp_group
        self.is_bypassed = False
        """See `Recurrence`."""

    def __deepcopy__(self, memo: dict) -> "CompressedKeys":
        return CompressedKeys(copy.deepcopy(self.module, memo), self.sp_group)

    @property
    def elements(self) -> tuple[int, int]:
        """The number of elements per token that are sent to all ranks, compressed and by heads."""
        module, ranks = self.module, self.sp_group.size
        a_head = module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim
        return ranks * (module.kv_lora_rank + module.qk_rope_head_dim), max(ranks, module.num_heads) * a_head

    @property
    def is_chosen(self) -> bool:
        """True if keys and values are sent compressed: this is less, and the projection can be read head by head."""
        projection = self.module.kv_b_proj
        plain = type(projection) is nn.Linear and not isinstance(projection.weight, DTensor)
        hooked = projection._forward_hooks or projection._forward_pre_hooks or hasattr(projection.weight, "ds_id")
        compressed, by_heads = self.elements
        return self.sp_group.size > 1 and not self.is_bypassed and compressed < by_heads and plain and not hooked

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of this rank's tokens; if they are sent compressed, returns the arguments
        unchanged."""
        return (kv_nope, k_rot) if self.is_chosen else type(self.module).expand_kv(self.module, kv_nope, k_rot)

    def expand(self, kv_nope: Tensor, k_rot: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Expands [B, 1, S, R] and [B, 1, S, P] to keys [B, h, S, K] and values [B, h, S, V] of these heads."""
        projection = self.module.kv_b_proj
        width = self.module.qk_nope_head_dim + self.module.v_head_dim
        rows = slice(heads.start * width, heads.stop * width)
        bias = None if projection.bias is None else projection.bias[rows]
        part = Overridden(self.module, kv_b_proj=lambda latent: F.linear(latent, projection.weight[rows], bias))
        return type(self.module).expand_kv(part, kv_nope, k_rot)
