"""Calls torch's kernel for documents of several lengths: FlashAttention, which torch brings with it.

torch's function for it, `torch.nn.attention.varlen.varlen_attn`, has other arguments in each release: in 2.10 neither a
window nor a scale. The operators under it have had the same ones throughout, and counters of FLOPs and selective
checkpoints know them. They have no sinks, but return the logarithm of each softmax's sum. With it sinks are added to
the output, and the operator's backward is right if it is given both as they are with sinks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.utils import logging

from seqtile.ops.attention_limits import attention_warning

logger = logging.get_logger(__name__)
NAME = "seqtile_torch_varlen"
DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 256
"""The widest head that FlashAttention computes."""
_APART = 128  # tokens that its backward leaves free after each document, in its sum of gradients of queries


def register() -> str:
    """Makes the kernel known to Hugging Face, as an attention that gets lengths of documents; returns its name."""
    AttentionInterface.register(NAME, torch_varlen)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return NAME


def reason_against(q: Tensor, v: Tensor, options: dict[str, Any]) -> str | None:
    """Says why the kernel cannot compute attention of queries q [..., K] and values v [..., Kv]; None if it can.

    Args:
        q: the queries. A fake tensor on a GPU stands for one there.
        v: the values.
        options: what Hugging Face passes to attentions: dropout, softcap and others.
    """
    if (lacking := _lacking(q.device)) is not None:
        return lacking
    if q.dtype not in DTYPES:
        return f"it computes in bfloat16 and float16, not in {str(q.dtype).removeprefix('torch.')}"
    if (width := max(q.shape[-1], v.shape[-1])) > WIDEST:
        return f"its heads are at most {WIDEST} wide, not {width}"
    for option, what in (("dropout", "dropout"), ("softcap", "soft cap of scores")):
        if options.get(option):
            return f"it has no {what}"
    return None


def _lacking(device: torch.device) -> str | None:
    """Says what the kernel lacks on a device."""
    if device.type != "cuda":
        return f"it runs on a GPU, not on {device.type}"
    if not torch.cuda.is_available():
        return None  # a simulation
    if torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without NVIDIA's FlashAttention"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
    return None


def torch_varlen(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None = None, *, scaling: float | None = None,
    sliding_window: int | None = None, s_aux: Tensor | None = None, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor,
    max_length_q: int, max_length_k: int, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes causal attention within documents, whose tokens follow one another, as Hugging Face calls attentions:
    from q [1, h, n, K], k [1, kv, m, K] and v [1, kv, m, Kv] to [1, n, h, Kv], and None for scores.

    A document's last query sees all its keys. q, k and v have one dtype; ask `reason_against` before. Saves q, k and
    v, copied where their width is no multiple of 8 or differs from another's, the output, and a float32 number for each
    query and head.

    Args:
        module: not used.
        mask: None.
        scaling: factor of the scores; without it K ** -0.5.
        sliding_window: how many keys a query sees, its own included.
        s_aux: sinks [h], logits that take a share of every softmax.
        cu_seq_lens_q: int32, where documents start among the queries, and the end; `cu_seq_lens_k` among the keys.
        max_length_q: queries of the longest document; `max_length_k` its keys.
    """
    width, wide = v.shape[3], max(q.shape[3], v.shape[3])
    wide += -wide % (8 if wide <= 128 else 64)  # see _as_read
    scale = q.shape[3] ** -0.5 if scaling is None else scaling
    q, k, v = (_as_read(x, wide) for x in (q, k, v))
    if not torch.compiler.is_compiling():
        longest = max_length_q + _APART * (len(cu_seq_lens_q) - 2)
        if (said := attention_warning(NAME, q.transpose(0, 1)[None], None, longest)) is not None:
            logger.warning_once(said)
    window = -1 if sliding_window is None else sliding_window - 1  # torch's leaves out the query's own key
    call = (max_length_q, max_length_k), scale, window
    return _TorchVarlen.apply(q, k, v, s_aux, cu_seq_lens_q, cu_seq_lens_k, *call)[None, ..., :width], None


def _as_read(x: Tensor, wide: int) -> Tensor:
    """Returns x [1, h, n, K] as the kernel reads it: [n, h, wide], tokens first, since the output lies as the queries
    do, and rows at multiples of 16 bytes.

    Widths above 128 are padded to 192 or 256, which the kernel computes in any case: at 129 to 160 the backward in
    torch 2.11 is reported to write beyond its memory, and some GPUs lack one for 193 to 224.
    """
    x = x[0].transpose(0, 1)
    if x.shape[2] < wide:
        return pad(x, (0, wide - x.shape[2]))
    first, second, last = x.stride()
    is_aligned = all(step % 8 == 0 for step in (first, second, x.storage_offset()))
    return x if last == 1 and first >= second and is_aligned else x.contiguous()


class _TorchVarlen(torch.autograd.Function):
    """From q [n, h, K], k and v [m, kv, K], sinks [h] or None, and int32 starts of documents to [n, h, K]."""

    @staticmethod
    def forward(node, q, k, v, sinks, starts_q, starts_k, lengths, scale, window):
        options = {"scale": scale, "window_size_left": window, "window_size_right": 0}
        node.call = (starts_q, starts_k, *lengths, 0.0, window < 0), options  # without dropout; causal
        out, sums, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *node.call[0], False, **options)
        if sinks is not None:
            own, sums = sums, torch.logaddexp(sums, sinks.float()[:, None])
            out.mul_((own - sums).exp().T[..., None])
        node.save_for_backward(q, k, v, sinks, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(node, d_out):
        (q, k, v, sinks, out, sums), (call, options) = node.saved_tensors, node.call
        random = torch.empty(2, dtype=torch.uint64, device=q.device)  # read only with dropout
        backward = torch.ops.aten._flash_attention_backward
        d_qkv = backward(d_out, q, k, v, out, sums, *call, random, random, **options)
        if not node.needs_input_grad[3]:
            return *d_qkv, *[None] * 6
        shares = (sinks.float()[:, None] - sums).exp()
        d_sinks = (shares * (d_out * out).sum(-1, dtype=torch.float32).T).sum(1).neg().to(sinks.dtype)
        return *d_qkv, d_sinks, *[None] * 5
