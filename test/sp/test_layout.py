"""Values computed once per forward, however many layers there are, and how often the host waits; groups of ranks."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from seqtile import sp
from seqtile.attention import by_masks, nodes, segments
from seqtile.attention.layout import edges_of, rows_between
from seqtile.protocols import SHARDED
from seqtile.sp import attention, same_batch
from seqtile.sp.attention import UlyssesAttention
from seqtile.sp.groups import SequenceParallel
from seqtile.sp.layout import ShardedLayout
from seqtile.sp.same_batch import bits, hash_of, mixed, token_hashes
from sp import recurrences
from sp.cases import batch_of_kind
from sp.on_device import OnDevice
from sp.over_ranks import alone
from support.measure import LiveBytes
from support.tiny import build, checkpointing


def test_without_torch_distributed() -> None:
    with pytest.raises(ValueError, match="start the script by torchrun"):
        sp.initialize(2)


DUPLICATE = "Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000"


@pytest.mark.parametrize("said", [DUPLICATE, "unhandled system error"], ids=["duplicate", "another error"])
def test_ranks_on_one_device(said: str, one_rank: sp.SequenceParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses ranks on the same device in their first collective; other errors of it stay as they are."""

    def all_gather_object(*_: object) -> None:
        raise dist.DistBackendError(f"NCCL error, NCCL version 2.26.5\nLast error:\n{said}\nframe #0")

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    expected, message = (
        (ValueError, rf"got cuda:0 \({DUPLICATE}\); torch.cuda.set_device\(int\(os.environ")
        if said == DUPLICATE
        else (dist.DistBackendError, said)
    )
    with pytest.raises(expected, match=message):
        sp.initialize(group=one_rank.group)


def test_a_batch_is_hashed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live bytes do not grow with the batch; each value counts, and its place."""
    assert same_batch._HASHED <= 2**20
    monkeypatch.setattr(same_batch, "_HASHED", 2**12)
    count = 40 * same_batch._HASHED + 5
    values = torch.randn(1, count // 5, 5).bfloat16()
    with LiveBytes() as memory:
        found = hash_of({"0": bits(values)})
    assert memory.peak <= 26 * same_batch._HASHED < count
    assert found == hash_of({"0": bits(values.clone())}) == hash_of({"0": bits(values.mT.clone().mT)})
    flat = values.flatten()
    first, second, *rest = flat.split(same_batch._HASHED)
    for moved in (torch.cat([second, first, *rest]), flat.roll(1), torch.cat([flat[:-1], -flat[-1:]])):
        assert hash_of({"0": bits(moved)}) != found
    with LiveBytes() as memory:
        hashes = token_hashes(bits(values).expand(2, -1, -1))
    assert memory.peak <= 26 * same_batch._HASHED + 3 * hashes.nbytes and hashes[0].equal(hashes[1])
    assert hashes[0].equal(mixed(bits(values)).sum(2)[0]) and len(hashes.unique()) == count // 5


@pytest.mark.parametrize("rows", [1, 5])
def test_documents_are_waited_for_once(rows: int) -> None:
    positions = torch.cat([torch.arange(length) for length in (17, 1, 45)]).expand(rows, -1)
    valid = torch.ones_like(positions, dtype=torch.bool)
    OnDevice.waits = 0
    found = rows_between(edges_of(positions.as_subclass(OnDevice), valid.as_subclass(OnDevice)))
    assert OnDevice.waits == 1 and found == (((0, 17), (17, 18), (18, 63)),) * rows


def test_ranks_agree_by_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def all_reduce(found: torch.Tensor, op: Any, group: Any) -> None:
        calls.append((op, group))
        found.fill_(9)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(attention, "device_of", lambda sp_group: torch.device("cpu"))
    of_ranks = ShardedLayout(SequenceParallel("ranks", 1, 8, 0, 1), 5, (((0, 40),),), "sdpa")
    steps = UlyssesAttention(SimpleNamespace(), of_ranks, None, {}, 8, 8)
    assert [steps.agree_on_max(size) for size in (3, 0)] == [9, 9]
    assert calls == [(dist.ReduceOp.MAX, "ranks")]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[sp.SequenceParallel]:
    yield from alone("gloo")


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_a_whole_batch_is_waited_for_once(kind: str, one_rank: sp.SequenceParallel) -> None:
    """For its comparison between ranks and its documents together, before the first layer."""
    model, batch = build("llama"), batch_of_kind(kind)
    sp.apply_ulysses(model, one_rank, batches="whole")
    batch |= {name: value.as_subclass(OnDevice) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    waits = []

    def reached(*_: object) -> None:
        waits.append(OnDevice.waits)

    model.model.rotary_emb.register_forward_pre_hook(reached)
    OnDevice.waits = 0
    assert model(**batch).loss.isfinite() and waits == [1]


def test_another_batch_in_a_forward(one_rank: sp.SequenceParallel) -> None:
    """A forward of another batch leaves what is known of the running forward, and no other attribute, as it was."""
    model = build("llama")
    sp.apply_ulysses(model, one_rank, batches="whole")
    batch = batch_of_kind("packed")
    expected, sharding, inside = model(**batch).loss, vars(model)[SHARDED], []

    def another(*_: object) -> None:
        handle.remove()
        before, running = dict(vars(sharding)), dict(vars(sharding.forward))
        with sharding.other_batch(lambda: None):
            inside.append(model(**batch_of_kind("padded")).loss)
        assert vars(sharding) == before and vars(sharding.forward) == running and running["owners"] is not None

    handle = model.model.layers[1].register_forward_pre_hook(another)
    assert model(**batch).loss.equal(expected) and len(inside) == 1


COUNTED = ((nodes, "rank_heads"), (segments, "segments_of"), (by_masks, "blocks"), (attention, "check"))


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_layers_ask_for_what_is_found_once(
    family: str, kind: str, one_rank: sp.SequenceParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five layers need as many computations as one of each kind, also when they are recomputed."""
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    for module, name in COUNTED:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    found = []
    for repeated in (1, 5):
        kinds = ["linear_attention"] * repeated + ["full_attention"] * repeated
        many = {"num_hidden_layers": 2 * repeated, "layer_types": kinds}
        model = build("llama", num_hidden_layers=repeated) if family == "llama" else recurrences.build(family, **many)
        sp.apply_ulysses(model, one_rank)
        checkpointing(model, False)
        calls.clear()
        model(**sp.shard(batch_of_kind(kind), one_rank)).loss.backward()
        found.append(sorted(calls))
    assert found[0] == found[1] and {name for _, name in COUNTED} == {*found[0]}
