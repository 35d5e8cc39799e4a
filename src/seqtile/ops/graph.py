"""Computes gradients of a part of a graph inside the backward of the whole graph, without calling the leaves' hooks.

`p.register_hook(f)` promises f the whole gradient of p once per backward. torch.autograd.grad would call f with the
gradient of each chunk, and the engine would call f again with their sum.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import GradientEdge


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
