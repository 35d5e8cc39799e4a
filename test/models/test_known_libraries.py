"""Which layers of PEFT, bitsandbytes, torchao, Liger and transformers' quantisation count as treating each token by
itself: those that compute in chunks what they compute at once, in evaluation and in training."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from seqtile.models.find import inside_peft
from seqtile.models.known import _CLASSES, is_of_library, refusal_of, unknown_in
from support.tiny import OLDEST, build

peft = pytest.importorskip("peft")
lora_config = sys.modules["peft.tuners.lora.config"]
IN, OUT, ROWS, IDS = 64, 48, (2, 9), 30


class Model(nn.Module):
    """What PEFT adapts."""

    def __init__(self, up: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.norm, self.embed = up or nn.Linear(IN, OUT), nn.LayerNorm(IN), nn.Embedding(IDS, OUT)
        self.config = {"model_type": "own"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x))


def noisy(layer: nn.Module) -> nn.Module:
    """Returns a layer with adapters that are not zero."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return layer


def adapted(name: str, base: Callable[[], nn.Module] = lambda: None, at: str = "up", **options: Any) -> Callable:
    """Returns a function that makes a layer with an adapter, whose config has this name."""

    def make() -> nn.Module:
        model = Model(base())
        model.is_loaded_in_4bit = type(model.up).__name__ == "Linear4bit"
        model.is_loaded_in_8bit = type(model.up).__name__ == "Linear8bitLt"
        config = getattr(peft, f"{name}Config")(target_modules=[at], **options)
        return noisy(peft.get_peft_model(model, config).base_model.model.get_submodule(at))

    return make


def lora(base: Callable[[], nn.Module] = lambda: None, **options: Any) -> Callable:
    return adapted("Lora", base, r=4, **options)


def arrow() -> nn.Module:
    """Two adapters, and a third that mixes them for each token."""
    model = peft.get_peft_model(Model(), peft.LoraConfig(r=4, target_modules=["up"]), adapter_name="task_0")
    model.add_adapter("task_1", peft.LoraConfig(r=4, target_modules=["up"]))
    routed = lora_config.ArrowConfig(top_k=1)
    routed.task_adapter_names, routed.gks_adapter_names = ["task_0", "task_1"], []
    model.add_adapter("arrow_router", peft.LoraConfig(r=4, target_modules=["up"], arrow_config=routed))
    layer = model.base_model.model.up
    noisy(layer.requires_grad_(True))
    model.set_adapter("arrow_router")
    return layer


def of_gptq(name: str, **options: Any) -> Callable:
    """LoRA over the linear layer of another package, for which a plain one stands in."""

    def make() -> nn.Module:
        module, cls = {"gptq": "GPTQLoraLinear", "awq": "AwqLoraLinear", "aqlm": "AqlmLoraLinear"}, None
        cls = getattr(sys.modules[f"peft.tuners.lora.{name}"], module[name])
        base = nn.Linear(IN, OUT).requires_grad_(False)
        return noisy(cls(base, "default", peft.LoraConfig(**options), r=4, lora_alpha=8))

    return make


def four_bits(cls: str = "Linear4bit") -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = getattr(bnb.nn, cls)(IN, OUT, True, torch.float32)
    layer.load_state_dict(nn.Linear(IN, OUT).state_dict())
    return layer.to("cpu").requires_grad_(False)


def eight_bits(threshold: float = 0.0, trained: bool = False) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(IN, OUT, True, has_fp16_weights=trained, threshold=threshold)
    layer.load_state_dict(nn.Linear(IN, OUT).state_dict())
    return layer.to("cpu").requires_grad_(trained)


def ao(name: str = "quantization") -> ModuleType:
    return pytest.importorskip(f"torchao.{name}")


def of_torchao(config: Callable[[], Any]) -> Callable:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(IN, OUT)).requires_grad_(False)
        ao().quantize_(model, config())
        return model[0]

    return make


def int8(granularity: str, **options: Any) -> Callable:
    """A layer that rounds its input to 8 bits, too."""
    name = "Int8StaticActivationInt8WeightConfig" if options else "Int8DynamicActivationInt8WeightConfig"
    return of_torchao(lambda: getattr(ao(), name)(granularity=getattr(ao(), granularity)(), **options))


