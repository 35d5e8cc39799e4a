"""What changes between the forward of a part that runs in chunks and its backward, which runs the part again: the
gradients are the untiled ones, or a RuntimeError names what changed."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import seqtile
from models.layered import assert_equal, gradients_of, tiled_copy, whole
from seqtile.models.chunked import InChunks
from support.assertions import relative_error
from support.choice import every_value
from support.tiny import CHUNK, build, checkpointing

pytestmark = pytest.mark.usefixtures("one_thread")
PARTS = {  # the part that runs in chunks: a model, and how it is tiled
    "mlp": (lambda: build("llama", hidden_act="relu"), {"layer": False}),
    "experts": (lambda: build("mixtral"), {"layer": False}),
    "layer of Llama's shape": (lambda: build("llama", hidden_act="relu"), {"layer": True}),
    "layer of another shape": (lambda: build("gemma2"), {"layer": True}),
}
of_parts = pytest.mark.parametrize("part", PARTS)
Change = Callable[[nn.Module], object]


def pair(part: str, change: Change | None = None) -> tuple[nn.Module, nn.Module]:
    make, options = PARTS[part]
    untiled = make()
    untiled = (change and change(untiled)) or untiled
    return untiled, tiled_copy(untiled, **options)


def with_adapters(model: nn.Module, **options: object) -> nn.Module:
    """Returns a model with two adapters whose weights are not zero."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "up_proj"], init_lora_weights=False, **options)
    wrapped = get_peft_model(model, config, "a").train()
    wrapped.add_adapter("b", config)
    return wrapped


def dora(model: nn.Module) -> nn.Module:
    return with_adapters(model, use_dora=True)


def steps(model: nn.Module, batch: dict, change: Change) -> tuple[torch.Tensor, dict]:
    """Returns loss and gradients of a step in which `change` comes between forward and backward."""
    loss = model(**batch).loss
    change(model)
    loss.backward()
    return loss.detach(), gradients_of(model)


def modules_of(model: nn.Module, *kinds: type | str) -> list[nn.Module]:
    return [each for each in model.modules() if type(each) in kinds or type(each).__name__ in kinds]


def other_activation(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.SiLU()


def other_projection(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("up_proj", "o_proj"):
            if isinstance(vars(module)["_modules"].get(name), nn.Linear):
                setattr(module, name, copy.deepcopy(getattr(module, name)))


def other_parameter(model: nn.Module) -> None:
    for name, parameter in [*model.named_parameters()]:
        if "embed" not in name:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, nn.Parameter(torch.randn_like(parameter)))


def other_epsilon(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 3.0)


def other_forward(model: nn.Module) -> None:
    for module in modules_of(model, nn.Linear):
        module.forward = lambda x: None


CHANGES: dict[str, Change] = {
    "evaluation": nn.Module.eval,
    "an activation": other_activation,
    "a projection": other_projection,
    "an epsilon": other_epsilon,
    "a forward": other_forward,
    "a hook": lambda model: [each.register_forward_hook(lambda *_: 0) for each in modules_of(model, nn.Linear)],
    "frozen weights": lambda model: model.requires_grad_(False),
}


@pytest.mark.full("of 28 cases", but=every_value)
@pytest.mark.parametrize("change", CHANGES)
@of_parts
def test_a_change_before_the_backward(part: str, change: str) -> None:
    (untiled, tiled), batch = pair(part), whole(101)
    theirs = steps(untiled, batch, CHANGES[change])
    before = {name: parameter for name, parameter in tiled.named_parameters()}
    ours = steps(tiled, batch, CHANGES[change])
    assert_equal(ours, theirs)
    assert change == "a projection" or all(p is before[name] for name, p in tiled.named_parameters())


@pytest.mark.full("of 4 cases", but=("experts",))
@of_parts
def test_other_parameters_before_the_backward(part: str) -> None:
    """The gradients go to the parameters of the forward; the other ones are in place again afterwards."""
    (untiled, tiled), batch = pair(part), whole(101)
    then = [{name: p for name, p in model.named_parameters()} for model in (untiled, tiled)]
    for model in (untiled, tiled):
        steps(model, batch, other_parameter)
    for name, parameter in then[0].items():
        assert relative_error(then[1][name].grad, parameter.grad) <= 1e-5, name
    assert all(p.grad is None for name, p in tiled.named_parameters() if p is not then[1][name])


ADAPTER_CHANGES: dict[str, Change] = {
    "another adapter": lambda model: model.set_adapter("b"),
    "another scale": lambda model: [
        each.set_scale("a", 7.0) for each in model.modules() if hasattr(each, "set_scale") and hasattr(each, "lora_A")
    ],
    "unfrozen": lambda model: model.requires_grad_(True),
    "no adapter": lambda model: model.base_model.disable_adapter_layers(),
    "a deleted adapter": lambda model: model.delete_adapter("b"),
}


@pytest.mark.full("of 20 cases", but=every_value)
@pytest.mark.parametrize("change", ADAPTER_CHANGES)
@of_parts
def test_adapters_changed_before_the_backward(part: str, change: str) -> None:
    (untiled, tiled), batch = pair(part, dora), whole(101)
    assert_equal(*(steps(model, batch, ADAPTER_CHANGES[change]) for model in (tiled, untiled)))


@pytest.mark.full("of 8 cases", but=every_value)
@pytest.mark.parametrize("both", [False, True], ids=["as PEFT leaves them", "both trained"])
@of_parts
def test_two_adapters_in_one_backward(part: str, both: bool) -> None:
    models, batches, found = pair(part, dora), [whole(101), whole(77)], []
    for model in models:
        total = 0
        for name, batch in zip("ab", batches, strict=True):
            model.set_adapter(name)
            total = total + model(**batch).loss
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or (both and "lora" in name))
        total.backward()
        found.append((total.detach(), gradients_of(model)))
    assert_equal(found[1], found[0])
    assert all((grad is not None) == (both or ".b." in name) for name, grad in found[0][1].items() if "lora_B" in name)


