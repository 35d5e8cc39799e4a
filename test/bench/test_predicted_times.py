import re
from pathlib import Path

import pytest
import torch
from benchmark import small_models
from benchmark.predicted_times import OperationCounter, Prediction, predict, step_of_completions, steps, without_data
from benchmark.rates import H200, Rates
from benchmark.shapes import SHAPES

from seqtile.memory.batch import Batch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
ROWS = {
    ("loss", "4,096"): "linear_cross_entropy llama3_8b-4096 seqtile",
    ("loss", "131,072"): "linear_cross_entropy llama3_8b-131072 seqtile",
    ("MLP", "131,072"): "gated_mlp llama3_8b-131072 seqtile",
    ("layer of Hugging Face", "131,072"): "decoder_layer llama3_8b-131072 huggingface",
    ("layer, MLP tiled", "131,072"): "decoder_layer llama3_8b-131072 seqtile",
    ("layer, all tiled", "131,072"): "decoder_layer llama3_8b-131072 seqtile_layer",
    ("layer, all tiled, head chunks", "131,072"): "decoder_layer llama3_8b-131072 seqtile_head_groups",
}


def test_prices() -> None:
    """Prices computed by hand: a product costs its FLOP, a float32 sum half its traffic, a view nothing, all else its
    bytes."""
    with without_data(), OperationCounter() as counter:
        a, b = torch.empty(100, 30, dtype=torch.bfloat16), torch.empty(30, 20, dtype=torch.bfloat16)
        (a @ b).view(2000).t()
        torch.empty(100, 20).addmm_(a, b)
        a + a[:1].expand(100, 30)
        torch.empty(100, 30).copy_(a)
    product, added, sum_, copied = counter.operations
    assert (product.flops, product.bytes) == (2 * 100 * 30 * 20, 0)
    assert (added.flops, added.bytes) == (2 * 100 * 30 * 20, 4 * 100 * 20)
    assert (sum_.flops, sum_.bytes) == (0, 2 * (2 * 100 * 30 + 30))
    assert (copied.flops, copied.bytes) == (0, (2 + 4) * 100 * 30)
    found = Prediction(counter.operations)
    rates = Rates(1e6, 1e5)
    assert found.floor(rates) == pytest.approx(2 * 0.12)
    assert found.seconds(rates) == pytest.approx(2 * 0.12 + (8000 + 12060 + 18000) / 1e5)


@pytest.mark.full("5 s of a page of predictions")
def test_predictions_and_their_table() -> None:
    """The overhead over the matmuls alone stays small, and docs/benchmarks.md shows the predictions."""
    found = {name: predict(*given) for name, *given in steps("first") if name in ROWS.values()}
    ratio = {key: found[name].seconds() / found[name].floor() for key, name in ROWS.items()}
    assert ratio["loss", "4,096"] <= 1.08
    assert ratio["loss", "131,072"] <= 1.075
    assert ratio["MLP", "131,072"] <= 1.0605
    layer, groups = (found[ROWS[name, "131,072"]] for name in ("layer, all tiled", "layer, all tiled, head chunks"))
    assert groups.seconds() <= 1.082 * layer.seconds()
    for (step, tokens), name in ROWS.items():
        row = re.search(rf"^\| {step} +\| +{tokens} \| +([\d.]+) \| +([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
        milliseconds = [1e3 * found[name].seconds(), 1e3 * found[name].floor()]
        assert [f"{number:.2f}" for number in milliseconds] == [*row.groups()[:2]], step
        assert row[3] == f"{ratio[step, tokens]:.3f}", step


def test_a_step_of_completions() -> None:
    """A layer's products are proportional to the number of distinct tokens, the head's to the completions. In attention
    each query reads the keys of its own sequence."""
    batch = Batch(4, 700, 600, 1)
    apart, once = (step_of_completions(shares, batch, SHAPES["tiny"]) for shares in (False, True))
    layers = [
        sum(each.flops for each in step.two.operations) - sum(each.flops for each in step.one.operations)
        for step in (apart, once)
    ]
    assert layers[0] * 1000 == layers[1] * 2800 > 0
    head = [
        sum(each.flops for each in step.one.operations) - of_layer
        for step, of_layer in zip((apart, once), layers, strict=True)
    ]
    assert head[0] == head[1] == 3 * 2 * 400 * 1000 * 64
    assert apart.core == 2 * 2 * 9 * 4 * (700**2 / 2) * 64
    assert once.core == 2 * 2 * 11 * (600**2 / 2 + 4 * (700**2 - 600**2) / 2) * 64


@pytest.mark.full("half a minute of a page of predictions")
@pytest.mark.parametrize(("shares", "row"), [(False, "each sequence by itself"), (True, "the prompt computed once")])
def test_the_table_of_completions(shares: bool, row: str) -> None:
    step = step_of_completions(shares)
    figures = [step.seconds(), step.floor(), step.core / H200.flops]
    shown = re.search(rf"^\| {row} +\| +([\d.]+) \| +([\d.]+) \| +([\d.]+) \|$", PAGE.read_text(), re.M)
    assert [f"{seconds:.2f}" for seconds in figures] == [*shown.groups()]


@pytest.mark.full("half a minute of a page of predictions", but=("Qwen3-0.6B",))
@pytest.mark.parametrize("model", small_models.MODELS)
def test_small_models_and_their_table(model: str) -> None:
    """No way takes more than 1.03 of the untiled layer's predicted time, and the page shows all."""
    *chunks, short, long = small_models.row(model)
    assert all(float(ratio) <= 1.03 for ratio in f"{short} / {long}".split(" / "))
    row = f"| {' | '.join((*chunks, short, long))} |"
    assert row in (PAGE.parent / "how-it-works.md").read_text().splitlines()
