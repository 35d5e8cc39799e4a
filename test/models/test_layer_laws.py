"""The cost of a tiled layer: matmuls, and live tensors of tokens x width."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import seqtile
from models.layered import in_groups, on_model_or_classes, tiled_model
from seqtile.ops.decoder_layer import qkv
from support.choice import every_value
from support.measure import FlopCount, LiveBytes, eager_memory, flops_of_step
from support.tiny import CHUNK, batch_of, build, checkpointing

pytestmark = [eager_memory, pytest.mark.usefixtures("pristine")]
K = 1024
TOKENS = 190
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"num_hidden_layers": 2, "head_dim": 128, "vocab_size": 128, "pad_token_id": 0}


@pytest.mark.full("of 16 models", but=every_value)
@on_model_or_classes
@in_groups
@pytest.mark.parametrize("arch", ["granite", "llama", "qwen3", "smollm3"])
def test_products_under_checkpointing(arch: str, head_groups: int | None, on_classes: bool) -> None:
    """The products of the untiled checkpointed layer. With groups, the q, k and v projections once more; without groups
    but with per-head norms, the q and k projections once more."""
    model = build(arch)
    checkpointing(model, False)
    untiled = flops_of_step(model, TOKENS)
    model = tiled_model(arch, on_classes, layer=True, head_groups=head_groups, loss=False)
    checkpointing(model, False)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    widths = [len(getattr(attention, name).weight) for name in ("q_proj", "k_proj", "v_proj")]
    again = sum(widths if head_groups else widths[:2] if hasattr(attention, "q_norm") else [])
    of_biases = 0 if mlp.down_proj.bias is None else 48 + 2 * 130  # their sums, which are products on a CPU
    assert flops_of_step(model, TOKENS) == untiled + 2 * (2 * TOKENS * 48 * again + 2 * TOKENS * of_biases)


def test_products_of_modules_that_are_called() -> None:
    """One more computation of queries, keys, values and down than when reading weights."""
    model = build("llama")
    checkpointing(model, False)
    untiled = flops_of_step(model, TOKENS)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
    seqtile.apply_seqtile(model, layer=True, loss=False, chunk_tokens=CHUNK)
    assert flops_of_step(model, TOKENS) == untiled + 2 * 2 * TOKENS * 48 * (48 + 2 * 24 + 130)


class BareFunction(torch.autograd.Function):
    """An attention that saves queries, keys, values, output and log-sum-exp, and counts its products (half for
    causality)."""

    flops = 0

    @classmethod
    def count(cls, q: torch.Tensor, products: int) -> None:
        cls.flops += products * q.shape[2] ** 2 * q.shape[1] * q.shape[3]

    @staticmethod
    def forward(ctx, q, k, v):
        BareFunction.count(q, 2)
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, torch.empty(*out.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, *_ = ctx.saved_tensors
        BareFunction.count(q, 5)
        return tuple(torch.empty(x.transpose(1, 2).shape, dtype=x.dtype).transpose(1, 2) for x in (q, k, v))


def measured(arch: str, tokens: int, **options: object) -> tuple[float, int]:
    """Peak of two checkpointed layers at Llama-8B's widths, in tensors of tokens x width, and FLOP; without data."""
    AttentionInterface.register("bare", lambda module, q, k, v, mask, **_: (BareFunction.apply(q, k, v), None))
    config = AutoConfig.for_model(arch, **LLAMA_8B)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="bare", dtype=torch.bfloat16).train()
        if options:
            seqtile.apply_seqtile(model, loss=False, **options)
        checkpointing(model, False)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        BareFunction.flops = 0
        with LiveBytes() as memory, FlopCount() as flops:
            model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    assert not flops.unknown
    return memory.peak / (tokens * 4096 * 2), flops.total + BareFunction.flops


