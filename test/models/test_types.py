"""Every Hugging Face model type is tiled as docs/models.md says, and computes the same tiled."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import seqtile
from seqtile.models import known, recognise
from seqtile.models.find import mlps_of
from seqtile.models.model_types import model_classes, model_types
from seqtile.models.parts import LAYER, LOSS
from seqtile.proof import findings, proven
from seqtile.proof.difference import difference
from seqtile.proof.small import small_model, unfilled
from support.real_configs import REAL_CONFIGS
from support.type_table import config_of, found_in, row, sharing_of, varlen_of

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
COUNTS = (
    r"Of (\d+) types in transformers .*, (\d+) can be built small .* for the loss of (\d+), the MLPs or experts of "
    r"(\d+), the whole layers of (\d+), and of (\d+) in head chunks"
)
OF_ANOTHER = f"transformers {transformers.__version__}," not in PAGE
documented = pytest.mark.skipif(OF_ANOTHER, reason="the page is of another transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_counts_in_readme() -> None:
    _, tried, loss, mlp, layers, _ = (int(found) for found in re.search(COUNTS, PAGE).groups())
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert (
        f"Of [{tried} model types](docs/models.md#the-table), each tried as a tiny model, the loss is tiled in {loss}, "
        f"the MLPs or experts in {mlp}, and whole layers in {layers}"
    ) in readme


@pytest.mark.full("half a second each", but=("qwen3_vl", "mistral", "ctrl", "deepseek_v3"))
@documented
@pytest.mark.parametrize("model_type", model_types())
def test_a_type(model_type: str) -> None:
    found = found_in(model_type)
    if isinstance(found, str):
        assert f"`{model_type}`," in PAGE or f"`{model_type}`." in PAGE, found
        return
    expected = next(line for line in PAGE.split("\n") if line.startswith(f"| `{model_type}` |"))
    varlen = varlen_of(small_model(model_classes(model_type)[0], config_of(model_type)))
    assert row(model_type, found, sharing_of(model_type), varlen) == expected, found


@pytest.mark.full("a second each", but=("granitemoe",))
@pytest.mark.parametrize("model_type", ["gpt_neox", "starcoder2", "granitemoe"])
def test_by_the_classes(model_type: str) -> None:
    model_class, config = model_classes(model_type)[0], CONFIG_MAPPING[model_type]()
    plain = small_model(model_class, config)
    getattr(seqtile, f"apply_seqtile_to_{model_type}")(chunk_tokens=findings.CHUNK, check=False)
    tiled = small_model(model_class, config)
    status = seqtile.status(tiled)
    seen = findings.gradients_of(tiled)
    seqtile.restore(model_type)
    assert status.loss.tiled == 1 and (status.mlp.tiled == status.mlp.total)
    truth, nudged = findings.gradients_of(plain), findings.gradients_of(plain, nudge=findings.EPS)
    assert difference(truth, seen, nudged, findings.EPS) is None
    assert seqtile.status(small_model(model_class, config)).mlp.tiled == 0


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    """A rotary embedding that rotates pairs of neighbours instead of halves."""
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))
    turned = [torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) for x in (q, k)]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


def test_another_rotary_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """If its source did not show it, the proof would find it."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    model = small_model(LlamaForCausalLM, LlamaConfig())
    monkeypatch.setattr(recognise, "is_llamas_rotary", lambda function: True)
    monkeypatch.setattr("seqtile.models.forward.layer.is_llamas_rotary", lambda function: True)
    [found] = [found for found in findings.findings(model) if found.part is LAYER]
    assert "differs by" in found.refusal and found.error > 0.01


class ScaledMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self.down(nn.functional.gelu(self.up(x)))


class MixingMLP(ScaledMLP):
    """Looks like an MLP, but lets each token see the previous one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x + x.roll(1, dims=1))))


class WithoutGradientMLP(ScaledMLP):
    """Its gradients are NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * (x - x).abs().sqrt()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ScaledMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, scale=2.0)  # an option, which the tiled forward passes on, untiled


