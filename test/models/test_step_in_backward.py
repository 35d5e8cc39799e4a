"""Weights that change during a backward, or between forward and backward: no gradient mixes two versions of the
weights."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from models.layered import KINDS, MODES, whole
from models.test_layer import PROJECTIONS
from support.assertions import relative_error
from support.choice import every_pair
from support.tiny import build, checkpointing, loss_and_gradients, tiled_copy
from support.training import with_lora

Step = Callable[[nn.Parameter], None]


def adamw(parameter: nn.Parameter) -> Step:
    """As in PyTorch's tutorial on optimizer steps inside the backward."""
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, eps=1e-3)  # else a gradient near 0 turns rounding into a step
    return lambda _: optimizer.step()


def in_data(_: nn.Parameter) -> Step:
    return lambda parameter: parameter.data.add_(parameter.grad, alpha=-0.1)


def without_grad(_: nn.Parameter) -> Step:
    return torch.no_grad()(lambda parameter: parameter.add_(parameter.grad, alpha=-0.1))


def trained(model: nn.Module, make_step: Callable[[nn.Parameter], Step], batches: list[dict]) -> dict:
    """Every parameter steps as soon as its gradient exists, once per backward. Returns the parameters."""
    fired: Counter[str] = Counter()

    def stepped(name: str, step: Step, parameter: nn.Parameter) -> None:
        fired[name] += 1
        step(parameter)
        parameter.grad = None

    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in wanted.items():
        parameter.register_post_accumulate_grad_hook(partial(stepped, name, make_step(parameter)))
    for batch in batches:
        model(**batch).loss.backward()
    assert fired == dict.fromkeys(wanted, len(batches))
    return wanted


def with_adapters(model: nn.Module) -> nn.Module:
    """LoRA on every projection and the head; its matrices and the norms are trained."""
    model = with_lora(model, *PROJECTIONS, "lm_head")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "norm" in name)
    model.enable_input_require_grads()
    return model


CASES = [(what, mode) for what in ("llama", "qwen3", "phi3", "adapters") for mode in MODES]
CASES.remove(("phi3", "groups"))  # its layers do not have them


@pytest.mark.full("of 99 cases", but=every_pair)
@pytest.mark.parametrize("make_step", [adamw, in_data, without_grad])
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize(("what", "mode"), CASES)
def test_steps_inside_the_backward(what: str, mode: str, reentrant: bool | None, make_step: Callable) -> None:
    """qwen3's embeddings are tied to its head. Four steps, equal to Hugging Face's."""
    untiled = with_adapters(build("llama")) if what == "adapters" else build(what)
    tiled = tiled_copy(untiled, **MODES[mode])
    before = {name: parameter.detach().clone() for name, parameter in untiled.named_parameters()}
    batches = [whole(length) for length in (101, 77, 40, 63)]
    for model in (untiled, tiled):
        checkpointing(model.get_base_model() if what == "adapters" else model, reentrant)
    theirs, ours = trained(untiled, make_step, batches), trained(tiled, make_step, batches)
    for name, parameter in theirs.items():
        assert relative_error(parameter, before[name]) > 1e-4, f"{name} was not trained"
        error = relative_error(ours[name], parameter)  # AdamW divides rounding errors of small gradients by themselves
        assert error <= 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_changed_between_forward_and_backward(mode: str) -> None:
    """Where torch raises: the same error, or the gradients of the weight that the forward used."""
    untiled = build("qwen3", tie_word_embeddings=False)
    tiled = tiled_copy(untiled, **MODES[mode])
    batch = whole(101)
    _, truth = loss_and_gradients(untiled, **batch)
    raised = set()
    for name, parameter in untiled.named_parameters():
        if "embed" in name:
            continue  # no forward of seqtile's reads it
        ours = tiled.get_parameter(name)
        for model, changed in ((untiled, parameter), (tiled, ours)):
            model.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            with torch.no_grad():
                changed.mul_(1.5)
            try:
                loss.backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                raised.add((model is tiled, name))
            with torch.no_grad():
                changed.div_(1.5)
        if (True, name) in raised:
            continue
        assert (False, name) in raised, "torch does not raise for this weight"
        for other, gradient in truth.items():
            assert relative_error(tiled.get_parameter(other).grad, gradient) <= 1e-5, f"{name} changed: {other}"
    assert len(raised) > len(truth), "almost all raise, on both sides"
