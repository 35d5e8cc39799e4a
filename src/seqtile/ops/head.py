"""From checked arguments to the operands of the tiles, and from values of labelled tokens back to all tokens."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels.loss_options import LossOptions
from seqtile.ops.checks import autocast_dtype, check_no_transform
from seqtile.ops.head_checks import check_class_weight, check_head, check_labels, check_number
from seqtile.ops.logit_tiles import Operands, Settings
from seqtile.ops.tiles import resolve_chunk_tokens


def prepare_head(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    ignore_index: int | None,
    class_weight: torch.Tensor | None = None,
    accumulate_dtype: torch.dtype | None,
    chunk_tokens: int | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Operands, Settings]:
    """Checks every argument, for TypeError or ValueError, and makes them what the loop over tiles takes.

    They are made flat, and searched for labelled tokens, by `run_head`.
    """
    check_head(op, hidden, weight, target, bias, ignore_index, accumulate_dtype)
    if class_weight is not None:
        check_class_weight(op, class_weight, hidden, weight.shape[0])
    options = LossOptions(
        logit_scale=check_number(op, "logit_scale", logit_scale, -math.inf),
        softcap=0.0 if softcap is None else check_number(op, "softcap", softcap, 0, above=True),
        temperature=check_number(op, "temperature", temperature, 0, above=True),
        label_smoothing=check_number(op, "label_smoothing", label_smoothing, 0, 1),
        z_loss=check_number(op, "z_loss", z_loss, 0),
    )
    dtype = autocast_dtype(hidden) or hidden.dtype
    own_dtype = dtype if dtype == weight.dtype else torch.float32  # autocast's weights are usually float32
    settings = Settings(
        options, resolve_chunk_tokens(chunk_tokens, hidden.shape[-1]), dtype, accumulate_dtype or own_dtype
    )
    return Operands(hidden, weight, bias, target, None, class_weight), settings


def run_head(op: str, run: Callable, operands: Operands, ignore_index: int | None, *args: Any) -> Any:
    """run(operands, *args), the operands made flat and knowing which tokens are labelled.

    Under torch.compile, `run` is compiled only if `ignore_index` is None: otherwise the number of tiles follows from
    the labels, and compiling it anew for every batch would cost more than it brings.
    """
    run_operands = _run_operands if ignore_index is None else _run_labelled_operands
    return run_operands(op, run, operands, ignore_index, *args)


def _run_operands(op: str, run: Callable, operands: Operands, ignore_index: int | None, *args: Any) -> Any:
    check_no_transform(op)  # here, since asking would put a node into a graph that breaks before it has another
    hidden, weight, bias, target, _, class_weight = operands
    hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long().contiguous()
    check_labels(op, target, weight.shape[0], ignore_index)
    rows = None if ignore_index is None else labelled_rows(target, ignore_index)
    bias = None if bias is None else bias.contiguous()
    class_weight = None if class_weight is None else class_weight.float().contiguous()
    return run(Operands(hidden, weight, bias, target, rows, class_weight), *args)


@torch.compiler.disable(reason="seqtile counts the labelled tokens; with ignore_index=None it need not")
def _run_labelled_operands(*args: Any) -> Any:
    return _run_operands(*args)


def labelled_rows(target: torch.Tensor, ignore_index: int) -> torch.Tensor | None:
    """Where `target` [T] is not `ignore_index`: [n] int64, or None if that is everywhere.

    The one wait for the device in a call: the loop over tiles must know n. A simulation, where n is not known, takes
    all tokens down the path that some would take.
    """
    if isinstance(target, FakeTensor) or target.is_meta:
        return torch.arange(target.shape[0], device=target.device)
    rows = (target != ignore_index).nonzero().squeeze(1)
    return None if rows.shape[0] == target.shape[0] else rows


def spread(values: torch.Tensor, rows: torch.Tensor | None, shape: torch.Size, fill: float = 0) -> torch.Tensor:
    """`values` [n] of the labelled tokens as `shape`, a target's; `fill` for the ignored. Differentiable."""
    if rows is not None:
        values = values.new_full((shape.numel(),), fill).index_copy(0, rows, values)
    return values.view(shape)
