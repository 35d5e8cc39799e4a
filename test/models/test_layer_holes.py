"""What a tiled layer must not skip, lose or mix up."""

from collections.abc import Iterator

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import seqtile
from assertions import relative_error
from models.layered import assert_equal, tiled_copy, whole
from tiny import build, checkpointing, loss_and_gradients, modeling_restored


@pytest.fixture(autouse=True)
def pristine() -> Iterator[None]:
    with modeling_restored():
        yield
        seqtile.restore()


class OwnAttention(modeling_llama.LlamaAttention):
    def forward(self, *args: object, **options: object):
        attended, weights = super().forward(*args, **options)
        return 2 * attended, weights


class OwnMLP(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_an_attention_with_a_forward_of_its_own_is_refused() -> None:
    model = tiled_copy(build("llama"))
    model.model.layers[1].self_attn.__class__ = OwnAttention
    with pytest.raises(ValueError, match="skips its attention's forward, which is not Hugging Face's"):
        model(**whole(101))
    assert "REFUSES" in str(seqtile.status(model).layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama.LlamaAttention, "forward", OwnAttention.forward)
        with pytest.raises(ValueError, match="skips its attention's forward"):
            seqtile.apply_seqtile(build("llama"), layer=True)


@pytest.mark.parametrize("head_groups", [None, 2])
def test_an_mlp_with_a_forward_of_its_own_is_called(head_groups: int | None) -> None:
    untiled = build("llama")
    tiled = tiled_copy(untiled, head_groups)
    for model in (untiled, tiled):
        mlp = model.model.layers[1].mlp
        vars(mlp).pop("forward", None)
        mlp.__class__ = OwnMLP
    batch = whole(101)
    if head_groups is None:
        assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))
    else:
        with pytest.raises(ValueError, match="its MLP has a forward of its own"):
            tiled(**batch)


def test_a_replaced_rotary_embedding_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **options: rotate(q, k, sin, cos, **options)
    )
    untiled = build("llama")
    tiled, batch = tiled_copy(untiled), whole(101)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


class FailingFunction(torch.autograd.Function):
    """An identity; what comes to its backward when one more is `left` fails."""

    left = 0

    @staticmethod
    def forward(ctx, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out: torch.Tensor) -> torch.Tensor:
        FailingFunction.left -= 1
        if FailingFunction.left == 0:
            raise RuntimeError("out of memory")
        return d_out


@pytest.mark.parametrize("head_groups", [None, 2])
def test_a_backward_that_failed_is_tried_again(head_groups: int | None) -> None:
    """An attention raises in the first backward of a graph that is kept; the second has what a fresh one has."""

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        out, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)
        return FailingFunction.apply(out), weights

    AttentionInterface.register("failing", attention)
    untiled = build("llama", attn_implementation="failing")
    tiled, batch = tiled_copy(untiled, head_groups), whole(101)
    truth = loss_and_gradients(untiled, **batch)
    loss = tiled(**batch).loss
    FailingFunction.left = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward(retain_graph=True)
    tiled.zero_grad(set_to_none=True)
    loss.backward()
    assert_equal((loss.detach(), {name: weight.grad for name, weight in tiled.named_parameters()}), truth)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_dropout_draws_in_the_backward_what_it_drew_in_the_forward(attention: str) -> None:
    """With and without checkpointing, of either kind: from one seed the same gradients."""
    ids = torch.randint(3, 200, (1, 101))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    model, found = build("llama", attn_implementation=attention, attention_dropout=0.4), []
    for reentrant in (None, False, True):
        tiled = tiled_copy(model, 2)
        checkpointing(tiled, reentrant)
        torch.manual_seed(7)
        found.append(loss_and_gradients(tiled, **batch))
    assert relative_error(found[0][0], loss_and_gradients(model.eval(), **batch)[0]) > 1e-4, "nothing was dropped"
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.parametrize("head_groups", [None, 2])
def test_prefixes_over_a_frozen_model(head_groups: int | None) -> None:
    """Nothing before the first layer's attention requires a gradient, its keys and values do."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    untiled = get_peft_model(build("llama"), config)
    tiled, batch = tiled_copy(untiled, head_groups), whole(101)
    del batch["use_cache"]
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("head_groups", [None, 2])
def test_a_weight_of_attention_over_a_frozen_model(head_groups: int | None) -> None:
    temperature = torch.tensor(0.5, requires_grad=True)

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v * temperature, mask, **options)

    AttentionInterface.register("tempered", attention)
    untiled = build("llama", attn_implementation="tempered").requires_grad_(False)
    tiled, batch, found = tiled_copy(untiled, head_groups), whole(101), []
    for model in (untiled, tiled):
        temperature.grad = None
        model(**batch).loss.backward()
        found.append(temperature.grad)
    assert relative_error(found[1], found[0]) <= 1e-5


def test_callers_of_a_layer() -> None:
    """By position and by keyword, with checkpointing; attentions asked for by the config; angles that are learned."""
    model = tiled_copy(build("llama", attn_implementation="eager"))
    x = torch.randn(1, 101, 48)
    angles = model.model.rotary_emb(x, torch.arange(101)[None])
    layer = model.model.layers[0]
    by_keyword = layer(x, position_embeddings=angles)
    checkpointing(model, False)
    assert layer(x, None, None, None, False, angles).equal(by_keyword)
    with pytest.raises(ValueError, match="expected fixed angles"):
        layer(x, position_embeddings=tuple(angle.clone().requires_grad_() for angle in angles))
    model.config.output_attentions = True
    with torch.no_grad():
        assert len(model.eval()(**whole(101)).attentions) == 2


def test_dtypes_that_do_not_fit() -> None:
    model = tiled_copy(build("llama").bfloat16())
    model.model.layers[0].mlp.gate_proj.float()
    with pytest.raises(TypeError, match=r"decoder_layer: gate_weight is torch.float32, x is torch.bfloat16"):
        model(**whole(101))


def test_a_mask_for_each_head_is_no_groups() -> None:
    model = tiled_copy(build("llama"), 2)
    layer, x = model.model.layers[0], torch.randn(1, 101, 48)
    angles = model.model.rotary_emb(x, torch.arange(101)[None])
    with pytest.raises(ValueError, match="a mask for each head cannot be cut into groups"):
        layer(x, torch.zeros(1, 4, 101, 101), position_embeddings=angles)