def nf4() -> nn.Module:
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    layer.weight = nn.Parameter(ao().NF4Tensor.from_tensor(layer.weight.detach(), 16, 4), requires_grad=False)
    return layer


def simulated(activation: Callable | None, weight: Callable | None = None) -> Callable:
    """A layer of torchao's for training that will be quantised later."""

    def make() -> nn.Module:
        qat = ao("quantization.qat")
        configs = [config and config(qat) for config in (activation, weight)]
        return qat.linear.FakeQuantizedLinear(IN, OUT, True, *configs)

    return make


def float8(recipe: str, **options: Any) -> Callable:
    """A layer of torchao's for training in float8, as it computes without a GPU's kernels."""

    def make() -> nn.Module:
        config = ao("float8").Float8LinearConfig.from_recipe_name(recipe)
        config = dataclasses.replace(config, emulate=True, **options)
        return ao("float8.float8_linear").Float8Linear.from_float(nn.Linear(IN, OUT), config=config)

    return make


def of_transformers(module: str, cls: str, *arguments: Any, **options: Any) -> Callable:
    def make() -> nn.Module:
        layer = getattr(pytest.importorskip(f"transformers.integrations.{module}"), cls)(IN, OUT, *arguments, **options)
        for tensor in (*layer.parameters(), *layer.buffers()):
            if not tensor.is_floating_point():
                tensor.data = torch.randint(0, 120, tensor.shape).to(tensor.dtype)
            elif tensor.dim() == 0:
                tensor.data.fill_(0.1)
        return layer

    return make


def by_token(qat: ModuleType, **options: Any) -> Any:
    return qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, **options)


def in_groups(qat: ModuleType) -> Any:
    return qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)


def in_float8(qat: ModuleType, granularity: str = "PerRow") -> Any:
    return qat.Float8FakeQuantizeConfig(granularity=getattr(ao(), granularity)())


