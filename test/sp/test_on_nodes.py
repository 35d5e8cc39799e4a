"""Ranks that pass for several nodes: what test_sequence_parallel.py and test_whole_batches.py do on one."""

from collections.abc import Callable

import pytest

from distributed.cases import pool_of
from sp import images, loading, prefixes, recurrences, steps, trainer, whole, worker
from sp.cases import attention_cases, layer_cases
from sp.nodes import (
    compared_first_step,
    cut_for_others,
    evaluated,
    hosts,
    meshes,
    refused,
    status_of,
    weights_over_a_part,
)
from sp.over_ranks import on_nodes
from support.pool import Pool

pytestmark = pytest.mark.dist
NODES = ((4, 2), (8, 4), (8, 2))
"""Ranks, and ranks a node."""
FULL = pytest.mark.full("eight processes, 2 to 5 s each")


def each_on_nodes(cases: list[tuple], every_day: tuple[str, ...], in_turn: bool = False) -> pytest.MarkDecorator:
    """Cases that begin with their name and kind of sequence: some run every day on four ranks, all of them on eight;
    `in_turn`: on 2 x 4 or 4 x 2, one after the other."""
    found = []
    for i, case in enumerate(cases):
        name = f"{case[0]}-{case[1]}"
        few, *eight = NODES
        for ranks, per_node in [few] * (name in every_day) + (eight[i % 2 :][:1] if in_turn else eight):
            marks = () if ranks == 4 else FULL
            found.append(
                pytest.param(ranks, per_node, i, case, marks=marks, id=f"{ranks // per_node}x{per_node}-{name}")
            )
    return pytest.mark.parametrize(("pool", "per_node", "i", "case"), found, indirect=["pool"])


OF_NODES = pytest.mark.parametrize(
    ("pool", "per_node"),
    [pytest.param(*nodes, marks=FULL if nodes[0] > 4 else (), id="{}in{}".format(*nodes)) for nodes in NODES],
    indirect=["pool"],
)


@each_on_nodes(attention_cases(), ("gqa 4/2-packed, window", "few 2/1-padded"))
def test_attention(pool: Pool, per_node: int, i: int, case: tuple) -> None:
    """Loss and gradients for every kind of heads and of sequence, with no more all-to-alls than on one node."""
    pool.run(on_nodes, per_node, worker.attention, i, *case)


@each_on_nodes(layer_cases(), ("layer gqa 4/2-window",))
def test_whole_layers(pool: Pool, per_node: int, i: int, case: tuple) -> None:
    pool.run(on_nodes, per_node, worker.whole_layer, i, *case)


def families() -> list[tuple]:
    """Each family with each kind of sequence, one after the other as shards and as whole batches."""
    kinds = [*recurrences.SEQUENCES]
    return [(family, kind) for family in recurrences.FAMILIES for kind in kinds]


@each_on_nodes(families(), ("qwen3_5-packed", "deepseek_v3-plain"), in_turn=True)
def test_families(pool: Pool, per_node: int, i: int, case: tuple) -> None:
    """Recurrences, which are dealt to all ranks, sinks and latent attention; bytes sent by the first layer."""
    batches = ("cut", "whole")[i % 2]
    pool.run(on_nodes, per_node, recurrences.compared, recurrences.Case(*case, None), None, {}, batches)


@each_on_nodes(attention_cases(), ("flash 4/2-packed",), in_turn=True)
def test_whole_batches(pool: Pool, per_node: int, i: int, case: tuple) -> None:
    pool.run(on_nodes, per_node, whole.of_kind, i, *case)


@pytest.mark.full("2 s each", but=("short-4in2", "evaluated-4in2", "cut_for_others-4in2", "status_of-4in2"))
@OF_NODES
@pytest.mark.parametrize("case", [worker.axes, whole.short, whole.read, evaluated, cut_for_others, status_of])
def test_single_cases(pool: Pool, per_node: int, case: Callable[[], None]) -> None:
    pool.run(on_nodes, per_node, case)


@pytest.mark.full("2 s each", but=("gemma3-4in2",))
@OF_NODES
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_images(pool: Pool, per_node: int, model_type: str) -> None:
    """Positions of several axes, DeepStack's features, spans of tokens that see each other both ways."""
    pool.run(on_nodes, per_node, images.compared, model_type, {}, False)


@pytest.mark.full("1 s each", but=("None-llama-4in2",))
@OF_NODES
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("implementation", [None, "eager", "flash_attention_3", "flex_attention"])
def test_shared_prefixes(pool: Pool, per_node: int, implementation: str | None, family: str) -> None:
    pool.run(
        on_nodes,
        per_node,
        prefixes.over_ranks,
        family,
        {"layer": True} if family == "llama" else None,
        implementation,
        True,
    )


@pytest.mark.full("of a product")
@OF_NODES
@pytest.mark.parametrize("batches", ["cut", "whole"])
@pytest.mark.parametrize("kind", recurrences.SEQUENCES)
@pytest.mark.parametrize(("arch", "shape", "tiled"), recurrences.BALANCED)
def test_balance(pool: Pool, per_node: int, arch: str, shape: dict, tiled: bool, kind: str, batches: str) -> None:
    """The loss that balances experts."""
    pool.run(on_nodes, per_node, recurrences.balance, arch, shape, tiled, kind, batches)


@pytest.mark.full("2 s each", but=("sampler-4",))
@pytest.mark.parametrize("pool", [4], indirect=True)
@pytest.mark.parametrize("kind", ["sampler", "generator", "random state"])
def test_loader(pool: Pool, kind: str) -> None:
    """Ranks that draw different samples, in two groups on two nodes each."""
    pool.run(on_nodes, 1, loading.epochs_of, kind)


@pytest.mark.full("ten steps of 8 ranks", but=("4-hsdp-cut",))
@pytest.mark.parametrize("batches", ["cut", "whole"])
@pytest.mark.parametrize(
    ("pool", "strategy"),
    [
        pytest.param(pool_of(strategy, ranks), strategy, id=f"{ranks}-{strategy}")
        for ranks in (4, 8)
        for strategy in ("ddp", "fsdp2", "hsdp", "zero3", "zero3_hpz")
    ],
    indirect=["pool"],
)
def test_reducers(pool: Pool, strategy: str, batches: str) -> None:
    """Two groups on two nodes each, with half of their ranks on either: ten steps equal one process's."""
    size, updates = (2, 2) if pool.count == 4 else (4, 10)
    pool.run(on_nodes, size // 2, steps.reducers, "llama", strategy, {"layer": True}, batches, 1, size, updates)


@pytest.mark.full("10 s")
@pytest.mark.parametrize("pool", [4], indirect=True)
@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (4, 2)])
@pytest.mark.usefixtures("one_thread")
def test_trainer(pool: Pool, size: int, per_node: int) -> None:
    """Three epochs that accumulate batches with uneven labels; resumed in the middle of an epoch."""
    expected = trainer.one_process("llama")
    pool.run(on_nodes, per_node, trainer.train, expected, size, "llama", leaves_traces=True)


@pytest.mark.full("3 s each", but=("cut-4",))
@pytest.mark.parametrize("pool", [4], indirect=True)
@pytest.mark.parametrize("batches", ["cut", "whole"])
def test_first_step(pool: Pool, batches: str) -> None:
    """It is compared, and equal."""
    pool.run(on_nodes, 2, compared_first_step, batches)


@pytest.mark.parametrize("pool", [4], indirect=True)
@pytest.mark.parametrize("case", [meshes, hosts, refused, weights_over_a_part])
def test_who_shares_a_sequence(pool: Pool, case: Callable[[], None]) -> None:
    pool.run(case)