@pytest.mark.full("of 4 cases", but=("mlp",))
@of_parts
def test_dropout_of_adapters(part: str) -> None:
    """With another probability, or another adapter, before the backward, as if nothing had changed."""
    _, tiled = pair(part, lambda model: with_adapters(model, lora_dropout=0.4))
    batch, found = whole(101), []

    def other_dropout(model: nn.Module) -> None:
        for each in modules_of(model, nn.Dropout):
            each.p = 0.9

    def back_and_forth(model: nn.Module) -> None:
        model.set_adapter("b")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)

    tiled(**batch)  # compares itself with the untiled model
    for change in (lambda model: None, other_dropout, back_and_forth):
        for each in modules_of(tiled, nn.Dropout):
            each.p = 0.4
        tiled.zero_grad()
        torch.manual_seed(3)
        loss, gradients = steps(tiled, batch, change)
        found.append((loss, {name: grad if grad is None else grad.clone() for name, grad in gradients.items()}))
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


def loaded(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def data_of_one(model: nn.Module, of: str = "down_proj") -> None:
    weight = next(p for name, p in model.named_parameters() if of in name)
    weight.data = torch.randn_like(weight)


REFUSED: dict[str, tuple[Change, str]] = {
    "in place": (loaded, "in place|inplace"),
    "half": (lambda model: model.half(), r"had its \.data replaced"),
    "data": (data_of_one, r"had its \.data replaced"),
}


@pytest.mark.full("of 24 cases", but=every_value)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", REFUSED)
@of_parts
def test_what_cannot_be_put_back_is_named(part: str, change: str, frozen: bool) -> None:
    apply, said = REFUSED[change]
    _, tiled = pair(part)
    for name, parameter in tiled.named_parameters():
        parameter.requires_grad_(not frozen or "embed" in name)
    with pytest.raises(RuntimeError, match=said):
        steps(tiled, whole(101), apply)


@pytest.mark.parametrize(("layer", "name"), [(False, "down_proj"), (True, "down_proj"), (True, "q_proj")])
def test_weights_of_a_fused_part_that_were_replaced(layer: bool, name: str) -> None:
    """It computes with them once more."""
    tiled = tiled_copy(build("llama"), layer=layer)
    with pytest.raises(RuntimeError, match=r"had its \.data replaced"):
        steps(tiled, whole(101), partial(data_of_one, of=name))


def test_merged_adapters_and_other_classes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tiled = pair("mlp", dora)
    with pytest.raises(RuntimeError, match="adapters that are merged"):
        steps(tiled, whole(101), lambda model: model.merge_adapter())
    tiled.unmerge_adapter()
    loss = tiled(**whole(101)).loss
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    with pytest.raises(RuntimeError, match=r"changed in between: ReLU\.forward"):
        loss.backward()


# Weights by functional_call


def given_leaves(model: nn.Module, weights: dict) -> dict:
    return weights


def computed_all(model: nn.Module, weights: dict) -> dict:
    return {name: weight * 1.1 for name, weight in weights.items()}


def computed_one(model: nn.Module, weights: dict) -> dict:
    name = next(name for name in weights if "down_proj" in name)
    return weights | {name: weights[name] + weights[name].mean(-1, keepdim=True)}


def inner_step(model: nn.Module, weights: dict) -> dict:
    """A step of gradient descent, as in first-order MAML."""
    loss = functional_call(model, weights, kwargs=whole_of_inner).loss
    gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=False)
    return {name: weight - 0.1 * grad for (name, weight), grad in zip(weights.items(), gradients, strict=True)}