KNOWN: dict[str, Callable[[], nn.Module]] = {
    "LoRA": lora(),
    "rslora": lora(use_rslora=True),
    "LoRA with a bias": lora(lora_bias=True),
    "LoRA of GPT-2's": lora(lambda: Conv1D(OUT, IN), fan_in_fan_out=True),
    "LoRA of 4 bits": lora(four_bits),
    "LoRA of 8 bits": lora(eight_bits),
    "LoRA of torchao's": lora(of_torchao(lambda: ao().Int8WeightOnlyConfig())),
    "DoRA": lora(use_dora=True),
    "DoRA of 4 bits": lora(four_bits, use_dora=True),
    "MiCA": lora(init_lora_weights="mica"),
    "KaSA": lora(kasa_config=lora_config.KasaConfig()),
    "block diagonal LoRA": lora(use_bdlora=lora_config.BdLoraConfig(target_modules_bd_a=["up"], nblocks=2)),
    "VeLoRA, random": lora(velora_config=lora_config.VeloraConfig(num_groups=4, init_type="random")),
    "Arrow": arrow,
    "GPTQ": of_gptq("gptq"),
    "QA-LoRA": of_gptq("gptq", use_qalora=True, qalora_group_size=8),
    "AWQ": of_gptq("awq"),
    "AQLM": of_gptq("aqlm"),
    "LoRA of an embedding": adapted("Lora", at="embed"),
    "DoRA of an embedding": adapted("Lora", at="embed", use_dora=True),
    "MiCA of an embedding": adapted("Lora", at="embed", r=4, init_lora_weights="mica"),
    "HiRA of an embedding": adapted("Hira", at="embed", r=4),
    "OFT of an embedding": adapted("OFT", at="embed", oft_block_size=4),
    "TinyLoRA of an embedding": adapted("TinyLora", at="embed", r=2),
    "tokens of an embedding": adapted("TrainableTokens", at="embed", token_indices=[1, 3]),
    "AdaLoRA": adapted("AdaLora", total_step=10),
    "AdaLoRA of 4 bits": adapted("AdaLora", four_bits, total_step=10),
    "AdaLoRA of 8 bits": adapted("AdaLora", eight_bits, total_step=10),
    "AdaMSS": adapted("Adamss", num_subspaces=2),
    "BEFT": adapted("Beft"),
    "BOFT": adapted("BOFT", boft_block_size=4),
    "C3A": adapted("C3A", block_size=8),
    "DEFT": adapted("Deft"),
    "DeLoRA": adapted("Delora"),
    "FourierFT": adapted("FourierFT", n_frequency=20),
    "FRoD": adapted("Frod"),
    "GLoRA": adapted("Glora"),
    "GraLoRA": adapted("Gralora", r=4, gralora_k=2, hybrid_r=2),
    "HiRA": adapted("Hira", r=4),
    "HiRA of 4 bits": adapted("Hira", four_bits, r=4),
    "HiRA of 8 bits": adapted("Hira", eight_bits, r=4),
    "HRA": adapted("HRA"),
    "IA3": adapted("IA3", feedforward_modules=[]),
    "IA3 of an input": adapted("IA3", feedforward_modules=["up"]),
    "IA3 of 4 bits": adapted("IA3", four_bits, feedforward_modules=[]),
    "IA3 of 8 bits": adapted("IA3", eight_bits, feedforward_modules=["up"]),
    "LN tuning": adapted("LNTuning", at="norm"),
    "LoHa": adapted("LoHa", r=4),
    "LoKr": adapted("LoKr", r=4),
    "MiSS": adapted("Miss", r=4),
    "MiSS, bat": adapted("Miss", r=4, init_weights="bat"),
    "MiSS, mini": adapted("Miss", r=4, init_weights="mini", mini_r=4),
    "OFT": adapted("OFT", oft_block_size=4),
    "OFT, bounded": adapted("OFT", oft_block_size=4, coft=True, module_dropout=0.5),
    "OSF": adapted("OSF"),
    "PEANuT": adapted("Peanut"),
    "PSOFT": adapted("Psoft", r=4),
    "PVeRA": adapted("Pvera", r=4),
    "PVeRA of 4 bits": adapted("Pvera", four_bits, r=4),
    "PVeRA of 8 bits": adapted("Pvera", eight_bits, r=4),
    "RandLoRA": adapted("RandLora", r=4),
    "RandLoRA of 4 bits": adapted("RandLora", four_bits, r=4),
    "RandLoRA of 8 bits": adapted("RandLora", eight_bits, r=4),
    "RoAd": adapted("Road", group_size=16),
    "RoAd of 4 bits": adapted("Road", four_bits, group_size=16),
    "RoAd of 8 bits": adapted("Road", eight_bits, group_size=16),
    "SHiRA": adapted("Shira", r=4),
    "Supertuning": adapted("Supertuning"),
    "TinyLoRA": adapted("TinyLora", r=2),
    "Uni-LoRA": adapted("UniLora", r=4, theta_d_length=64),
    "VB-LoRA": adapted("VBLoRA", r=4, vector_length=8, num_vectors=16),
    "VeRA": adapted("Vera", r=4),
    "WaveFT": adapted("WaveFT", n_frequency=20),
    "Linear4bit": four_bits,
    "LinearFP4": lambda: four_bits("LinearFP4"),
    "LinearNF4": lambda: four_bits("LinearNF4"),
    "Linear8bitLt": eight_bits,
    "int8 weights": of_torchao(lambda: ao().Int8WeightOnlyConfig()),
    "int4 weights": of_torchao(lambda: ao().IntxWeightOnlyConfig(torch.int4, ao().PerGroup(16))),
    "int4 weights, int8 tokens": of_torchao(
        lambda: ao().Int8DynamicActivationIntxWeightConfig(torch.int4, ao().PerGroup(16))
    ),
    "float8 weights": of_torchao(lambda: ao().Float8WeightOnlyConfig()),
    "torchao's NF4": nf4,
    "int8 by token": int8("PerRow"),
    "int8 by a scale that is given": int8("PerTensor", act_quant_scale=torch.full((1, 1, 1), 0.1)),
    "simulated, by token": simulated(by_token, in_groups),
    "simulated, weights": simulated(None, in_groups),
    "simulated, float8 by token": simulated(in_float8),
    "simulated, 8 bits by token": lambda: ao("quantization.qat").linear.Int8DynActInt4WeightQATLinear(
        IN, OUT, groupsize=32
    ),
    "float8, by token": float8("rowwise"),
    "float8, by token, gradients not": float8("rowwise_with_gw_hp"),
    "BitLinear": of_transformers("bitnet", "BitLinear", True, dtype=torch.float32),
    "BitLinear in training": of_transformers("bitnet", "AutoBitLinear", online_quant=True, use_rms_norm=True),
    "Gemma's 4 bits": of_transformers("gemma_quant", "QuantizedLinear", True, num_bits=4),
}
DRAWS, SCALE = "draws once for all its tokens", "takes one scale over all its tokens"
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str | None, str | None]] = {
    # -> how it is called, and what is said of it in evaluation and in training
    "aLoRA": (lora(alora_invocation_tokens=[3]), {"alora_offsets": [3, 5]}, *["counted from the end"] * 2),
    "aLoRA of 4 bits": (
        lora(four_bits, alora_invocation_tokens=[3]),
        {"alora_offsets": [3, 5]},
        *["counted from the end"] * 2,
    ),
    "MonteCLoRA": (lora(monteclora_config=lora_config.MontecloraConfig()), {}, None, DRAWS),
    "VeLoRA": (lora(velora_config=lora_config.VeloraConfig(num_groups=4)), {}, None, "keeps a mean of its tokens"),
    "BOFT with dropout": (adapted("BOFT", boft_block_size=4, boft_dropout=0.5), {}, None, DRAWS),
    "LoHa with dropout": (adapted("LoHa", r=4, rank_dropout=0.5), {}, None, DRAWS),
    "LoKr with dropout": (adapted("LoKr", r=4, rank_dropout=0.5), {}, None, DRAWS),
    "Lily": (adapted("Lily", r=4), {}, *["by their mean over all its tokens"] * 2),
    "Poly": (adapted("Poly", r=4, n_tasks=2, n_skills=2), {"task_ids": torch.tensor([1, 0])}, *["the task of"] * 2),
    "int8 by tensor": (int8("PerTensor"), {}, *[SCALE] * 2),
    "simulated, by tensor": (simulated(lambda qat: in_float8(qat, "PerTensor")), {}, *[SCALE] * 2),
    "simulated, by the first batch": (simulated(lambda qat: by_token(qat, is_dynamic=False)), {}, *[SCALE] * 2),
    "simulated, float8 weights": (simulated(None, in_float8), {}, *["gradient is rounded once"] * 2),
    "float8 by tensor": (float8("tensorwise"), {}, *[SCALE] * 2),
    "float8 by token, other scales": (
        float8("rowwise", round_scales_to_power_of_2=False),
        {},
        *["gradient takes one scale"] * 2,
    ),
}


