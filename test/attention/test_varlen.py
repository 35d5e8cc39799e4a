"""Attention without masks computes what Hugging Face's attention computes with them, and makes none."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    masking_utils,
    utils,
)
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    chunked_overlay,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    eager_mask,
)

import seqtile
from attention.cpu_kernel import kernel_on_cpu
from seqtile.attention import backends, segments, torch_varlen, varlen
from seqtile.attention.backends import attend, kernel_of
from seqtile.attention.heads import rank_heads
from seqtile.attention.layout import Layout
from seqtile.attention.local import LocalAttention
from seqtile.attention.sdpa_lengths import few_lengths
from seqtile.models.model_types import model_classes
from seqtile.models.varlen import attention_of
from seqtile.proof import proven
from seqtile.proof.small import small_model
from support.measure import LiveBytes
from support.tiny import loss_and_gradients
from support.type_table import config_of

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, VOCAB = 150, 64
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
BOTH = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "gemma2": BOTH,  # soft caps
    # Every token goes to every expert: where two are all but equal, rounding would choose between them.
    "gpt_oss": BOTH | EXPERTS,  # sinks
    "llama4_text": {"attention_chunk_size": 24, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1} | EXPERTS,
    "deepseek_v3": {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8,
                    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
                    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 16},
}  # fmt: skip


def built(name: str, attention: str = "eager", **changes: Any) -> nn.Module:
    """A tiny model, without dropout; in evaluation mode it would make a cache."""
    config = AutoConfig.for_model(name, **(SIZES | HEADS | TYPES.get(name, {}) | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def tiled(model: nn.Module, **options: Any) -> nn.Module:
    model = copy.deepcopy(model)
    seqtile.apply_seqtile(model, attention="varlen", check=False, **options)
    return model


def positions_of(documents: int, length: int = LENGTH) -> Tensor:
    edges = [0, *sorted((torch.randperm(length - 1)[: documents - 1] + 1).tolist()), length]
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(edges)])[None]


def packed(documents: int, rows: int = 1) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (rows, LENGTH))
    positions = torch.cat([positions_of(documents) for _ in range(rows)])
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "use_cache": False}


def padded() -> dict[str, Any]:
    """Three rows; the first token behind padding is predicted from padding."""
    ids, mask = torch.randint(1, VOCAB, (3, LENGTH)), torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, : int(torch.randint(1, 60, ()))] = mask[1, int(torch.randint(80, LENGTH, ())) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100), "use_cache": False}


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "one document": lambda: packed(1),
    "40 documents": lambda: packed(40),
    "two rows": lambda: packed(5, rows=2),
    "padded": padded,
}


def assert_same(model: nn.Module, other: nn.Module, batch: dict[str, Any], tolerance: float = 1e-5) -> None:
    loss, gradients = loss_and_gradients(model, **batch)
    found, of_other = loss_and_gradients(other, **batch)
    torch.testing.assert_close(found, loss, rtol=tolerance, atol=tolerance)
    largest = max(gradient.norm() for gradient in gradients.values() if gradient is not None)
    for name, gradient in gradients.items():
        if gradient is not None:
            assert (of_other[name] - gradient).norm() < tolerance * largest, name


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of blocks are much smaller than length x length."""
    monkeypatch.setattr(segments, "MASK_ELEMENTS", 2**10)


