"""seqtile.fit: the features that it enables and their order, agreement with memory.plan, and refusals without
changes."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import seqtile
from seqtile import fitting, memory
from seqtile.fitting import Fit, choose, formula_of
from seqtile.memory.setup import GIB
from seqtile.memory.simulate import Simulation
from seqtile.models.find import is_checkpointed
from support.tiny import batch_of, build

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B = LlamaConfig(**SIZES, num_key_value_heads=8, vocab_size=128256)
ON_24 = {"lora_rank": 16, "dtype": "bfloat16", "gpu_memory_gib": 24, "host_memory_gib": 200}


def cheapest(seq_len: int, **setup: object) -> Fit:
    return choose(formula_of(LLAMA_8B), memory.Setup(**setup), seq_len)


def on_meta(config: object, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def on(found: object) -> tuple[str, ...]:
    return tuple(line.split("(")[0][5:].strip() for line in found.lines if line.startswith("  on "))


@pytest.mark.parametrize(("seq_len", "features"), [(5_000, 1), (21_000, 2), (40_000, 3), (100_000, 4)])
def test_the_cheapest_that_fits(seq_len: int, features: int) -> None:
    """The first setup of a fixed order that fits, by memory.plan. Each feature is needed for some length."""
    found = cheapest(seq_len, **ON_24)
    host = {"offload": ("activations",)}
    rungs = [{"tiles": ("loss", "mlp")}, {"tiles": memory.TILES}, {"tiles": memory.TILES} | host]
    rungs.append(rungs[-1] | {"head_groups": "auto"})
    plans = [memory.plan(LLAMA_8B, seq_len=seq_len, **ON_24, **rung) for rung in rungs]
    first = next(plan for plan in plans if plan.fits)
    assert found.plan == first and found.setup == first.setup and len(on(found)) == plans.index(first) + 1 == features
    assert found.offload == ("activations" in first.setup.offload)
    assert found.options == {"layer": "layer" in first.setup.tiles, "head_groups": first.setup.head_groups}
    assert f"{first.gpu_bytes / 2**30:.1f} of 24.0 GiB, fits" in str(found)


def test_attention_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first feature for packed rows of a model that Hugging Face loads with sdpa, beside the loss and the MLPs."""
    applied: list[dict] = []
    monkeypatch.setattr(fitting, "apply_seqtile", lambda model, **options: applied.append(options))
    monkeypatch.setattr(fitting, "enable_offload", lambda *given, **options: None)
    model, given = on_meta(LLAMA_8B), ON_24 | {"margin": 0, "rows": "packed"}
    found = seqtile.fit(model, seq_len=40_000, **given)
    assert applied == [{"layer": True, "head_groups": None, "attention": "varlen"}]
    assert on(found) == (
        *("attention without masks", "loss and MLPs in chunks"),
        *("layers in chunks", "layer inputs in host memory"),
    )
    assert on(seqtile.fit(model, seq_len=100, **given))[:2] == on(found)[:2], "the loss and the MLPs are always on"
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "attention_refusal", lambda model: "its masks are its own")
        with pytest.raises(ValueError, match=r"seq_len: expected at most 3.* tokens, got 40,000"):
            seqtile.fit(model, seq_len=40_000, **given)
    plain = seqtile.fit(model, seq_len=100, **given | {"rows": "plain"})
    assert plain.setup.attention == "sdpa" and "off  attention without masks: sdpa makes none here" in str(plain)


def test_too_long_tells_the_longest() -> None:
    most = memory.longest(LLAMA_8B, **ON_24, tiles=memory.TILES, offload="activations", head_groups="auto")
    found = cheapest(most.tokens, **ON_24)
    assert len(on(found)) == 4
    with pytest.raises(ValueError, match=f"seq_len: expected at most {most.tokens:,} tokens, got {most.tokens + 1:,}"):
        cheapest(most.tokens + 1, **ON_24)
    with pytest.raises(ValueError, match="seq_len: weights and optimizer alone are too large, got 100"):
        cheapest(100, gpu_memory_gib=24, host_memory_gib=200)