class Convolution(ScaledMLP):
    """A convolution along the sequence between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2))


class OtherGPT2(GPT2LMHeadModel):
    mlp: type[nn.Module]

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp = self.mlp()


class MixingGPT2(OtherGPT2):
    mlp = MixingMLP


class ScaledGPT2(OtherGPT2):
    mlp = Scaled


class WithoutGradientGPT2(OtherGPT2):
    mlp = WithoutGradientMLP


class UnusedGPT2(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer.h[1].unused = ScaledMLP()


@pytest.fixture
def on_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the classes of this file count as those of a model from the hub, which are proven on a small model."""
    names = (*known.HUGGING_FACE, __name__.split(".")[0])
    for module in (known, proven):
        monkeypatch.setattr(module, "HUGGING_FACE", names)
    made_by, own = known._made_by, {"MixingMLP", "Scaled", "WithoutGradientMLP", "ScaledMLP"}
    monkeypatch.setattr(known, "_made_by", lambda cls: made_by(cls) | own)


@pytest.mark.usefixtures("on_hub")
def test_a_part_that_differs_is_left_untiled() -> None:
    """Nor is a layer that contains it: the layer's file was proven without this module."""
    model = small_model(MixingGPT2, GPT2Config())
    with pytest.raises(ValueError, match=r"the layers of MixingGPT2 cannot be tiled: the gradient of .* differs by"):
        seqtile.apply_seqtile(model, layer=True, chunk_tokens=findings.CHUNK)
    seqtile.apply_seqtile(model, chunk_tokens=findings.CHUNK)
    status = seqtile.status(model)
    assert status.mlp.tiled == 0 and status.loss.tiled == 1
    assert "MixingMLP is left untiled: " in str(status) and "differs by" in str(status)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ScaledGPT2, "its forward ran untiled"),
        (UnusedGPT2, "does not call it"),
        (WithoutGradientGPT2, "the loss or a gradient of a small model of its class is not finite"),
    ],
)
@pytest.mark.usefixtures("on_hub")
def test_a_proof_of_nothing_is_none(cls: type[GPT2LMHeadModel], reason: str) -> None:
    """A proof is void if it compares untiled with untiled, does not call the module, or has values that are NaN."""
    model = small_model(cls, GPT2Config())
    seqtile.apply_seqtile(model, chunk_tokens=findings.CHUNK)
    status = seqtile.status(model)
    assert f"MLP is left untiled: {reason}" in str(status) or f"given token ids, {reason}" in str(status)
    assert status.mlp.tiled == status.mlp.total - (1 if cls is UnusedGPT2 else 2)


@pytest.mark.full("a dozen seconds of hrm_text", but=("llama-*", "gpt_oss-*", "olmo2-*"))
@pytest.mark.parametrize(("model_type", "tiled"), [("llama", 6), ("gpt_oss", 4), ("olmo2", 4), ("hrm_text", None)])
def test_every_call_is_counted(model_type: str, tiled: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, each once as an MLP and once (or, in head chunks, twice) as a layer."""
    counted: list[findings.WayTaken] = []
    leave = findings.WayTaken.__exit__
    monkeypatch.setattr(findings.WayTaken, "__exit__", lambda *given: counted.append(given[0]) or leave(*given))
    assert not isinstance(found_in(model_type), str)
    assert all(one.chunked and not one.untiled for one in counted)
    loss, *layers = counted
    assert loss.chunked == 1 and (tiled is None or sum(one.chunked for one in layers) == tiled)


def test_the_proof_leaves_no_trace() -> None:
    state = torch.random.get_rng_state()
    model = small_model(MixingGPT2, GPT2Config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    list(findings.findings(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Records the small models on which something is proven; no proof finds a difference."""
    found: list[object] = []
    monkeypatch.setattr(proven, "findings", lambda model: found.append(model) or [])
    proven._proof_of.cache_clear()
    yield found
    proven._proof_of.cache_clear()


def test_a_changed_file_is_proven_again(runs: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(LlamaForCausalLM, LlamaConfig())
    assert proven.unproven(model)(LOSS, model) is None and not runs
    monkeypatch.setattr(proven, "fingerprint", lambda module: "another file")
    assert "no such module" in proven.unproven(model)(LOSS, model) and len(runs) == 1


SIZES = {"hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        (SIZES | {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "pad_token_id": 7, "dtype": "bfloat16"}, True),
        (SIZES | {"num_key_value_heads": 1}, False),
        ({"mlp_bias": True}, False),
        ({"hidden_act": "relu"}, False),
        ({"attention_bias": True, "tie_word_embeddings": True}, False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}, False),
    ],
)
def test_what_was_proven_holds_for_other_sizes_alone(runs: list[object], changes: dict, same: bool) -> None:
    sizes = {"vocab_size": 40, "num_hidden_layers": 2, "intermediate_size": 50}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes | changes))
    assert (proven.unproven(model)(LOSS, model) is None) == same and len(runs) == (not same)


