"""Parts that are called chunk by chunk, trained on two processes under every way of reducing gradients: a rank of it.

python -m distributed.chunked, in test/, prints the table of them in docs/compatibility.md.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import seqtile
from distributed.worker import STRATEGIES, base_of, fsdp2, full, train
from seqtile import sp
from seqtile.models.find import layers_of
from support.assertions import relative_error
from support.tiny import CHUNK, batch_of, build, checkpointing
from support.training import halved, with_lora

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = ((101, 9, 63), (60, 160, 30))
CHECKPOINTS = {"none": None, "non-reentrant": False, "reentrant": True}


class Part(NamedTuple):
    made: Callable[[], nn.Module]
    layer: bool = False
    """Whole layers are tiled."""


def adapted(make: Callable[[], nn.Module], *also: str, **options: object) -> nn.Module:
    model = with_lora(make(), *PROJECTIONS, *also, task_type="CAUSAL_LM", **options)
    model.enable_input_require_grads()
    return model


def plain(arch: str = "llama", **changes: object) -> nn.Module:
    return halved(build(arch, tie_word_embeddings=False, **changes))


def mixture() -> nn.Module:
    """Every token goes to all experts, so that rounding changes no route."""
    return plain("mixtral", output_router_logits=True, num_experts_per_tok=4)


def in_4_bits() -> nn.Module:
    from models.test_quantised import KINDS, quantised

    return quantised(plain(intermediate_size=128), **KINDS["nf4"])


def in_8_bits() -> nn.Module:
    from models.test_quantised import in_8_bits

    return in_8_bits(plain(intermediate_size=128))


DROPOUT = {"lora_dropout": 1e-9}  # which drops nothing: chunks would draw other masks
PARTS = {
    "mixture": Part(mixture),
    "mixture, whole layers": Part(mixture, layer=True),
    "LoRA with dropout, of the head too": Part(partial(adapted, plain, "lm_head", **DROPOUT)),
    "LoRA with dropout, whole layers": Part(partial(adapted, plain, **DROPOUT), layer=True),
    "DoRA": Part(partial(adapted, plain, use_dora=True)),
    "4-bit LoRA with dropout": Part(partial(adapted, in_4_bits, **DROPOUT)),
    "8-bit LoRA": Part(partial(adapted, in_8_bits)),
    "layer of another shape": Part(partial(plain, "gemma2"), layer=True),
}


def each_part(model: nn.Module, **options: object):
    """FSDP2 with what is in a layer sharded by itself, and whole layers too."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers_of(base_of(model)):
        for name, child in layer.named_children():
            if name in ("mlp", "self_attn"):
                fully_shard(getattr(child, "experts", child), **options)
    return fsdp2(model, **options)
