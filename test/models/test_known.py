"""What users put into a model is neither tried out nor copied: unless it is known, or declared by `seqtile.tokenwise`,
the part around it runs untiled, from the next forward on, and `status` names it."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama

import seqtile
from models.layered import assert_equal, assert_same_step, tiled_copy
from seqtile import declared
from seqtile.declared import is_declared
from seqtile.models.find import mlps_of
from seqtile.models.forward.loss import loss_verdict
from seqtile.models.forward.mlp import experts_verdict
from support.choice import every_value
from support.tiny import batch_of, build, loss_and_gradients


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) + x.mean(-2, keepdim=True)


class Answering(Mixing):
    """Has every attribute, as dicts that look like objects do."""

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None


def mixing_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * x.mean(1, keepdim=True)


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


class OwnLora(nn.Module):
    """Another, which holds as many projections as an MLP does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        wide, out = base.weight.shape if isinstance(base, nn.Embedding) else reversed(base.weight.shape)
        without = {} if isinstance(base, nn.Embedding) else {"bias": False}  # the gradient of one of keys is zero
        self.a, self.b = type(base)(wide, 2, **without), nn.Linear(2, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def mixing_function(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * x.std(-2, keepdim=True)


class Proxy:
    """Looks like the function that it calls, as the decorators of wrapt do."""

    def __init__(self, wrapped: Callable) -> None:
        self.wrapped = wrapped

    def __call__(self, *args: object) -> torch.Tensor:
        output = self.wrapped(*args)
        return output + output.mean(-2, keepdim=True)

    def __getattr__(self, name: str) -> object:
        return getattr(self.wrapped, name)

    def __deepcopy__(self, memo: dict) -> "Proxy":
        return Proxy(copy.deepcopy(self.wrapped, memo))

    @property
    def __class__(self) -> type:
        return type(self.wrapped)


def forward_of_text(mlp: nn.Module) -> None:
    """Executes the changed text of a forward where Hugging Face's code is, as libraries that patch code do."""
    text, made = "def forward(self, x): return self.act(x) + self.act(x).mean(-2, keepdim=True)", {}
    exec(text, vars(sys.modules["transformers.activations"]), made)
    mlp.act_fn.act = nn.functional.silu
    mlp.act_fn.forward = MethodType(made["forward"], mlp.act_fn)


Change = Callable[[nn.Module], None]


def of_each(name: str, change: Change) -> Change:
    """The change of one module in every layer."""
    return lambda model: [change(layer.get_submodule(name)) for layer in model.model.layers]


def in_layer(name: str, made: Callable[[nn.Module], nn.Module]) -> Change:
    """Replaces a module in every layer by what `made` makes of it."""
    owner, _, child = name.rpartition(".")
    return of_each(owner, lambda module: setattr(module, child, made(getattr(module, child))))


@seqtile.tokenwise
class Declared(nn.SiLU):
    pass


class OwnParameter(nn.Parameter):
    pass


def with_forward(module: nn.Module) -> nn.Module:
    module.forward = MethodType(mixing_forward, module)
    return module


def function_as_activation(function: Callable) -> Change:
    def change(mlp: nn.Module) -> None:
        del mlp.act_fn
        mlp.act_fn = function

    return of_each("mlp", change)


def own_forward(name: str, forward: Callable) -> Change:
    return of_each(name, lambda module: setattr(module, "forward", MethodType(forward, module)))


def mixing_linear(module: nn.Module) -> None:
    module.__class__ = MixingLinear


MLP, LAYER, HEAD = "mlp", "layer", "loss"
NORM = "post_attention_layernorm"
UNKNOWN = "which is neither known nor declared to treat each token by itself"
HERE = __name__
PLUGGED_IN: dict[str, tuple[Change, str, str]] = {  # the change to the model, the part around it, what status says
    "activation": (in_layer("mlp.act_fn", lambda _: Mixing()), MLP, f"act_fn is a {HERE}.Mixing"),
    "with every attribute": (
        in_layer("mlp.act_fn", lambda _: Answering()),
        MLP,
        f"act_fn is a {HERE}.Answering",
    ),
    "torch's softmax": (
        in_layer("mlp.act_fn", lambda _: nn.Softmax(dim=1)),
        MLP,
        "act_fn is a torch.nn.modules.activation.Softmax",
    ),
    "function": (function_as_activation(mixing_function), MLP, f"it has {HERE}.mixing_function as its act_fn"),
    "function of torch's": (function_as_activation(partial(torch.softmax, dim=1)), MLP, "softmax as its act_fn"),
    "function without gradients": (
        function_as_activation(torch.enable_grad()(mixing_function)),
        MLP,
        f"it has {HERE}.mixing_function as its act_fn",
    ),
    "checkpointed function": (
        function_as_activation(partial(checkpoint, mixing_function, use_reentrant=False)),
        MLP,
        "checkpoint as its act_fn",
    ),
    "method of another module": (function_as_activation(nn.Softmax(dim=1).forward), MLP, "forward as its act_fn"),
    "own forward of a declared class": (
        of_each("mlp", lambda mlp: setattr(mlp, "act_fn", with_forward(Declared()))),
        MLP,
        f"act_fn has {HERE}.mixing_forward as its forward",
    ),
    "weight of a user's class": (
        of_each("mlp.up_proj", lambda one: setattr(one, "weight", OwnParameter(one.weight.data))),
        MLP,
        f"up_proj has a {HERE}.OwnParameter",
    ),
    "forward of an instance": (
        own_forward("mlp.act_fn", mixing_forward),
        MLP,
        f"act_fn has {HERE}.mixing_forward as its forward",
    ),
    "function in a proxy": (
        function_as_activation(Proxy(nn.functional.silu)),
        MLP,
        f"it has {HERE}.Proxy as its act_fn",
    ),
    "declared function in a proxy": (
        function_as_activation(Proxy(seqtile.tokenwise(lambda x: x.relu()))),
        MLP,
        f"it has {HERE}.Proxy as its act_fn",
    ),
    "forward in a proxy": (
        of_each("mlp.down_proj", lambda one: setattr(one, "forward", Proxy(one.forward))),
        MLP,
        f"down_proj has {HERE}.Proxy as its forward",
    ),
    "forward of the head in a proxy": (
        lambda model: setattr(model.lm_head, "forward", Proxy(model.lm_head.forward)),
        HEAD,
        f"head has {HERE}.Proxy as its forward",
    ),
    "text of a forward": (of_each("mlp", forward_of_text), MLP, "act_fn has <string>.forward as its forward"),
    "call of a class": (of_each("mlp.up_proj", mixing_linear), MLP, f"up_proj is a {HERE}.MixingLinear"),
    "adapter": (in_layer("mlp.up_proj", lambda one: LowRank(one, True)), MLP, f"up_proj is a {HERE}.LowRank"),
    "in a sequence": (
        in_layer("mlp.act_fn", lambda one: nn.Sequential(one, nn.BatchNorm1d(61, affine=False))),
        MLP,
        "act_fn.1 is a torch.nn.modules.batchnorm.BatchNorm1d",
    ),
    "norm of two dimensions": (
        in_layer("mlp.act_fn", lambda one: nn.Sequential(one, nn.LayerNorm((61, 130), elementwise_affine=False))),
        MLP,
        "act_fn.1 is a torch.nn.modules.normalization.LayerNorm",
    ),
    "norm": (in_layer(NORM, lambda _: OwnNorm(48, (-1, -2))), LAYER, f"{NORM} is a {HERE}.OwnNorm"),
    "forward of a norm": (
        own_forward("input_layernorm", mixing_forward),
        LAYER,
        f"input_layernorm has {HERE}.mixing_forward as its forward",
    ),
    "projection": (of_each("self_attn.q_proj", mixing_linear), LAYER, f"self_attn.q_proj is a {HERE}.MixingLinear"),
    "head": (lambda model: mixing_linear(model.lm_head), HEAD, f"head is a {HERE}.MixingLinear"),
}


@pytest.fixture(autouse=True)
def nothing_is_declared() -> Iterator[None]:
    yield
    for thing in (OwnGelu, OwnNorm, OwnMLP, LowRank, OwnLora, mixing_function, keep, double):
        if is_declared(thing):
            del thing._seqtile_tokenwise
    declared.latest = None
    seqtile.restore()


def untiled_in(model: nn.Module) -> dict[str, int]:
    """How many modules of each part run untiled because of what they hold."""
    status = seqtile.status(model)
    parts = {MLP: status.mlp, LAYER: status.layer, HEAD: status.loss}
    return {name: each.tiled - each.fused - each.chunked for name, each in parts.items() if each is not None}


def assert_same_loss(ours: nn.Module, theirs: nn.Module) -> None:
    """In evaluation, without gradients."""
    batch = batch_of(2, 61)
    with torch.no_grad():
        losses = [model.eval()(**batch).loss for model in (ours, theirs)]
    torch.testing.assert_close(*losses)
    for model in (ours, theirs):
        model.train()


@pytest.mark.full("of 52 models", but=every_value)
@pytest.mark.parametrize("layer", [False, True], ids=["parts", "layer"])
@pytest.mark.parametrize("later", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("name", PLUGGED_IN)
def test_the_part_around_it_is_left_untiled(name: str, later: bool, layer: bool) -> None:
    """Put in before seqtile is applied or later, in training and in evaluation; all else stays tiled."""
    change, part, said = PLUGGED_IN[name]
    untiled = build("llama", tie_word_embeddings=False)
    model = tiled_copy(untiled, layer=layer)
    if later:
        model(**batch_of(2, 61))
        change(model)
    change(untiled)
    if later:
        model.load_state_dict(untiled.state_dict())
    else:
        model = tiled_copy(untiled, layer=layer)
    layers = {LAYER: 2 * (part != HEAD)} if layer else {}
    assert untiled_in(model) == {MLP: 2 * (part == MLP), HEAD: int(part == HEAD)} | layers
    if layer or part != LAYER:
        assert f"{said}, " in str(seqtile.status(model))
    assert_same_step(model, untiled, batch_of(2, 61))
    assert_same_loss(model, untiled)


@pytest.mark.full("5 s of compiler each")
@pytest.mark.parametrize("layer", [False, True])
def test_left_untiled_past_the_recompile_limit(layer: bool) -> None:
    """There the compiler has compiled the code that decides, for a short sequence, and leaves eager the code that
    then does as decided."""
    untiled = build("llama", num_hidden_layers=1)
    untiled.model.layers[0].mlp.act_fn = Mixing()
    model = tiled_copy(untiled, layer=layer, chunk_tokens=25)
    torch._dynamo.reset()
    model.model.layers[0].compile(backend="eager")
    for length in (20, 61):
        batch = batch_of(1, length)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
            torch.testing.assert_close(model(**batch).loss, untiled(**batch).loss)


@pytest.mark.parametrize("part", [HEAD, "experts"])
def test_compiled_code_gets_the_same_verdict(part: str) -> None:
    model = build("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[])
    model.lm_head = nn.Sequential(model.lm_head, Mixing())
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = Mixing()
    verdict, module = {HEAD: (loss_verdict, model), "experts": (experts_verdict, experts)}[part]
    torch._dynamo.reset()
    assert torch.compile(verdict, backend="eager")(module).how == verdict(module).how == "untiled"


TOKENWISE: dict[str, tuple[Change, object]] = {  # the change to the model, and what is declared
    "activation": (in_layer("mlp.act_fn", lambda _: OwnGelu()), OwnGelu),
    "function": (function_as_activation(partial(torch.softmax, dim=-1)), None),
    "forward of an instance": (own_forward("mlp.act_fn", lambda self, x: x * x.tanh()), None),
    "adapter": (in_layer("mlp.up_proj", lambda one: LowRank(one, False)), LowRank),
    "norm": (in_layer(NORM, lambda _: OwnNorm(48)), OwnNorm),
    "mlp": (in_layer("mlp", lambda _: OwnMLP()), OwnMLP),
    "head": (lambda model: setattr(model, "lm_head", LowRank(model.lm_head, False)), LowRank),
}


def declare(model: nn.Module, name: str, thing: object) -> None:
    for layer in model.model.layers:
        if name == "function":
            layer.mlp.act_fn = seqtile.tokenwise(layer.mlp.act_fn)
        elif name == "forward of an instance":
            seqtile.tokenwise(layer.mlp.act_fn)
    if thing is not None:
        assert seqtile.tokenwise(thing) is thing


@pytest.mark.full("of 28 models", but=every_value)
@pytest.mark.parametrize("layer", [False, True], ids=["parts", "layer"])
@pytest.mark.parametrize("later", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("name", TOKENWISE)
def test_what_is_declared_is_tiled(name: str, later: bool, layer: bool) -> None:
    """Declared before seqtile is applied, or after a forward; the first step compares it."""
    change, thing = TOKENWISE[name]
    untiled = build("llama", tie_word_embeddings=False)
    change(untiled)
    if not later:
        declare(untiled, name, thing)
    model = tiled_copy(untiled, layer=layer)
    if later:
        if layer or name != "norm":
            assert sum(untiled_in(model).values())
        model(**batch_of(2, 61))
        declare(model, name, thing)
    assert not sum(untiled_in(model).values())
    assert_same_step(model, untiled, batch_of(2, 61))
    status = seqtile.status(model)
    assert "equal the untiled model's" in str(status)
    assert name == "norm" or status.mlp.chunked + status.loss.chunked


def test_torchs_own_modules_are_known() -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.GELU(), nn.Dropout(0.0), nn.Identity())
        layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj, nn.Tanh(), nn.RMSNorm(24))
    tiled = tiled_copy(model)
    status = seqtile.status(tiled)
    assert (status.mlp.chunked, status.layer.chunked) == (2, 2)
    assert_same_step(tiled, model, batch_of(2, 61))


def test_a_users_lora_is_no_mlp() -> None:
    """One of a projection of attention or of an MLP, of all of these, and of the embeddings: it counts as no MLP, and
    the MLPs are as many as before."""
    untiled = build("llama", num_hidden_layers=3)
    untiled.model.embed_tokens = OwnLora(untiled.model.embed_tokens)
    first, second, _ = untiled.model.layers
    for name, module in [*first.named_modules()]:
        if isinstance(module, nn.Linear):
            owner, _, child = name.rpartition(".")
            setattr(first.get_submodule(owner), child, OwnLora(module))
    second.mlp.down_proj = OwnLora(second.mlp.down_proj)
    model = tiled_copy(untiled, layer=False)
    mlps = [layer.mlp for layer in model.model.layers]
    assert mlps_of(model) == mlps
    assert untiled_in(model) == {MLP: 2, HEAD: 0}
    seqtile.tokenwise(OwnLora)
    assert_same_step(model, untiled, batch_of(2, 61))
    status = seqtile.status(model).mlp
    assert (status.total, status.fused, status.chunked) == (3, 1, 2)


@pytest.mark.parametrize("arch", ["llama", "phi3", "qwen3_moe"])
def test_a_sequence_in_a_projections_place(arch: str) -> None:
    """Of modules that are known, one of which has the weights: the MLP is found, and runs in chunks."""
    untiled = build(arch)
    found = mlps_of(untiled)
    for mlp in found:
        name, inner = next((name, each) for name, each in mlp.named_children() if isinstance(each, nn.Linear))
        setattr(mlp, name, nn.Sequential(inner, nn.Identity()))
    assert found and mlps_of(untiled) == found
    model = tiled_copy(untiled, layer=False)
    assert seqtile.status(model).mlp.chunked >= len(found) and untiled_in(model) == {MLP: 0, HEAD: 0}
    assert_same_step(model, untiled, batch_of(2, 61))


class OwnBlock(nn.Module):
    """A mixture of a user's own, in whose experts seqtile finds the MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.first, self.second = nn.Linear(48, 1, bias=False), OwnMLP(), OwnMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x).sigmoid() * self.first(x) + self.second(x)


def test_mlps_of_a_users_own_block() -> None:
    untiled = build("llama")
    untiled.model.layers[0].mlp, untiled.model.layers[1].mlp = OwnBlock(), OwnMLP()
    seqtile.tokenwise(OwnMLP)
    model = tiled_copy(untiled, layer=False)
    assert seqtile.status(model).mlp.chunked == 3
    assert_same_step(model, untiled, batch_of(2, 61))


SCRIPTED = {
    "activation": ("mlp.act_fn", lambda _: Relu2()),
    "sequence": ("mlp.act_fn", lambda _: nn.Sequential(nn.SiLU(), nn.GELU())),
    "projection": ("self_attn.q_proj", copy.copy),
    "norm": ("input_layernorm", copy.copy),
}


class Relu2(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * x


@pytest.mark.full("of 8 models", but=every_value)
@pytest.mark.parametrize("is_declared", [False, True], ids=["left", "declared"])
@pytest.mark.parametrize("name", SCRIPTED)
def test_what_torch_jit_scripts(name: str, is_declared: bool) -> None:
    """Put in before seqtile is applied in one layer, later in the other."""
    untiled = build("llama")
    at, made = SCRIPTED[name]
    model = copy.deepcopy(untiled)
    for one in (untiled, model):
        for layer in one.model.layers:
            if layer is model.model.layers[1]:
                seqtile.apply_seqtile(model, chunk_tokens=50, layer=True)
            owner, _, child = at.rpartition(".")
            scripted = torch.jit.script(made(layer.get_submodule(at)))
            setattr(layer.get_submodule(owner), child, seqtile.tokenwise(scripted) if is_declared else scripted)
    assert_same_step(model, untiled, batch_of(2, 61))
    status = seqtile.status(model)
    assert status.layer.chunked == 2 * is_declared and untiled_in(model)[LAYER] == 2 * (not is_declared)
    assert is_declared or "is a torch.jit._script.RecursiveScriptModule, which is neither known" in str(status)


@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "inside"])
def test_what_torch_jit_traces(is_inside: bool) -> None:
    """The first step is compared with it, too."""
    untiled = build("llama")
    traced = torch.jit.trace(nn.SiLU(), torch.randn(2, 3, 130))
    untiled.model.layers[0].mlp.act_fn = Scaled(traced) if is_inside else traced
    untiled.model.layers[0].mlp.act_fn.scale = 1.5
    model = build("llama")
    model.load_state_dict(untiled.state_dict())  # since it cannot be copied
    model.model.layers[0].mlp.act_fn = untiled.model.layers[0].mlp.act_fn
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=50)
    assert_same_step(model, untiled, batch_of(2, 61))
    assert untiled_in(model) == {MLP: 1, LAYER: 1, HEAD: 0}
    assert "equal the untiled model's" in str(seqtile.status(model))


def test_one_layer_of_several_in_both_directions() -> None:
    """The others stay tiled, and it is tiled again when what it held is gone."""
    model = tiled_copy(build("llama"))
    own, mlp = model.model.layers[1].mlp.act_fn, model.model.layers[1].mlp
    for _ in range(2):
        mlp.act_fn = Mixing()
        model(**batch_of(2, 61))
        assert untiled_in(model) == {MLP: 1, LAYER: 1, HEAD: 0}
        mlp.act_fn = own
        model(**batch_of(2, 61))
        assert untiled_in(model) == {MLP: 0, LAYER: 0, HEAD: 0}


def test_by_classes() -> None:
    untiled, batch = build("llama"), batch_of(2, 61)
    untiled.model.layers[1].mlp.act_fn = Mixing()
    loss, gradients = loss_and_gradients(untiled, **batch)
    seqtile.apply_seqtile_to_llama(layer=True, chunk_tokens=50)
    model = build("llama")
    model.load_state_dict(untiled.state_dict())
    model.model.layers[1].mlp.act_fn = Mixing()
    assert untiled_in(model) == {MLP: 1, LAYER: 1, HEAD: 0}
    assert_equal(loss_and_gradients(model, **batch), (loss, gradients))


def keep(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    module.kept = [*getattr(module, "kept", ()), output]


def double(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def steer(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    output = output.clone()
    output[:, 3] += 1
    return output


def steer_input(module: nn.Module, args: tuple) -> tuple:
    x = args[0].clone()
    x[:, -2] *= 3
    return (x, *args[1:])


def steer_gradient(module: nn.Module, grad_input: tuple, grad_output: tuple) -> tuple:
    return tuple(None if each is None else each * torch.arange(61)[:, None] for each in grad_input)


INSIDE = ["mlp.down_proj", "mlp.act_fn", "self_attn.q_proj", "input_layernorm", "mlp", "lm_head"]
HOOKS = {
    "forward": ("register_forward_hook", steer),
    "pre": ("register_forward_pre_hook", steer_input),
    "backward": ("register_full_backward_hook", steer_gradient),
}


@pytest.mark.full("of 36 models", but=every_value)
@pytest.mark.parametrize("layer", [False, True], ids=["parts", "layer"])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("place", INSIDE)
def test_hooks_that_steer_at_a_place(place: str, kind: str, layer: bool) -> None:
    """They leave the smallest part around untiled, until they are removed."""
    register, hook = HOOKS[kind]
    untiled = build("llama", tie_word_embeddings=False)
    model = tiled_copy(untiled, layer=layer)
    model(**batch_of(2, 61))
    at = place if place == "lm_head" else f"model.layers.1.{place}"
    handles = [getattr(each.get_submodule(at), register)(hook) for each in (model, untiled)]
    in_mlp, in_head = place.startswith("mlp."), place == "lm_head"
    layers = {LAYER: int(not in_head)} if layer else {}
    assert untiled_in(model) == {MLP: int(in_mlp), HEAD: int(in_head)} | layers
    assert_same_step(model, untiled, batch_of(2, 61))
    assert_same_loss(model, untiled)
    for handle in handles:
        handle.remove()
    assert not sum(untiled_in(model).values())
    assert_same_step(model, untiled, batch_of(2, 61))


@pytest.mark.parametrize("layer", [False, True], ids=["parts", "layer"])
@pytest.mark.parametrize("place", ["mlp.gate_proj", "mlp.act_fn", "self_attn.o_proj"])
def test_a_loss_on_activations_that_a_hook_keeps(place: str, layer: bool) -> None:
    """Each forward hands it all tokens once, with their graph."""
    untiled = build("llama")
    model = tiled_copy(untiled, layer=layer, check=True)
    batch, found = batch_of(2, 61), []
    for each in (model, untiled):
        modules = [one.get_submodule(place) for one in each.model.layers]
        for module in modules:
            module.register_forward_hook(keep)
        loss = each(**batch).loss
        assert all(len(module.kept) == 1 and module.kept[0].shape[1] == 61 for module in modules)
        (loss + sum(module.kept[0].abs().mean() for module in modules)).backward()
        found.append({name: parameter.grad for name, parameter in each.named_parameters()})
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("layer", "arch"), [(False, "llama"), (True, "llama"), (True, "qwen3_moe")])
def test_what_a_hook_counts(layer: bool, arch: str) -> None:
    """Hooks anywhere in the model are called as often as untiled, the first step included."""
    model, seen = build(arch), []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    model(**(batch := batch_of(2, 61)))
    truth, seen[:] = sorted(seen), []
    seqtile.apply_seqtile(model, chunk_tokens=50, layer=layer)
    assert not seen
    model(**batch).loss.backward()
    assert sorted(seen) == truth and model.lm_head.weight.grad is not None


def test_hooks_that_see_all_tokens_untile_nothing() -> None:
    """On an MLP, a layer, the model, its embeddings, and attention that is not tiled."""
    untiled = build("llama")
    model = tiled_copy(untiled, layer=False)
    places = [
        "layers.0.mlp",
        "layers.1",
        "",
        "embed_tokens",
        "layers.0.self_attn.q_proj",
    ]
    for each in (model, untiled):
        for place in places:
            each.model.get_submodule(place).register_forward_hook(lambda module, args, output: None)
        each.model.layers[0].mlp.register_forward_hook(steer)
        each.model.embed_tokens.register_forward_hook(steer)
    assert not sum(untiled_in(model).values())
    assert_same_step(model, untiled, batch_of(2, 61))


def test_whole_layers_with_a_hook_on_their_mlp() -> None:
    """The layer runs untiled, its MLP, which the hook sees whole, does not."""
    untiled = build("llama")
    model = tiled_copy(untiled)
    for each in (model, untiled):
        each.model.layers[0].mlp.register_forward_hook(steer)
    assert untiled_in(model) == {MLP: 0, LAYER: 1, HEAD: 0}
    assert_same_step(model, untiled, batch_of(2, 61))


def test_a_hook_on_the_norm_after_the_layers() -> None:
    untiled = build("llama")
    model = tiled_copy(untiled)
    for each in (model, untiled):
        each.model.norm.register_forward_hook(steer)
    assert not sum(untiled_in(model).values()) and "REFUSES" not in str(seqtile.status(model))
    assert_same_step(model, untiled, batch_of(2, 61))


def test_an_untiled_head_says_what_its_logits_cost() -> None:
    model = tiled_copy(build("llama"))
    model.lm_head.register_forward_hook(steer)
    batch = batch_of(2, 61)
    assert type(model(**batch).logits) is torch.Tensor
    assert model(**batch, skip_logits=True).logits is None
    assert "makes logits of 844 bytes a token, and its loss 844 in float32" in str(seqtile.status(model))


def test_a_hook_that_is_declared() -> None:
    """It runs once for each chunk, in the first step too."""
    untiled = build("llama")
    model = tiled_copy(untiled)
    seqtile.tokenwise(double)
    for each in (model, untiled):
        each.model.layers[0].mlp.down_proj.register_forward_hook(double)
    assert not sum(untiled_in(model).values()) and seqtile.status(model).mlp.chunked == 1
    assert_same_step(model, untiled, batch_of(2, 61))
    assert "equal the untiled model's" in str(seqtile.status(model))


def test_functions_of_torch_that_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, linear = [], nn.functional.linear
    untiled = build("llama")
    model = tiled_copy(untiled)
    monkeypatch.setattr(nn.functional, "linear", lambda x, *others: calls.append(x.shape[1]) or linear(x, *others))
    assert untiled_in(model) == {MLP: 2, LAYER: 2, HEAD: 1}
    model.eval()(**batch_of(2, 61))
    assert set(calls) == {61}


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        return function(*args, **(kwargs or {}))


def test_a_mode_of_a_users() -> None:
    model = tiled_copy(build("llama"))
    with Mode():
        assert untiled_in(model) == {MLP: 2, LAYER: 2, HEAD: 1}
    assert untiled_in(model) == {MLP: 0, LAYER: 0, HEAD: 0}


@pytest.mark.parametrize(
    ("owner", "name", "layer"),
    [(SiLUActivation, "__call__", 2), (nn.functional, "dropout", 0), (modeling_llama, "rotate_half", 2)],
    ids=str,
)
def test_what_else_was_replaced(owner: object, name: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused part does not call dropout, and stays fused."""
    model, usual = tiled_copy(build("llama")), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: usual(*args, **options), raising=False)
    assert untiled_in(model)[LAYER] == layer


def test_experts_computed_by_a_users_function() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    model = tiled_copy(build("mixtral"), layer=False)
    assert not untiled_in(model)[MLP]
    moe.ALL_EXPERTS_FUNCTIONS.register("of a user", lambda *args: None)
    model.config._experts_implementation = "of a user"
    assert untiled_in(tiled_copy(model, layer=False))[MLP] == 2


class Calling(nn.Module):
    """A module in a function's place, as the `kernels` package makes it."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("wrapped", [lambda own: own, partial, Calling])
def test_a_rotary_embedding_that_was_replaced(wrapped: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, calls = modeling_llama.apply_rotary_pos_emb, []
    model = tiled_copy(build("llama"))

    def own(q: torch.Tensor, *others: torch.Tensor) -> tuple:
        calls.append(q.shape[2])
        return rotary(q, *others)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", wrapped(own))
    assert untiled_in(model) == {MLP: 0, LAYER: 2, HEAD: 0}
    model.eval()(**batch_of(2, 61))
    assert set(calls) == {61}
    assert untiled_in(tiled_copy(build("llama"))) == {MLP: 0, LAYER: 2, HEAD: 0}


def test_tokenwise_marks_things() -> None:
    """It returns the thing, and the mark survives copies; a subclass, and what wraps the thing, has none."""

    @seqtile.tokenwise
    class Own(nn.Module):
        pass

    @seqtile.tokenwise
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    @wraps(function)
    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    module = seqtile.tokenwise(nn.Conv1d(2, 2, 1))
    assert isinstance(module, nn.Conv1d) and isinstance(Own(), Own)
    marked = [Own, Own(), function, module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    assert all(map(is_declared, marked))
    unmarked = [type("Other", (Own,), {}), type("Other", (Own,), {})(), wrapper, partial(function), nn.Conv1d(2, 2, 1)]
    assert not any(map(is_declared, unmarked))
    x = torch.randn(3)
    for thing in (partial(torch.clamp, min=0), x.add, torch.tanh):
        wrapped = seqtile.tokenwise(thing)
        assert wrapped is not thing and is_declared(wrapped) and not is_declared(thing)
        torch.testing.assert_close(wrapped(x), thing(x))
    assert is_declared(pickle.loads(pickle.dumps(seqtile.tokenwise(partial(torch.clamp, min=0)))))
    proxy = Proxy(mixing_function)
    assert is_declared(seqtile.tokenwise(proxy)) and not is_declared(mixing_function)
    with pytest.raises(TypeError, match="expected a class, a module, a function or a hook, got 3"):
        seqtile.tokenwise(3)
    with pytest.raises(TypeError, match="takes no attributes; declare a subclass"):
        seqtile.tokenwise(int)


class Scaled(nn.Module):
    """Scales by what another module computes in each step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def set_scale(scale: torch.Tensor, module: nn.Module) -> None:
    module.scale = scale


@pytest.mark.parametrize("name", ["mlp.act_fn", NORM])
@pytest.mark.parametrize("is_tokenwise", [False, True], ids=["unknown", "declared"])
def test_a_module_that_reads_a_computed_tensor(is_tokenwise: bool, name: str) -> None:
    """Its graph, from before the step, survives the first step's comparison."""
    untiled, batch = build("llama"), batch_of(2, 61)
    in_layer(name, Scaled)(untiled)
    untiled.scale = nn.Linear(5, 130 if name == "mlp.act_fn" else 48)
    if is_tokenwise:
        of_each(name, seqtile.tokenwise)(untiled)
    model, given, results = tiled_copy(untiled, check=True), torch.randn(5), []
    for each in (model, untiled):
        of_each(name, partial(set_scale, each.scale(given)))(each)
        results.append(loss_and_gradients(each, **batch))
    assert "equal the untiled model's" in str(seqtile.status(model))
    assert_equal(*results)


def test_cached_parametrizations() -> None:
    untiled, batch = build("llama"), batch_of(2, 61)
    of_each("mlp.up_proj", weight_norm)(untiled)
    model, results = tiled_copy(untiled, check=True), []
    for each in (model, untiled):
        with parametrize.cached():
            results.append(loss_and_gradients(each, **batch))
    assert_equal(*results)


class Counting(nn.SiLU):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_under_selective_checkpointing() -> None:
    """A module that has changed since the forward is looked at again in the recomputation, where no operation may run
    that the forward did not."""
    untiled, batch = build("llama"), batch_of(2, 61)
    untiled.model.layers[0].mlp.act_fn = Counting()
    untiled.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": selective})
    model = tiled_copy(untiled)
    assert_equal(loss_and_gradients(model, **batch), loss_and_gradients(untiled, **batch))
    assert model.model.layers[0].mlp.act_fn.calls == untiled.model.layers[0].mlp.act_fn.calls


def selective() -> tuple:
    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keeps = operation == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Weighed(nn.Module):
    """A user's own LoRA, as a parametrization with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(130, 2)), nn.Parameter(torch.rand(2, 48))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


@pytest.mark.parametrize("is_tokenwise", [False, True], ids=["left", "declared"])
def test_a_parametrization_with_weights(is_tokenwise: bool) -> None:
    untiled = build("llama")
    for layer in untiled.model.layers:
        weighed = seqtile.tokenwise(Weighed()) if is_tokenwise else Weighed()
        parametrize.register_parametrization(layer.mlp.up_proj, "weight", weighed)
    model = tiled_copy(untiled, layer=False)
    status = seqtile.status(model)
    assert untiled_in(model)[MLP] == 2 * (not is_tokenwise) and status.mlp.fused == 2 * is_tokenwise
    assert is_tokenwise or f"{HERE}.Weighed, which is neither known" in str(status)
    assert_same_step(model, untiled, batch_of(2, 61))


@pytest.mark.parametrize("mixes", [False, True])
def test_what_is_compiled_and_declared_is_compared(mixes: bool) -> None:
    """A compiled backward may take its inputs' memory, and then keeps no graph."""
    model = build("llama", num_hidden_layers=1)
    model.model.layers[0].mlp.act_fn = seqtile.tokenwise(
        torch.compile(Mixing() if mixes else OwnGelu(), backend="aot_eager")
    )
    seqtile.apply_seqtile(model, chunk_tokens=50)
    if mixes:
        with pytest.raises(ValueError, match="computes something else"):
            model(**batch_of(2, 61))
    else:
        model(**batch_of(2, 61)).loss.backward()
        assert "equal the untiled model's" in str(seqtile.status(model))
