"""Every forward decides whether each part reads weights or calls modules chunk by chunk; `status` reports it
correctly."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import seqtile
from models.layered import assert_same_step, gradients_of, tiled_copy
from seqtile.arch import ARCHS
from support.choice import every_value
from support.measure import FlopCount, LiveBytes, eager_memory
from support.tiny import CHUNK, batch_of, build, checkpointing, loss_and_gradients
from support.training import with_lora

Change = Callable[[nn.Module], nn.Module]
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]


def lora(*targets: str, **options: object) -> Change:
    def add(model: nn.Module) -> nn.Module:
        return with_lora(model, *targets, **options).get_base_model().train()

    return add


@seqtile.tokenwise
class Rounded(nn.Linear):
    """Represents a quantized layer: it does not compute its weight's product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight + (self.weight.round() - self.weight).detach(), self.bias)


def quantised(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Rounded
    return model


@seqtile.tokenwise
def halved(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def hooked(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.gate_proj.register_forward_hook(halved)
    return model


def activation_hooked(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.act_fn.register_forward_hook(halved)
    return model


def exact_gelu(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
    return model


def two_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    wrapped = with_lora(model, *PROJECTIONS)
    wrapped.add_adapter("second", peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False))
    wrapped.base_model.set_adapter(["default", "second"])
    return model.train()


def nested(model: nn.Module) -> nn.Module:
    model = lora(*PROJECTIONS)(model)
    for layer in model.model.layers:
        layer.mlp.up_proj.base_layer = copy.deepcopy(layer.mlp.up_proj)
    return model


def of_the_mlp(change: Callable[[nn.Module], None]) -> Change:
    """`change` of every adapter in the MLPs; one in the attention remains trainable."""

    def apply(model: nn.Module) -> nn.Module:
        model = lora(*PROJECTIONS, "q_proj")(model)
        for layer in model.model.layers:
            for name in PROJECTIONS:
                change(getattr(layer.mlp, name))
        return model

    return apply


ADAPTER = "gate_proj has a LoRA adapter"
# A change to the model -> why its MLP and its loss are called chunk by chunk, None if their weights are read.
PATHS: dict[str, tuple[Change, str | None, str | None]] = {
    "lora of all": (lora(*PROJECTIONS), None, None),
    "lora of one": (lora("up_proj"), None, None),
    "lora of the attention": (lora("q_proj", "v_proj"), None, None),
    "lora, disabled": (of_the_mlp(lambda module: module.enable_adapters(False)), None, None),
    "lora, merged": (of_the_mlp(lambda module: module.merge()), None, None),
    "rslora": (lora(*PROJECTIONS, use_rslora=True), None, None),
    "dora": (lora(*PROJECTIONS, use_dora=True), f"{ADAPTER} of another kind, DoraLinearVariant", None),
    "lora with a bias": (lora(*PROJECTIONS, lora_bias=True), f"{ADAPTER} with a bias", None),
    "two adapters": (two_adapters, "gate_proj has 2 active LoRA adapters", None),
    "lora over lora": (nested, "up_proj is a LoRA adapter over another", None),
    "lora of the head": (lora("lm_head", "up_proj"), None, "lm_head has an adapter"),
    "quantised": (quantised, f"down_proj is a {__name__}.Rounded", None),
    "a hook": (hooked, "gate_proj has hooks", None),
    "a hook on the activation": (activation_hooked, "its activation has hooks", None),
    "another activation": (exact_gelu, "its activation is GELU", None),
    "float64": (lambda model: model.double(), "gate_proj.weight is torch.float64", "lm_head.weight is torch.float64"),
}


def pair(change: Change, arch: str, when: str) -> tuple[nn.Module, nn.Module]:
    """The same model with the same change, untiled and tiled; tiled before or after the change."""
    original, models = build(arch, tie_word_embeddings=False), []
    for is_tiled in (False, True):
        model = copy.deepcopy(original)
        if is_tiled and when == "before":
            seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
        torch.manual_seed(0)
        model = change(model)
        if is_tiled and when == "after":
            seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
        models.append(model)
    return models[0], models[1]


@pytest.mark.full("of 34 models", but=every_value)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PATHS)
def test_path(name: str, when: str) -> None:
    change, mlp_reason, loss_reason = PATHS[name]
    untiled, tiled = pair(change, "llama", when)
    status = seqtile.status(tiled)
    assert (status.mlp.reason, status.loss.reason) == (mlp_reason, loss_reason)
    assert (status.mlp.tiled, status.loss.tiled) == (2, 1)
    assert str(status).count("in chunks: ") == sum(r is not None for r in (mlp_reason, loss_reason))
    for batch in (batch_of(3, 101), batch_of(1, 30) | {"num_items_in_batch": torch.tensor(41)}):
        assert_same_step(tiled, untiled, batch)
        assert any(gradient is not None for gradient in gradients_of(untiled).values())


CALLED_HEADS = {
    "cohere": {"logit_scale": 2.5},
    "gemma2": {"final_logit_softcapping": 0.5},
    "gemma3_text": {"final_logit_softcapping": 0.5},
    "granite": {"logits_scaling": 0.2},
}


@pytest.mark.full("two scale and two cap", but=("cohere", "gemma2"))
@pytest.mark.parametrize("arch", CALLED_HEADS)
def test_called_heads_scale_and_cap_their_logits(arch: str) -> None:
    untiled = build(arch, **CALLED_HEADS[arch])
    untiled.lm_head.register_forward_hook(halved)
    tiled = tiled_copy(untiled, layer=False)
    assert seqtile.status(tiled).loss.reason == "lm_head has hooks"
    assert_same_step(tiled, untiled, batch_of(3, 101))


@pytest.mark.parametrize("arch", ["phi3", "gemma2", "glm4"])
def test_lora_of_other_architectures(arch: str) -> None:
    fused = "gate_up" in ARCHS[arch].merged
    untiled, tiled = pair(lora(*(["gate_up_proj", "down_proj"] if fused else PROJECTIONS)), arch, "after")
    assert seqtile.status(tiled).mlp.reason is None
    assert_same_step(tiled, untiled, batch_of(3, 101))


of_experts = lora("q_proj", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


@pytest.mark.full("of 24 models", but=every_value)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("arch", [name for name, arch in ARCHS.items() if arch.routed])
def test_lora_of_experts(arch: str, when: str, reentrant: bool | None, experts: str) -> None:
    """PEFT computes the weights of all experts in every forward; here once for all chunks."""
    untiled, tiled = pair(of_experts, arch, when)
    assert seqtile.status(tiled).mlp.tiled == 2
    for model in (untiled, tiled):
        model.set_experts_implementation(experts)
        model.enable_input_require_grads()
    assert_same_step(tiled, untiled, batch_of(3, 101), reentrant)
    assert any("experts" in name for name, gradient in gradients_of(untiled).items() if gradient is not None)


@eager_memory
def test_computed_weights_of_experts_do_not_outlive_their_layer() -> None:
    """Under checkpointing only a layer's input is alive after its forward."""
    alive = []
    for model in pair(of_experts, "mixtral", "after"):
        model.enable_input_require_grads()
        checkpointing(model, False)
        batch = batch_of(1, 101)
        with LiveBytes() as memory:
            loss = model.model(**{name: batch[name] for name in ("input_ids", "use_cache")}).last_hidden_state.sum()
        alive.append(memory.live)
        loss.backward()
    assert 0 < alive[1] <= alive[0]


def test_dropout_takes_the_other_way_while_training_only() -> None:
    _, tiled = pair(lora(*PROJECTIONS, lora_dropout=0.1), "llama", "after")
    assert "2 of 2 in chunks: gate_proj has a LoRA adapter with dropout 0.1" in str(seqtile.status(tiled))
    loss, gradients = loss_and_gradients(tiled, **batch_of(1, 101))
    assert loss.isfinite() and any(gradient is not None and gradient.norm() > 0 for gradient in gradients.values())
    assert seqtile.status(tiled.eval()).mlp.reason is None


def test_plain_lora_spends_nothing_on_frozen_weights() -> None:
    untiled, tiled = pair(lora(*PROJECTIONS), "llama", "after")
    batch, counts = batch_of(1, 190), []
    for model in (untiled, tiled):
        with FlopCount() as flops:
            loss_and_gradients(model, **batch)
        counts.append(flops.total)
    unit, ignored = 2 * 190 * 48 * 130, 2 * 5 * 48 * 211  # a frozen head costs two products
    adapters = 2 * 190 * 4 * (48 + 130)  # one direction of one adapter
    assert 2 * 2 * unit - 2 * ignored < counts[1] - counts[0] <= 2 * 2 * unit - 2 * ignored + 2 * 9 * adapters
