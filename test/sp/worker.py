"""Code of a rank that compares attention over ranks with one process."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

import seqtile
from seqtile import sp
from seqtile.models.forward.layer import groups_of
from sp import images
from sp.attentions import install
from sp.cases import WRAPPED, batch_of_kind
from sp.over_ranks import Traffic, assert_same_step, by_first_rank, context
from support.tiny import build, checkpointing, loss_and_gradients


class Spread(NamedTuple):
    """The counts of a step over the ranks."""

    model: nn.Module
    forward: int
    """The number of all-to-alls."""
    backward: int
    recomputes: bool


def compared(i: int, case: str, kind: str, arch: str, shape: dict, **options: object) -> Spread:
    """Computes the i-th case's step in one process and over ranks, there with `options`, and compares loss and
    gradients."""
    install()
    ctx = context()
    torch.manual_seed(i)
    one = build(arch, **shape)
    many = copy.deepcopy(one)
    heads = case.removeprefix("layer ").split()[0]
    many.config._attn_implementation = WRAPPED.get(heads, one.config._attn_implementation)
    batch = batch_of_kind(kind)
    expected = by_first_rank(loss_and_gradients, one, **batch)
    sp.apply_ulysses(many, ctx)
    if options:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options, check=False)  # all-to-alls are counted
    reentrant = (None, False, True)[i % 3]
    checkpointing(many, reentrant)
    with Traffic() as traffic:
        ours = sp.reduce_loss(many(**sp.shard(batch, ctx)).loss, ctx)
        forward = len(traffic.sent)
        ours.backward()
    assert_same_step(ours, many, expected, f"{case}, {kind}")
    return Spread(many, forward, len(traffic.sent) - forward, reentrant is not None)


def attention(i: int, *case: Any, **options: object) -> None:
    """Loss and gradients for a kind of heads and of sequence; two all-to-alls per layer and direction."""
    spread = compared(i, *case, **options)
    layers = spread.model.config.num_hidden_layers
    assert spread.forward == 2 * layers, f"{spread.forward} all-to-alls in the forward"
    assert spread.backward == (4 if spread.recomputes else 2) * layers, f"{spread.backward} in the backward"


def whole_layer(i: int, name: str, kind: str, arch: str, shape: dict, groups: int | str | None, repeats: bool) -> None:
    """The same with whole layers tiled and attention in head chunks: the next group is sent before waiting for the
    last."""
    size = context().size
    spread = compared(i, name, kind, arch, shape, layer=True, head_groups=groups)
    config = spread.model.config
    found = groups_of(spread.model.model.layers[0].self_attn, groups, size) or 1
    if not repeats and config.num_attention_heads // found >= size:  # else ranks share a head's queries
        attentions = found * config.num_hidden_layers
        once = 2 if found == 1 else 3  # there and back; with groups once more there
        assert spread.forward == 2 * attentions, f"{spread.forward} all-to-alls in the forward"
        assert spread.backward == (once + 2 * spread.recomputes) * attentions, f"{spread.backward} in the backward"


def axes() -> None:
    """Multimodal positions [3, B, S]: an image of 16 tokens in the text, with its embeddings already merged."""
    ctx, one, batch = context(), images.made("qwen2_5_vl")[0], batch_of_kind("plain")
    embedded = 4 * torch.randn(1, batch.pop("input_ids").shape[1], one.config.text_config.hidden_size)
    positions = torch.arange(embedded.shape[1]).expand(3, 1, -1).clone()
    image = torch.arange(16)
    positions[:, 0, 40:56] = 40 + torch.stack([torch.zeros_like(image), image // 4, image % 4])
    positions[:, :, 56:] = 44 + torch.arange(embedded.shape[1] - 56)
    batch |= {"inputs_embeds": embedded, "position_ids": positions}
    expected = loss_and_gradients(one, **batch)
    sp.apply_ulysses(one, ctx)
    one.zero_grad()
    ours = sp.reduce_loss(one(**sp.shard(batch, ctx)).loss, ctx)
    ours.backward()
    assert_same_step(ours, one, expected, "three axes")
