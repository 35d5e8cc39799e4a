"""Mistakes that would otherwise stay unnoticed: batches that are not shards of one batch, losses that are not
reduced."""

import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import seqtile
from seqtile import sp
from sp import recurrences
from sp.over_ranks import assert_same_step, context
from sp.trainer import SequenceParallelTrainer, collate, model_of
from sp.trainer import documents as samples
from support.tiny import VOCAB, build, checkpointing, loss_and_gradients

LENGTH = 60
Batch = dict[str, torch.Tensor]


def batch_of(seed: int, length: int = LENGTH) -> Batch:
    """One sequence, the same for the same seed on every rank."""
    ids = torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def whole(ctx: sp.SequenceParallel) -> Batch:
    """A whole sequence on every rank, with everything that a shard has except positions."""
    batch = sp.shard(batch_of(0), sp.SequenceParallel(ctx.group, 0, 1, 0, 1))
    return {name: value for name, value in batch.items() if name not in ("position_ids", "batch_hash")}


def without(name: str, ctx: sp.SequenceParallel, rank: int = 1) -> Batch:
    """A shard without one entry, on one rank."""
    return {key: value for key, value in sp.shard(batch_of(0), ctx).items() if key != name or ctx.rank != rank}


def documents(ctx: sp.SequenceParallel) -> Batch:
    """The ranks' batches differ only in the starts of documents."""
    lengths = (20 + ctx.rank, LENGTH - 20 - ctx.rank)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return sp.shard(batch_of(0) | {"position_ids": positions}, ctx)


def labels(ctx: sp.SequenceParallel) -> Batch:
    """The ranks' batches differ only in which token has no label."""
    batch = batch_of(0)
    batch["labels"][0, 10 + ctx.rank] = -100
    return sp.shard(batch, ctx)


def embedded(ctx: sp.SequenceParallel) -> Batch:
    batch = batch_of(ctx.rank)
    return sp.shard({"inputs_embeds": torch.ones(1, LENGTH, 48), "labels": batch["labels"]}, ctx)


def sampled(ctx: sp.SequenceParallel) -> Batch:
    """A sampler that distributes samples over ranks instead of groups."""
    rows = [batch_of(i) for i in range(4)]
    sampler = torch.utils.data.DistributedSampler(rows, dist.get_world_size(), dist.get_rank(), shuffle=False)
    collator = sp.DataShardingCollator(lambda rows: rows[0], ctx)
    return next(iter(DataLoader(rows, sampler=sampler, collate_fn=collator, num_workers=1)))


NO_POSITIONS = "no position_ids came with the tokens"
OTHERS = "the ranks of a group hold different batches, or shards of different ones"
SHAPES = "the ranks of a group hold batches of different shapes"
SAME = "every rank of the group holds the same tokens at the same positions"
MIXED_UP: dict[str, tuple[Callable[[sp.SequenceParallel], Batch], str]] = {
    "whole sequences": (whole, NO_POSITIONS),
    "whole sequences without labels": (lambda ctx: {"input_ids": batch_of(0)["input_ids"]}, NO_POSITIONS),
    "another whole sequence on each rank": (lambda ctx: {"input_ids": batch_of(ctx.rank)["input_ids"]}, NO_POSITIONS),
    "whole sequences with positions": (lambda ctx: whole(ctx) | {"position_ids": torch.arange(LENGTH)[None]}, SAME),
    "positions dropped": (lambda ctx: without("position_ids", ctx, ctx.rank), NO_POSITIONS),
    "positions dropped by one rank": (lambda ctx: without("position_ids", ctx), SHAPES),
    "the hash dropped by one rank": (lambda ctx: without("batch_hash", ctx), SHAPES),
    "other samples": (lambda ctx: sp.shard(batch_of(ctx.rank), ctx), OTHERS),
    "other labels": (labels, OTHERS),
    "other documents": (documents, OTHERS),
    "other embeddings": (embedded, OTHERS),
    "other samples by a sampler over ranks": (sampled, OTHERS),
}


def spread() -> tuple[nn.Module, Batch, torch.Tensor]:
    """A model over the ranks, a correct batch, and its loss."""
    model = build("llama")
    sp.apply_ulysses(model, context())
    right = sp.shard(batch_of(0), context())
    return model, right, model(**right, use_cache=False).loss.detach()


def mixed_up(name: str) -> None:
    """It is refused on every rank, and none waits for another; then the correct batch has its loss."""
    model, right, loss = spread()
    make, match = MIXED_UP[name]
    with pytest.raises(ValueError, match=match):
        model(**make(context()), use_cache=False)
    assert model(**right, use_cache=False).loss.equal(loss)


def by_hand() -> None:
    """A batch that another tool has cut is accepted; arguments must be keywords."""
    model, right, loss = spread()
    cut = {name: value for name, value in right.items() if name != "batch_hash"}
    assert model(**cut, use_cache=False).loss.equal(loss)
    assert model(return_dict=False, **right, use_cache=False)[0].equal(loss)
    with pytest.raises(ValueError, match="and the rest by keyword"):
        model(right["input_ids"], None, right["position_ids"])


