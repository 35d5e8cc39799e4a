"""Walks autograd's graph, and computes gradients of a part of it inside the backward of the whole.

For a part, the leaves' hooks are not called. `p.register_hook(f)` promises f the whole gradient of p once per backward.
torch.autograd.grad would call f with the gradient of each chunk, and the engine would call f again with their sum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

import torch
from torch.autograd.graph import GradientEdge, Node


def gradients_of(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    d_outputs: Sequence[torch.Tensor],
    retain_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Returns the gradients of the inputs, None for unused ones. Calls no hook of a leaf among the inputs."""
    if not outputs:
        return [None] * len(inputs)
    with without_hooks(leaf for leaf in inputs if isinstance(leaf, torch.Tensor)):
        return torch.autograd.grad(outputs, inputs, d_outputs, retain_graph=retain_graph, allow_unused=True)


@contextmanager
def without_hooks(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Empties the leaves' hook dicts, which the engine reads when it calls hooks, and refills them on exit."""
    emptied = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in emptied:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in emptied:
            hooks.update(kept)


def nodes_behind(
    ends: Iterable[Node | None], start: Node | None = None, stops: Callable[[Node], bool] | None = None
) -> list[Node]:
    """Returns every node that a backward from `ends` reaches, once each; without `start` and nodes reachable only
    through it, or through a node where it `stops`."""
    seen, nodes, pending = {start, None}, [], list(ends)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            nodes.append(node)
            if stops is None or not stops(node):
                pending += map(itemgetter(0), node.next_functions)
    return nodes


def leaves_behind(ends: Iterable[Node | None], start: Node | None = None) -> Iterator[tuple[torch.Tensor, Node, int]]:
    """Yields every use of a leaf by a node of `nodes_behind`: the leaf, the node, and the place among its inputs."""
    for node in nodes_behind(ends, start):
        for place, (following, _) in enumerate(node.next_functions):
            if (leaf := getattr(following, "variable", None)) is not None:
                yield leaf, node, place
