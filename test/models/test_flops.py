"""A checkpointed layer with a tiled MLP multiplies no more than the untiled one (facts: 11 u, u = 2 T D M FLOP)."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import seqtile
from seqtile.arch import ARCHS
from support.measure import flops_of_step
from support.tiny import CHUNK, CLASSES, VOCAB, build, checkpointing, tiled_copy

TOKENS = 190
OTHERS = "a quarter of a second each; with a norm behind the MLP, with biases, and with experts"
IGNORED = 3 * 2 * 5 * 48 * VOCAB  # FLOP that the tiled loss saves: three products for the 5 tokens of a masked prompt


@pytest.mark.full(OTHERS, but=("llama", "gemma2", "granite"))
@pytest.mark.parametrize("arch", [arch for arch in CLASSES if not ARCHS[arch].routed])
def test_tiled_mlp(arch: str) -> None:
    """A norm after the MLP saves a tensor, so a checkpoint's recomputation runs the MLP: 14 u, not 12."""
    untiled = build(arch)
    tiled = tiled_copy(untiled, loss=False)
    layers, unit = 2, 2 * TOKENS * 48 * 130
    biases = 2 * TOKENS * (48 + 2 * 130) if untiled.model.layers[0].mlp.down_proj.bias is not None else 0  # their sums
    assert flops_of_step(tiled, TOKENS) - flops_of_step(untiled, TOKENS) == layers * ((11 - 9) * unit + biases)
    for model in (untiled, tiled):
        checkpointing(model, reentrant=False)
    checkpointed = flops_of_step(untiled, TOKENS)
    more = biases + (2 * unit if ARCHS[arch].norm_after else 0)
    assert flops_of_step(tiled, TOKENS) == checkpointed + layers * more
    del untiled.model.layers[1:], tiled.model.layers[1:]
    for model in (untiled, tiled):
        model.config.num_hidden_layers = 1
    a_layer = checkpointed - flops_of_step(untiled, TOKENS)
    assert a_layer > 11 * unit and checkpointed + more - flops_of_step(tiled, TOKENS) == a_layer


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_tiled_experts(experts: str) -> None:
    """A recomputation runs untiled experts fully, because their outputs are saved for the weighted sum: 12 u both
    ways."""
    untiled = build("mixtral")
    untiled.set_experts_implementation(experts)
    tiled = tiled_copy(untiled, loss=False)
    unit = 2 * 2 * TOKENS * 48 * untiled.config.intermediate_size  # two experts per token
    assert flops_of_step(tiled, TOKENS) - flops_of_step(untiled, TOKENS) == 2 * (12 - 9) * unit
    for model in (untiled, tiled):
        checkpointing(model, reentrant=False)
    assert flops_of_step(tiled, TOKENS) == flops_of_step(untiled, TOKENS)


@pytest.mark.full(OTHERS, but=("*llama*", "*gemma2*", "*mixtral*"))
@pytest.mark.parametrize("options", [{"mlp": False}, {"chunk_tokens": TOKENS}], ids=["loss", "one chunk"])
@pytest.mark.parametrize("arch", CLASSES)
def test_a_tiled_loss_and_a_sequence_of_one_chunk_pay_nothing(arch: str, options: dict) -> None:
    untiled = build(arch)
    assert flops_of_step(tiled_copy(untiled, **options), TOKENS) == flops_of_step(untiled, TOKENS) - IGNORED


def test_a_counter_that_hooks_modules() -> None:
    """torch's FlopCounterMode looks for the node that computes the gradient of what each module is given."""
    untiled = build("llama")
    for layer in untiled.model.layers:  # they then run in chunks
        layer.mlp.down_proj.register_forward_hook(seqtile.tokenwise(lambda *_: None))
    assert flops_counted(tiled_copy(untiled, layer=True, check=False)) > flops_counted(untiled)


def flops_counted(model: nn.Module) -> int:
    ids = torch.randint(0, VOCAB, (1, 3 * CHUNK + 2))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()
