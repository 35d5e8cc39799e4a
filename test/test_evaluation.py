"""seqtile.evaluate: equals Hugging Face's way of computing perplexity, for documents of any length."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, MambaConfig

import seqtile
from seqtile import evaluation
from seqtile.evaluation import Evaluation
from support.measure import LiveBytes
from support.tiny import VOCAB, build
from support.training import with_lora


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "FIRST", 32)


def window_by_window(model: nn.Module, ids: torch.Tensor, context: int, stride: int) -> dict[int, list[float]]:
    """Losses by number of preceding tokens, over windows whose last tokens count, as in Hugging Face's perplexity
    guide."""
    found, end = {}, 0
    model = copy.deepcopy(model).eval()
    for start in range(0, len(ids), stride):
        window, first = ids[start : start + context], end
        with torch.no_grad():
            logits = model(input_ids=window[None], use_cache=False).logits[0]
        end = start + len(window)
        for i in range(max(1, first - start), len(window)):
            found.setdefault(i, []).append(F.cross_entropy(logits[i - 1], window[i]).item())
        if end == len(ids):
            return found
    raise AssertionError


@pytest.mark.parametrize(("context", "stride"), [(None, None), (90, 31), (64, 63), (100, 1), (64, None)])
def test_as_hugging_face_computes_it(context: int | None, stride: int | None, device: str) -> None:
    model, ids = build("gemma2", device), torch.randint(3, VOCAB, (150,), device=device)
    documents = [ids, ids[:47].flip(0)]
    found = seqtile.evaluate(model, documents, context=context, stride=stride, text_bytes=400)
    assert model.training and not seqtile.status(model).loss.tiled, "as before"
    whole = context or 150
    expected: dict[int, list[float]] = {}
    for document in documents:
        for before, losses in window_by_window(model, document, whole, stride or whole // 2 or 1).items():
            expected.setdefault(before, []).extend(losses)
    losses = [loss for each in expected.values() for loss in each]
    assert found.tokens == len(losses) == 149 + 46
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / 400, rel=1e-5)
    assert found.by_position[0].start == 0 and found.by_position[-1].stop == max(expected)
    for span in found.by_position:
        of_span = [loss for before in expected for loss in expected[before] if span.start < before <= span.stop]
        assert span.tokens == len(of_span) and span.loss == pytest.approx(sum(of_span) / len(of_span), rel=1e-5)


def test_tiled_models_and_adapters() -> None:
    base = build("llama")
    base.model.layers[0].mlp.eval()
    model, ids = with_lora(base, "q_proj", "lm_head"), torch.randint(3, VOCAB, (150,))
    training, calls = [module.training for module in model.modules()], []
    found = seqtile.evaluate(model, ids, each=lambda *done: calls.append(done), context=100, stride=25)
    with model.disable_adapter():
        spans = seqtile.evaluate(model, ids, context=100, stride=25).by_position
    assert max(abs(a.loss - b.loss) for a, b in zip(found.by_position, spans, strict=True)) > 1e-4
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=32)
    again = seqtile.evaluate(model, ids, context=100, stride=25)
    assert again.loss == pytest.approx(found.loss, rel=1e-5) and seqtile.status(model).layer.tiled == 2
    assert [module.training for module in model.modules()] == training and calls == [(1, 3), (2, 3), (3, 3)]


def test_what_tokenizers_return() -> None:
    model, ids = build("llama"), torch.randint(3, VOCAB, (40,))
    one, listed = seqtile.evaluate(model, ids), ids.tolist()
    for same in (ids[None], ids.int(), listed, [listed], tuple(listed), [ids[None]], iter([ids])):
        assert seqtile.evaluate(model, same) == one
    assert seqtile.evaluate(model, [ids[:30], listed[:20]]).tokens == 29 + 19
    assert seqtile.evaluate(model, ids, context=100, stride=50) == one, "a document shorter than the stride"


def test_what_is_refused() -> None:
    model, ids = build("llama"), [3, 4, 5]
    for documents in ("text", ["text", "more"], b"text", {"input_ids": ids}, [{"input_ids": ids}], 7, torch.zeros(9)):
        with pytest.raises(TypeError, match=r"expected the token ids .*, got .*; pass tokenizer\(text\)\.input_ids"):
            seqtile.evaluate(model, documents)
    for documents in (torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, dtype=torch.long), [], [ids, [3]], iter([])):
        with pytest.raises(ValueError, match=r"expected token ids \[N\] of at least 2 tokens, got .*; pass several"):
            seqtile.evaluate(model, documents)
    for text_bytes in ([100], "text"):
        with pytest.raises(TypeError, match=r"text_bytes: expected one number, .*, got .*; pass sum"):
            seqtile.evaluate(model, ids, text_bytes=text_bytes)
    for options in ({"context": 20, "stride": 20}, {"context": 20, "stride": 0}, {"context": 1}, {"context": 0}):
        with pytest.raises(ValueError, match=r"expected 1 <= stride < context, got context=.*; pass a longer context"):
            seqtile.evaluate(model, torch.zeros(50, dtype=torch.long), **options)
    with pytest.raises(ValueError, match=r"expected a context with a stride, got stride=7 alone; pass context="):
        seqtile.evaluate(model, ids, stride=7)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 30}


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({}, 100),
        (YARN, 120),
        (YARN | {"factor": 2.0}, 100),  # a multiple of the original length: positions determine the scaling
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 200),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, None),
    ],
    ids=["plain", "yarn", "yarn of fewer", "linear", "dynamic"],
)
def test_more_tokens_than_a_model_is_configured_for(
    rope: dict, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama", max_position_embeddings=100, rope_parameters=rope or None)
    evaluation.logger.warning_once.cache_clear()
    seqtile.evaluate(model, [3] * (most or 100))
    seqtile.evaluate(model, [3] * 301, context=most or 100)
    seqtile.evaluate(model, [3] * 50, context=1000)
    assert not [text for text in caplog.messages if text.startswith("evaluate")]
    caplog.clear()
    for options in ({}, {"context": 10_000}):
        seqtile.evaluate(model, [3] * 301, **options)
    said = f"LlamaForCausalLM is configured for {most} positions at most, and is given 301 tokens at once"
    assert [said in text and f"pass context={most} " in text for text in caplog.messages] == [True] * (most is not None)


def test_configs_that_tell_no_positions() -> None:
    mamba = nn.Module()
    mamba.config = MambaConfig()
    assert evaluation.positions_of(nn.Linear(2, 2)) == evaluation.positions_of(mamba) == math.inf
    kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    model = build("gemma3_text")
    model.config.rope_parameters = kinds
    assert evaluation.positions_of(with_lora(model, "q_proj")) == 8 * 256


def test_how_it_prints() -> None:
    spans = (evaluation.Span(0, 1024, 1000, 2.0), evaluation.Span(1024, 2047, 1000, 1.0))
    found = Evaluation(2000, 1.5, spans, 8000)
    assert str(found).splitlines()[1:] == [
        "            0 to 1,024       1,000   2.0000       7.389",
        "        1,024 to 2,047       1,000   1.0000       2.718",
        "                   all       2,000   1.5000       4.482",
        "0.5410 bits per byte",
    ]
    assert found.figures()["by_position"][1] | {"perplexity": 0} == {
        "start": 1024, "stop": 2047, "tokens": 1000, "loss": 1.0, "perplexity": 0
    }  # fmt: skip


def attention(module: nn.Module, q: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format), None


def test_memory_of_an_evaluation() -> None:
    """For 32K tokens: a chunk of logits, and two tensors as large as the hidden states."""
    AttentionInterface.register("without_scores", attention)
    config, peaks = LlamaConfig(hidden_size=256, intermediate_size=8192, num_hidden_layers=2, vocab_size=64_000), []
    config._attn_implementation = "without_scores"
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        seqtile.apply_seqtile(model, chunk_tokens=2048)
        for tokens in (16_384, 32_768):
            ids = torch.zeros(1, tokens, dtype=torch.long)
            with LiveBytes() as memory, torch.no_grad():
                model(input_ids=ids, labels=ids)
            peaks.append(memory.peak)
    hidden, chunk = 32_768 * 256 * 2, 2048 * 64_000 * 2
    assert peaks[1] < chunk + 2 * hidden and peaks[1] - peaks[0] < hidden
