"""Records inside a tiled layer: router logits, attentions, outputs of modules; layers in threads."""

import copy
import threading

import pytest
import torch
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils import output_capturing
from transformers.utils.output_capturing import OutputRecorder

from models import layered
from models.layered import KINDS, assert_equal, gradients_of
from seqtile.models.forward.layer import _FORWARD_CHECKPOINTS
from seqtile.proof.small import WORDS, small_model
from support.assertions import relative_error
from support.choice import every_value
from support.tiny import build, checkpointing, loss_and_gradients

CHUNK = 7


def ids_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, WORDS - 5, (rows, length))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def tiled_copy(model: nn.Module) -> nn.Module:
    return layered.tiled_copy(model, loss=False, chunk_tokens=CHUNK)


def assert_close(ours: tuple, theirs: tuple, tolerance: float) -> None:
    """Like assert_equal, but a gradient of zeros may be None."""
    found = ((value, {name: g for name, g in of.items() if g is not None and g.any()}) for value, of in (ours, theirs))
    assert_equal(*found, tolerance, tolerance)


def assert_close_steps(ours: nn.Module, theirs: nn.Module, batch: dict, tolerance: float) -> None:
    assert_close(loss_and_gradients(ours, **batch), loss_and_gradients(theirs, **batch), tolerance)


@pytest.mark.full("of 12 models", but=every_value)
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_router_logits(arch: str, rows: int, reentrant: bool | None) -> None:
    """With the loss that balances experts, which is computed from records inside layers."""
    untiled = build(arch, output_router_logits=True, router_aux_loss_coef=0.5)
    tiled, batch = tiled_copy(untiled), ids_of(rows, 3 * CHUNK + 2)
    for model in (untiled, tiled):
        checkpointing(model, reentrant)
    theirs, ours = untiled(**batch), tiled(**batch)
    for mine, his in zip(ours.router_logits, theirs.router_logits, strict=True):
        assert relative_error(mine, his) <= 1e-5
    assert relative_error(ours.aux_loss, theirs.aux_loss) <= 1e-5
    assert_close_steps(tiled, untiled, batch, 3e-5)


@pytest.mark.parametrize("reentrant", KINDS)
def test_attentions_are_recorded_of_layers_that_run_untiled(reentrant: bool | None) -> None:
    """Also under checkpointing, whose recomputation records nothing."""
    untiled = build("qwen3_moe", attn_implementation="eager")
    tiled, batch = tiled_copy(untiled), ids_of(1, 3 * CHUNK + 2) | {"output_attentions": True}
    for model in (untiled, tiled):
        checkpointing(model, reentrant)
    if reentrant is False and not _FORWARD_CHECKPOINTS:  # a recomputation cannot be told of it
        with pytest.raises(ValueError, match="output_attentions=True reaches a tiled layer under checkpointing"):
            tiled(**batch)
        return
    assert relative_error(tiled(**batch).attentions[1], untiled(**batch).attentions[1]) <= 1e-5
    assert_close_steps(tiled, untiled, batch, 3e-5)


def test_two_models_in_two_threads() -> None:
    """At the same time, each with its own attention; the backwards run in further threads."""
    models = [small_model(Olmo2ForCausalLM, Olmo2Config(num_hidden_layers=2)).double().train() for _ in range(2)]
    models[1].set_attn_implementation("sdpa")
    batches = [ids_of(1, 3 * CHUNK + 2 * i) for i in range(2)]
    truth = [loss_and_gradients(model, **batch) for model, batch in zip(models, batches, strict=True)]
    tiled, failed = [tiled_copy(model) for model in models], []

    def train(i: int) -> None:
        try:
            for _ in range(8):
                tiled[i].zero_grad(set_to_none=True)
                loss = tiled[i](**batches[i]).loss
                other = threading.Thread(target=loss.backward)
                other.start()
                other.join()
                assert_close((loss.detach(), gradients_of(tiled[i])), truth[i], 1e-6)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


class Registry(dict):
    """One registry for models of all classes."""

    def get(self, *model: object) -> dict:
        return self


@pytest.mark.parametrize("of", ["mlp", "q_proj", "all"])
def test_what_is_recorded_inside_a_layer_of_llamas_shape(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are then called, because they have hooks; also in later calls that record nothing."""
    recorders = {
        "mlp": OutputRecorder(LlamaMLP, index=0),
        "q_proj": OutputRecorder(nn.Linear, index=0, layer_name="q_proj"),
        "all": [OutputRecorder(LlamaMLP, index=0), OutputRecorder(nn.Linear, index=0, layer_name="k_proj")],
    }
    untiled, batch = build("llama"), ids_of(2, 3 * CHUNK + 2)
    tiled = tiled_copy(untiled)
    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", Registry(seen=recorders[of]))
    inputs, found = {"input_ids": batch["input_ids"], "use_cache": False}, []
    for model in (untiled, tiled):
        model.zero_grad()
        output = model.model(**inputs, output_seen=True)
        (output.last_hidden_state.sum() + sum(seen.square().sum() for seen in output["seen"])).backward()
        found.append((torch.cat([seen.flatten() for seen in output["seen"]]).detach(), gradients_of(model)))
    assert_close(found[1], found[0], 1e-5)
    assert_close_steps(tiled, untiled, batch, 1e-5)


@pytest.mark.full("10 s of compiler")
def test_router_logits_compiled() -> None:
    eager = tiled_copy(build("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5))
    compiled, batch = copy.deepcopy(eager), ids_of(1, 3 * CHUNK + 2)
    compiled.compile(backend="aot_eager")
    assert_close_steps(compiled, eager, batch, 1e-5)
