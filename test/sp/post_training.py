"""DPO's loss on packed documents over the ranks that share them, against one process: each rank has a part of every sum
of log-probabilities. Losses that are one sum over tokens are reduced as the model's own is."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqtile
from seqtile import sp
from seqtile.attention.nodes import Nodes
from seqtile.sp.cut import parts_of
from sp.over_ranks import assert_same_step, by_first_rank, context
from sp.whole import by_one
from support.tiny import VOCAB, build

LENGTHS = (17, 30, 9, 41)  # alternately chosen and rejected; none ends at a shard boundary
PROMPT = 4
Reduce = Callable[[Tensor], Tensor]


def packed() -> dict[str, Tensor]:
    """Four documents, each a prompt and a completion, in one row; for each token its document."""
    ids = torch.randint(3, VOCAB, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.masked_fill(positions < PROMPT, -100),
        "documents": documents,
    }


def log_probs_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs, labels = {name: batch[name] for name in ("input_ids", "position_ids", "batch_hash")}, batch["shift_labels"]
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    return seqtile.linear_log_probs(hidden, model.lm_head.weight, labels, chunk_tokens=11)


def dpo(model: nn.Module, reference: nn.Module, batch: dict[str, Tensor], reduce: Reduce) -> Tensor:
    def sums(of: nn.Module) -> Tensor:
        nothing = torch.zeros(len(LENGTHS))
        return reduce(nothing.index_add(0, batch["documents"][0], log_probs_of(of, batch)[0]))

    with torch.no_grad():
        before = sums(reference)
    chosen, rejected = (sums(model) - before).view(-1, 2).unbind(1)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def preferences() -> None:
    """The loss over packed documents, and every gradient, over ranks equal those of one process."""
    ctx, one, reference = context(), build("llama"), build("llama").requires_grad_(False)
    batch, many = packed(), copy.deepcopy(one)
    whole = parts_of(batch, [0], Nodes(1, 1))[0]
    expected = by_first_rank(by_one, dpo, one, reference, whole | {"batch_hash": None}, lambda share: share)
    for model in (many, reference):
        sp.apply_ulysses(model, ctx)
    seqtile.apply_seqtile(many, chunk_tokens=11, loss=False)
    ours = dpo(many, reference, sp.shard(batch, ctx), lambda share: sp.reduce_loss(share, ctx))
    ours.backward()
    assert any(gradient.norm() > 0 for gradient in expected[1].values())
    assert_same_step(ours, many, expected)