def results(layer: nn.Module, x: torch.Tensor, few: int | None, **options: Any) -> list[torch.Tensor]:
    """Returns a layer's outputs, and the gradients of its input and parameters, with all tokens at once or a few at a
    time."""
    x = x.clone().requires_grad_(x.is_floating_point())
    pieces = [x] if few is None else x.flatten(0, 1)[None].split(few, 1)
    y = torch.cat([layer(piece, **options).flatten(0, 1) for piece in pieces])
    leaves = [each for each in (x, *layer.parameters()) if each.requires_grad]
    upstream = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) - 0.4
    gradients = torch.autograd.grad(y, leaves, upstream, allow_unused=True) if y.requires_grad else []
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


def equal_in_chunks(layer: nn.Module, **options: Any) -> bool:
    """Returns whether a layer computes the same a few tokens at a time. Of the options of a whole sequence's call a
    chunk's call may make nothing."""
    numbers = torch.randn(*ROWS, IN) * torch.logspace(-2, 1, ROWS[1])[:, None]
    x = torch.randint(IDS, ROWS) if hasattr(inside_peft(layer), "num_embeddings") else numbers
    whole = results(layer, x, None, **options)
    try:
        pairs = zip(whole, results(layer, x, 4, **options), strict=True)
    except (RuntimeError, IndexError, AssertionError):
        return False
    largest = max(other.norm() for other in whole)
    # The sum that is a single number's gradient may cancel.
    return all(
        (mine - other).norm() <= 1e-5 * (largest if other.numel() == 1 else other.norm()) for other, mine in pairs
    )


