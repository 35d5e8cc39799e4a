"""PEFT's tuners around the projections of MLPs, which run in chunks: loss and gradients are the untiled model's."""

import pytest
import torch

import seqtile
from models.layered import assert_equal
from support.tiny import CHUNK, batch_of, build, loss_and_gradients

peft = pytest.importorskip("peft")
TUNERS = {
    "AdaLora": {"total_step": 10},
    "Beft": {},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "Deft": {},
    "Delora": {},
    "FourierFT": {"n_frequency": 20},
    "Frod": {},
    "Glora": {},
    "Gralora": {"r": 4, "gralora_k": 2},
    "Hira": {"r": 4},
    "HRA": {},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LoHa": {"r": 4},
    "LoKr": {"r": 4},
    "Lora": {"use_dora": True},
    "Miss": {"r": 4},
    "OFT": {"oft_block_size": 16},
    "OSF": {},
    "Peanut": {},
    "Psoft": {"r": 4},
    "RandLora": {"r": 4},
    "Road": {"group_size": 16},
    "Shira": {"r": 4},
    "Supertuning": {},
    "TinyLora": {"r": 2},
    "UniLora": {"r": 4, "theta_d_length": 64},
    "VBLoRA": {"r": 4, "vector_length": 16, "num_vectors": 16},
    "Vera": {"r": 4},
    "WaveFT": {"n_frequency": 20},
}


@pytest.mark.full("of 30 tuners", but=("IA3", "OFT"))
@pytest.mark.parametrize("name", TUNERS)
def test_in_chunks(name: str) -> None:
    options = {"target_modules": ["gate_proj", "up_proj", "down_proj"]} | TUNERS[name]
    model = peft.get_peft_model(build("llama", intermediate_size=128), getattr(peft, f"{name}Config")(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    batch = batch_of(2, 101)
    expected = loss_and_gradients(model, **batch)  # of the same model: OSF's hooks on parameters are not copied
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    assert_equal(loss_and_gradients(model, **batch), expected, 1e-6, 5e-5)
    status = seqtile.status(model)
    assert status.mlp.chunked == 2 and "equal the untiled model's" in str(status)