def test_a_config_that_is_not_remembered_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(LlamaForCausalLM, LlamaConfig(mlp_bias=True, hidden_act="gelu"))
    assert proven.digest(model.config) not in proven._proven(proven.PROVEN)[proven.fingerprint(modeling_llama.__name__)]
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=findings.CHUNK)
    assert "left untiled" not in str(seqtile.status(model))
    monkeypatch.setattr(findings, "_compare_part", lambda *_: (None, "it differs"))
    proven._proof_of.cache_clear()
    seqtile.apply_seqtile(seqtile.restore(model) or model, chunk_tokens=findings.CHUNK)
    assert "LlamaForCausalLM is left untiled: it differs" in str(seqtile.status(model))
    proven._proof_of.cache_clear()


@pytest.mark.parametrize("known", [True, False])
def test_a_config_whose_small_model_does_not_run(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of its file for other configs are valid for it; without any, the model stays untiled."""
    model = small_model(LlamaForCausalLM, LlamaConfig(mlp_bias=True, hidden_act="gelu"))
    monkeypatch.setattr(proven, "_proof_of", lambda *_: "IndexError: too small")
    if not known:
        monkeypatch.setattr(proven, "_proven", lambda table: {})
    seqtile.apply_seqtile(model, chunk_tokens=findings.CHUNK)
    assert ("left untiled: it could not be proven on a small model" in str(seqtile.status(model))) is not known


@pytest.mark.full("half a second each", but=("Llama-3.1*", "*B, balanced", "Gemma-3-4B", "gpt-oss*", "*V3", "Phi-4"))
@documented
@pytest.mark.parametrize("known", REAL_CONFIGS, ids=lambda known: known[0])
def test_well_known_configs(known: tuple, runs: list[object]) -> None:
    """Such a model is tiled without running a proof, and without treating any module as replaced."""
    _, model_type, said = known
    model = unfilled(model_classes(model_type)[0], config_of(model_type, said))
    reason_of = proven.unproven(model)
    for part in findings.PROVEN_ALONE:
        for module in part.modules(model):
            assert part.refusal(module) is not None or reason_of(part, module) is None
    assert not runs


def test_attention_is_given_the_whole() -> None:
    """A layer that runs chunk by chunk gives its attention function the tensors of the whole sequence."""
    shapes: list[dict[str, torch.Size]] = []

    def watched(module: nn.Module, q: torch.Tensor, *args: Any, **options: Any) -> Any:
        given = {"q": q} | options
        shapes.append({name: value.shape for name, value in given.items() if isinstance(value, torch.Tensor)})
        return sdpa_attention_forward(module, q, *args, **options)

    AttentionInterface.register("watched", watched)
    model, length = small_model(Olmo2ForCausalLM, Olmo2Config()).train(), 3 * findings.CHUNK + 1
    model.set_attn_implementation("watched")
    inputs = {"input_ids": torch.randint(3, 50, (2, length)), "position_ids": torch.arange(length).repeat(2, 1)}
    model(**inputs, use_cache=False)
    untiled = shapes.copy()
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=findings.CHUNK, check=False)
    shapes.clear()
    model(**inputs, use_cache=False)
    assert untiled[0]["position_ids"] == (2, length) and shapes == untiled


def test_a_convolution_is_no_mlp() -> None:
    model = small_model(LlamaForCausalLM, LlamaConfig())
    model.model.layers[0].mlp = Convolution()
    assert [type(mlp).__name__ for mlp in mlps_of(model)] == ["LlamaMLP"]
