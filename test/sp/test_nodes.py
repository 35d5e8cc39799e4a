"""Tokens and heads of ranks on several nodes: each once, with equal work, and with few bytes across nodes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqtile.attention.heads import count, width, within
from seqtile.attention.nodes import Nodes, Received, received
from seqtile.sp.shards import in_order, places_of
from sp.test_all_to_all import Wire, plans_of
from sp.test_heads import shapes


@given(shapes(), st.integers(1, 4))
def test_each_token_once(shape: tuple[int, int, int, int], number: int) -> None:
    """Equally many on each rank, in order, and in one run with one node."""
    per_node, *_, length = shape
    nodes = Nodes(number * per_node, per_node)
    length = -(-length // nodes.size) * nodes.size
    held = [nodes.tokens_of(rank, length) for rank in range(nodes.size)]
    assert {count(runs) for runs in held} == {length // nodes.size}
    assert all(list(runs) == sorted(runs) and len(runs) <= min(2, number) for runs in held)
    places = places_of(length, nodes)
    tokens = [[token for run in runs for token in range(*run)] for runs in held]
    for rank, own in enumerate(tokens):
        assert places[own].tolist() == [*range(rank * len(own), (rank + 1) * len(own))]
    gathered = torch.tensor(tokens)[:, None]
    assert in_order(gathered, nodes)[0].tolist() == [*range(length)]


@given(shapes(), st.integers(1, 4), st.booleans())
def test_each_query_once(shape: tuple[int, int, int, int], number: int, in_nodes: bool) -> None:
    """With its kv head; within nodes on the node that has its token."""
    per_node, q_heads, kv_heads, length = shape
    nodes = Nodes(number * per_node, per_node)
    length = -(-length // nodes.size) * nodes.size
    done = []
    for rank, share in enumerate(nodes.heads(q_heads, kv_heads, length, in_nodes)):
        for head, kv in zip(range(*share.q.indices(q_heads)), share.kv_of_q, strict=True):
            assert share.kv.start + kv == head * kv_heads // q_heads
            done += [(head, row) for run in share.rows for row in range(*run)]
        own = nodes.tokens_of_node(rank // per_node, length)
        assert not in_nodes or count(share.rows) == sum(count(within(share.rows, *run)) for run in own)
    assert sorted(done) == [(head, row) for head in range(q_heads) for row in range(length)]


HEADS = ((32, 32), (32, 16), (32, 8), (64, 8), (16, 2), (128, 1))


@pytest.mark.parametrize("in_nodes", [False, True])
@pytest.mark.parametrize(("number", "per_node"), [(2, 4), (2, 8), (4, 8), (16, 8), (4, 2)])
@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
def test_equal_work(q_heads: int, kv_heads: int, number: int, per_node: int, in_nodes: bool) -> None:
    """Under a causal mask no rank computes more than 1.1 times the mean, also where ranks share a head's queries."""
    nodes, length = Nodes(number * per_node, per_node), number * per_node * 96
    shares = nodes.heads(q_heads, kv_heads, length, in_nodes)
    work = [(share.q.stop - share.q.start) * sum(sum(range(*run)) for run in share.rows) for share in shares]
    assert max(work) <= 1.1 * sum(work) / len(work)


def of_a_forward(found: Received) -> float:
    return found.keys + 2 * found.queries


def across(nodes: Nodes, q_heads: int, kv_heads: int, in_nodes: bool, backward: bool) -> int:
    """Returns the elements that the all-to-alls of attention, with heads of one element, send to other nodes."""
    sent, local = 0, 4
    for by_kv in ((False, True, True), (False,)):
        to_heads = (len(by_kv) == 3) != backward
        for rank, plan in enumerate(plans_of(nodes, q_heads, kv_heads, by_kv, local, in_nodes)):
            heads = [(plan.heads.kv, nodes.size * local) if is_kv else (plan.heads.q, None) for is_kv in by_kv]
            here = [(1, kv_heads if is_kv else q_heads, local, 1) for is_kv in by_kv]
            there = [(1, width(own), tokens or count(plan.heads.rows), 1) for own, tokens in heads]
            with Wire() as wire:
                plan.start([torch.zeros(shape) for shape in (here if to_heads else there)], to_heads=to_heads)
                _, _, _, counts = wire.calls[rank]
            node = range(nodes.size)[rank // nodes.per_node * nodes.per_node :][: nodes.per_node]
            sent += sum(number for other, number in enumerate(counts) if other not in node)
    return sent


@pytest.mark.parametrize("backward", [False, True])
def test_bytes_across_nodes(backward: bool) -> None:
    """Counted in the all-to-alls, for 32 query heads and 8 kv heads on two nodes of four: as the formula has it, and
    0.4 times what the flat plan sends."""
    nodes = Nodes(8, 4)
    flat, within_nodes = (across(nodes, 32, 8, in_nodes, backward) for in_nodes in (False, True))
    assert within_nodes <= 0.4 * flat
    for found, in_nodes in ((flat, False), (within_nodes, True)):
        assert found == 32 * of_a_forward(received(nodes, 32, 8, in_nodes))


def test_never_more_than_flat() -> None:
    """Elements across nodes for each token and head, by formula; 25 shapes."""
    nodes = Nodes(8, 4)
    flat, within_nodes = (received(nodes, 32, 8, in_nodes) for in_nodes in (False, True))
    assert flat == (8 * 2 * 1 / 2, 8 * 4 / 2) and within_nodes == (8 * 2 * 2 / 2, 0)  # half of the tokens are elsewhere
    assert of_a_forward(within_nodes) <= 0.4 * of_a_forward(flat) and nodes.chooses_in_nodes(32, 8)
    chosen = 0
    for number, per_node in ((2, 4), (2, 8), (4, 8), (8, 8), (3, 5)):
        for q_heads, kv_heads in HEADS[:5]:
            nodes = Nodes(number * per_node, per_node)
            flat, within_nodes = (
                of_a_forward(received(nodes, q_heads, kv_heads, in_nodes)) for in_nodes in (False, True)
            )
            assert nodes.chooses_in_nodes(q_heads, kv_heads) == (within_nodes < flat)
            chosen += within_nodes < flat
    assert 5 < chosen < 25
    assert not Nodes(8, 8).chooses_in_nodes(32, 8) and received(Nodes(8, 8), 32, 8, False) == (0, 0)
