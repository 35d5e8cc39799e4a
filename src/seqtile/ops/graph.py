"""Walks over autograd graphs."""

from collections.abc import Iterable, Iterator

from torch.autograd.graph import Node


def nodes_behind(ends: Iterable[Node | None], start: Node | None = None) -> Iterator[Node]:
    """Every node that a backward from `ends` reaches, once each; without `start` and what only it leads to."""
    seen: set[Node | None] = {start, None}
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]
