"""Modules that users put into a model are not in the small model of its class. When seqtile is applied, it tests such a
module by itself, tiles it if it computes token by token, and otherwise leaves it untiled by name."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import seqtile
from models.layered import assert_same_step, tiled_copy
from seqtile.models.replaced import mixing_reason
from support.choice import every_value
from support.tiny import CHUNK, batch_of, build


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) + x.mean(-2, keepdim=True)


class MixingBack(nn.Module):
    """Its gradient mixes tokens, its output does not."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / gradient.norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.Function.apply(x)


class OwnGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((13,), 1.3))  # with one element, its gradient would cancel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * (x * torch.sigmoid(1.702 * x)).unflatten(-1, (-1, 13))).flatten(-2)


class OwnNorm(nn.Module):
    def __init__(self, width: int, over: tuple[int, ...] = (-1,)) -> None:
        super().__init__()
        self.weight, self.over = nn.Parameter(torch.rand(width) + 0.5), over

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.square().mean(self.over, keepdim=True) + 1e-6).rsqrt()


class OwnMLP(nn.Module):
    """No small model has this class, and it computes token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 60), nn.Linear(60, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class MixingLinear(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x + x.roll(1, dims=1))


class LowRank(nn.Module):
    """A user's own adapter, which calls the layer that it replaces, `base_layer`, as PEFT does."""

    def __init__(self, layer: nn.Linear, mix: bool) -> None:
        super().__init__()
        self.base_layer, self.mix = layer, mix
        self.a, self.b = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.b(self.a(x.cumsum(-2) if self.mix else x))