whole_of_inner = whole(83)


def functional_steps(model: nn.Module, given: list[dict], make: Callable, batches: list[dict]) -> tuple:
    """Returns the loss of one functional call for each of `given`, before one backward, and all gradients."""
    given = [{name: weight.clone().requires_grad_() for name, weight in weights.items()} for weights in given]
    losses = [
        functional_call(model, make(model, weights), kwargs=batch).loss
        for weights, batch in zip(given, batches, strict=True)
    ]
    sum(losses).backward()
    gradients = {f"{i} {name}": weight.grad for i, each in enumerate(given) for name, weight in each.items()}
    return sum(losses).detach(), gradients | gradients_of(model)


@pytest.mark.full("of 32 cases", but=every_value)
@pytest.mark.parametrize("make", [given_leaves, computed_all, computed_one, inner_step])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@of_parts
def test_functional_calls_with_weights_that_train(part: str, frozen: bool, make: Callable) -> None:
    """The model's own parameters get no gradient."""
    models = pair(part, lambda model: model.requires_grad_(not frozen))
    batches = [whole(101), whole(77)]
    own = {name: p.detach() for name, p in models[0].named_parameters()}
    given = [{name: p + 0.01 * torch.randn_like(p) for name, p in own.items()} for _ in batches]
    theirs, ours = (functional_steps(model, given, make, batches) for model in models)
    assert_equal(ours, theirs, gradients=2e-5)


def test_functional_calls_of_a_head_in_chunks() -> None:
    def with_a_head_in_chunks(model: nn.Module) -> None:
        model.lm_head = nn.Sequential(nn.Identity(), model.lm_head)

    models = pair("mlp", with_a_head_in_chunks)
    batches = [whole(101), whole(77)]
    given = [{name: p.detach() * 1.1 for name, p in models[0].named_parameters()} for _ in batches]
    for make in (given_leaves, computed_all):
        theirs, ours = (functional_steps(model, given, make, batches) for model in models)
        assert_equal(ours, theirs)


def test_frozen_weights_of_a_functional_call() -> None:
    """They are those of the forward in the backward, too."""
    for part in PARTS:
        models = pair(part, lambda model: model.requires_grad_(False))
        given = {name: p * 1.1 for name, p in models[0].named_parameters()}
        found, x = [], torch.randn(1, 101, 48)
        for model in models:
            states = x.clone().requires_grad_()
            functional_call(model, given, kwargs={"inputs_embeds": states}).logits.square().mean().backward()
            found.append(states.grad)
        assert relative_error(found[1], found[0]) <= 1e-5, part