class Watch(TorchDispatchMode):
    """Records tensors of length x length, the lengths in which sdpa is called, and its pairs of queries and keys."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.squares, self.lengths, self.pairs = length, [], set(), 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for x in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            if sum(size == self.length for size in x.shape) > 1:
                self.squares.append(str(op))
        if "scaled_dot_product" in str(op) and "backward" not in str(op):
            self.lengths.add(args[0].shape[2])
            self.pairs += args[0].shape[0] * args[0].shape[2] * args[1].shape[2]
        return out


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TYPES)
def test_equals_masks(small_blocks: None, name: str, batch: str) -> None:
    """Windows, soft caps, sinks, chunks and unequal widths of heads, and no tensor of length x length."""
    model, inputs = built(name), BATCHES[batch]()
    other = tiled(model, mlp=False, loss=False)
    assert_same(model, other, inputs)
    with Watch(LENGTH) as watch:
        other(**inputs).loss.backward()
    assert not watch.squares


@pytest.mark.parametrize("batch", ["40 documents", "two rows", "padded"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
def test_by_torchs_kernel(name: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a layer and head chunk, also with sinks and unequal widths of heads."""
    model, inputs = built(name, "eager" if name == "gpt_oss" else "sdpa"), BATCHES[batch]()
    groups = None if name in ("gpt_oss", "deepseek_v3") else 2 if batch == "padded" else "auto"
    other, calls = tiled(model, layer=True, head_groups=groups, chunk_tokens=64), []
    kernel = torch_varlen.torch_varlen
    monkeypatch.setattr(
        torch_varlen, "torch_varlen", lambda *args, **own: (calls.append(args), kernel(*args, **own))[1]
    )
    with kernel_on_cpu():
        assert_same(model, other, inputs)
    again = 2 if groups == 2 else 1  # copies of what is not padding are made again, not kept
    assert len(calls) == model.config.num_hidden_layers * (2 if groups else 1) * again


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"softcap": 5.0}])
def test_blocks_where_the_kernel_lacks_something(options: dict[str, float]) -> None:
    heads = rank_heads(0, 1, 4, 2, ((0, 60),))
    layout = Layout(60, (((0, 20), (20, 60)),), varlen.register("sdpa"))
    q, _, v = random_heads(1, 60)
    with kernel_on_cpu():
        assert kernel_of(LocalAttention(nn.Module(), layout, heads, None, {}), q, v) == torch_varlen.NAME
        kernel = kernel_of(LocalAttention(nn.Module(), layout, heads, None, options), q, v)
    assert kernel == ("eager" if "softcap" in options else "sdpa")


