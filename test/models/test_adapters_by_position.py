"""Adapters of PEFT's that depend on a token's place or row: aLoRA, X-LoRA, batches with an adapter for each row.

The parts around them are left untiled, in training and in evaluation, as long as they are active.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import seqtile
from models.layered import KINDS, assert_equal
from support.tiny import CHUNK, VOCAB, build, checkpointing, loss_and_gradients

peft = pytest.importorskip("peft")
PROJECTIONS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
INVOKED = [5, 6]
EACH = {"mlp": {}, "layer": {"layer": True}}


def config(**options: object) -> object:
    plain = {"r": 4, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.LoraConfig(**plain | options)


def invoking() -> dict[str, torch.Tensor]:
    """A batch whose rows invoke aLoRA at different places."""
    ids = torch.randint(10, VOCAB, (2, 101))
    for row, place in enumerate((23, 70)):
        ids[row, place : place + 2] = torch.tensor(INVOKED)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def adapted(**options: object) -> nn.Module:
    """A model with two adapters: "default" with these options, which is active, and "plain"."""
    model = peft.get_peft_model(build("llama"), config(**options))
    model.add_adapter("plain", config())
    return model.train()


def tiled_copy(model: nn.Module, **options: object) -> nn.Module:
    tiled = copy.deepcopy(model)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK, **options)
    return tiled


def reasons(model: nn.Module) -> list[str | None]:
    """Returns why parts of a model are left untiled."""
    status = seqtile.status(model)
    return [part.untiled_reason for part in (status.mlp, status.layer) if part is not None]


def assert_untiled(model: nn.Module, because: str) -> None:
    assert all(reason and because in reason for reason in reasons(model)), reasons(model)
    assert seqtile.status(model).mlp.fused == seqtile.status(model).mlp.chunked == 0


def assert_same_evaluation(ours: nn.Module, theirs: nn.Module, **batch: object) -> None:
    with torch.no_grad():
        expected, found = (model.eval()(**batch) for model in (theirs, ours))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.logits, expected.logits)


def assert_same(ours: nn.Module, theirs: nn.Module, reentrant: bool | None = None, **batch: object) -> None:
    """Asserts that two models compute the same in evaluation and in training, with the given checkpointing: there PEFT
    refuses a forward without a backward."""
    for model in (ours, theirs):
        model.get_base_model().gradient_checkpointing_disable()
    assert_same_evaluation(ours, theirs, **batch)
    for model in (ours, theirs):
        checkpointing(model.train().get_base_model(), reentrant)
    assert_equal(loss_and_gradients(ours, **batch), loss_and_gradients(theirs, **batch))


@pytest.mark.full("of 6 cases", but=("mlp-plain", "layer-ckpt"))
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_alora(options: dict, reentrant: bool | None) -> None:
    untiled, batch = adapted(alora_invocation_tokens=INVOKED), invoking()
    tiled = tiled_copy(untiled, **options)
    assert_same(tiled, untiled, reentrant, **batch)
    assert_untiled(tiled, "begins at a position, counted from the end of the sequence (aLoRA)")
    for model in (untiled, tiled):
        model.set_adapter("plain")
    assert_same(tiled, untiled, reentrant, **batch)
    assert not any(reasons(tiled))
    for model in (untiled, tiled):
        model.set_adapter("default")
    assert_same(tiled, untiled, reentrant, **batch)
    assert_untiled(tiled, "aLoRA")


def test_alora_beside_another_adapter() -> None:
    """Two are active, then none."""
    untiled, batch = adapted(alora_invocation_tokens=INVOKED), invoking()
    untiled.base_model.set_adapter(["plain", "default"])
    tiled = tiled_copy(untiled, layer=True)
    assert_same(tiled, untiled, **batch)
    assert_untiled(tiled, "aLoRA")
    with untiled.disable_adapter(), tiled.disable_adapter():
        assert_same_evaluation(tiled, untiled, **batch)
        assert not any(reasons(tiled))


def test_a_merged_adapter_beside_alora() -> None:
    """PEFT computes with the merged weights alone."""
    untiled, batch = adapted(alora_invocation_tokens=INVOKED), invoking()
    tiled = tiled_copy(untiled, layer=True)
    for model in (untiled, tiled):
        model.merge_adapter(adapter_names=["plain"])
    assert_same_evaluation(tiled, untiled, **batch)
    assert not any(reasons(tiled))
    for model in (untiled, tiled):
        model.unmerge_adapter()
    assert_same(tiled, untiled, **batch)
    assert_untiled(tiled, "aLoRA")


@pytest.mark.full("of 2 cases", but=("layer",))
@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_x_lora(options: dict, tmp_path: Path) -> None:
    base, paths = build("llama", use_cache=False), {}
    for name in ("0", "1"):
        peft.get_peft_model(copy.deepcopy(base), config()).save_pretrained(paths.setdefault(name, str(tmp_path / name)))
    wanted = {"hidden_size": 48, "xlora_depth": 1, "layerwise_scalings": True, "task_type": "CAUSAL_LM"}
    untiled = peft.get_peft_model(base, peft.XLoraConfig(adapters=paths, **wanted))
    tiled = tiled_copy(untiled, **options)
    assert_same(tiled, untiled, **invoking())
    assert_untiled(tiled, "runs the forward of peft.tuners.xlora.layer.XLoraLinearLayer")


@pytest.mark.full("of 2 cases", but=("layer",))
@pytest.mark.parametrize("options", EACH.values(), ids=EACH)
def test_an_adapter_for_each_row(options: dict) -> None:
    """PEFT tells its layers by hooks which rows are whose, and only in evaluation."""
    untiled, batch, seen = adapted(lora_bias=True).eval(), invoking(), []
    tiled = tiled_copy(untiled, **options).eval()
    last = tiled.get_base_model().model.layers[1]
    last.register_forward_pre_hook(lambda *_: seen.extend(reasons(tiled)))
    for names in (["default", "plain"], ["plain", "__base__"]):
        assert_same_evaluation(tiled, untiled, **batch, adapter_names=names)
        assert all("has a hook, peft" in reason for reason in seen), seen
        seen.clear()
    assert_same(tiled, untiled, **batch)
    assert not any(seen) and not any(reasons(tiled))
    assert seqtile.status(tiled).mlp.chunked == 2
