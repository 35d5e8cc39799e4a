"""TRL's trainers with seqtile's loss functions: SFT's loss for three matmuls where TRL's own takes four; the
log-probabilities of GRPO, RLOO, DPO and KTO, with fewer live bytes; and the loss of DistillationTrainer.

    SFTTrainer.compute_loss ─ model(fused_lm_head=True) ─ _ChunkedLogProbFunction.apply ─ linear_log_probs
      says that what it gets will be summed                 the name that is replaced

Everything else stays TRL's: losses, metrics, packing, masks, prompts, adapters and ranks.
"""

import hashlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from seqtile.ops.head.divergence import linear_divergence
from seqtile.ops.head.log_probs import TokenValues, linear_log_probs
from seqtile.ops.state import having

logger = logging.get_logger(__name__)
_VALUES = {"entropy": "entropy", "log_sum_sq_probs": "sum_squared_probs"}
_VALUES |= {"mean_logits": "mean_logit", "is_top1": "is_largest"}
"""TRL's names of values, in its order, and those of `TokenValues`."""
_KNOWN = {  # of 1.16, see `_fingerprint`
    "add_fused_lm_head": "422d009f04b66659",
    "_ChunkedLogProbFunction": "1d8220b44273cdf3",
    "SFTTrainer.compute_loss": "ca448211ff653fe6",
    "_chunked_divergence_loss": "550cb45191ab1654",
}
_LOGITS = 45 * 2**20  # elements of a chunk of logits, where TRL's has 128 Mi
_DISTILLATION = "trl.trainer.distillation_trainer"
_to_be_summed: ContextVar[bool] = ContextVar("to_be_summed", default=False)


def apply_seqtile_to_trl() -> None:
    """Makes the trainers of TRL 1.16 compute log-probabilities by `linear_log_probs`; call it once, before training.

    Replaces `_ChunkedLogProbFunction` in `trl.trainer.utils` and DistillationTrainer's `_chunked_divergence_loss` (by
    `linear_divergence`), and wraps `SFTTrainer.compute_loss`. With u = 2 n D V FLOP for n labelled tokens, SFT's
    `loss_type="nll"` costs 3 u, "dft" and the other trainers 4 u. Memory is that of `linear_log_probs`, in chunks of at
    most 45 Mi logits; of more where a half-precision weight gradient makes room for them. TRL still computes losses
    from all logits (`label_smoothing_factor`, `compute_loss_func`) and heads that ZeRO-3 has partitioned. For MLPs and
    layers use `apply_seqtile` or `SeqtileCallback`.

    Raises:
        ImportError: TRL is not installed.
        ValueError: another version, or another library has replaced these functions; nothing is changed.
    """
    import trl
    from trl.trainer import sft_trainer, utils

    head, compute_loss = getattr(utils, "_ChunkedLogProbFunction", None), sft_trainer.SFTTrainer.compute_loss
    if isinstance(head, _Head):
        return
    distillation = import_module(_DISTILLATION) if find_spec(_DISTILLATION) else None
    divergence = getattr(distillation, "_chunked_divergence_loss", None)
    functions = (getattr(utils, "add_fused_lm_head", None), getattr(head, "forward", None), compute_loss, divergence)
    unknown = [name for name, one in zip(_KNOWN, functions, strict=True) if _fingerprint(one) != _KNOWN[name]]
    if unknown:
        raise ValueError(
            f"trl {trl.__version__}: expected {' and '.join(unknown)} of TRL 1.16, got others; seqtile tiles MLPs and "
            "layers under any version, apply_seqtile(model) before the trainer is built"
        )
    utils._ChunkedLogProbFunction, on_gpu = _Head(head, utils._use_triton), utils._use_triton
    utils._use_triton = lambda device: device.type == "cpu" or on_gpu(device)  # the labelled tokens alone on a CPU, too
    sft_trainer.SFTTrainer.compute_loss = _announced(compute_loss)
    distillation._chunked_divergence_loss = _tiled_divergence(divergence)


