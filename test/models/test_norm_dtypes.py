"""Norms in float32 beside bfloat16 without autocast. Llama's norm then returns float32, Liger's its input's dtype."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import seqtile
from models.layered import assert_equal, whole
from seqtile.models.forward.layer import layer_verdict
from support.tiny import build, loss_and_gradients, tiled_copy

pytestmark = pytest.mark.usefixtures("pristine")


def ligers(x: torch.Tensor, weight: torch.Tensor, eps: float, *_: object) -> torch.Tensor:
    """What Liger's kernel computes of Llama's norm."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed * weight).to(x.dtype)


def in_half(norms: torch.dtype | None = torch.float32, liger: type[nn.Module] | None = None) -> nn.Module:
    model = build("llama").bfloat16()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if "norm" in name:
                if liger is not None:
                    module.add_module(name, liger(48, child.variance_epsilon))
                getattr(module, name).to(norms)
    return model


def test_ligers_norms_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("liger_kernel.transformers.rms_norm")
    monkeypatch.setattr(module, "LigerRMSNormFunction", SimpleNamespace(apply=ligers))
    untiled = in_half(liger=module.LigerRMSNorm)
    tiled, batch = tiled_copy(untiled, layer=True, head_groups=2), whole(101)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch), 1e-2, 5e-2)
    assert seqtile.status(tiled).layer.fused == 2
    states = [model.model(batch["input_ids"]).last_hidden_state for model in (tiled, untiled)]
    assert [state.dtype for state in states] == [torch.bfloat16] * 2


def test_llamas_norms_run_in_chunks_without_autocast() -> None:
    """They widen what follows them. With float32 projections the whole layer then computes in float32; projections in
    bfloat16 refuse, untiled too, but under autocast."""
    untiled = build("llama")
    batch = {"inputs_embeds": torch.randn(1, 101, 48).bfloat16(), "labels": torch.arange(101)[None]}
    tiled = tiled_copy(untiled, layer=True)
    assert_equal(loss_and_gradients(tiled, **batch), loss_and_gradients(untiled, **batch), 1e-6, 2e-5)
    layer = in_half().model.layers[0]
    reason = "input_layernorm returns torch.float32, where its input is in torch.bfloat16"
    assert layer_verdict(layer, torch.bfloat16)[:2] == ("chunked", reason)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer_verdict(layer, torch.bfloat16).how == "fused"
    with pytest.raises(RuntimeError, match="same dtype"):
        tiled_copy(in_half(), layer=True, check=False)(**whole(101))
