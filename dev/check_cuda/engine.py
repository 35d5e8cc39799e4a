"""A backward pass in Python: torch's own asks the driver for devices, and ends the process where there is none."""

from collections.abc import Iterator

import torch
from torch.autograd.graph import Node

_TENSOR_ARGUMENTS: dict[Node, list[bool]] = {}
"""Of a node of a Function of ours: which of its arguments are tensors, and so have an edge."""
_apply = torch.autograd.Function.apply.__func__


def _noted(cls: type, *arguments: object, **options: object) -> object:
    result = _apply(cls, *arguments, **options)
    for output in result if isinstance(result, tuple) else (result,):
        if isinstance(output, torch.Tensor) and getattr(type(output.grad_fn), "_forward_cls", None) is cls:
            _TENSOR_ARGUMENTS[output.grad_fn] = [isinstance(argument, torch.Tensor) for argument in arguments]
            break
    return result


torch.autograd.Function.apply = classmethod(_noted)


def backward(out: torch.Tensor) -> None:
    """Every node's own backward, called in order; leaves get their `grad`."""
    pending: dict[Node, dict[int, torch.Tensor]] = {out.grad_fn: {out.output_nr: torch.ones_like(out)}}
    for node in reversed(list(_in_order(out.grad_fn))):
        gradients = pending.pop(node, None)
        if not gradients:
            continue
        with torch.no_grad():
            if type(node).__name__ == "AccumulateGrad":
                leaf, gradient = node.variable, gradients[0]
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
                continue
            for (following, index), gradient in zip(node.next_functions, _called(node, gradients), strict=False):
                if following is not None and gradient is not None:
                    found = pending.setdefault(following, {})
                    found[index] = found[index] + gradient if index in found else gradient


def _called(node: Node, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
    metadata = node._input_metadata
    given = [gradients.get(i) for i in range(len(metadata))]
    if not hasattr(type(node), "_forward_cls"):
        result = node(*given)
        return list(result) if isinstance(result, tuple) else [result]
    if getattr(node, "materialize_grads", True):
        zeros = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in metadata]
        given = [zero if gradient is None else gradient for gradient, zero in zip(given, zeros, strict=True)]
    result = node.apply(*given)
    result = result if isinstance(result, tuple) else (result,)
    return [gradient for gradient, has in zip(result, _TENSOR_ARGUMENTS[node], strict=True) if has]


def _in_order(end: Node) -> Iterator[Node]:
    """Every node after all that its backward leads to."""
    seen, stack = {end}, [(end, iter(end.next_functions))]
    while stack:
        node, edges = stack[-1]
        for following, _ in edges:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append((following, iter(following.next_functions)))
                break
        else:
            yield node
            stack.pop()