def hooked_on_one_rank() -> None:
    """A hook that changes what a rank sends is refused on every rank, and none waits; one on all ranks, or one that
    changes nothing that is sent, is not."""
    ctx, group = context(), {"layer": True, "head_groups": 2, "chunk_tokens": 16, "check": False}
    for arch, options, name, changes in (
        ("deepseek_v3", None, "kv_b_proj", True),
        ("llama", group, "q_proj", True),
        ("llama", group | {"head_groups": None}, "q_proj", False),
        ("llama", None, "q_proj", False),
    ):
        for batches in ("cut", "whole"):
            model = recurrences.build(arch) if name == "kv_b_proj" else build(arch, num_key_value_heads=4)
            sp.apply_ulysses(model, ctx, batches=batches)
            if options is not None:
                seqtile.apply_seqtile(model, **options)
            batch = batch_of(0) if batches == "whole" else sp.shard(batch_of(0), ctx)
            loss = model(**batch, use_cache=False).loss.detach()
            attention = model.model.layers[1].self_attn

            def hooked(rank: int, attention: nn.Module = attention, name: str = name) -> object:
                seen = getattr(attention, name)
                return seen.register_forward_hook(lambda *_: None) if ctx.rank == rank else None

            handles = [hooked(1)]
            if changes:
                for _ in range(2):
                    with pytest.raises(ValueError, match=r"compute (model\.)?layers\.1\S* in different ways, \["):
                        model(**batch, use_cache=False)
            else:
                assert torch.allclose(model(**batch, use_cache=False).loss, loss, rtol=1e-5)
            handles.append(hooked(0))
            if options != group:
                assert torch.allclose(model(**batch, use_cache=False).loss, loss, rtol=1e-5)
            for handle in filter(None, handles):
                handle.remove()
            assert model(**batch, use_cache=False).loss.equal(loss)


def after_a_failure() -> None:
    """A failed forward leaves nothing of its batch for the next one, even if that is the base model's alone."""
    model, right, _ = spread()
    base, inputs = model.model, {name: right[name] for name in ("input_ids", "position_ids")}
    expected = base(**inputs)[0]
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(right["input_ids"], **right | {"position_ids": right["position_ids"] + 7}, use_cache=False)
    with pytest.raises(ValueError, match=NO_POSITIONS):
        base(input_ids=right["input_ids"])
    assert base(**inputs)[0].equal(expected)


def cut_twice() -> None:
    """First by the collator, then by the loader or by Trainer's mixin."""
    ctx = context()
    collator = sp.DataShardingCollator(collate, ctx)
    loader = sp.ShardedDataLoader(DataLoader(samples(), collate_fn=collator), ctx)
    with pytest.raises(ValueError, match="this batch is a shard already"):
        next(iter(loader))
    given = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "ddp_backend": "gloo"}
    arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=2, **given)
    options = {"args": arguments, "train_dataset": samples(), "data_collator": collator}
    trainer = SequenceParallelTrainer(model_of("llama"), sequence_parallel=ctx, **options)
    with pytest.raises(ValueError, match="this batch is a shard already"):
        trainer.train()
    shard = sp.shard(collate([samples()[0]]), ctx)
    with pytest.raises(ValueError, match="this batch is a shard already"):
        trainer.model(**shard)
    model = model_of("llama")
    sp.apply_ulysses(model, ctx)
    with pytest.raises(ValueError, match=f"{OTHERS}|{SHAPES}"):  # without the mixin each rank has its own samples
        Trainer(model, **options).train()


def raw(model: nn.Module, batch: Batch, ctx: sp.SequenceParallel) -> torch.Tensor:
    return model(**sp.shard(batch, ctx), use_cache=False).loss


def halved(share: torch.Tensor) -> torch.Tensor:
    share /= 2  # in place, as Trainer scales it
    return share


REDUCED: dict[str, Callable[..., torch.Tensor]] = {
    # For the partial losses of two batches: half of the sum of the groups' losses.
    "each": lambda a, b, ctx: (sp.reduce_loss(a, ctx) + sp.reduce_loss(b, ctx)) / 2,
    "scaled before": lambda a, b, ctx: sp.reduce_loss(a / 2, ctx) + sp.reduce_loss(halved(b), ctx),
    "added before": lambda a, b, ctx: sp.reduce_loss((a + b) * 0.5, ctx),
}
FORGOTTEN: dict[str, Callable[..., torch.Tensor]] = {
    "as it is": lambda a, b, ctx: a,
    "scaled": lambda a, b, ctx: (a + b) * ctx.size,
    "one of two": lambda a, b, ctx: sp.reduce_loss(a, ctx) + b,
    "reduced for a print": lambda a, b, ctx: (sp.reduce_loss(a, ctx), a)[1],
    "reduced without its graph": lambda a, b, ctx: sp.reduce_loss(a.detach(), ctx) * 0 + a,
}


def losses(reentrant: bool | None) -> None:
    """The backward of a partial loss raises before any parameter has a gradient, unless the loss was reduced; its other
    terms do not matter. With the reduction, gradients are those of one process."""
    ctx, batch_pair, model = context(), (batch_of(0), batch_of(1, 83)), build("llama")
    checkpointing(model, reentrant)
    found = [loss_and_gradients(model, **batch, use_cache=False)[1] for batch in batch_pair]
    expected = {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}
    sp.apply_ulysses(model, ctx)
    for name, make in FORGOTTEN.items():
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"expected loss = sp\.reduce_loss\(loss, ctx\) before"):
            make(*(raw(model, batch, ctx) for batch in batch_pair), ctx).backward()
        if name != "one of two":
            assert all(parameter.grad is None for parameter in model.parameters()), name
    for name, make in REDUCED.items():
        model.zero_grad()
        loss = make(*(raw(model, batch, ctx) for batch in batch_pair), ctx)
        loss.backward()
        assert_same_step(loss, model, (loss.detach(), expected), name)


def reduced_twice() -> None:
    """Each backward of a reduced loss runs. A partial loss still raises afterwards, and evaluation can reduce a
    loss."""
    model, right, _ = spread()
    ctx, share = context(), model(**right, use_cache=False).loss
    loss = sp.reduce_loss(share, ctx)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"sp\.reduce_loss"):
        share.backward()
    with torch.no_grad():
        assert sp.reduce_loss(raw(model, batch_of(0), ctx), ctx).isfinite()
