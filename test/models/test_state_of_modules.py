"""Modules with state would compute another state chunk by chunk: their part is left untiled; if they are declared, they
are refused by name, and their buffers restored."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import seqtile
from models.layered import KINDS, assert_same_step
from support.choice import every_value
from support.tiny import batch_of, build, loss_and_gradients, tiled_copy

pytestmark = pytest.mark.on_gpu("refused before any kernel runs", only=every_value)


class Counting(nn.Module):
    """Normalises by a running mean over the tokens seen in training, and counts them."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("mean_square", torch.ones(width))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.tokens += x.shape[:-1].numel()
                self.mean_square.lerp_(x.detach().square().flatten(0, -2).mean(0), 0.1)
        return x * (self.mean_square + 1e-6).rsqrt()


def counted(parent: str, name: str, width: int) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        module = model.get_submodule(f"model.layers.1.{parent}")
        setattr(module, name, nn.Sequential(getattr(module, name), Counting(width)))

    return change


def spectral(name: str) -> Callable[[nn.Module], None]:
    return lambda model: nn.utils.spectral_norm(model.get_submodule(name))


KEEPING: dict[str, Callable[[nn.Module], None]] = {
    "spectral norm of a projection": spectral("model.layers.1.mlp.up_proj"),
    "statistics in the MLP": counted("mlp", "act_fn", 130),
    "spectral norm of the head": spectral("lm_head"),
    "statistics in attention": counted("self_attn", "q_proj", 48),
}
TILED = [(name, layer) for name in KEEPING for layer in (False, True) if layer or "attention" not in name]


def keeping(name: str, device: str) -> nn.Module:
    model = build("llama", device, tie_word_embeddings=False)
    KEEPING[name](model)
    return model.to(device)


@pytest.mark.full("of 21 cases", but=every_value)
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize(("name", "layer"), TILED)
def test_state_is_that_of_the_untiled_model(name: str, layer: bool, reentrant: bool | None, device: str) -> None:
    """What keeps state is not declared, so its part runs untiled: loss, gradients and state are the untiled ones."""
    untiled, batch = keeping(name, device), batch_of(3, 101, device)
    tiled = tiled_copy(untiled, layer=layer)
    assert_same_step(tiled, untiled, batch, reentrant)
    for (name, ours), theirs in zip(tiled.named_buffers(), untiled.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("layer", [False, True])
def test_state_of_what_is_declared_is_refused(layer: bool, device: str) -> None:
    """With stateful modules in evaluation mode and the rest in training, loss and gradients are the untiled ones."""
    untiled, batch = keeping("statistics in the MLP", device), batch_of(3, 101, device)
    seqtile.tokenwise(untiled.model.layers[1].mlp.act_fn)
    tiled = tiled_copy(untiled, layer=layer)
    untiled(**batch_of(2, 31, device))
    tiled.load_state_dict(untiled.state_dict())
    buffers = {name: buffer.clone() for name, buffer in tiled.named_buffers()}
    with pytest.raises(ValueError, match=r"fn changes .*act_fn\.1\.(mean_square|tokens).*eval mode"):
        loss_and_gradients(tiled, **batch)
    assert all(buffer.equal(buffers[name]) for name, buffer in tiled.named_buffers())
    for model in (untiled, tiled):
        model.model.layers[1].mlp.act_fn.eval()
    assert_same_step(tiled, untiled, batch)
