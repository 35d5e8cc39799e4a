"""What a tiled layer must not skip, lose or mix up."""

from collections.abc import Iterator

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import seqtile
from models.layered import assert_equal, tiled_copy, whole
from support.assertions import relative_error
from support.tiny import CHUNK, build, checkpointing, loss_and_gradients, modeling_restored


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
    with pytest.raises(
        ValueError, match=r"cannot be tiled: its attention's forward, .*OwnAttention.forward, is not Llama's"
    ):
        model(**whole(101))
    assert "REFUSES" in str(seqtile.status(model).layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama.LlamaAttention, "forward", OwnAttention.forward)
        with pytest.raises(ValueError, match="cannot be tiled: its attention's forward"):
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
    undropped = loss_and_gradients(model.eval(), **batch)[1]["lm_head.weight"]
    assert relative_error(found[0][1]["lm_head.weight"], undropped) > 1e-3, "nothing was dropped"
    for other in found[1:]:
        assert_equal(other, found[0])


def test_attention_dropout_is_that_of_the_untiled_layer() -> None:
    """In one group attention draws, in the forward and where it runs again, what it draws untiled."""
    untiled = build("llama", attn_implementation="eager", attention_dropout=0.4)
    tiled, batch, found = tiled_copy(untiled, 1), whole(101), []
    for model in (untiled, tiled):
        torch.manual_seed(7)
        found.append(loss_and_gradients(model, **batch))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("head_groups", [None, 2])