def test_computed_weights_do_not_outlive_their_graph() -> None:
    """Neither by the verdicts on modules nor by a loss that is kept after its backward."""
    for part in PARTS:
        _, tiled = pair(part, lambda model: model.requires_grad_(False))
        given = {name: p * torch.ones((), requires_grad=True) for name, p in tiled.named_parameters()}
        loss = functional_call(tiled, given, kwargs=whole(101)).loss
        loss.backward()
        held = [weakref.ref(weight) for name, weight in given.items()]
        given.clear()
        gc.collect()
        assert not any(weight() is not None for weight in held), part


def normed(model: nn.Module) -> None:
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.mlp.up_proj)


def test_a_parametrization_put_on_before_the_backward() -> None:
    for part in ("mlp", "layer of another shape"):
        models, batch, found = pair(part), whole(101), []
        for model in models:
            leaves = dict(model.named_parameters())
            loss, _ = steps(model, batch, normed)
            found.append((loss, {name: p.grad for name, p in leaves.items()}))
            assert parametrize.is_parametrized(model.model.layers[0].mlp.up_proj)
        assert_equal(found[1], found[0])


@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrization_removed_before_the_backward_is_named(kind: Callable) -> None:
    """A copy of a parametrized module shares its class, so the model is not copied."""

    def removed(model: nn.Module) -> None:
        for layer in model.model.layers:
            parametrize.remove_parametrizations(layer.mlp.up_proj, "weight")

    for part in ("mlp", "layer of another shape"):
        make, options = PARTS[part]
        tiled = make()
        for layer in tiled.model.layers:
            kind(layer.mlp.up_proj)
        seqtile.apply_seqtile(tiled, chunk_tokens=50, **options)
        with pytest.raises(RuntimeError, match=r"changed in between: ParametrizedLinear\.weight|was changed in place"):
            steps(tiled, whole(101), removed)


def of_experts(model: nn.Module) -> nn.Module:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False)
    return get_peft_model(model, config).train()


@pytest.mark.full("of 6 cases", but=every_value)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("change", ["no adapter", "unfrozen", "evaluation"])
def test_adapters_of_experts_changed_before_the_backward(change: str, layer: bool) -> None:
    untiled, batch = of_experts(build("mixtral")), whole(101)
    tiled = tiled_copy(untiled, layer=layer)
    assert_equal(*(steps(model, batch, (ADAPTER_CHANGES | CHANGES)[change]) for model in (tiled, untiled)))


@pytest.mark.full("of 4 cases", but=("layer of another shape",))
@of_parts
def test_a_functional_call_under_reentrant_checkpointing(part: str) -> None:
    """The recomputation, after the call has ended, uses the model's own weights, as untiled."""
    models = pair(part)
    given = {name: p.detach() * 1.1 for name, p in models[0].named_parameters()}
    for model in models:
        checkpointing(model, True)
    theirs, ours = (functional_steps(model, [given], given_leaves, [whole_of_inner]) for model in models)
    assert_equal(ours, theirs)


@pytest.mark.full("8 s of compiler each", but=("layer",))
@pytest.mark.parametrize("layer", [False, True], ids=["mlp", "layer"])
def test_scales_of_adapters_changed_after_a_compiled_forward(layer: bool) -> None:
    untiled = with_adapters(build("llama", num_hidden_layers=1, hidden_act="relu"))
    model, batch, found = copy.deepcopy(untiled), whole(61), []
    seqtile.apply_seqtile(model.get_base_model(), layer=layer, chunk_tokens=CHUNK, check=False)
    compiled = model.get_base_model().model.layers[0]
    (compiled if layer else compiled.mlp).compile(backend="eager")
    for each in (model, untiled):
        found.append(steps(each, batch, change_scales))
    assert_equal(*found)


def change_scales(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            scaling |= {name: 3 * scale for name, scale in scaling.items()}


@pytest.mark.usefixtures("one_rank")
def test_what_fsdp2_gathers_meanwhile_stays() -> None:
    """FSDP2 would not gather it again."""
    x, head = torch.randn(3, 8), nn.Linear(8, 4, bias=False)
    expected = head(x)
    fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
    head.unshard()
    snapshot = InChunks(head=head).snapshot()
    head.reshard()
    with snapshot.put_back():
        head.unshard()
    torch.testing.assert_close(head(x), expected)
