"""Which tokens each rank holds, and which heads and queries it computes, where the ranks of a group are on several
nodes.

A node gets an early and a late part of each sequence, so that under a causal mask all nodes have the same work. Its
ranks hold these tokens in order, equally many each. With two nodes of two ranks:

    tokens   0 . . . | . . . . | . . . . | . . . length
    node         0         1         1         0
    rank         0         2         3         1

There are two plans of heads. In both a rank gets keys and values of whole sequences.

    flat          heads are dealt to all ranks; queries and outputs of other nodes' tokens cross the network
    within nodes  heads are dealt to the ranks of each node, which compute the queries of the node's own tokens: only
                  keys and values cross the network, but to every node

The plan with the fewest bytes across nodes is chosen, for each number of heads.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from seqtile.attention.heads import RankHeads, Rows, count, rank_heads, taken, width, within, zigzag


class Nodes(NamedTuple):
    """The nodes of a group of ranks: `size` ranks, of which `per_node` that follow one another are on one node."""

    size: int
    per_node: int

    @property
    def number(self) -> int:
        return self.size // self.per_node

    def tokens_of_node(self, node: int, length: int) -> Rows:
        """Returns the tokens that the ranks of a node hold of a sequence of `length`, a multiple of `size`."""
        return zigzag(((0, length),), node, self.number)

    def tokens_of(self, rank: int, length: int) -> Rows:
        """Returns the tokens that a rank holds, in order: one run, or two where the node's parts meet."""
        node, place = divmod(rank, self.per_node)
        local = length // self.size
        return taken(self.tokens_of_node(node, length), place * local, (place + 1) * local)

    def runs(self, length: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Returns each run of tokens that one rank holds, in the order of tokens, and its places: a token's place is
        its rank times the tokens of a rank, plus its index among those of the rank."""
        if self.number == 1:
            return [((0, length), (0, length))]
        held = [run for rank in range(self.size) for run in self.tokens_of(rank, length)]
        ends = [0, *accumulate(stop - start for start, stop in held)]
        return sorted(zip(held, pairwise(ends), strict=True))

    def heads(self, q_heads: int, kv_heads: int, length: int, in_nodes: bool) -> list[RankHeads]:
        """Returns the heads and queries of every rank, by the plan within nodes or the flat one."""
        if not in_nodes:
            return [rank_heads(rank, self.size, q_heads, kv_heads, ((0, length),)) for rank in range(self.size)]
        places = (divmod(rank, self.per_node) for rank in range(self.size))
        return [
            rank_heads(place, self.per_node, q_heads, kv_heads, self.tokens_of_node(node, length))
            for node, place in places
        ]

    def chooses_in_nodes(self, q_heads: int, kv_heads: int) -> bool:
        """Returns whether fewer bytes cross the network if heads are dealt within nodes."""
        if self.number == 1:
            return False
        (keys, queries), (flat_keys, flat_queries) = (received(self, q_heads, kv_heads, way) for way in (True, False))
        return keys + 2 * queries < flat_keys + 2 * flat_queries  # outputs are as large as queries

    def sharers(self, q_heads: int, kv_heads: int) -> int:
        """Returns how many ranks heads are dealt to: all, or those of a node."""
        return self.per_node if self.chooses_in_nodes(q_heads, kv_heads) else self.size


class Received(NamedTuple):
    """What all ranks together receive from other nodes in a forward's attention, for each token of a sequence, in
    elements of a head. A backward sends as much."""

    keys: float
    """Keys and values."""
    queries: float
    """Queries; outputs are as many."""


@lru_cache(maxsize=256)
def received(nodes: Nodes, q_heads: int, kv_heads: int, in_nodes: bool) -> Received:
    """Returns what crosses the network by the plan within nodes or the flat one."""
    length, keys, queries = 2 * nodes.size, 0, 0
    for rank, heads in enumerate(nodes.heads(q_heads, kv_heads, length, in_nodes)):
        own = nodes.tokens_of_node(rank // nodes.per_node, length)
        here = sum(count(within(heads.rows, *run)) for run in own)
        keys += 2 * width(heads.kv) * (length - count(own))
        queries += width(heads.q) * (count(heads.rows) - here)
    return Received(keys / length, queries / length)