def test_dry_run_changes_nothing(capsys: pytest.CaptureFixture) -> None:
    """On a machine without a GPU, for another machine's GPU."""
    model, given = on_meta(LLAMA_8B), {"seq_len": 400_000, "gpu_memory_gib": 160, "host_memory_gib": 1900}
    found = seqtile.fit(model, **given | {"gpu_memory_gib": 200}, dry_run=True)
    assert capsys.readouterr().out == f"{found}\n" and found.offload and str(found).count("predicted") == 1
    told = {"attention": "sdpa", "tiles": memory.TILES, "offload": "activations"}  # as Hugging Face loads the model
    assert found.plan == memory.plan(LLAMA_8B, **given, **told)
    assert not is_checkpointed(model) and seqtile.status(model).mlp.tiled == 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_chosen_is_applied(checkpointed: bool) -> None:
    model = build("llama")
    if checkpointed:
        model.gradient_checkpointing_enable()
    found = seqtile.fit(model, seq_len=101, gpu_memory_gib=2)
    status = seqtile.status(model)
    assert (status.loss.tiled, status.mlp.tiled, status.layer) == (1, 2, None) and found.setup.dtype == "float32"
    assert is_checkpointed(model) and not found.offload
    model(**batch_of(1, 101)).loss.backward()


def test_layers_groups_and_offload_are_applied() -> None:
    model = build("llama")
    at_most = {"seq_len": 900_000, "host_memory_gib": 8}
    wanted = {"dtype": "float32", "tiles": memory.TILES, "offload": "activations", "head_groups": "auto"}
    needed = memory.plan(model.config, **at_most, **wanted)
    with pytest.warns(UserWarning, match="checkpoint"):  # on a CPU, offload is checkpointing
        seqtile.fit(model, gpu_memory_gib=needed.gpu_bytes / 2**30, margin=0, **at_most)
    status = seqtile.status(model)
    assert status.layer.tiled == 2 and status.layer.head_groups == 2 and is_checkpointed(model)


def test_lora_is_planned() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    found = seqtile.fit(model, seq_len=101, gpu_memory_gib=2).setup
    assert found.lora_rank == 4 and not found.load_in_4bit
    assert seqtile.status(model).mlp.tiled == 2


def test_4_bits_are_planned() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    model = build("llama")
    for layer in model.model.layers:
        down = layer.mlp.down_proj
        layer.mlp.down_proj = bnb.nn.Linear4bit(down.in_features, down.out_features, bias=False).to("cpu")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["down_proj"]))
    assert seqtile.fit(model, seq_len=101, gpu_memory_gib=2, dry_run=True).setup.load_in_4bit


QWEN = Qwen3_5TextConfig(
    vocab_size=5000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, layer_types=["full_attention"] * 2
)


