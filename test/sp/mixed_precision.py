"""FSDP2 with parameters in bfloat16, which casts and copies the arguments of every module that it wraps."""

import copy
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import seqtile
from distributed.worker import fsdp2
from seqtile import sp
from sp import recurrences
from sp.cases import batch_of_kind
from sp.over_ranks import context
from support.assertions import assert_each_as_exact, relative_error
from support.tiny import build, checkpointing, loss_and_gradients

KINDS = ("plain", "packed", "padded")
TILED = (None, {}, {"layer": True}, {"layer": True, "head_groups": 2})
CASES = [
    *product(["llama"], TILED, [None, False, True]),
    ("gemma3_text", {"layer": True}, False),  # its layers are called around their attention
    ("qwen3_5", {}, False),
]
"""Model, options of seqtile, and whether its checkpoints are reentrant (None: no checkpoints)."""


def step(model: nn.Module, ctx: sp.SequenceParallel, batch: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and gradients of a model in FSDP2 over the ranks of `ctx`, with a policy that sets only the dtype."""
    mesh = dist.DeviceMesh.from_group(ctx.group, "cpu")
    fsdp2(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    loss = model(**batch).loss
    loss = sp.reduce_loss(loss, ctx) if "batch_hash" in batch else loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def mixed_precision(i: int, name: str, options: dict | None, reentrant: bool | None, batches: str = "cut") -> None:
    """Loss and gradients over ranks are as close to float32 as those of one process; both in bfloat16."""
    ctx, alone = context(), context(1)
    torch.manual_seed(i)
    exact = build(name, tie_word_embeddings=False) if name != "qwen3_5" else recurrences.build(name)
    batch = batch_of_kind("plain" if name == "qwen3_5" else KINDS[i % len(KINDS)])
    one, many = copy.deepcopy(exact), copy.deepcopy(exact)
    true_loss, true_gradients = loss_and_gradients(exact, **batch)
    loss, gradients = step(one, alone, batch)
    sp.apply_ulysses(many, ctx, batches=batches)
    if options is not None:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options)
    checkpointing(many, reentrant)
    our_loss, ours = step(many, ctx, batch if batches == "whole" else sp.shard(batch, ctx))
    assert relative_error(our_loss, loss) <= 3e-3 and relative_error(our_loss, true_loss) <= 3e-3
    assert_each_as_exact(ours, gradients, true_gradients)
