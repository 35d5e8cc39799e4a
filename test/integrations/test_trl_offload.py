"""TRL's activation offloading beside tiled layers and seqtile's offload: the same training. On a CPU, where stand-ins
take the place of a GPU's streams, and plain memory that of host memory."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from seqtile.integrations.trainer import SeqtileCallback
from seqtile.integrations.trl import apply_seqtile_to_trl, restore_trl
from support.assertions import relative_error
from support.plain_store import offloaded
from support.tiny import build
from support.trl_trainers import token_documents, trainer

trl = pytest.importorskip("trl")
offloading = pytest.importorskip("trl.models.activation_offloading")


class Stream:
    """Of a GPU, where everything has happened at once."""

    def wait(self, other: object) -> None: ...

    wait_event = wait_stream = wait
    record_event = synchronize = lambda self: None


class Device:
    """What `torch.get_device_module` returns for a GPU."""

    Stream = current_stream = staticmethod(Stream)
    empty_cache = staticmethod(lambda: None)

    @staticmethod
    def stream(stream: Stream) -> AbstractContextManager:
        return nullcontext()


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what TRL copies."""
    shapes: list[torch.Size] = []
    made = offloading.get_act_offloading_ctx_manager

    def manager(model: torch.nn.Module) -> object:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            patched.setattr(torch, "get_device_module", lambda _: Device)
            found = made(model, use_pin_memory=False)
        pack = found.pack_hook

        def counted(tensor: torch.Tensor) -> int:
            number = pack(tensor)
            shapes.extend([tensor.shape] * found.tracker[number][1])
            return number

        found.pack_hook = counted
        return found

    monkeypatch.setattr("trl.trainer.sft_trainer.get_act_offloading_ctx_manager", manager)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr("seqtile.integrations.trainer.enable_offload", offloaded)
    return shapes


def trained(tmp_path: Path, *callbacks: SeqtileCallback, **options: bool) -> tuple[list[float], torch.Tensor]:
    """Returns the losses and the weights after three steps."""
    torch.manual_seed(0)
    model = build("llama", num_hidden_layers=4)
    training = trainer(trl.SFTTrainer, model, token_documents(), tmp_path, learning_rate=1.0, **options)
    for callback in callbacks:
        training.add_callback(callback)
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.full("three runs each", but=("True",))
@pytest.mark.parametrize("checkpointed", [True, False])
def test_beside_tiled_layers_and_beside_offload(checkpointed: bool, moved: list, tmp_path: Path) -> None:
    callback = partial(SeqtileCallback, chunk_tokens=20, layer=True, head_groups=2)
    untiled = trained(tmp_path, gradient_checkpointing=checkpointed)
    options = {"gradient_checkpointing": checkpointed, "activation_offloading": True}
    apply_seqtile_to_trl()
    try:
        alone, of_layers = trained(tmp_path, callback(), **options), len(moved)
        moved.clear()
        both = trained(tmp_path, callback(offload=True), **options)
    finally:
        restore_trl()
    assert 0 < len(moved) < of_layers, "seqtile moves the layers' inputs"
    for losses, weights in (alone, both):
        assert losses == pytest.approx(untiled[0], rel=1e-5) and relative_error(weights, untiled[1]) <= 1e-5
