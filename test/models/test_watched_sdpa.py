"""cuDNN is left out of sdpa where its gradients are wrong: in any attention of a model's, tiled or not."""

import time
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import seqtile
from models.layered import small_of
from seqtile import limits, sdpa
from seqtile.limits import cudnn_limit
from seqtile.renamed import enable_checkpointing
from seqtile.sdpa import WatchedSdpa, watch_sdpa
from support.tiny import build

pytestmark = pytest.mark.usefixtures("pristine")
TOKENS = 72


def test_what_is_wrong() -> None:
    """Measured on an H200: right at 523,264 x 4,096 elements, a little below 2**31, and wrong at 525,312 x 4,096; the
    masks by PyTorch's issue 196678."""
    assert cudnn_limit(2**31 - 1, 2**19, False) is None and "2**31" in cudnn_limit(2**31, 2**19, False)
    assert [keys for keys in range(1, 400) if cudnn_limit(8, keys, True)] == [64, 192, 320]
    assert cudnn_limit(8, 64, False) is None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether cuDNN may compute each call of sdpa; on a CPU that passes for a GPU that prefers cuDNN."""
    found, function = [], F.scaled_dot_product_attention

    def recorded(*args: Tensor, **options: object) -> Tensor:
        found.append(cuda.cudnn_sdp_enabled())
        return function(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(sdpa, "may_choose_cudnn", lambda implementation, q: cuda.cudnn_sdp_enabled())
    own = getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "function", ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(sdpa.logger, "warning_once", found.append)
    return found


@pytest.mark.parametrize("options", [{"mlp": False}, {"layer": True}, {"layer": True, "head_groups": 2}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_long_queries(
    options: dict, reentrant: bool, seen: list[bool], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward, and when a checkpoint computes it again; head chunks need it only when they are longer."""
    model, ids = build("llama", attn_implementation="sdpa").train(), torch.randint(60, (1, TOKENS))
    enable_checkpointing(model, reentrant)
    seqtile.apply_seqtile(model, chunk_tokens=32, check=False, **options)
    model(ids, labels=ids).loss.backward()
    assert all(seen) and not said
    q = TOKENS * model.config.hidden_size // options.get("head_groups", 1)
    for limit, is_wrong in ((q + 1, False), (q, True)):
        monkeypatch.setattr(limits, "INT32", limit)
        seen.clear()
        model(ids, labels=ids).loss.backward()
        assert set(seen) == {not is_wrong} and len(seen) >= 2 * model.config.num_hidden_layers
    assert f"head width is {q:,}, not less" in said[0] and "head_groups" in said[0]
    seen.clear()
    with torch.no_grad():
        model.eval()(ids)
    assert all(seen), "there is no gradient"


@pytest.mark.parametrize("arch", ["llama", "afmoe", "doge"])
def test_as_models_call_it(arch: str, seen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pass the mask, or all, by keyword."""
    monkeypatch.setattr(limits, "INT32", 1)
    seqtile.apply_seqtile(build("llama"))
    model = small_of(arch).train()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(60, (1, TOKENS))
    model(ids).logits.sum().backward()
    assert seen and not any(seen)


def test_every_argument_by_its_name(seen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    watch_sdpa()
    q, module = torch.randn(1, 2, 64, 8), SimpleNamespace(training=True)
    given = {"module": module, "query": q, "key": q, "value": q, "scaling": 1.0, "is_causal": False}
    ALL_ATTENTION_FUNCTIONS["sdpa"](**given)
    ALL_ATTENTION_FUNCTIONS["sdpa"](**given, attention_mask=torch.ones(1, 1, 64, 64, dtype=torch.bool))
    ALL_ATTENTION_FUNCTIONS["sdpa"](**given, position_bias=torch.randn(1, 2, 64, 64))
    monkeypatch.setattr(limits, "INT32", 10)
    ALL_ATTENTION_FUNCTIONS["sdpa"](**given | {"query": q[..., :1, :1], "key": q[..., :1], "value": q})
    assert seen == [True, False, False, False]


def test_no_other_kernel_is_enabled(seen: list[bool], said: list[str]) -> None:
    q, mask = torch.randn(1, 2, 64, 8), torch.ones(1, 1, 64, 64, dtype=torch.bool)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]), sdpa.around(q, q, q, mask):
        assert cuda.cudnn_sdp_enabled()
    assert "so cuDNN computes it" in said[0]


def test_threads_that_leave_cudnn_out_together() -> None:
    """The switches are the process's: each thread finds cuDNN off, and it is on in the end."""
    found: list[bool] = []

    def leave_out() -> None:
        with sdpa.without_cudnn():
            time.sleep(0.01)
            found.append(cuda.cudnn_sdp_enabled())

    threads = [Thread(target=leave_out) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] * 4 and cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("tokens", "is_wrong"), [(64, True), (63, False), (128, False), (192, True)])