def mixing_function(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * x.std(-2, keepdim=True)


Change = Callable[[nn.Module], None]


def of_each(name: str, change: Change) -> Change:
    """The change of one module in every layer."""
    return lambda model: [change(layer.get_submodule(name)) for layer in model.model.layers]


def in_layer(name: str, made: Callable[[nn.Module], nn.Module]) -> Change:
    """Replaces a module in every layer by what `made` makes of it."""
    owner, _, child = name.rpartition(".")
    return of_each(owner, lambda module: setattr(module, child, made(getattr(module, child))))


def as_function(mlp: nn.Module) -> None:
    del mlp.act_fn
    mlp.act_fn = mixing_function


def own_forward(name: str, forward: Callable) -> Change:
    return of_each(name, lambda module: setattr(module, "forward", MethodType(forward, module)))


def mixing_linear(module: nn.Module) -> None:
    module.__class__ = MixingLinear


DEPENDS = "which mixes tokens"
MLP, LAYER, HEAD = "mlp", "layer", "loss"
NORM = "post_attention_layernorm"
WRONG: dict[str, tuple[Change, str, str]] = {  # the change to the model, the affected part, and the message
    "activation": (in_layer("mlp.act_fn", lambda _: Mixing()), MLP, "act_fn is a Mixing"),
    "torch's softmax": (in_layer("mlp.act_fn", lambda _: nn.Softmax(dim=1)), MLP, "act_fn is a Softmax"),
    "gradient": (in_layer("mlp.act_fn", lambda _: MixingBack()), MLP, "act_fn is a MixingBack"),
    "function": (of_each("mlp", as_function), MLP, "act_fn is a function"),
    "forward of an instance": (
        own_forward("mlp.act_fn", lambda self, x: x * x.mean(1, keepdim=True)),
        MLP,
        "act_fn is a SiLUActivation",
    ),
    "call of a class": (of_each("mlp.up_proj", mixing_linear), MLP, "up_proj is a MixingLinear"),
    "adapter": (in_layer("mlp.up_proj", lambda one: LowRank(one, True)), MLP, "up_proj is a LowRank"),
    "norm": (in_layer(NORM, lambda _: OwnNorm(48, (-1, -2))), LAYER, f"{NORM} is a OwnNorm"),
    "forward of a norm": (
        own_forward("input_layernorm", lambda self, x: x * x.var(1, keepdim=True)),
        LAYER,
        "input_layernorm is a LlamaRMSNorm",
    ),
    "projection": (of_each("self_attn.q_proj", mixing_linear), LAYER, "q_proj is a MixingLinear"),
    "head": (lambda model: mixing_linear(model.lm_head), HEAD, "lm_head is a MixingLinear"),
}
RIGHT: dict[str, Change] = {
    "activation": in_layer("mlp.act_fn", lambda _: OwnGelu()),
    "torch's activation": in_layer("mlp.act_fn", lambda _: nn.ReLU(inplace=True)),
    "forward of an instance": own_forward("mlp.act_fn", lambda self, x: x * x.tanh()),
    "adapter": in_layer("mlp.up_proj", lambda one: LowRank(one, False)),
    "norm": in_layer(NORM, lambda _: OwnNorm(48)),
    "projection": in_layer("self_attn.v_proj", lambda one: nn.Sequential(one, nn.Tanh())),
    "dropout": in_layer("input_layernorm", lambda one: nn.Sequential(one, nn.Dropout(0.0))),
    "mlp": in_layer("mlp", lambda _: OwnMLP()),
    "head": lambda model: setattr(model, "lm_head", LowRank(model.lm_head, False)),
}


@pytest.mark.full("of 22 models", but=("*-layer", "activation-parts", "gradient-parts", "head-parts"))
@pytest.mark.parametrize("layer", [False, True], ids=["parts", "layer"])
@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_tokens_is_left_untiled(name: str, layer: bool) -> None:
    change, part, reason = WRONG[name]
    untiled, reason = build("llama", tie_word_embeddings=False), f"its {reason}, {DEPENDS}"
    change(untiled)
    if layer and part != HEAD:
        with pytest.raises(ValueError, match=f"layers of LlamaForCausalLM cannot be tiled.*{reason}"):
            tiled_copy(untiled)
        return
    model = tiled_copy(untiled, layer=layer, check=False)
    status = seqtile.status(model)
    tiled = {MLP: status.mlp.tiled, HEAD: status.loss.tiled, LAYER: status.layer.tiled if status.layer else 0}
    assert tiled == {MLP: 2, HEAD: 1, LAYER: 2 if layer else 0} | ({} if part == LAYER else {part: 0})
    assert (reason in str(status)) == (part != LAYER)
    assert_same_step(model, untiled, batch_of(2, 2 * CHUNK + 3))


@pytest.mark.full("of 18 models", but=("*-layer", "head-parts"))
@pytest.mark.parametrize("layer", [False, True], ids=["parts", "layer"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_computes_token_by_token_is_tiled(name: str, layer: bool) -> None:
    untiled = build("llama", tie_word_embeddings=False)
    RIGHT[name](untiled)
    tiled = tiled_copy(untiled, layer=layer)
    status = seqtile.status(tiled)
    assert status.loss.tiled == 1 and status.mlp.tiled == 2 and (not layer or status.layer.tiled == 2)
    assert "left untiled" not in str(status)
    assert_same_step(tiled, untiled, batch_of(2, 2 * CHUNK + 3))


def test_one_layer_of_several() -> None:
    """The others are tiled."""
    model = build("llama")
    model.model.layers[1].mlp.act_fn = Mixing()
    status = seqtile.status(tiled_copy(model))
    assert status.mlp.tiled == status.layer.tiled == 1
    assert f"LlamaDecoderLayer is left untiled: its act_fn is a Mixing, {DEPENDS}" in str(status)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) * (0.1 if self.training else 0)


class AlwaysNoisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class Uncopied(nn.Identity):
    def __deepcopy__(self, memo: dict) -> None:
        raise RuntimeError("one of its kind")


@pytest.mark.full("of 40 modules", but=every_value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(31, 7), None),
        (nn.LayerNorm(24), None),
        (nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.3)), None),
        (Noisy(), None),
        (AlwaysNoisy(), "which does not compute the same twice"),
        (nn.BatchNorm1d(9), "does not run on some"),
        (nn.Conv1d(9, 9, 3, padding=1), "does not run on some"),
        (nn.MultiheadAttention(24, 2), "does not run on some"),
        (nn.Linear(8, 8, device="meta"), "does not run on some"),
        (Uncopied(), "cannot be copied to be tried out: RuntimeError: one of its kind"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "",
)
def test_a_trial(module: nn.Module, reason: str | None, dtype: torch.dtype) -> None:
    """It has no side effects."""
    module = module.to(dtype).train()
    before = {} if "meta" in map(str, {p.device for p in module.parameters()}) else module.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    state = torch.random.get_rng_state()
    found = mixing_reason(module, {24, 48})
    assert found is None if reason is None else reason in found
    assert torch.equal(torch.random.get_rng_state(), state) and module.training
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in module.parameters())


