"""Attentions that this machine lacks, or that a user might register, implemented with dense masks: flash attention 3 as
its documentation defines it, which Hugging Face's wrapper calls as if it were installed, and three user attentions."""

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from seqtile.attention.heads import RankHeads, Rows
from seqtile.attention.layout import Layout
from seqtile.attention.local import LocalAttention

OWN = {"of booleans": sdpa_mask, "of addends": eager_mask, "of squares": None}
INSTALLED = ("sdpa", "eager", "flash_attention_3", "flex_attention")


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None, sinks: Tensor | None = None, cap: float = 0.0
) -> Tensor:
    """q [..., H, n, K], k and v [..., KV, m, K]; seen [n, m] bools or addends; sinks [H]; `cap` of scores, or 0."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
    if sinks is not None:
        assert sinks.shape == (q.shape[-3],), "the sinks are not those of the heads"
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[-2]] @ v


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    s_aux: Tensor | None = None, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Packed sequences [tokens, heads, K]; a causal mask and a window are aligned at the lower right corner."""
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and len(cu_seqlens_q) == len(cu_seqlens_k)
    found = []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (starts_q[-1], starts_k[-1]) == (len(q), len(k)), "tokens beyond the last sequence"
    for i in range(len(starts_q) - 1):
        here, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        queries, seen = here.stop - here.start, keys.stop - keys.start
        assert 0 < queries <= max_seqlen_q and seen <= max_seqlen_k
        distance = torch.arange(seen - queries, seen)[:, None] - torch.arange(seen)
        mask = (distance >= 0) & (distance <= window_size[0] if window_size[0] >= 0 else distance >= 0)
        parts = (x.transpose(0, 1) for x in (q[here], k[keys], v[keys]))
        found.append(dense(*parts, mask, softmax_scale, s_aux, softcap).transpose(0, 1))
    return torch.cat(found)


def own(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    scaling: float | None = None, is_causal: bool | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    name = module.config._attn_implementation
    assert name in OWN, "an attention is called under its own name"
    assert q.shape[1] == k.shape[1] * module.num_key_value_groups and is_causal
    if mask is None:
        assert q.shape[2] == k.shape[2] and name != "of addends"
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    assert (mask.dtype == torch.bool) == (name != "of addends")
    return dense(q, k, v, mask, scaling).transpose(1, 2), None


def flex_with_sinks(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: flex_attention.BlockMask,
    scaling: float | None = None, s_aux: Tensor | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Flex attention with sinks, which only a GPU supports, computed with the given mask."""
    queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    rows = []
    for row in range(len(q)):
        seen = mask.mask_mod(torch.tensor(row), torch.tensor(0), queries, keys)
        nothing = ~seen.any(-1, keepdim=True)  # queries of padding
        rows.append(dense(q[row], k[row], v[row], seen | nothing, scaling, s_aux).masked_fill(nothing, 0))
    return torch.stack(rows).transpose(1, 2), None


def install() -> None:
    module = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_func = module.flash_attn_with_kvcache = None
    sys.modules["flash_attn_interface"] = module
    for name, mask in OWN.items():
        AttentionInterface.register(name, own)
        if mask is not None:
            AttentionMaskInterface.register(name, mask)
    flex_attention._validate_device = lambda *_: None  # compiled for a CPU it has no backward; eager it has
    torch.compiler.set_stance("force_eager")


def asked(
    implementation: str, documents: tuple[Rows, ...], length: int, share: RankHeads, window: int | None,
    **options: object,
) -> LocalAttention:  # fmt: skip
    """The attention of one rank's sequence, called without a model."""
    module = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation="seqtile_ulysses"), training=True, is_causal=True, modules=list
    )
    layout = Layout(length, documents, implementation)
    return LocalAttention(module, layout, share, window, options)