def test_masks(tokens: int, is_wrong: bool, seen: list[bool], said: list[str]) -> None:
    model, ids = build("llama", attn_implementation="sdpa"), torch.randint(60, (2, tokens))
    mask = torch.ones_like(ids)
    seqtile.apply_seqtile(model, check=False)
    model(ids, attention_mask=mask)
    assert all(seen), "all ones are no mask"
    mask[0, -5:] = 0
    seen.clear()
    model(ids, attention_mask=mask)
    assert set(seen) == {not is_wrong} and bool(said) == is_wrong
    assert cuda.cudnn_sdp_enabled()


def test_a_mask_that_the_other_kernel_misreads(
    seen: list[bool], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN stays: NaN are rarer, and seen. Where its gradients would be wrong without a word, it is an error."""
    monkeypatch.setattr(limits, "UINT32", 64 * 64 - 1)
    monkeypatch.setattr(limits, "limit_of", lambda kernel, attention: ("torch 2.12", "torch 2.13 or later"))
    q, mask = torch.randn(1, 2, 64, 8), torch.ones(1, 1, 64, 64, dtype=torch.bool)
    with sdpa.around(q, q, q, mask):
        assert cuda.cudnn_sdp_enabled()
    assert not said
    monkeypatch.setattr(limits, "INT32", q.numel())
    with pytest.raises(ValueError, match=r"wrong gradients .* But .* has more than 2\*\*32 elements"):
        sdpa.around(q, q, q, mask)


def test_one_function_for_the_process(seen: list[bool]) -> None:
    """However often it is put there, and in a model that is only sharded."""
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for _ in range(2):
        watch_sdpa()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].function is own
    AttentionInterface._global_mapping["sdpa"] = own
    seqtile.share_prefixes(build("llama", attn_implementation="sdpa"))
    assert isinstance(ALL_ATTENTION_FUNCTIONS["sdpa"], WatchedSdpa)


@pytest.mark.parametrize(
    ("dtype", "capability", "release", "may"),
    [
        (torch.bfloat16, (9, 0), "2.11.0+cu130", True),
        (torch.float16, (10, 0), "2.13.0", True),
        (torch.float32, (9, 0), "2.11.0+cu130", False),
        (torch.bfloat16, (8, 0), "2.11.0+cu130", False),
        (torch.bfloat16, (9, 0), "2.10.0", False),
    ],
)
def test_where_torch_prefers_cudnn(
    dtype: torch.dtype, capability: tuple, release: str, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere nothing is left out; nor where the user switched cuDNN off."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(limits, "installed", lambda package: release)
    monkeypatch.setattr(limits, "limit_of", limits.limit_of.__wrapped__)  # which keeps its answers
    q = SimpleNamespace(is_cuda=True, dtype=dtype, device=None)
    assert sdpa.may_choose_cudnn("sdpa", q) is may and not sdpa.may_choose_cudnn("eager", q)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not sdpa.may_choose_cudnn("sdpa", q)
    if dtype == torch.float32:  # which autocast would cast, as it does queries after RoPE
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
        assert sdpa.may_choose_cudnn("sdpa", q)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [192, 704])
def test_a_gradient_under_a_mask(tokens: int) -> None:
    """Queries that look away from all keys: cuDNN's gradient is NaN in the releases that have the defect."""
    model = build("llama", attn_implementation="sdpa", head_dim=64).to("cuda", torch.bfloat16)
    seqtile.apply_seqtile(model, check=False)
    q, k = (torch.full((1, 2, tokens, 64), side * 4.0, device="cuda", dtype=torch.bfloat16) for side in (1, -1))
    q.requires_grad_()
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="cuda").tril()
    attention = model.model.layers[0].self_attn
    out = ALL_ATTENTION_FUNCTIONS["sdpa"](attention, q, k, torch.randn_like(k), mask, scaling=0.125)[0]
    out.sum().backward()
    assert q.grad.isfinite().all()