def mixing_output(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return output + output.mean(-2, keepdim=True)


def mixing_input(module: nn.Module, args: tuple) -> tuple[torch.Tensor]:
    return (args[0] + args[0].mean(-2, keepdim=True),)


HOOKED = {  # the hook's place and type, the part that it keeps from running in chunks, and that part's class
    "activation": ("model.layers.1.mlp.act_fn", mixing_output, "mlp", "LlamaMLP"),
    "projection": ("model.layers.1.mlp.down_proj", mixing_input, "mlp", "LlamaMLP"),
    "head": ("lm_head", mixing_output, "loss", "LlamaForCausalLM"),
}


def hooked(name: str, model: nn.Module) -> nn.Module:
    place, hook, *_ = HOOKED[name]
    kind = "register_forward_hook" if hook is mixing_output else "register_forward_pre_hook"
    getattr(model.get_submodule(place), kind)(hook)
    return model


@pytest.mark.full("of 6 models", but=every_value)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_that_mixes_tokens(name: str, layer: bool) -> None:
    """It is tested when seqtile is applied: the module that contains it stays untiled, by name."""
    place, _, _, owner = HOOKED[name]
    untiled = hooked(name, build("llama"))
    tiled = tiled_copy(untiled, layer=layer)
    assert f"{owner} is left untiled: a hook on its {place.rpartition('.')[2]}" in str(seqtile.status(tiled))
    assert_same_step(tiled, untiled, batch_of(2, 61))


@pytest.mark.full("of 6 models", but=every_value)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_that_mixes_tokens_and_came_later(name: str, layer: bool) -> None:
    """The first step tests it and raises; hooks that treat every token alike may be added."""
    _, _, part, owner = HOOKED[name]
    tiled = tiled_copy(build("llama"), layer=layer)
    tiled.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, output: output * 0.5)
    tiled(**batch_of(2, 61))
    hooked(name, tiled)
    whole = "LlamaDecoderLayer" if layer and part == "mlp" else owner
    said = f"{whole} cannot run in chunks: a hook on its .* mixes tokens.*Nothing was trained"
    with pytest.raises(ValueError, match=said):
        tiled(**batch_of(2, 61))


@pytest.mark.full("of 6 models", but=every_value)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("arch", "place", "options"),
    [
        ("llama", "model.layers.1.mlp.down_proj", {}),
        ("llama", "model.layers.1.mlp.down_proj", {"layer": True}),
        ("qwen3_moe", "model.layers.0.mlp.gate", {"layer": True}),
    ],
)
def test_a_hook_that_treats_every_token_alike(arch: str, place: str, options: dict, autocast: bool) -> None:
    """It may stay, also on modules that do not run on random tokens, such as a router, and where products are
    rounded."""
    model, seen = build(arch), []
    model.get_submodule(place).register_forward_hook(lambda module, args, output: seen.append(output))
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, **options)
    assert "a hook on" not in str(seqtile.status(model))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**batch_of(2, 61))
    assert "up to rounding, on 56 tokens of the batch" in str(seqtile.status(model)) and seen