@pytest.mark.full("8 to 16 s each", but=("*128-16",))
@pytest.mark.parametrize(
    ("head_groups", "limit", "thousands", "chunk"),
    [
        (None, 9.0, 128, 16),
        ("auto", 7.6, 128, 16),
        ("auto", 6.4, 128, None),
        (None, 8.5, 1024, 16),
        ("auto", 6.0, 1024, 16),
    ],
)
def test_tensors_alive(head_groups: str | None, limit: float, thousands: int, chunk: int | None) -> None:
    """Hugging Face has 34.7; with the MLP tiled 21.9. Some use longer chunks than usual, because a simulation takes
    time per chunk. The matmuls are those of the untiled layers, within 1 %."""
    options = {} if chunk is None else {"chunk_tokens": chunk * K}
    _, untiled = measured("llama", thousands * K)
    alive, products = measured("llama", thousands * K, layer=True, head_groups=head_groups, **options)
    print(f"{alive:.2f} tensors of {thousands}K x 4096, products {products / untiled - 1:+.4f}")
    assert alive <= limit and abs(products / untiled - 1) <= 0.01


def test_groups_share_what_the_norm_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward. A backward, which needs more memory, recomputes it for each group."""
    normed, rms_norm = [], qkv.rms_norm
    monkeypatch.setattr(qkv, "rms_norm", lambda x, *args, **of: normed.append(len(x)) or rms_norm(x, *args, **of))
    model = tiled_model("llama", layer=True, head_groups=2, loss=False, check=False)
    with torch.no_grad():
        model(**batch_of(1, TOKENS))
    assert sum(normed) == TOKENS * model.config.num_hidden_layers


@pytest.mark.full("of four cases", but=every_value)
@pytest.mark.parametrize("reentrant", [None, False])
@in_groups
def test_a_dropped_graph_is_freed(head_groups: int | None, reentrant: bool | None, monkeypatch) -> None:
    """It is freed at once, without the garbage collector: it has no reference cycle."""
    made: list[weakref.ref] = []
    project = qkv.project

    def watched(*args: object, **options: object):
        buffer, raw = project(*args, **options)
        made.append(weakref.ref(buffer.untyped_storage()))
        return buffer, raw

    monkeypatch.setattr(qkv, "project", watched)
    model = tiled_model("llama", layer=True, head_groups=head_groups, check=False)
    checkpointing(model, reentrant)
    batch = batch_of(1, 101)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as memory:
            loss = model(**batch).loss
            alive = [storage() is not None for storage in made]
            assert alive == [head_groups is None and reentrant is None] * 2 * (head_groups or 1)
            del loss
        assert not any(storage() for storage in made)
        assert memory.live == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_layer_keeps_without_checkpointing(rows: int) -> None:
    """A layer keeps its input, attention's output and log-sum-exp; without groups also queries, keys and values. It
    does not copy the angles that the rows of a batch share."""
    kept = {}
    for head_groups in (None, 2):
        model = tiled_model("llama", layer=True, head_groups=head_groups, check=False)
        layer, x = model.model.layers[0], torch.randn(rows, TOKENS, 48, requires_grad=True)
        angles = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
        with LiveBytes() as memory:
            y = layer(x, position_embeddings=angles)
            kept[head_groups] = memory.live - y.numel() * 4
    small = 64  # tokens of the graph
    assert kept[2] - rows * TOKENS * (48 + 4) * 4 in range(small)
    assert kept[None] - kept[2] - rows * TOKENS * (48 + 2 * 24) * 4 in range(-small, small)


def test_weights_are_not_copied() -> None:
    """A bfloat16 layer whose weights dominate memory: at its peak a step adds only float32 gradient sums, one per
    projection, and the already rounded ones."""
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA_8B), dtype=torch.bfloat16)
        seqtile.apply_seqtile(model.train(), layer=True, check=False, chunk_tokens=2)
        layer = model.model.layers[0]
        layer.mlp.requires_grad_(False)
        angles = (torch.zeros(1, 3, 128, dtype=torch.bfloat16),) * 2
        x = torch.zeros(1, 3, 4096, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes() as memory:
            y = layer(x, position_embeddings=angles)
            forward = memory.peak
            y.sum().backward()
    q, k, o = (getattr(layer.self_attn, name).weight.numel() for name in ("q_proj", "k_proj", "o_proj"))
    activations = 64 * x.numel() * 2
    assert forward < activations
    assert memory.peak < (q + 2 * k) * 4 + o * 2 + q * 2 + activations


def test_the_norm_behind_the_layers_keeps_its_input_alone() -> None:
    model = build("qwen3").bfloat16()
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK)
    saved: list[torch.Tensor] = []
    x = torch.randn(1, 101, 48, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model.model.norm(x)
    assert {tensor.data_ptr() for tensor in saved} == {x.data_ptr(), model.model.norm.weight.data_ptr()}
