"""A backward pass in Python: torch's own asks the driver for devices, and ends the process where there is none."""

from collections.abc import Iterator, Sequence
from itertools import count
from unittest.mock import patch

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edge = tuple[Node, int]

_TENSOR_ARGUMENTS: dict[Node, list[bool]] = {}
"""Of a node of a Function of ours: which of its arguments are tensors, and so have an edge."""
_numbers = count()
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
    """Like `out.backward()`: leaves get their `grad`."""
    number = next(_numbers)  # checkpointing computes a layer again once for each number of a backward
    with patch.object(torch._C, "_current_graph_task_id", lambda: number):
        _walk((out.grad_fn, out.output_nr), torch.ones_like(out), None)


def grad(
    outputs: torch.Tensor | GradientEdge | Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor],
    *,
    retain_graph: bool = True,
    allow_unused: bool = True,
) -> list[torch.Tensor | None]:
    """Like `torch.autograd.grad`, of one output."""
    (output,) = outputs if isinstance(outputs, list | tuple) and not isinstance(outputs, GradientEdge) else [outputs]
    (gradient,) = grad_outputs if isinstance(grad_outputs, list | tuple) else [grad_outputs]
    wanted = [_edge(each) for each in inputs]
    found = _walk(_edge(output), gradient, wanted)
    return [found.get(edge) for edge in wanted]


def _edge(of: torch.Tensor | GradientEdge) -> Edge:
    edge = get_gradient_edge(of) if isinstance(of, torch.Tensor) else of
    return edge.node, edge.output_nr


def _walk(end: Edge, gradient: torch.Tensor, wanted: Sequence[Edge] | None) -> dict[Edge, torch.Tensor]:
    """Every node's own backward, called in order; returns what reaches the `wanted`, of which nothing is called; with
    None leaves get their `grad`."""
    pending: dict[Node, dict[int, torch.Tensor]] = {end[0]: {end[1]: gradient}}
    found: dict[Edge, torch.Tensor] = {}
    order = list(_in_order(end[0]))
    leading = _leading_to(order, {node for node, _ in wanted}) if wanted is not None else set(order)
    for node in reversed(order):
        gradients = pending.pop(node, None)
        if not gradients or node not in leading:
            continue
        if wanted is not None and any(node is each for each, _ in wanted):
            found |= {(node, i): gradient for i, gradient in gradients.items()}
            continue
        with torch.no_grad():
            if type(node).__name__ == "AccumulateGrad":
                leaf, gradient = node.variable, gradients[0]
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
                continue
            for (following, index), gradient in zip(node.next_functions, _called(node, gradients), strict=False):
                if following in leading and gradient is not None:
                    sums = pending.setdefault(following, {})
                    gradient = _as_expected(gradient, following._input_metadata[index])
                    sums[index] = sums[index] + gradient if index in sums else gradient
    return found


def _as_expected(gradient: torch.Tensor, metadata: object) -> torch.Tensor:
    """As torch's engine does: what was broadcast is summed, and a gradient has its tensor's dtype."""
    gradient = gradient if gradient.shape == metadata.shape else gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)


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


def _leading_to(order: Sequence[Node], wanted: set[Node]) -> set[Node]:
    leading = set(wanted)
    for node in order:  # each after all that its backward leads to
        if any(following in leading for following, _ in node.next_functions):
            leading.add(node)
    return leading


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
