"""Code of a rank whose group is on several nodes, or passes for it."""

import socket
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

import seqtile
from seqtile import sp
from seqtile.models.status import outcome_of
from sp import recurrences
from sp.over_ranks import by_first_rank, context
from support.tiny import batch_of, build


def seen(ctx: sp.SequenceParallel) -> tuple[int | None, ...]:
    return ctx.rank, ctx.size, ctx.per_node, ctx.data_parallel_rank, ctx.data_parallel_size


def meshes() -> None:
    """A whole mesh or a part of it, with nodes or without, as Accelerate names axes."""
    rank = dist.get_rank()
    for names, shape, part, expected in (
        (("sp_node", "sp"), (2, 2), None, (rank, 4, 2, 0, 1)),
        (("dp_replicate", "sp_node", "cp"), (1, 2, 2), ("sp_node", "cp"), (rank, 4, 2, 0, 1)),
        (("dp_shard", "sp_node", "sp", "tp"), (2, 2, 1, 1), None, (rank % 2, 2, 1, rank // 2, 2)),
        (("dp_replicate", "dp_shard", "cp", "sp"), (1, 2, 1, 2), None, (rank % 2, 2, 2, rank // 2, 2)),
        (("dp_shard", "cp"), (2, 2), None, (rank % 2, 2, 2, rank // 2, 2)),
        (("dp_shard", "cp", "tp"), (1, 2, 2), ("dp_shard", "cp"), (rank // 2, 2, 2, 0, 1)),
        (("sp_node", "sp"), (1, 4), "sp", (rank, 4, 4, 0, 1)),
        (("pp", "sp"), (4, 1), None, (0, 1, 1, 0, 1)),
        ("accelerate", (), None, (rank % 2, 2, 2, rank // 2, 2)),
    ):
        if names == "accelerate":
            mesh = ParallelismConfig(cp_size=2, dp_shard_size=2).build_device_mesh("cpu")
        else:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        ctx = sp.initialize(mesh=mesh if part is None else mesh[part])
        assert seen(ctx) == expected, (names, seen(ctx))
        total = torch.ones(())
        dist.all_reduce(total, group=ctx.group)
        assert total == ctx.size
    for names, shape, part, match in (
        (("sp", "cp"), (2, 2), None, "both larger than 1"),
        (("sp_node", "sp"), (2, 2), "sp", r'expected mesh\["sp_node", "sp"\]'),
        (("sp", "sp_node"), (2, 2), None, "expected sp_node before sp"),
        (("dp", "tp"), (2, 2), None, "got 'dp', 'tp' of dp, tp"),
        (("dp", "ring", "sp"), (1, 2, 2), None, "name the axes"),
        (None, (2, 2), None, "of one dimension, or with names"),
    ):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(ValueError, match=match):
            sp.initialize(mesh=mesh if part is None else mesh[part])


def hosts() -> None:
    """The ranks' host names tell nodes; a number overrules them."""
    rank, said = dist.get_rank(), []
    with patch("builtins.print", lambda text, file: said.append(text)):
        for names, size, per_node, expected in (
            ("aabb", 4, None, 2),
            ("aabb", 4, 4, 4),
            ("aabb", 2, None, 2),
            ("abab", 2, None, 1),
            ("abab", 4, 4, 4),
            ("aaaa", 4, 2, 2),
            ("aaaa", 2, 4, 2),
            ("aaab", 4, None, 4),
            ("abab", 4, None, 4),
        ):
            with patch.object(socket, "gethostname", lambda name=names[rank]: name):
                assert sp.initialize(size, per_node=per_node).per_node == expected, (names, size, per_node)
    uneven = [text for text in said if "so all are taken as one node" in text]
    assert len(said) - len(uneven) == 3 * (rank == 0), said
    assert len(uneven) == 2 * (rank == 0) and (rank or "shared by 3 on a, 1 on b" in uneven[0])


def refused() -> None:
    """On every rank, also what only one of them asked wrongly; none waits, and the next call works."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    for arguments, names, match in (
        ({"sequence_parallel_size": 4, "per_node": True}, "aaaa", "per_node is True"),
        ({"sequence_parallel_size": 4, "per_node": 3}, "aaaa", "per_node is 3, expected a divisor or a multiple"),
        ({"sequence_parallel_size": 4, "per_node": 0}, "aaaa", "per_node is 0"),
        ({"sequence_parallel_size": 4, "per_node": 1 + rank % 2}, "aaaa", "per_node is 1, 2, 1, 2"),
        ({"sequence_parallel_size": 4, "per_node": 2 if rank else "2"}, "aaaa", "per_node is '2', 2, 2, 2"),
        ({"sequence_parallel_size": 4 if rank else 2}, "aaaa", "ask for different groups"),
        ({"sequence_parallel_size": 4 if rank else 3}, "aaaa", "is 3, expected a divisor of the 4 ranks"),
        ({"sequence_parallel_size": 4} if rank else {"group": dist.group.WORLD}, "aaaa", "ask for different groups"),
        ({"group": pair}, "aaaa", "in none of the groups|Invalid|not part of|not registered"),
        ({}, "aaaa", "exactly one of"),
    ):
        with patch.object(socket, "gethostname", lambda name=names[rank]: name):
            with pytest.raises(ValueError, match=match):
                sp.initialize(**arguments)
    assert seen(sp.initialize(2)) == (rank % 2, 2, 2, rank // 2, 2)


def compared_first_step(batches: str) -> None:
    ctx, model, batch = context(), build("qwen3", num_key_value_heads=2), batch_of(2, 61)
    sp.apply_ulysses(model, ctx, batches=batches)
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=11)
    if batches == "cut":
        sp.reduce_loss(model(**sp.shard(batch, ctx)).loss, ctx).backward()
    else:
        model(**batch).loss.backward()
    assert "up to rounding" in str(outcome_of(model))


def cut_for_others() -> None:
    """Shards that were cut by hand, or for other nodes, hold other tokens: refused on every rank."""
    ctx, batch = context(), batch_of(1, 48)
    del batch["attention_mask"]
    one_node = sp.initialize(ctx.size, per_node=ctx.size)
    by_hand = sp.shard(batch, one_node)
    del by_hand["batch_hash"]
    for of_model, shard, match in (
        (ctx, sp.shard(batch, one_node), f"for {ctx.size} ranks on each node, expected one for {ctx.per_node}"),
        (one_node, sp.shard(batch, ctx), f"for {ctx.per_node} ranks on each node, expected one for {ctx.size}"),
        (ctx, by_hand, "was cut by hand"),
    ):
        model = build("llama")
        sp.apply_ulysses(model, of_model)
        with pytest.raises(ValueError, match=match):
            model(**shard)
    sp.restore(model)
    sp.apply_ulysses(model, one_node)
    assert model(**by_hand).loss.isfinite()


def evaluated() -> None:
    """The loss of documents by position, of unequal lengths."""
    ctx, model = context(), build("qwen3", num_key_value_heads=2)
    documents = [torch.randint(3, 90, (length,)) for length in (70, 33)]
    expected = by_first_rank(seqtile.evaluate, model, documents, context=41)
    sp.apply_ulysses(model, ctx, batches="whole")
    found = seqtile.evaluate(model, documents, context=41)
    assert found.tokens == expected.tokens and found.loss == pytest.approx(expected.loss, rel=1e-6)
    for ours, theirs in zip(found.by_position, expected.by_position, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)


def status_of() -> None:
    """`seqtile.status` says what goes across nodes."""
    ctx, heads = context(), ("num_attention_heads", "num_key_value_heads")
    more = recurrences.at_least_a_head_each("qwen3_5", ctx.size)
    for make, expected in (
        (lambda: build("qwen3", num_key_value_heads=2), "keys and values of attention"),
        (lambda: build("qwen3", **dict.fromkeys(heads, ctx.size)), "queries, keys and values, outputs of attention"),
        (lambda: recurrences.build("qwen3_5", **more), ", and all inputs and outputs of recurrences"),
        (lambda: recurrences.build("deepseek_v3"), "latents of attention"),
    ):
        model = make()
        sp.apply_ulysses(model, ctx)
        sharing = f"on each of {ctx.nodes.number} nodes; across nodes go "
        assert (sharing if "rec" in expected else sharing + expected) in (said := str(seqtile.status(model)))
        assert expected in said
    sp.restore(model)
    sp.apply_ulysses(model, sp.initialize(ctx.size, per_node=ctx.size))
    assert f"{ctx.size} ranks share a sequence\n" in f"{seqtile.status(model)}\n"
    model = build("llama", **dict.fromkeys(heads, 8))
    sp.apply_ulysses(model, ctx)
    seqtile.apply_seqtile(model, layer=True, head_groups="auto")
    groups = {4: 2, 8: None}[ctx.size]
    assert seqtile.status(model).layer.head_groups == groups


def weights_over_a_part() -> None:
    """FSDP2 on one node of a sequence's two would leave out the other's gradients: refused on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp_node", "sp"))
    ctx, batch = sp.initialize(mesh=mesh), batch_of(1, 24)
    layers, lacks = (lambda model: [*model.model.layers, model]), "expected among them all that share"
    for part, over, match in (
        (layers, "sp", lacks),
        (lambda model: [model], "sp", lacks),
        (layers, ("sp_node", "sp"), None),
        (layers, None, None),
    ):
        model = build("llama")
        sp.apply_ulysses(model, ctx, batches="whole")
        for module in part(model):
            fully_shard(module, mesh=over and mesh[over], reshard_after_forward=False)
        with torch.no_grad():
            assert model(**batch).loss.isfinite()
        with pytest.raises(ValueError, match=match) if match else nullcontext():
            model(**batch).loss.backward()
    frozen = build("llama").requires_grad_(False)
    sp.apply_ulysses(frozen, ctx, batches="whole")
    fully_shard(frozen, mesh=mesh["sp"])
    assert frozen(**batch).loss.isfinite()
