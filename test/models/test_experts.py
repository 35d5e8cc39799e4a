"""A mixture's experts: Hugging Face's implementations, 4 bits, routes that skip experts, a router's records; and the
order in which gradients of chunked parts arrive."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe

import seqtile
from models.layered import KINDS, assert_equal, small_of
from seqtile.models.find import experts_in
from seqtile.proof.small import WORDS
from seqtile.rules import default_chunk_tokens
from support.tiny import CHUNK, batch_of, build, checkpointing, counting, loss_and_gradients, tiled_copy
from support.training import with_lora


def test_grouped_mm_runs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is computed by the implementation that is set."""
    untiled = build("mixtral", experts_implementation="grouped_mm")
    tiled, batch, calls = tiled_copy(untiled), batch_of(1, 3 * CHUNK + 7), []
    expected = loss_and_gradients(untiled, **batch)
    function = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", seqtile.tokenwise(counting(calls, function)))
    assert_equal(loss_and_gradients(tiled, **batch), expected, 1e-5, 3e-5)
    assert len(calls) == 2 * 2 * 4  # layers, forward and backward, chunks


@pytest.mark.parametrize("reentrant", KINDS)
def test_experts_of_4_bits(reentrant: bool | None) -> None:
    """bitsandbytes' experts, with adapters on the attention."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    pytest.importorskip("peft")
    model = build("mixtral", hidden_size=64, intermediate_size=128).requires_grad_(False)
    for experts in experts_in(model):
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(experts, name, quant_type="nf4")
    untiled = with_lora(model, "q_proj", "v_proj", task_type="CAUSAL_LM")
    untiled.enable_input_require_grads()
    checkpointing(untiled.get_base_model(), reentrant)
    expected = loss_and_gradients(untiled, **(batch := batch_of(1, 3 * CHUNK + 7)))
    seqtile.apply_seqtile(untiled, chunk_tokens=CHUNK)
    status = seqtile.status(untiled).mlp
    assert status.chunked == 2 and "routed to experts" in status.reason
    assert_equal(loss_and_gradients(untiled, **batch), expected, 1e-5, 3e-5)


def test_experts_of_mxfp4_are_left_with_the_remedy() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    model = small_of("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.experts = mxfp4.Mxfp4GptOssExperts(model.config)
    seqtile.apply_seqtile(model, check=False)
    assert "Mxfp4Config(dequantize=True)" in str(seqtile.status(model))


@pytest.mark.parametrize("reentrant", KINDS)
def test_experts_without_tokens_get_no_gradient(reentrant: bool | None) -> None:
    """As untiled: an optimizer with weight decay would use gradients of zeros."""
    untiled = small_of("longcat_flash")
    for experts in experts_in(untiled):  # all tokens go to an expert that returns its input
        experts.register_forward_pre_hook(
            lambda module, args: (args[0], torch.full_like(args[1], module.num_routed_experts), args[2])
        )
    tiled, ids = copy.deepcopy(untiled), torch.randint(5, WORDS - 5, (1, 17))
    seqtile.apply_seqtile(tiled, chunk_tokens=5)
    found = []
    for model in (untiled, tiled):
        checkpointing(model, reentrant)
        _, gradients = loss_and_gradients(model, input_ids=ids, labels=ids, use_cache=False)
        found.append({name for name, gradient in gradients.items() if gradient is None})
    assert found[0] == found[1] and len([name for name in found[1] if ".experts." in name]) >= 4


class Rows(TorchDispatchMode):
    """Counts the rows of products whose results have a given width."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.rows = width, set()

    def __torch_dispatch__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        result = function(*args, **kwargs or {})
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and result.shape[1] == self.width:
            self.rows.add(result.shape[0])
        return result


def test_router_logits_are_recorded_chunk_by_chunk() -> None:
    """No layer runs untiled to record them."""
    model = build("mixtral", num_local_experts=5, output_router_logits=True)
    seqtile.apply_seqtile(model, layer=True, loss=False, chunk_tokens=CHUNK, check=False)
    with Rows(5) as products:
        output = model(**batch_of(1, 3 * CHUNK + 7))
    assert products.rows == {CHUNK, 7} and {len(logits) for logits in output.router_logits} == {3 * CHUNK + 7}


def of_dora() -> nn.Module:
    pytest.importorskip("peft")
    return with_lora(build("llama"), "gate_proj", "up_proj", "down_proj", use_dora=True, task_type="CAUSAL_LM")


ORDERED = {"DoRA": (of_dora, False), "mixture": (lambda: build("mixtral"), False)}
ORDERED |= {"mixture, layers": (lambda: build("mixtral"), True), "gemma2": (lambda: build("gemma2"), True)}


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", ORDERED)
def test_gradients_arrive_in_the_order_of_an_untiled_backward(name: str, reentrant: bool | None) -> None:
    """ZeRO-1 and -2 fill their buckets in this order, which must be the same on a rank whose sequence fits in a
    chunk."""
    make, layer = ORDERED[name]
    untiled = make()
    if hasattr(untiled, "enable_input_require_grads"):
        untiled.enable_input_require_grads()
    tiled, batch, orders = copy.deepcopy(untiled), batch_of(1, 3 * CHUNK + 7), []
    seqtile.apply_seqtile(tiled, layer=layer, chunk_tokens=CHUNK, check=False)
    for model in (untiled, tiled):
        order: list[str] = []
        checkpointing(getattr(model, "get_base_model", lambda model=model: model)(), reentrant)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                note = lambda _, name=name, order=order: order.append(name)  # noqa: E731
                parameter.register_post_accumulate_grad_hook(note)
        loss_and_gradients(model, **batch)
        orders.append(order)
    assert orders[0] == orders[1] and len(orders[0]) > 10


def test_the_page_has_the_chunks_of_mixtures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| .* \| ([\d,]+) \|$", page, re.M)
    assert [int(experts) for experts, *_ in rows] == [8, 32, 64, 128, 128]
    for experts, a_token, tokens in rows:
        assert default_chunk_tokens(4096, int(experts) / int(a_token)) == int(tokens.replace(",", ""))
