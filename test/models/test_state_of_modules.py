"""Modules with state would compute another state chunk by chunk: they are refused by name, and their buffers
restored."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from models.layered import KINDS, assert_same_step
from support.choice import every_value
from support.tiny import batch_of, build, checkpointing, loss_and_gradients, tiled_copy

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


KEEPING: dict[str, tuple[Callable[[nn.Module], None], str]] = {  # the change to the model, and the name of its state
    "spectral norm of a projection": (spectral("model.layers.1.mlp.up_proj"), r"up_proj\.weight_u"),
    "statistics in the MLP": (counted("mlp", "act_fn", 130), r"act_fn\.1\.(mean_square|tokens)"),
    "spectral norm of the head": (spectral("lm_head"), r"head\.weight_u"),
    "statistics in attention": (counted("self_attn", "q_proj", 48), r"q_proj\.1\.(mean_square|tokens)"),
}
TILED = [(name, layer) for name in KEEPING for layer in (False, True) if layer or "attention" not in name]


def keeping(name: str, device: str) -> nn.Module:
    model = build("llama", device, tie_word_embeddings=False)
    KEEPING[name][0](model)
    return model.to(device)


@pytest.mark.full("of 21 cases", but=every_value)
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize(("name", "layer"), TILED)
def test_state_is_refused(name: str, layer: bool, reentrant: bool | None, device: str) -> None:
    """With stateful modules in evaluation mode and the rest in training, loss and gradients are the untiled ones."""
    untiled, batch = keeping(name, device), batch_of(3, 101, device)
    tiled = tiled_copy(untiled, layer=layer)
    untiled(**batch_of(2, 31, device))
    tiled.load_state_dict(untiled.state_dict())
    checkpointing(tiled, reentrant)
    buffers = {name: buffer.clone() for name, buffer in tiled.named_buffers()}
    with pytest.raises(ValueError, match=rf"fn changes .*{KEEPING[name][1]}.*eval mode"):
        loss_and_gradients(tiled, **batch)
    assert all(buffer.equal(buffers[name]) for name, buffer in tiled.named_buffers())
    for module in (*untiled.modules(), *tiled.modules()):
        if any(True for _ in module.buffers(recurse=False)):
            module.eval()
    assert_same_step(tiled, untiled, batch, reentrant)
