"""What gated_mlp requires of its arguments, checked before anything is computed."""

from collections.abc import Sequence
from numbers import Real

import torch

from seqtile.kernels.launch import ACTIVATIONS
from seqtile.ops.checks import DTYPES, check_dense, check_device, check_operands, check_shape
from seqtile.ops.projection import LowRank, Projection

_OP = "gated_mlp"


def check_adapters(**adapters: object) -> None:
    """Raises TypeError unless each is a LowRank or None."""
    for name, adapter in adapters.items():
        if adapter is not None and not isinstance(adapter, LowRank):
            raise TypeError(
                f"{_OP}: {name} is a {type(adapter).__name__}, expected seqtile.LowRank(a, b, scale) or None"
            )


def check_gated_mlp(
    x: torch.Tensor,
    projections: Sequence[Projection],
    activation: str,
    up_bias: torch.Tensor | None,
    up_lora: LowRank | None,
) -> None:
    """`projections` are gate, up and down, or where gate holds up too, gate and down."""
    names = ("gate", "up", "down") if len(projections) == 3 else ("gate", "down")
    operands = {"x": x}
    for name, projection in zip(names, projections, strict=True):
        operands[f"{name}_weight"] = projection.weight
        if projection.bias is not None:
            operands[f"{name}_bias"] = projection.bias
    check_operands(_OP, "x", operands)
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"{_OP}: x has shape {list(x.shape)}, expected [..., D] with at least one token")
    gate = projections[0].weight
    fused = len(projections) == 2
    if gate.dim() != 2 or gate.shape[1] != x.shape[-1] or (fused and gate.shape[0] % 2):
        expected = "[2M, D]" if fused else "[M, D]"
        raise ValueError(f"{_OP}: gate_weight has shape {list(gate.shape)}, expected {expected} with D = {x.shape[-1]}")
    if fused and (up_bias is not None or up_lora is not None):
        raise ValueError(f"{_OP}: without up_weight, gate_weight holds up too: pass its bias and adapter as gate's")
    width, hidden_size = gate.shape[0] // (2 if fused else 1), gate.shape[1]
    into = (2 * width if fused else width, hidden_size)
    for name, projection in zip(names, projections, strict=True):
        out_features, in_features = (hidden_size, width) if name == "down" else into
        _check_projection(name, projection, out_features, in_features, x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{_OP}: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")


def _check_projection(name: str, projection: Projection, out_features: int, in_features: int, x: torch.Tensor) -> None:
    meaning = "[D, M]" if name == "down" else "gate_weight's [M, D]"
    check_shape(_OP, f"{name}_weight", projection.weight, (out_features, in_features), meaning)
    if projection.bias is not None:
        check_shape(_OP, f"{name}_bias", projection.bias, (out_features,), f"one number a row of {name}_weight")
    if projection.a is None and projection.b is None:
        return
    if isinstance(projection.scale, bool) or not isinstance(projection.scale, Real):
        raise TypeError(f"{_OP}: {name}_lora.scale is {projection.scale!r}, expected a Python number")
    for part, tensor in (("a", projection.a), ("b", projection.b)):
        check_dense(_OP, f"{name}_lora.{part}", tensor)
        if tensor.dim() != 2 or tensor.dtype not in DTYPES:
            raise ValueError(
                f"{_OP}: {name}_lora.{part} is {tensor.dtype} {list(tensor.shape)}, expected a floating-point matrix"
            )
        check_device(_OP, f"{name}_lora.{part}", tensor, "x", x)
    rank = projection.a.shape[0]
    check_shape(_OP, f"{name}_lora.a", projection.a, (rank, in_features), "[r, in]")
    check_shape(_OP, f"{name}_lora.b", projection.b, (out_features, rank), "[out, r]")