def refusal(layer: nn.Module) -> str | None:
    return next((reason for module in layer.modules() if (reason := refusal_of(module)) is not None), None)


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # BitLinear's functions
        yield


@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "AdaMSS":  # it needs scikit-learn to group the columns of a weight
        monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))
        monkeypatch.setitem(sys.modules, "sklearn.cluster", SimpleNamespace(KMeans=Alternating))
    if "PVeRA" in name:  # it draws for each token, as dropout does
        monkeypatch.setattr(torch, "randn_like", lambda like: torch.full_like(like, 0.3))
    layer = KNOWN[name]()
    for training in (False, True):
        layer.train(training)
        assert refusal(layer) is None
        assert equal_in_chunks(layer)
        assert "embedding" in name or unknown_in(layer, "up") is None  # no part of a model holds an embedding


class Alternating:
    def __init__(self, n_clusters: int, **_: Any) -> None:
        self.number = n_clusters

    def fit_predict(self, rows: numpy.ndarray) -> numpy.ndarray:
        return numpy.arange(len(rows)) % self.number


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, options, *said = REFUSED[name]
    layer = make()
    for training in (False, True):
        layer.train(training)
        expected = said[training]
        assert equal_in_chunks(layer, **options) is (expected is None)
        assert refusal(layer) is None if expected is None else expected in refusal(layer)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: eight_bits(1.0), "with a threshold, which looks for outliers in all its tokens"),
        (
            lambda: eight_bits(trained=True),
            "that trains its weight, whose gradient takes one scale over all its tokens",
        ),
        (adapted("Pvera", four_bits, r=4, generator_seed=1), "draws from a generator that it keeps"),
    ],
)
def test_refused_on_other_devices(make: Callable[[], nn.Module], reason: str) -> None:
    """What a layer does elsewhere than in training on a CPU."""
    assert reason in refusal(make())


def test_outliers_are_of_all_tokens() -> None:
    assert not equal_in_chunks(eight_bits(1.0).eval())


def test_an_adapter_that_is_not_active_refuses_nothing() -> None:
    model = peft.get_peft_model(Model(), peft.LoraConfig(target_modules=["up"], alora_invocation_tokens=[3]))
    model.add_adapter("plain", peft.LoraConfig(target_modules=["up"]))
    layer = model.base_model.model.up
    assert refusal(layer) is not None
    with model.disable_adapter():
        assert refusal(layer) is None
    layer.set_adapter(["plain", "default"])
    assert refusal(layer) is not None
    model.set_adapter("plain")
    assert refusal(layer) is None


@pytest.mark.parametrize("name", ["BOFT with dropout", "LoHa with dropout", "Lily", "VeLoRA"])
def test_an_adapter_of_other_layers(name: str) -> None:
    layer = REFUSED[name][0]().train()
    assert refusal(layer) is not None
    layer._active_adapter = ["of_another_layer"]
    assert refusal(layer) is None


def test_a_merged_adapter_refuses_nothing() -> None:
    layer = adapted("BOFT", boft_block_size=4, boft_dropout=0.5)().train()
    assert refusal(layer) is not None
    layer.merge()
    assert refusal(layer) is None


class OwnLora(peft.tuners.lora.layer.Linear):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x.cumsum(1), *args, **kwargs)


class OwnTensor(torch.Tensor):
    pass


def test_what_only_looks_like_a_library() -> None:
    """A subclass, a class of the same name, the class of a weight."""
    layer = lora()()
    layer.__class__ = OwnLora
    assert not is_of_library(type(layer).__module__)  # for others to judge
    layer.__class__ = type("Linear", (OwnLora,), {"__module__": "peft.tuners.lora.layer"})
    assert "may not treat each token by itself" in refusal_of(layer)
    plain = nn.Linear(3, 3)
    assert refusal_of(plain) is None
    plain.weight = nn.Parameter(plain.weight.detach().as_subclass(OwnTensor))
    assert "OwnTensor, whose products may not" in refusal_of(plain)


