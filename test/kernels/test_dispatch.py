"""What computes where: Triton or PyTorch, by `use_triton`; and machines on which Triton cannot launch."""

import logging
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import seqtile
from seqtile.kernels import dispatch, eager
from seqtile.models.status import outcome_of
from support.tiny import interpreted

triton = pytest.importorskip("triton")

KERNELS = {
    "function": lambda logits, target, losses: dispatch.cross_entropy_(logits, target, losses, dispatch.LossOptions()),
    "custom op": lambda logits, target, losses: torch.ops.seqtile.cross_entropy_(
        *(logits, target, losses, False, 1.0, 0.0, 1.0, 0.0, 0.0), *[None] * 10
    ),
}


@pytest.fixture
def without_triton() -> Iterator[None]:
    seqtile.use_triton(False)
    yield
    seqtile.use_triton(True)


@pytest.mark.parametrize("way", KERNELS)
def test_pytorch_computes_on_request(way: str, without_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Triton's interpreter would run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "PROGRAMS", {})
    logits, target, losses = torch.randn(5, 7), torch.randint(0, 7, (5,)), torch.empty(5)
    KERNELS[way](logits, target, losses)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    seqtile.use_triton(True)
    assert dispatch.triton_serves(logits)


@pytest.mark.parametrize(("on_gpu", "rows"), [(False, 8), (True, 256)])
def test_blocks_on_a_gpu_are_large(on_gpu: bool, rows: int) -> None:
    """Each operation of a block is a launch there."""

    class Chunk(SimpleNamespace):
        shape = torch.Size((1024, 32_768))

        def __len__(self) -> int:
            return 1024

    assert next(iter(eager._row_blocks(Chunk(is_cuda=on_gpu)))) == slice(0, rows)


def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton.backends.nvidia.driver.CudaDriver, "is_active", staticmethod(lambda: False))


def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)


def no_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", shutil.which("gcc") or shutil.which("clang") or pytest.skip("no compiler"))


def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes Triton find a driver, and nothing that was built before."""
    driver = triton.backends.nvidia.driver
    monkeypatch.setattr(driver.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


LACKS = {
    no_driver: "0 active drivers",
    no_compiler: "Failed to find C compiler",
    no_headers: "(cc|clang) failed, and has said why on stderr",
}


@pytest.mark.skipif(interpreted(), reason="the interpreter launches nothing")
@pytest.mark.parametrize("lack", LACKS, ids=lambda lack: lack.__name__)
def test_what_triton_lacks_is_named_before_a_part_is_blamed(
    lack: Callable[[pytest.MonkeyPatch, Path], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the first training step, in which Triton itself fails; PyTorch can then compute instead."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, **sizes)).train()
    seqtile.apply_seqtile(model)
    ids = torch.randint(0, 32, (1, 30))
    lack(monkeypatch, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "triton_serves", lambda tensor: True)
        patch.setattr(logging.getLogger("transformers"), "propagate", True)
        with pytest.raises(OSError, match=f"{LACKS[lack]}.*gcc python3.*-dev.*use_triton"):
            model(input_ids=ids, labels=ids)
    assert not caplog.records
    assert "stopped the training: OSError: Triton cannot launch" in outcome_of(model)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
    assert "equal the untiled model's" in outcome_of(model)


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(eager, "rotary_", launch)
    monkeypatch.setattr(dispatch, "triton_serves", lambda tensor: False)
    with pytest.raises(RuntimeError, match=r"^Triton Error"):
        dispatch.run("rotary_", torch.zeros(1), torch.zeros(1), torch.zeros(1), False)
