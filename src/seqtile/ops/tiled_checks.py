"""What `tiled` requires of its inputs, of its function's outputs, and of what the function uses besides."""

from collections.abc import Iterable, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from seqtile.ops.checks import check_dense
from seqtile.ops.graph import nodes_behind


def listed(name: str, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors of an iterable; a TypeError for what is none, or one tensor by itself."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tiled: {name} is a {type(tensors).__name__}, expected a list of tensors")
    return tuple(tensors)


def check_inputs(
    inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor], params: Sequence[torch.Tensor], dim: int
) -> tuple[int, int]:
    """The inputs' length along `dim`, and how many tokens stand at one position of it."""
    if not inputs:
        raise ValueError("tiled: no input to cut; pass the tensors that hold the tokens")
    for kind, tensors in (("input", inputs), ("shared tensor", shared), ("parameter", params)):
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tiled: {kind} {i} is a {type(tensor).__name__}, expected a tensor")
            if kind == "input" or tensor.requires_grad:  # what is neither cut nor summed may be of any layout
                check_dense("tiled", f"{kind} {i}", tensor)
    for i, tensor in enumerate(inputs):
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] == 0:
            raise ValueError(f"tiled: input {i} has shape {list(tensor.shape)}, expected tokens along dimension {dim}")
        if tensor.shape[dim] != inputs[0].shape[dim]:
            raise ValueError(
                f"tiled: input {i} is {tensor.shape[dim]} long along dimension {dim}, input 0 is "
                f"{inputs[0].shape[dim]}; pass what has no tokens as shared"
            )
    for i, param in enumerate(params):
        if not param.is_leaf:
            raise ValueError(f"tiled: parameter {i} is computed from others; pass it as shared, or list those")
        if hasattr(param, "ds_id"):
            raise ValueError(
                f"tiled: parameter {i} is sharded over ranks by ZeRO-3: every tile would gather it, inside "
                "GatheredParameters too, and ranks may have different numbers of tiles; leave this part untiled, use "
                "ZeRO-2 or FSDP2, or inside GatheredParameters around forward and backward pass its clone as shared"
            )
        if is_traceable_wrapper_subclass(param):
            raise ValueError(
                f"tiled: parameter {i} is a {type(param).__name__}, sharded over ranks: every tile would gather it, "
                "and ranks may have different numbers of tiles; under FSDP2 call tiled in the forward of the module "
                "that is sharded, where its parameters are whole, else pass .full_tensor() as shared"
            )
    first = inputs[0]
    others = [size for i, size in enumerate(first.shape[:-1]) if i != dim % first.dim()]
    return first.shape[dim], torch.Size(others).numel()


def check_outputs(results: Sequence[torch.Tensor], length: int, dim: int) -> None:
    """Raises ValueError unless every output of a tile is as long as the tile."""
    for i, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"tiled: output {i} of fn is a {type(result).__name__}, expected a tensor")
        if not -result.dim() <= dim < result.dim() or result.shape[dim] != length:
            raise ValueError(
                f"tiled: output {i} of fn is {list(result.shape)} for a tile of {length}, expected {length} along "
                f"dimension {dim}: fn must make one output a token"
            )


def check_leaves(
    results: Sequence[torch.Tensor], known: Sequence[torch.Tensor], error: type[Exception] = ValueError
) -> None:
    """Raises `error` if the results' graph reaches a leaf that is not `known`: its gradient would be lost."""
    allowed = {id(tensor) for tensor in known}
    for node in nodes_behind(result.grad_fn for result in results):
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in allowed:
            raise error(
                f"tiled: fn uses a tensor {list(leaf.shape)} that requires a gradient and that it was not given; list "
                "it in params, or if it is computed from others pass what fn uses as shared"
            )