def restore_trl() -> None:
    """Puts back what `apply_seqtile_to_trl` replaced."""
    from trl.trainer import sft_trainer, utils

    if isinstance(head := utils._ChunkedLogProbFunction, _Head):
        utils._ChunkedLogProbFunction, utils._use_triton = head.original, head.original_use_triton
        sft_trainer.SFTTrainer.compute_loss = sft_trainer.SFTTrainer.compute_loss.__wrapped__
        distillation = import_module(_DISTILLATION)
        distillation._chunked_divergence_loss = distillation._chunked_divergence_loss.__wrapped__


def _fingerprint(function: Any) -> str:
    """Returns the beginning of the SHA-256 of a function's source; of anything else nothing."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16] if inspect.isfunction(function) else ""


def _announced(compute_loss: Callable) -> Callable:
    @wraps(compute_loss)
    def announcing(self, *args: Any, **kwargs: Any) -> Any:
        if self.compute_loss_func is not None or self.label_smoother is not None:
            logger.warning_once("compute_loss_func and label_smoothing_factor: TRL computes this loss from all logits")
        with having(_to_be_summed, self.args.loss_type == "nll"):
            return compute_loss(self, *args, **kwargs)

    return announcing


def _tiled_divergence(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @wraps(original)
    def divergence(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the loss, the sum of the student's entropies and how many tokens count. Hidden states [B, K, D] of
        each, weights [V, D], mask [B, K]."""
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        if any(hasattr(value, "ds_id") for value in values.values()):  # ZeRO-3, which TRL gathers
            return original(*args, **kwargs)
        mask, items, heads = values["completion_mask"] != 0, values["num_items_in_batch"], {}
        for name in ("student", "teacher"):
            hidden, bias, scale = (values[f"{name}_{of}"] for of in ("hidden_states", "lm_head_bias", "logit_scale"))
            heads |= {
                f"{name}_hidden": hidden,
                f"{name}_weight": _whole(values[f"{name}_lm_head_weight"], hidden),
                f"{name}_bias": None if bias is None else _whole(bias, hidden) * scale,  # TRL scales it, too
                f"{name}_scale": scale,
                f"{name}_softcap": values[f"{name}_final_logit_softcapping"],
            }
        options = {"beta": values["beta"], "temperature": values["temperature"], "mask": mask}
        loss, entropies = linear_divergence(**heads, **options, reduction="sum", return_entropy=True)
        divisor: Any = mask.sum().clamp(min=1) if items is None else items
        loss = loss / (divisor.to(loss.device) if isinstance(divisor, torch.Tensor) else divisor)
        return loss, entropies.sum(), mask.sum()

    return divergence


def _whole(parameter: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Returns a head's parameter gathered, in the dtype of its hidden states unless autocast sees to that."""
    parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return parameter if torch.is_autocast_enabled(hidden.device.type) else parameter.to(hidden.dtype)


class _Head:
    """Stands in for TRL's autograd function: `apply` takes and returns what that one's does."""

    def __init__(self, original: Any, original_use_triton: Callable):
        self.original, self.original_use_triton = original, original_use_triton

    def apply(
        self, hidden, weight, bias, targets, temperature, chunk_size, cap=None, scale=1.0, outputs=tuple(_VALUES)
    ):
        """hidden [n, D], weight [V, D], bias [V] or None, targets [n]; five values [n], None where not in `outputs`."""
        if hidden.numel() == 0 or hasattr(weight, "ds_id"):
            return self.original.apply(hidden, weight, bias, targets, temperature, chunk_size, cap, scale, outputs)
        if not torch.is_autocast_enabled(hidden.device.type):
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        # The rounded gradient of a half-precision weight is as large as D tokens' logits, which are gone by then.
        makes_room = weight.requires_grad and weight.dtype.itemsize == 2
        wanted = [ours for theirs, ours in _VALUES.items() if theirs in outputs]
        options = {"temperature": temperature, "softcap": cap, "logit_scale": scale}
        options["bias"] = None if bias is None else bias * scale  # TRL scales it with the product
        chunks = {"chunk_tokens": None if makes_room else max(1, _LOGITS // weight.shape[0])}
        asked = {"outputs": wanted, "to_be_summed": _to_be_summed.get(), "ignore_index": None}
        result = linear_log_probs(hidden, weight, targets, **options, **chunks, **asked)
        log_probs, values = result if wanted else (result, TokenValues())
        entropy, is_largest, mean_logit, squares = values
        return log_probs, entropy, None if squares is None else squares.log(), mean_logit, is_largest
