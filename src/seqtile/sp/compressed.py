"""Keys and values of latent attention (MLA), sent compressed if that takes fewer bytes than sending them by heads.

Such an attention makes keys and values of all heads from one latent a token [B, 1, S, R] and one rotary part
[B, 1, S, P], in its method `expand_kv`. Over ranks, latents and rotary parts of the whole sequence go to every rank,
once, and each expands them for its own heads. Source: DeepSeek-V2 (arXiv:2405.04434, 2.1).
"""

import copy
import inspect

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seqtile.sp.backends import Overridden
from seqtile.sp.groups import SequenceParallel

_PARTS = ("kv_b_proj", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_heads")


def is_latent(module: nn.Module) -> bool:
    """Returns whether a module is an attention of Hugging Face's that expands latents as above."""
    known = type(module).__module__.startswith("transformers.models.") and "expand_kv" not in vars(module)
    method = getattr(type(module), "expand_kv", None)
    if not known or method is None or not all(hasattr(module, part) for part in _PARTS):
        return False
    return list(inspect.signature(method).parameters) == ["self", "kv_nope", "k_rot"]


class CompressedKeys:
    """Replaces an attention's `expand_kv`."""

    def __init__(self, module: nn.Module, sp_group: SequenceParallel):
        self.module, self.sp_group = module, sp_group
        self.is_whole = False
        """As of `Recurrence`."""

    def __deepcopy__(self, memo: dict) -> "CompressedKeys":
        return CompressedKeys(copy.deepcopy(self.module, memo), self.sp_group)

    @property
    def elements(self) -> tuple[int, int]:
        """The elements that a token sends to all ranks, compressed and by heads."""
        module, ranks = self.module, self.sp_group.size
        a_head = module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim
        return ranks * (module.kv_lora_rank + module.qk_rope_head_dim), max(ranks, module.num_heads) * a_head

    @property
    def is_chosen(self) -> bool:
        """True if they travel compressed: it is less, and the projection can be read head by head."""
        projection = self.module.kv_b_proj
        plain = type(projection) is nn.Linear and not isinstance(projection.weight, DTensor)
        hooked = projection._forward_hooks or projection._forward_pre_hooks or hasattr(projection.weight, "ds_id")
        compressed, by_heads = self.elements
        return self.sp_group.size > 1 and not self.is_whole and compressed < by_heads and plain and not hooked

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of this rank's tokens: as they are, if they travel compressed."""
        return (kv_nope, k_rot) if self.is_chosen else type(self.module).expand_kv(self.module, kv_nope, k_rot)

    def expand(self, kv_nope: Tensor, k_rot: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Returns keys [B, h, S, K] and values [B, h, S, V] of these heads, of [B, 1, S, R] and [B, 1, S, P]."""
        projection = self.module.kv_b_proj
        width = self.module.qk_nope_head_dim + self.module.v_head_dim
        rows = slice(heads.start * width, heads.stop * width)
        bias = None if projection.bias is None else projection.bias[rows]
        part = Overridden(self.module, kv_b_proj=lambda latent: F.linear(latent, projection.weight[rows], bias))
        return type(self.module).expand_kv(part, kv_nope, k_rot)