def test_prefixes_over_a_frozen_model(head_groups: int | None) -> None:
    """Nothing before the first layer's attention requires a gradient, its keys and values do."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    untiled = get_peft_model(build("llama"), config)
    tiled, batch = tiled_copy(untiled, head_groups), whole(101)
    del batch["use_cache"]
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("of_module", [False, True], ids=["of a closure", "of the attention"])
@pytest.mark.parametrize("head_groups", [None, 2])
def test_a_weight_of_attention_over_a_frozen_model(head_groups: int | None, of_module: bool) -> None:
    """One that the module holds is known before: the attention runs no more often than without. Another of the same
    module, which nothing uses, has no gradient, as untiled."""
    temperature, calls = torch.full((12,), 0.5, requires_grad=True), []

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        calls.append(module)
        weight = module.temperature if of_module else temperature
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v * weight, mask, **options)

    AttentionInterface.register("tempered", attention)
    untiled = build("llama", attn_implementation="tempered").requires_grad_(False)
    for layer in untiled.model.layers if of_module else ():
        layer.self_attn.temperature, layer.self_attn.other = (nn.Parameter(torch.rand(12)) for _ in range(2))
    tiled, batch, found = tiled_copy(untiled, head_groups), whole(101), []
    for model in (untiled, tiled):
        model(**batch)  # the first step compares itself with the untiled model
        temperature.grad = None
        calls.clear()
        loss, count = model(**batch).loss, len(calls)
        loss.backward()
        own = {name: weight.grad for name, weight in model.named_parameters()}
        found.append((loss, own | {"of the closure": temperature.grad}))
    assert_equal(found[1], found[0])
    assert not of_module or count == len(tiled.model.layers) * (head_groups or 1)


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


@pytest.mark.parametrize("head_groups", [None, 2])
@pytest.mark.parametrize("changed", ["output", "queries"])
def test_an_attention_that_works_in_place(changed: str, head_groups: int | None) -> None:
    """Where Hugging Face raises, since what the backward needs was changed, so does a tiled layer; where not, it is
    right."""

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        if changed == "queries":
            q.mul_(0.5)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (out.mul_(0.5) if changed == "output" else out).transpose(1, 2).contiguous(), None

    AttentionInterface.register("in place", attention)
    untiled = build("llama", attn_implementation="in place")
    tiled, batch = tiled_copy(untiled, head_groups), whole(101)
    if changed == "queries":
        assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))
        return
    for model in (untiled, tiled):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place a tensor"):
            loss_and_gradients(model, **batch)


def test_queries_that_are_changed_in_place_alone() -> None:
    """They cannot be computed again, though they are all that the attention saves: so in groups it runs again."""

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        out = torch.nn.functional.scaled_dot_product_attention(q.mul_(0.5), k, v, is_causal=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("scaling in place", attention)
    untiled = build("llama", attn_implementation="scaling in place", num_key_value_heads=4)
    tiled, batch = tiled_copy(untiled, 2), whole(101)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch))


@pytest.mark.parametrize("on_classes", [False, True], ids=["model", "classes"])
def test_no_cache_is_made_in_training(on_classes: bool) -> None:
    """Hugging Face's config asks for one by default: heads are in groups all the same, and packed documents are told
    apart, as with use_cache=False."""
    heads: list[int] = []

    def attention(module: nn.Module, q, k, v, mask, **options: object):
        heads.append(q.shape[1])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)

    AttentionInterface.register("counting heads", attention)
    untiled = build("llama", attn_implementation="counting heads")
    batch = whole(101) | {"position_ids": torch.cat([torch.arange(n) for n in (17, 84)])[None]}
    truth = loss_and_gradients(untiled, **batch)
    del batch["use_cache"]
    if on_classes:
        seqtile.apply_seqtile_to_llama(layer=True, head_groups=2, chunk_tokens=CHUNK)
        tiled = build("llama", attn_implementation="counting heads")
        tiled.load_state_dict(untiled.state_dict())
    else:
        tiled = tiled_copy(untiled, 2)
    assert "in training none is made" in str(seqtile.status(tiled))
    tiled(**batch)  # the first step compares itself with the untiled model
    heads.clear()
    output = tiled(**batch)
    assert output.past_key_values is None and heads == [2] * 4
    base = tiled.model(**{name: batch[name] for name in ("input_ids", "position_ids")}, return_dict=False)
    assert isinstance(base, tuple) and len(base) == 1
    assert_equal(loss_and_gradients(tiled, **batch), truth)
    heads.clear()
    cache = DynamicCache(config=tiled.config)
    mixed = loss_and_gradients(untiled, **batch)  # with a cache Hugging Face does not tell documents apart
    heads.clear()
    assert_equal(loss_and_gradients(tiled, **batch, past_key_values=cache), mixed)
    assert cache.get_seq_length() == 101 and heads == [4] * 2, "a cache that is given is filled"
    short = {name: tensor[:, :40] for name, tensor in batch.items()}
    assert tiled(**short).past_key_values is None, "nor where the layers run untiled"
    with torch.no_grad():
        assert tiled.eval()(**short).past_key_values.get_seq_length() == 40


@pytest.mark.parametrize("head_groups", [None, 2])
def test_gradients_through_a_cache(head_groups: int | None) -> None:
    """Of a sequence in two parts, the second of which attends to the first."""
    untiled = build("llama")
    tiled, batch, found = tiled_copy(untiled, head_groups), whole(160), []
    for model in (untiled, tiled):
        cache = DynamicCache(config=model.config)
        parts = [
            {name: batch[name][:, part] for name in ("input_ids", "labels")} for part in (slice(80), slice(80, 160))
        ]
        losses = [model(**part, past_key_values=cache).loss for part in parts]
        losses[1].backward()
        found.append((losses[1].detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_short_sequences_and_evaluation_run_the_original_norms(arch: str) -> None:
    """One graph where a sequence fits in a chunk; in evaluation the logits are Hugging Face's to the bit."""
    untiled = build(arch).bfloat16()
    getattr(seqtile, f"apply_seqtile_to_{arch}")(layer=True, chunk_tokens=CHUNK)
    tiled = build(arch).bfloat16()
    tiled.load_state_dict(untiled.state_dict())
    ids = whole(40)["input_ids"]
    torch._dynamo.reset()
    graph = torch.compile(tiled.model, backend="eager", fullgraph=True)
    assert relative_error(graph(ids).last_hidden_state, untiled.model(ids).last_hidden_state) <= 1e-2
    torch._dynamo.reset()
    with torch.no_grad():
        ours, theirs = (model.eval()(ids).logits for model in (tiled, untiled))
        assert ours.equal(theirs)
        x = torch.randn(1, 101, 48, dtype=torch.bfloat16)
        assert tiled.model.norm(x).equal(untiled.model.norm(x))