@pytest.mark.parametrize(("gib", "tiled"), [(2.5, 1), (1.6, 2), (1.4, 0)])
def test_of_a_simulation_the_first_that_fits(gib: float, tiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and optimizer, 1 GiB for CUDA, and the bytes that the fake simulation reports: one GiB or half of one."""
    margin = random.uniform(0, 0.9)
    gib /= 1 - margin
    sizes = {("loss", "mlp"): 1.0, memory.TILES: 0.5}

    def run(self: Simulation, setup: memory.Setup) -> tuple[float, float]:
        assert self.model_class is Qwen3_5ForCausalLM
        return sizes[setup.tiles] * GIB, 1

    monkeypatch.setattr(Simulation, "run", run)
    model = on_meta(QWEN, torch.float32)
    if not tiled:
        with pytest.raises(ValueError, match="too large"):
            seqtile.fit(model, seq_len=4000, gpu_memory_gib=gib, margin=margin)
        return
    found = seqtile.fit(model, seq_len=4000, gpu_memory_gib=gib, margin=margin, dry_run=True)
    assert len(on(found)) == tiled and found.options == {"layer": tiled == 2, "head_groups": None}
    held = sum(weight.numel() for weight in model.parameters()) * 12 / 2**30
    assert found.gpu_gib == pytest.approx(1 + held + (1, 0.5)[tiled - 1], abs=1e-4)
    with pytest.raises(ValueError, match="attention: expected flash or varlen, got eager for plain rows, whose masks"):
        seqtile.fit(model, seq_len=4000, gpu_memory_gib=2, attention="eager")
    with pytest.raises(ValueError, match="it is simulated only for one GPU, without LoRA"):
        seqtile.fit(model, seq_len=4000, gpu_memory_gib=2, lora_rank=4)


@pytest.mark.full("20 s of simulation")
def test_a_type_without_a_formula_is_simulated() -> None:
    model = on_meta(QWEN, torch.float32)
    found = seqtile.fit(model, seq_len=4000, gpu_memory_gib=8, dry_run=True)
    assert on(found) == ("loss and MLPs in chunks",) and found.plan is None
    assert "simulated with its own code" in str(found) and 1 < found.gpu_gib < 6.4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seq_len": 0}, ValueError, "seq_len: expected a positive int, got 0"),
        ({"seq_len": 101, "batch_size": 0}, ValueError, "batch_size: expected a positive int"),
        ({"seq_len": 101, "optimiser": "sgd"}, TypeError, "did you mean optimizer"),
        ({"seq_len": 101, "gpu_memory_gib": -1}, ValueError, "gpu_memory_gib: expected more than 0 GiB, got -1"),
        ({"seq_len": 101, "margin": 1}, ValueError, "margin: expected a share, at least 0 and less than 1, got 1"),
        (
            {"seq_len": 101, "margin": "0.2"},
            ValueError,
            "margin: expected a share, at least 0 and less than 1, got '0.2'",
        ),
        ({"seq_len": 10**9}, ValueError, "seq_len: expected at most"),
    ],
    ids=str,
)
def test_bad_input_changes_nothing(options: dict, error: type[Exception], message: str) -> None:
    model = build("llama")
    with pytest.raises(error, match=message):
        seqtile.fit(model, **{"gpu_memory_gib": 2, "host_memory_gib": 2} | options)
    assert seqtile.status(model).mlp.tiled == 0 and not is_checkpointed(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="gpu_memory_gib: torch sees no GPU; pass the GiB"):
        seqtile.fit(build("llama"), seq_len=101)
    with pytest.raises(TypeError, match="expected a Hugging Face model"):
        seqtile.fit(nn.Linear(2, 2), seq_len=101, gpu_memory_gib=2)


@pytest.mark.gpu
def test_memory_at_hand() -> None:
    free, total = torch.cuda.mem_get_info()
    kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    found = seqtile.fit(build("llama", "cuda"), seq_len=101)
    assert math.isclose(found.setup.gpu_memory_gib, 0.8 * min(total, free + 2**30) / 2**30, abs_tol=0.5)
    del kept


def test_groups_of_heads_where_documents_keep_copies() -> None:
    """What attention without masks refuses by "auto" is not planned: padded rows, and documents in float32."""
    packed = memory.Setup(gpu_memory_gib=24, rows="packed", attention="varlen", tiles=memory.TILES, head_groups="auto")
    formula = formula_of(LLAMA_8B)
    assert formula.refusal("groups", packed, packed) is None
    for changes in ({"rows": "padded"}, {"dtype": "float32"}):
        setup = replace(packed, **changes)
        assert "would be computed once more" in formula.refusal("groups", setup, setup)
        with pytest.raises(ValueError, match="head_groups: expected a number, or attention other than varlen"):
            formula.predict(setup, 1000, 1)


def test_types_that_are_simulated_take_attention_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and scores are not simulated."""
    config = AutoConfig.for_model("cohere2", hidden_size=64, intermediate_size=8192, num_hidden_layers=2, vocab_size=99)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    found = seqtile.fit(model, seq_len=500, rows="packed", gpu_memory_gib=8, host_memory_gib=8, dry_run=True)
    assert found.options["attention"] == "varlen"
