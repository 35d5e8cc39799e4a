"""Counts the bytes that nodes send each other in a training step. It is arithmetic: no time is measured, and nothing
that hides them is known."""

from typing import NamedTuple

from seqtile.attention.nodes import received
from seqtile.memory.layer import planned_groups
from seqtile.memory.setup import Setup
from seqtile.memory.shape import Shape


class Traffic(NamedTuple):
    """The bytes that a node receives from others in a step."""

    attention: int
    """Queries, keys, values, outputs and their gradients, by the plan of heads that sends the fewest, see
    attention/nodes.py."""
    flat: int
    """The same with heads dealt to all GPUs that share a sequence."""
    weights: int
    """Weights and gradients, where each node is sent what it lacks once."""

    @property
    def all(self) -> int:
        return self.attention + self.weights


def traffic(shape: Shape, setup: Setup, tokens: int, weights: int, gradients: int) -> Traffic | None:
    """Returns the bytes of a step of so many tokens in a batch of sequences, and so many bytes of the model's weights
    and of its gradients; None on one node, and where nodes have unequal numbers of a sequence's GPUs.

    A checkpointed layer sends in its forward, in its recomputation and in its backward; with attention by groups of
    heads queries, keys and values once more.
    """
    nodes, groups = setup.nodes, planned_groups(shape, setup) or 1
    whole = setup.gpus % setup.gpus_per_node == 0 and setup.gpus_per_node % nodes.per_node == 0
    if setup.gpus <= setup.gpus_per_node or not whole:
        return None
    a_head = tokens * shape.head_dim * setup.bytes * shape.layers

    def attention(in_nodes: bool) -> int:
        keys, queries = received(nodes, shape.heads // groups, shape.kv_heads // groups, in_nodes)
        times = 3 if groups == 1 else 4
        return int(a_head * groups * (times * (keys + queries) + 3 * queries) / nodes.number)  # outputs, as queries

    chosen = not setup.flat and nodes.chooses_in_nodes(shape.heads // groups, shape.kv_heads // groups)
    if setup.hsdp or setup.zero_stage == 0:
        sharded = 2 * gradients  # an all-reduce: parts there, and sums back
    elif setup.zero_stage == 3:
        sharded = gradients + 2 * weights  # gathered before each forward and each backward
    else:
        sharded = gradients + min(weights, gradients)  # updated weights, gathered after the step
    elsewhere = 1 - setup.gpus_per_node / setup.gpus
    return Traffic(attention(chosen), attention(False), int(sharded * elsewhere))
