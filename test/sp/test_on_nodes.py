"""Ranks that pass for several nodes: what test_sequence_parallel.py and test_whole_batches.py do on one."""

import pytest

from sp import whole, worker
from sp.cases import attention_cases, layer_cases
from sp.over_ranks import on_nodes
from support.pool import Pool

pytestmark = pytest.mark.dist
NODES = ((4, 2), (8, 4), (8, 2))
"""Ranks, and ranks a node."""
FULL = pytest.mark.full("of all cases on 2 x 2, 2 x 4 and 4 x 2 ranks; on one node they run besides")


def each_on_nodes(cases: list[tuple], every_day: tuple[str, ...]) -> pytest.MarkDecorator:
    """Cases that begin with their name and kind of sequence; some run every day, on four ranks."""
    found = []
    for ranks, per_node in NODES:
        for i, case in enumerate(cases):
            name = f"{case[0]}-{case[1]}"
            marks = () if ranks == 4 and name in every_day else FULL
            found.append(
                pytest.param(ranks, per_node, i, case, marks=marks, id=f"{ranks // per_node}x{per_node}-{name}")
            )
    return pytest.mark.parametrize(("pool", "per_node", "i", "case"), found, indirect=["pool"])


OF_NODES = pytest.mark.parametrize(
    ("pool", "per_node"),
    [pytest.param(*nodes, marks=FULL if nodes[0] > 4 else (), id="{}in{}".format(*nodes)) for nodes in NODES],
    indirect=["pool"],
)


@each_on_nodes(attention_cases(), ("gqa 4/2-packed, window", "odd 9/3-ragged", "few 2/1-padded", "one 1/1-plain"))
def test_attention(pool: Pool, per_node: int, i: int, case: tuple) -> None:
    """Loss and gradients for every kind of heads and of sequence, with no more all-to-alls than on one node."""
    pool.run(on_nodes, per_node, worker.attention, i, *case)


@each_on_nodes(layer_cases(), ("layer gqa 4/2-window",))
def test_whole_layers(pool: Pool, per_node: int, i: int, case: tuple) -> None:
    pool.run(on_nodes, per_node, worker.whole_layer, i, *case)


@each_on_nodes(attention_cases(), ("mqa 4/1-padded", "flash 4/2-packed"))
def test_whole_batches(pool: Pool, per_node: int, i: int, case: tuple) -> None:
    pool.run(on_nodes, per_node, whole.of_kind, i, *case)
