"""A decoder layer of Hugging Face's under activation checkpointing, forward and backward, side by side.

A layer that is tiled as a whole is held to at most 1.05 of the time of `liger` from 32K tokens on (`time_x_liger`).
Attention is sdpa's, the same for all. gemma2_9b is not here: sdpa knows no soft cap, which its attention has.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from types import MethodType

import torch
from benchmark.bench_gated_mlp import liger_tiled_forward
from benchmark.device import DEVICE
from benchmark.methods import deepspeed_mlps
from benchmark.models import build
from benchmark.shapes import LENGTHS, SHAPES, Case, K, Shape
from benchmark.subject import Forward, Subject, activations, compiled, needs
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from seqtile import apply_seqtile


@dataclass
class Work:
    x: torch.Tensor  # [1, T, D]
    upstream: torch.Tensor
    model: PreTrainedModel
    """The copies that contestants make of it share its weights."""

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, *self.model.model.layers.parameters()


def operands(shape: Shape, tokens: int, dtype: torch.dtype) -> Work:
    return Work(*activations(shape, tokens, dtype), build(shape, dtype, layers=1, vocab=8))


def modeling(model: PreTrainedModel) -> object:
    """The module that has the model's classes."""
    return import_module(type(model).__module__)


def copied(model: PreTrainedModel) -> PreTrainedModel:
    return deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def checkpointed(work: Work, layer: nn.Module, rope: Callable | None = None) -> Forward:
    """`rope`: what Hugging Face's function for rotary embeddings is in this contestant's steps."""
    positions = torch.arange(work.x.shape[1], device=DEVICE)[None]
    embeddings = work.model.model.rotary_emb(work.x.detach(), positions)

    def compute() -> torch.Tensor:
        return checkpoint(layer, work.x, position_embeddings=embeddings, attention_mask=None, use_reentrant=False)

    @contextmanager
    def around() -> Iterator[None]:
        of_model, name = modeling(work.model), "apply_rotary_pos_emb"
        theirs = getattr(of_model, name)
        setattr(of_model, name, rope or theirs)
        try:
            yield
        finally:
            setattr(of_model, name, theirs)

    return Forward(compute, around)


def huggingface(work: Work) -> Forward:
    return checkpointed(work, work.model.model.layers[0])


def huggingface_compiled(work: Work) -> Forward:
    return checkpointed(work, compiled(work.model.model.layers[0]))


def with_liger(work: Work, swiglu: bool = True) -> tuple[PreTrainedModel, Callable]:
    """A copy with Liger's norms and, if asked for, its product of gate and up; and its RoPE, which is no module."""
    needs("liger_kernel")
    from liger_kernel import transformers as liger_kernels

    model, of_model = copied(work.model), modeling(work.model)
    apply = getattr(liger_kernels, f"apply_liger_kernel_to_{model.config.model_type}")
    before = dict(vars(of_model))
    apply(model=model, rope=False, rms_norm=True, swiglu=swiglu, fused_linear_cross_entropy=False)
    vars(of_model).update(before)  # it changes the classes too
    return model, liger_kernels.liger_rotary_pos_emb


def liger(work: Work) -> Forward:
    model, rope = with_liger(work)
    return checkpointed(work, model.model.layers[0], rope)


def liger_tiled(work: Work) -> Forward:
    model, rope = with_liger(work, swiglu=False)
    mlp = model.model.layers[0].mlp
    mlp.activation = "silu"
    mlp.forward = MethodType(liger_tiled_forward, mlp)
    return checkpointed(work, model.model.layers[0], rope)


def deepspeed_tiled(work: Work) -> Forward:
    needs("deepspeed", gpu=False)
    model = copied(work.model)
    deepspeed_mlps(model)
    return checkpointed(work, model.model.layers[0])


def seqtile(work: Work) -> Forward:
    model = copied(work.model)
    apply_seqtile(model, loss=False)
    return checkpointed(work, model.model.layers[0])


def seqtile_on_liger(work: Work) -> Forward:
    model, rope = with_liger(work, swiglu=False)
    apply_seqtile(model, loss=False)
    return checkpointed(work, model.model.layers[0], rope)


def seqtile_layer(work: Work, head_groups: str | None = None) -> Forward:
    model = copied(work.model)
    apply_seqtile(model, loss=False, layer=True, head_groups=head_groups)
    return checkpointed(work, model.model.layers[0])


def seqtile_head_groups(work: Work) -> Forward:
    return seqtile_layer(work, "auto")


CONTESTANTS: dict[str, Callable[[Work], Forward]] = {
    "huggingface": huggingface,
    "huggingface_compiled": huggingface_compiled,
    "liger": liger,
    "liger_tiled": liger_tiled,
    "deepspeed_tiled": deepspeed_tiled,
    "seqtile": seqtile,
    "seqtile_on_liger": seqtile_on_liger,
    "seqtile_layer": seqtile_layer,
    "seqtile_head_groups": seqtile_head_groups,
}


def flops(shape: Shape, tokens: int) -> float:
    """The MLP as in `bench_gated_mlp`; attention's projections once in the forward, once more and twice in the
    backward; its core, of which causality leaves half, with 2 products in the forward, 2 more and 5 in the backward."""
    mlp = 11 * 2.0 * tokens * shape.hidden * shape.mlp
    projections = 4 * 2.0 * tokens * shape.attention_parameters
    core = 9 * 2.0 * tokens * tokens / 2 * shape.q
    return mlp + projections + core


LENGTHS_HERE = {
    size: {
        name: tuple(tokens for tokens in lengths if tokens <= 512 * K)
        for name, lengths in of_size.items()
        if SHAPES[name].tiles_whole
    }
    for size, of_size in LENGTHS.items()
}
SUBJECT = Subject("decoder_layer", operands, CONTESTANTS, flops, lengths=LENGTHS_HERE)


def test_decoder_layer(compare, case: Case, contestant: str) -> None:
    compare(SUBJECT, case, contestant)