@pytest.mark.parametrize(
    ("installed", "capability", "options", "expected"),
    [
        ({2, 3}, 9, {}, "flash_attention_3"),
        ({2, 3}, 8, {}, "flash_attention_2"),
        ({2, 3}, 9, {"dropout": 0.1}, "flash_attention_2"),
        ({2, 3, 4}, 10, {"scaling": 0.5}, "flash_attention_4"),
        ({2}, 9, {"s_aux": torch.zeros(4)}, torch_varlen.NAME),
        (set(), 9, {}, torch_varlen.NAME),
        ({2}, 7, {}, torch_varlen.NAME),
    ],
)
def test_the_order_on_a_gpu(
    installed: set[int], capability: int, options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention's latest release for the GPU that has what the call needs, then torch's kernel."""
    for release in (2, 3, 4):
        name = f"is_flash_attn_{release}_available"
        monkeypatch.setattr(utils.import_utils, name, lambda release=release: release in installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    layout = Layout(60, (((0, 20), (20, 60)),), varlen.register("sdpa"))
    attention = LocalAttention(nn.Module(), layout, rank_heads(0, 1, 4, 2, ((0, 60),)), None, options)
    q, v = (SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, n, 60, 64), device="cuda") for n in (4, 2))
    with kernel_on_cpu():
        assert kernel_of(attention, q, v) == expected
        flash = attention._replace(layout=Layout(60, layout.documents, varlen.register("flash_attention_2")))
        assert kernel_of(flash, q, v) == "flash_attention_2", "the model's own comes first"


@pytest.mark.parametrize("batch", ["40 documents", "padded"])
@pytest.mark.parametrize(
    ("name", "groups"), [("llama", 2), ("llama", "auto"), ("mistral", 2), ("gemma2", None), ("gpt_oss", None)]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_in_tiled_layers_under_checkpointing(name: str, groups: int | str | None, reentrant: bool, batch: str) -> None:
    model, inputs = built(name), packed(1) if groups == "auto" else BATCHES[batch]()  # blocks keep their own outputs
    other = tiled(model, layer=True, head_groups=groups, chunk_tokens=64)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(model, other, inputs)


def test_offloaded_and_compressed_alike() -> None:
    model, inputs = built("llama"), packed(7)
    other = tiled(model, layer=True, chunk_tokens=64)
    seqtile.offload.enable(other)
    assert_same(model, other, inputs)


def test_under_autocast() -> None:
    """bfloat16: as far from float32 as the attention with masks is."""
    model, inputs = built("llama", "sdpa"), packed(7)
    truth, _ = loss_and_gradients(model, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        (loss, _), (found, _) = (loss_and_gradients(each, **inputs) for each in (model, tiled(model, loss=False)))
    assert abs(found - truth) <= 2 * abs(loss - truth) + 1e-3


@pytest.mark.parametrize("inside", [False, True])
def test_with_lora(inside: bool) -> None:
    """Before and after PEFT's wrapper."""
    model, inputs = built("llama", "sdpa"), packed(7)
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
    plain = get_peft_model(copy.deepcopy(model), adapters)
    if inside:
        seqtile.apply_seqtile(model, attention="varlen", layer=True, chunk_tokens=64)
    other = get_peft_model(model, adapters)
    if not inside:
        seqtile.apply_seqtile(other, attention="varlen", layer=True, chunk_tokens=64)
    other.load_state_dict(plain.state_dict())
    assert_same(plain, other, inputs)
    seqtile.restore(other)
    assert attention_of(model) == "sdpa"


def test_dropout_is_the_same_in_a_recomputation() -> None:
    """Without it gradients of a checkpointed layer are those of other random numbers."""
    model, inputs = tiled(built("llama", attention_dropout=0.4), mlp=False, loss=False), packed(7)

    def gradients(checkpointed: bool) -> dict[str, Tensor]:
        other = copy.deepcopy(model).train()
        if checkpointed:
            other.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        return loss_and_gradients(other, **inputs)[1]

    plain, again = gradients(False), gradients(True)
    torch.testing.assert_close(again, plain)
    torch.manual_seed(4)
    other = loss_and_gradients(copy.deepcopy(model).train(), **inputs)[1]
    assert any((other[name] - plain[name]).norm() > 1e-3 * plain[name].norm() for name in plain)


def random_heads(rows: int, length: int) -> list[Tensor]:
    return [torch.randn(rows, heads, length, 8, requires_grad=True) for heads in (4, 2, 2)]


def offset(positions: Tensor) -> Tensor:
    """The same documents, of which one does not begin at 0."""
    return positions + 7 * (positions == torch.arange(positions.shape[-1])).logical_not()


def mask_cases() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    spans = torch.full((2, 60), -1)
    spans[0, 5:14], spans[1, 23:41] = 0, 3
    yield "spans", create_causal_mask, {"block_sequence_ids": spans}
    yield (
        "spans, packed",
        create_causal_mask,
        {"block_sequence_ids": spans, "position_ids": positions_of(3, 60).expand(2, -1)},
    )
    yield "spans, window", create_sliding_window_causal_mask, {"block_sequence_ids": spans}
    yield "a span beyond the window", create_sliding_window_causal_mask, {"block_sequence_ids": torch.zeros_like(spans)}
    yield "chunks, packed", create_chunked_causal_mask, {"position_ids": positions_of(3, 60).expand(2, -1)}
    yield (
        "chunks, packed from another position",
        create_chunked_causal_mask,
        {"position_ids": offset(positions_of(3, 60)).expand(2, -1)},
    )
    by_position = {"or_mask_function": blockwise_overlay(spans), "position_ids": positions_of(3, 60).expand(2, -1)}
    yield "spans that are looked up by positions", create_sliding_window_causal_mask, by_position
    left = torch.ones(2, 60, dtype=torch.long)
    left[0, :13] = 0
    yield "chunks, padded", create_chunked_causal_mask, {"attention_mask": left}
    holes = left.clone()
    holes[1, 30:40] = 0
    yield "holes", create_causal_mask, {"attention_mask": holes}
    yield "all padding", create_causal_mask, {"attention_mask": left * torch.tensor([[0], [1]])}
    own = {"and_mask_function": lambda b, h, q, k: q - k != 3}
    yield "a function of the model's own", create_causal_mask, own


@pytest.mark.parametrize(
    ("kind", "create", "given"), [*mask_cases()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_masks_that_models_compose(kind: str, create: Callable[..., Any], given: dict[str, Any]) -> None:
    """Against the same function's mask for eager attention; queries of padding see nothing."""
    config = AutoConfig.for_model("llama", **SIZES, **HEADS)
    config.sliding_window, config.attention_chunk_size = 20, 16
    module = LlamaForCausalLM(config).model.layers[0].self_attn
    asked = {"config": config, "inputs_embeds": torch.empty(2, 60, 32), "attention_mask": None, "past_key_values": None}
    asked |= {"position_ids": None} | given
    config._attn_implementation = "eager"
    mask = create(**asked)
    config._attn_implementation = varlen.register("eager")
    layout = create(**asked)
    heads = random_heads(2, 60)
    upstream = torch.randn(2, 60, 4, 8)
    if (padding := given.get("attention_mask")) is not None:
        upstream *= padding[..., None, None]
    found = []
    for name, each in (("eager", mask), (config._attn_implementation, layout)):
        function = AttentionInterface._global_mapping.get(name) or eager_attention
        out = function(module, *heads, each, scaling=0.3)[0]
        found.append([out * (upstream != 0), *torch.autograd.grad(out, heads, upstream)])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if isinstance(layout, varlen.BatchLayout):
        assert layout.implementation == varlen.register("eager")
    remaps = hasattr(masking_utils, "remap_positions_for_packed_sequence")  # otherwise spans reach beyond documents
    unread = ("holes", "a function of the model's own", "a span beyond the window")
    is_read = kind not in (*unread, "spans that are looked up by positions" if remaps else "spans, packed")
    assert isinstance(layout, varlen.BatchLayout) == is_read


def eager_attention(module: nn.Module, *arguments: Any, **options: Any) -> Any:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    return eager_attention_forward(module, *arguments, **options)


def test_lengths_without_positions() -> None:
    """Only cumulative lengths tell documents, as for flash attention; behind the last one is padding."""
    model, inputs = built("llama"), packed(6)
    edges = [*(inputs["position_ids"][0] == 0).nonzero().flatten().tolist(), LENGTH]
    told = {name: torch.tensor(edges, dtype=torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    ids = {name: inputs[name] for name in ("input_ids", "labels", "use_cache")}
    other = tiled(model, mlp=False, loss=False)
    expected = model(**inputs).logits
    rotated = {"position_ids": inputs["position_ids"]} | ids  # positions as they are, told apart by lengths alone
    del rotated["position_ids"]
    found = other(**rotated, **told).logits
    assert not torch.allclose(found, other(**ids).logits)
    last = slice(edges[-2], None)  # attention is relative: a document's logits do not depend on where it begins
    torch.testing.assert_close(found[:, last], expected[:, last], rtol=1e-4, atol=1e-4)


def test_lengths_of_several_rows() -> None:
    """Cumulative lengths run over all rows; where a row ends a document ends."""
    model, ids = tiled(built("llama"), mlp=False, loss=False), torch.randint(1, VOCAB, (2, 30))
    told = {"cu_seq_lens_q": torch.tensor([0, 10, 30, 35, 50], dtype=torch.int32)}
    found = model(ids, use_cache=False, **told).logits
    for row, edges in enumerate(((0, 10, 30), (0, 5, 20, 30))):
        for start, stop in pairwise(edges):  # rotary attention does not see where a document begins
            alone = model(ids[row : row + 1, start:stop], use_cache=False).logits
            torch.testing.assert_close(found[row : row + 1, start:stop], alone, rtol=1e-4, atol=1e-4)


def test_lengths_keep_spans() -> None:
    config = AutoConfig.for_model("llama", **SIZES, **HEADS)
    config._attn_implementation = varlen.register("sdpa")
    spans = torch.full((1, 60), -1)
    spans[:, 5:14] = 0
    asked = {"config": config, "inputs_embeds": torch.empty(1, 60, 32), "attention_mask": None, "past_key_values": None}
    layout = create_causal_mask(**asked, position_ids=None, block_sequence_ids=spans)
    told = layout.with_lengths(torch.tensor([0, 20, 60]))
    assert told.documents == (((0, 20), (20, 60)),) and told.spans == ((((5, 14),),),) * 2


def test_a_custom_attention_is_refused_and_weights_in_the_config() -> None:
    AttentionInterface.register("a users own", lambda *given, **options: None)
    model = built("llama", "sdpa")
    model.set_attn_implementation("a users own")
    with pytest.raises(ValueError, match="it is 'a users own', which is not Hugging Face's"):
        seqtile.apply_seqtile(model, attention="varlen")
    other = built("llama", output_attentions=True)
    with pytest.raises(ValueError, match="its config asks for the weights of attention"):
        seqtile.apply_seqtile(other, attention="varlen")


def test_pickled_it_is_the_former(tmp_path: Any) -> None:
    """So that any process can load the model; a copy in this process has it."""
    model = built("llama", "sdpa")
    seqtile.apply_seqtile(model, attention="varlen")
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert attention_of(loaded) == "sdpa" and type(loaded.config._attn_implementation) is str
    assert attention_of(pickle.loads(pickle.dumps(model))) == "sdpa"
    assert attention_of(copy.deepcopy(model)) == varlen.register("sdpa") == attention_of(model)


def test_masks_made_in_advance() -> None:
    """A static cache with a window, and padding: `generate` makes masks before the model's forward."""
    model = built("mistral", "sdpa", sliding_window=8).eval()
    ids = torch.randint(1, VOCAB, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    asked |= {"disable_compile": True}
    expected = model.generate(ids, **asked)
    assert torch.equal(tiled(model).eval().generate(ids, **asked), expected)


def test_classes_and_models() -> None:
    """A model of tiled classes can have it by itself, also proven anew; the classes' restore leaves it that."""
    proven._attention_proof_of.cache_clear()
    try:
        seqtile.apply_seqtile_to_llama(attention="varlen", check=False)
        first, own = built("llama", "sdpa"), built("llama", "sdpa")
        own(**packed(3)), first(**packed(3))
        with patch.object(proven, "PROVEN_ATTENTION", proven.PROVEN.with_name("none.json")):
            with patch.object(proven, "_proven", lambda table: {}):
                seqtile.apply_seqtile(own, attention="varlen", mlp=False, loss=False, check=False)
        seqtile.apply_seqtile_to_llama(attention="varlen", layer=True, check=False)
        assert attention_of(first) == attention_of(own) == varlen.register("sdpa")
    finally:
        seqtile.restore("llama")
        proven._attention_proof_of.cache_clear()
    assert attention_of(first) == "sdpa" and attention_of(own) == varlen.register("sdpa")
    of_its_config = LlamaForCausalLM(own.config)
    seqtile.restore(of_its_config)
    assert attention_of(of_its_config) == "sdpa"


def test_work_of_packed_documents() -> None:
    """40 equal documents: at most 1/30 of the row's square."""
    length = 40 * 16
    model = tiled(built("llama", "sdpa", num_hidden_layers=1), mlp=False, loss=False)
    ids = torch.randint(1, VOCAB, (1, length))

    def pairs(positions: Tensor) -> int:
        with Watch(length) as watch:
            model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        return watch.pairs

    whole = pairs(torch.arange(length)[None])
    assert whole == length**2 and pairs((torch.arange(length) % 16)[None]) <= whole / 30


@pytest.mark.full("15 s of scores in blocks", but=("sdpa-*", "eager-50"))
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_live_bytes(implementation: str, window: int | None, small_blocks: None) -> None:
    """Forward and backward: attention's own tensors and one block, whose mask has 1,024 elements, and its scores."""
    length, rows = 2000, tuple(pairwise((0, *sorted((torch.randperm(1999)[:6] + 1).tolist()), 2000)))
    module = LlamaForCausalLM(AutoConfig.for_model("llama", **SIZES, **HEADS)).model.layers[0].self_attn
    heads, layout = rank_heads(0, 1, 4, 2, ((0, length),)), Layout(length, (rows,), varlen.register("sdpa"))
    options = {"softcap": 50.0} if implementation == "eager" else {}
    q, k, v = random_heads(1, length)
    with LiveBytes() as memory:
        out = attend(LocalAttention(module, layout, heads, window, options), q, k, v)
        out.backward(torch.ones_like(out))
    own = q.nbytes + k.nbytes + v.nbytes
    longest = max(stop - start for start, stop in rows)
    block = 4 * 4 * 1024 + 2 * longest * 3 * 8 * 4 * 4  # scores [4, n, m], and keys and values of a block by query head
    # Inputs, output, their gradients, gradients of keys and values in float32; copies of padded documents.
    assert memory.peak < 4 * own + 4 * out.nbytes + 12 * block, (memory.peak, own, block)
    assert memory.largest <= max(q.nbytes, 4 * 4 * 4 * 1024, 4 * longest * 8 * 4), memory.largest


def test_few_lengths_for_drawn_documents() -> None:
    """At most 12 lengths in a row of 64 documents, the same in every row; at most 1.5 times the documents' own work."""
    own = work = 0
    for _ in range(200):
        positions = positions_of(64, 2**17)[0]
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        lengths = [stop - start for start, stop in pairwise(edges)]
        found = few_lengths(set(lengths), len(positions))
        assert len({found[length] for length in lengths}) <= 12 and all(found[length] >= length for length in lengths)
        own, work = own + sum(x**2 for x in lengths), work + sum(found[x] ** 2 for x in lengths)
    assert work <= 1.5 * own


def test_lengths_of_calls_are_few() -> None:
    model, inputs = tiled(built("llama", "sdpa"), mlp=False, loss=False), packed(64)
    with Watch(LENGTH) as watch:
        model(**inputs)
    assert len(watch.lengths) <= 12


def test_a_cache_goes_the_models_own_way() -> None:
    model = built("llama", "sdpa").eval()
    other, ids = tiled(model).eval(), torch.randint(1, VOCAB, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    for given in ({}, {"attention_mask": mask}):
        expected = model.generate(ids, **given, max_new_tokens=8, do_sample=False)
        assert torch.equal(other.generate(ids, **given, max_new_tokens=8, do_sample=False), expected)
    cache, of_other = DynamicCache(), DynamicCache()
    model(ids, past_key_values=cache), other(ids, past_key_values=of_other)
    found, expected = other(ids, past_key_values=of_other).logits, model(ids, past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_weights_of_attention_are_those_of_the_former() -> None:
    model = built("llama").eval()
    ids = torch.randint(1, VOCAB, (1, 30))
    expected = model(ids, output_attentions=True).attentions
    torch.testing.assert_close(tiled(model).eval()(ids, output_attentions=True).attentions, expected)


def test_restore_puts_the_former_back(tmp_path: Any) -> None:
    model = built("llama", "eager")
    seqtile.apply_seqtile(model, attention="varlen")
    assert seqtile.status(model).attention == "eager" and "in the place of eager" in str(seqtile.status(model))
    model.save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()
    seqtile.apply_seqtile(model, attention="varlen")  # again
    copied = copy.deepcopy(model)
    seqtile.restore(model)
    assert attention_of(model) == "eager" and seqtile.status(model).attention is None
    assert seqtile.status(copied).attention == "eager"
    copied.set_attn_implementation("sdpa")  # chosen since: it stays
    seqtile.restore(copied)
    assert attention_of(copied) == "sdpa"


def test_by_the_classes() -> None:
    plain, inputs = built("llama", "sdpa"), packed(7)
    seqtile.apply_seqtile_to_llama(attention="varlen", mlp=False, loss=False)
    try:
        model = built("llama", "sdpa")
        model.load_state_dict(plain.state_dict())
        expected = loss_and_gradients(plain_forward(plain), **inputs)
        found = loss_and_gradients(model, **inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert seqtile.status(model).attention == "sdpa"
        model.set_attn_implementation("eager")  # chosen since: it stays
        model(**inputs)
        assert attention_of(model) == "eager"
        model.set_attn_implementation(varlen.register("sdpa"))
    finally:
        seqtile.restore("llama")
    assert attention_of(model) == "sdpa"


def plain_forward(model: nn.Module) -> nn.Module:
    """Restores a model of a tiled class by giving it an attention of its own name."""
    seqtile.restore("llama")
    found = copy.deepcopy(model)
    seqtile.apply_seqtile_to_llama(attention="varlen", mlp=False, loss=False)
    return found


def test_the_first_step_compares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = built("llama", "sdpa"), varlen.attend
    seqtile.apply_seqtile(model, attention="varlen")
    model(**packed(7)).loss.backward()
    assert "equal the untiled model's" in str(seqtile.status(model))
    monkeypatch.setattr(varlen, "attend", lambda *given: 1.01 * right(*given))
    other = built("llama", "sdpa")
    seqtile.apply_seqtile(other, attention="varlen")
    with pytest.raises(ValueError, match=r"the part is attention.*Pass attention=None"):
        other(**packed(7))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("falcon", "it does not take its attention from AttentionInterface"),
        ("bert", "it is not causal"),
        ("deepseek_v32", "of packed rows it fails without masks"),
    ],
)
def test_is_refused_by_name(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)  # another test's stand-in
    model = small_model(model_classes(name)[0], config_of(name))
    before = attention_of(model)
    with pytest.raises(ValueError, match=rf'attention="varlen".*{why}.*leave attention out'):
        seqtile.apply_seqtile(model, attention="varlen")
    assert attention_of(model) == before and not seqtile.status(model).mlp.tiled


def test_an_unknown_value() -> None:
    with pytest.raises(ValueError, match=r'attention: expected "varlen" or None, got \'flash\''):
        seqtile.apply_seqtile(built("llama"), attention="flash")


def test_with_shared_prefixes() -> None:
    model = built("llama")
    other = tiled(model)
    seqtile.share_prefixes(other, min_tokens=10)
    ids = torch.randint(1, VOCAB, (3, 60))
    ids[:, :30] = ids[0, :30].clone()
    mask = torch.ones_like(ids)
    mask[1, 50:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
    assert_same(model, other, inputs)
    assert seqtile.status(other).prefixes.saved_tokens == 60
    assert_same(model, other, packed(5))
    seqtile.restore(other)
    assert attention_of(other) == "eager"


def test_functions_are_read_by_name() -> None:
    """Each kind of function that Hugging Face composes masks of is known."""
    left = torch.zeros(2, dtype=torch.long)
    for function in (chunked_overlay(4, left), blockwise_overlay(torch.zeros(2, 9)), causal_mask_function):
        assert function.__qualname__.partition(".")[0] in varlen.recipe_of.__globals__["_CAUSAL"]
    assert eager_mask is not None


def test_over_one_rank_and_chosen_while_sharded() -> None:
    """A sharded model keeps the attention over ranks, which computes heads by the one that is chosen."""
    model = built("llama", "sdpa")
    seqtile.share_prefixes(model, min_tokens=10)
    seqtile.apply_seqtile(model, attention="varlen")
    assert attention_of(model) == varlen.register("sdpa") and "seqtile_ulysses" in model.config._attn_implementation
    plain = built("llama", "sdpa")
    plain.load_state_dict(model.state_dict())
    assert_same(plain, model, packed(5))
    assert "equal the untiled model's" in str(seqtile.status(model))
    seqtile.restore(model)
    assert attention_of(model) == "sdpa" == model.config._attn_implementation


def test_documents_in_the_place_of_sdpa_over_ranks() -> None:
    """Where torch's kernel can, it computes all documents in one call; rows that are one document go to sdpa."""
    heads, documents = rank_heads(0, 1, 4, 2, ((0, 60),)), (((0, 7), (7, 21), (21, 60)),)
    config = AutoConfig.for_model("llama", **SIZES, **HEADS)
    module = LlamaForCausalLM(config).model.layers[0].self_attn
    q, k, v = random_heads(1, 60)
    expected = attend(LocalAttention(module, Layout(60, documents, "sdpa"), heads, None, {}), q, k, v)
    attention = LocalAttention(module, Layout(60, documents, "sdpa"), heads, None, {})
    with kernel_on_cpu(), Watch(60) as watch:
        found = attend(attention, q, k, v)
        whole = kernel_of(attention._replace(layout=Layout(60, (((0, 60),),), "sdpa")), q, v)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not watch.lengths and whole == "sdpa"


def test_one_width_without_a_scale() -> None:
    """Values that are wider than keys: scores are scaled by the keys' width."""
    heads, layout = rank_heads(0, 1, 4, 2, ((0, 60),)), Layout(60, (((0, 20), (20, 60)),), varlen.register("sdpa"))
    module = LlamaForCausalLM(AutoConfig.for_model("llama", **SIZES, **HEADS)).model.layers[0].self_attn
    q, k, _ = random_heads(1, 60)
    v = torch.randn(1, 2, 60, 12)
    found = attend(LocalAttention(module, layout, heads, None, {}), q, k, v)
    expected = attend(LocalAttention(module, layout, heads, None, {"scaling": 8**-0.5}), q, k, v)
    torch.testing.assert_close(found, expected)
    wider = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found[:, :20], wider.transpose(1, 2)[:, :20], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("documents", "window", "stays"), [(4, None, True), (5, None, False), (4, 9, False)])
def test_few_documents_stay_with_cudnn(
    documents: int, window: int | None, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over ranks, under sdpa; not where attention without masks was asked for, which keeps one output for all."""
    monkeypatch.setattr(backends, "may_choose_cudnn", lambda name, q: name == "sdpa")
    row = tuple((10 * i, 10 * i + 10) for i in range(documents))
    q, _, v = random_heads(1, 10 * documents)
    heads = rank_heads(0, 1, 4, 2, ((0, 10 * documents),))
    with kernel_on_cpu():
        for name in ("sdpa", varlen.register("sdpa")):
            attention = LocalAttention(nn.Module(), Layout(10 * documents, (row,), name), heads, window, {})
            assert kernel_of(attention, q, v) == ("sdpa" if stays and name == "sdpa" else torch_varlen.NAME)


@pytest.mark.full("10 s")
def test_compiled() -> None:
    """The graph breaks at the mask and at each call of attention, nowhere else."""
    model, inputs = built("llama", "sdpa"), packed(5)
    other = tiled(model, mlp=False, loss=False)
    found = torch._dynamo.explain(other)(**inputs)
    assert {reason.user_stack[-1].name for reason in found.break_reasons} <= {"create_causal_mask", "__call__"}
    compiled = torch.compile(other, backend="eager")
    torch.testing.assert_close(compiled(**inputs).loss, model(**inputs).loss)