def test_the_forward_of_another_layer() -> None:
    """X-LoRA gives each LoRA layer a forward of its own."""
    layer = lora()()
    layers = pytest.importorskip("peft.tuners.xlora.layer")
    layer.forward = MethodType(layers.XLoraLinearLayer.forward, layer)
    assert "runs the forward of peft.tuners.xlora.layer.XLoraLinearLayer" in refusal_of(layer)


def test_what_is_around_other_modules() -> None:
    """Experts, a head that is trained as a whole, and the tokens that are trained of a head."""
    model = build("qwen3_moe", tie_word_embeddings=True)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"target_parameters": names, "modules_to_save": ["norm"], "trainable_token_indices": [1, 2]}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], **options))
    inside = [module for module in model.base_model.model.modules() if is_of_library(type(module).__module__)]
    assert {type(module).__name__ for module in inside} >= {"ParamWrapper", "ModulesToSaveWrapper", "Linear"}
    assert "TrainableTokensWrapper" in {type(module).__name__ for module in inside}
    assert all(refusal_of(module) is None for module in inside)


def test_torchao_s_float8_weights() -> None:
    """Whose products with inputs in float8 run on GPUs only."""
    layer, numbers = nn.Linear(IN, OUT).requires_grad_(False), torch.randn(OUT, IN)
    weights = ao("quantization.quantize_.workflows")
    for granularity in (ao().PerRow(), ao().PerTensor()):
        scaled = weights.QuantizeTensorToFloat8Kwargs(granularity=granularity)
        weight = weights.Float8Tensor.from_hp(numbers, act_quant_kwargs=scaled)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        expected = None if granularity == ao().PerRow() else "Float8Tensor, whose product takes one scale over all"
        assert refusal_of(layer) is expected or expected in refusal_of(layer)


def test_liger_s_forwards() -> None:
    """Liger exchanges the forwards of a model's modules, or their classes."""
    liger = pytest.importorskip("liger_kernel.transformers")
    norm = build("llama").model.norm
    norm.forward = MethodType(liger.rms_norm.LigerRMSNorm.forward, norm)
    assert refusal_of(norm) is refusal_of(liger.rms_norm.LigerRMSNormForGemma(8)) is None
    mixing = pytest.importorskip("liger_kernel.transformers.multi_token_attention").LigerMultiTokenAttention
    norm.forward = MethodType(mixing.forward, norm)
    assert "runs the forward of liger_kernel" in refusal_of(norm)
    assert "LigerMultiTokenAttention, which may not" in refusal_of(mixing(3, 3, 3))


NEED_OTHERS = {"EetqLoraLinear", "HqqLoraLinear", "IncLoraLinear"}  # PEFT defines these where another library is
MIXING = """_BaseAdaptedAttention AdaptedAttentionGPT AdaptedAttention MultiheadAttention ShadowLayer Router
TemperatureScaledSoftmax XLoraClassifier TeLinear LoraParallelLinear GloraPath"""


@pytest.mark.skipif(OLDEST, reason="of the pinned releases")
@pytest.mark.parametrize("path", sorted({name.rpartition(".")[0] for name in _CLASSES}))
def test_each_name_is_a_class(path: str) -> None:
    module = pytest.importorskip(path)
    names = {name.rpartition(".")[2] for name in _CLASSES if name.rpartition(".")[0] == path}
    assert {name for name in names if not isinstance(getattr(module, name, None), type)} <= NEED_OTHERS


def test_each_layer_of_peft_is_judged() -> None:
    """What a new release of PEFT adds is to be read, and listed here or there."""
    files = [file for name, file in sys.modules.items() if name.startswith("peft.tuners.") and "shadow" not in name]
    found = {cls for file in files for cls in vars(file).values() if isinstance(cls, type)}
    layers = {cls for cls in found if issubclass(cls, nn.Module) and cls.__module__.startswith("peft.tuners.")}
    assert len(layers) > 80
    of_whole_models = "Conv", "Model", "Encoder", "Tuner", "PromptEmbedding", "CPTEmbedding"
    layers = {cls for cls in layers if not any(part in cls.__name__ for part in of_whole_models)}
    assert {cls.__name__ for cls in layers if f"{cls.__module__}.{cls.__name__}" not in _CLASSES} <= {*MIXING.split()}
