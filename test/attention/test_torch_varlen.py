"""torch's kernel for documents of several lengths against dense attention. A stand-in on the CPU computes what its
operators promise."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attention.cpu_kernel import kernel_on_cpu
from attention.documents import CASES, Case, Documents
from seqtile import limits
from seqtile.attention import torch_varlen
from seqtile.attention.backends import attend
from seqtile.attention.heads import RankHeads
from seqtile.attention.torch_varlen import reason_against, register
from sp.attentions import asked, dense
from support.assertions import assert_as_exact, assert_each_as_exact

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
GROUPED = Case((4, 2), (20, 33), 30, has_sinks=True)


@pytest.fixture
def kernel() -> Iterator[None]:
    with kernel_on_cpu():
        yield


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("case", CASES)
def test_documents(case: str, dtype: torch.dtype) -> None:
    """Output and gradients, also of sinks."""
    drawn = Documents.drawn(CASES[case], dtype)
    ours, same_dtype, truth = (
        drawn.results(drawn.by_kernel),
        drawn.results(drawn.dense),
        drawn.results(drawn.dense, FP64),
    )
    assert_each_as_exact(ours, same_dtype, truth)
    assert {name: x.dtype for name, x in ours.items()} == {name: x.dtype for name, x in same_dtype.items()}


@pytest.mark.usefixtures("kernel")
def test_operands_that_the_kernel_would_misread() -> None:
    """Heads first, as where padding was taken out: the output is tokens first, so that nothing copies it. And in one
    tensor with an odd number of others, so that rows are not aligned."""
    drawn = Documents.drawn(Case((4, 4)), FP32)
    heads_first = {name: x.contiguous() for name, x in drawn.operands.items()}
    odd = {name: torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for name, x in drawn.operands.items()}
    columns = {name: x.transpose(2, 3).contiguous().transpose(2, 3) for name, x in drawn.operands.items()}
    expected = drawn.by_kernel(**drawn.operands)
    for operands in (heads_first, odd, columns):
        out = drawn.by_kernel(**operands)
        assert out.equal(expected) and out.is_contiguous()


@pytest.mark.usefixtures("kernel")
def test_what_is_saved() -> None:
    """Operands as they lie, cut from one projection, the output, and a number for each query and head."""
    drawn = Documents.drawn(Case((4, 4)), BF16)
    x = torch.randn(1, drawn.ends["q"][-1], 3, 4, 64, dtype=BF16, requires_grad=True)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = drawn.by_kernel(*(part.transpose(1, 2) for part in x.unbind(2)))
    assert [part.data_ptr() for part in (*x[0].unbind(1), out)] == [tensor.data_ptr() for tensor in saved[:4]]
    assert [(tensor.numel(), tensor.dtype) for tensor in saved[4:]] == [(out.numel() // 64, FP32)]


@pytest.mark.usefixtures("kernel")
def test_scores_of_attention_with_lengths_of_a_layout() -> None:
    """As sequence parallelism calls it, by its name among Hugging Face's."""
    share = RankHeads(slice(0, 4), slice(0, 2), (0, 0, 1, 1), ((0, 200),))
    rows = ((0, 70), (70, 199))
    q, k, v = (torch.randn(1, heads, 200, 24) for heads in (4, 2, 2))
    out = attend(asked(register(), (rows,), 200, share, 30, scaling=None, dropout=0.0), q, k, v)
    for start, stop in rows:
        away = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        parts = [x[0, :, start:stop] for x in (q, k, v)]
        expected, truth = (
            dense(*(x.to(dtype) for x in parts), (away >= 0) & (away < 30), None) for dtype in (FP32, FP64)
        )
        assert_as_exact(out[0, start:stop].transpose(0, 1), expected, truth)
    assert not out[0, 199:].any()


@pytest.mark.usefixtures("kernel")
def test_checkpoints_and_hooks_of_saved_tensors() -> None:
    """The same results, recomputed, or with saved tensors elsewhere."""
    drawn = Documents.drawn(GROUPED, FP32)
    expected = drawn.results(drawn.by_kernel)

    def moved(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            return drawn.by_kernel(q, k, v, sinks)

    def recomputed(*operands: Tensor, reentrant: bool) -> Tensor:
        return checkpoint(drawn.by_kernel, *operands, use_reentrant=reentrant)

    def recomputed_by_names(reentrant: bool) -> Callable[..., Tensor]:
        return lambda **operands: recomputed(*operands.values(), reentrant=reentrant)

    for attention in (moved, recomputed_by_names(False)):
        found = drawn.results(attention)
        assert all(found[name].equal(x) for name, x in expected.items())
    leaves = [x.detach().requires_grad_() for x in drawn.operands.values()]
    recomputed(*leaves, reentrant=True).backward(drawn.upstream)
    assert all(leaf.grad.equal(expected[name]) for name, leaf in zip(drawn.operands, leaves, strict=True))


@pytest.mark.usefixtures("kernel")
def test_autocast_changes_nothing() -> None:
    """Operands are cast before, also in a forward that runs under autocast and is differentiated in it."""
    drawn = Documents.drawn(GROUPED, BF16)
    expected = drawn.results(drawn.by_kernel)
    with torch.autocast("cpu", torch.float16):
        found = drawn.results(drawn.by_kernel)
    assert all(found[name].equal(x) for name, x in expected.items())


@pytest.mark.full("3 s of torch.compile")
@pytest.mark.usefixtures("kernel")
def test_compiled_in_one_graph() -> None:
    drawn = Documents.drawn(GROUPED, FP32)
    lengths = drawn.lengths  # whose longest documents are read

    def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return torch_varlen.torch_varlen(None, q, k, v, s_aux=sinks, sliding_window=30, **lengths)[0]

    expected = drawn.results(attention)
    found = drawn.results(torch.compile(attention, backend="aot_eager", fullgraph=True))
    assert all(found[name].equal(x) for name, x in expected.items())


@pytest.mark.usefixtures("kernel")
def test_flops_of_documents() -> None:
    """torch's counter counts the squares of the documents, not of the row."""

    def counted(documents: int) -> int:
        drawn = Documents.drawn(Case(), FP32, number=documents)
        drawn = drawn._replace(ends={name: list(range(0, 801, 800 // documents)) for name in "qk"})
        drawn.operands.update({name: torch.randn(1, 4, 800, 64) for name in "qkv"})
        with FlopCounterMode(display=False) as counter:
            drawn._replace(upstream=torch.ones(1, 800, 4, 64)).results(drawn.by_kernel)
        return counter.get_total_flops()

    assert counted(1) == 40 * counted(40) > 0


def on_gpu(width: int = 128, dtype: torch.dtype = BF16, of_values: int = 128) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(1, 4, 8, size, dtype=dtype, device="cuda") for size in (width, of_values))


@pytest.fixture
def gpu() -> Iterator[partial]:
    """A GPU as far as torch says what it has: `gpu(NAME, value)` replaces what it says. Tensors are fake."""
    with ExitStack() as stack:
        says = {"is_available": True, "get_device_capability": (9, 0)}

        def replace(name: str, value: object) -> None:
            where = torch.backends.cuda if name == "is_flash_attention_available" else torch.cuda
            stack.enter_context(patch.object(where, name, lambda *args: value))

        stack.enter_context(FakeTensorMode())
        for name, value in (*says.items(), ("is_flash_attention_available", True)):
            replace(name, value)
        yield replace


def test_what_the_kernel_can_compute(gpu: Callable) -> None:
    for operands in (on_gpu(), on_gpu(dtype=torch.float16), on_gpu(192), on_gpu(256, of_values=256), on_gpu(20)):
        assert reason_against(*operands, {"dropout": 0.0, "softcap": None, "s_aux": torch.empty(4)}) is None
    gpu("get_device_capability", (8, 0))
    assert reason_against(*on_gpu(), {}) is None
    gpu("is_available", False)  # a simulation
    gpu("is_flash_attention_available", False)
    assert reason_against(*on_gpu(), {}) is None


@pytest.mark.parametrize(
    ("reason", "options", "shape"),
    [
        ("not in float32", {}, {"dtype": FP32}),
        ("at most 256 wide, not 264", {}, {"width": 264}),
        ("at most 256 wide, not 257", {}, {"of_values": 257}),
        ("dropout", {"dropout": 0.1}, {}),
        ("soft cap", {"softcap": 30.0}, {}),
    ],
)
def test_calls_that_it_cannot_compute(gpu: Callable, reason: str, options: dict, shape: dict) -> None:
    assert reason in reason_against(*on_gpu(**shape), options)


@pytest.mark.parametrize(
    ("reason", "name", "value"),
    [
        ("compute capability 8.0, this GPU has 7.5", "get_device_capability", (7, 5)),
        ("without NVIDIA's FlashAttention", "is_flash_attention_available", False),
    ],
)
def test_gpus_that_lack_it(gpu: Callable, reason: str, name: str, value: object) -> None:
    gpu(name, value)
    assert reason in reason_against(*on_gpu(), {})


def test_no_gpu() -> None:
    q = torch.empty(1, 4, 8, 64, dtype=BF16)
    assert reason_against(q, q, {}) == "it runs on a GPU, not on cpu"


def test_an_old_release_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward overflows, by the tokens of a document and 128 for each before it. No kernel runs."""
    said: list[str] = []
    monkeypatch.setattr(torch_varlen.logger, "warning_once", said.append)
    monkeypatch.setattr(limits, "limit_of", limits.limit_of.__wrapped__)  # which keeps its answers
    tokens = 2**31 // (32 * 128)

    def call(release: str, *documents: int, trained: bool = True) -> list[str]:
        monkeypatch.setattr(limits, "installed", {"torch": release}.get)
        said.clear()
        starts = torch.empty(len(documents) + 1, dtype=torch.int32, device="meta")
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        lengths |= {"max_length_q": max(documents), "max_length_k": max(documents)}
        q = torch.empty(1, 32, sum(documents), 128, dtype=BF16, device="meta", requires_grad=trained)
        k = torch.empty(1, 8, sum(documents), 128, dtype=BF16, device="meta")
        torch_varlen.torch_varlen(None, q, k, k, **lengths)
        return said

    assert "from 524,288 tokens in a document on" in call("2.10.0", tokens)[0]
    assert call("2.10.0", 9, tokens - 128) and not call("2.10.0", 9, tokens - 129)
    assert not call("2.10.0", tokens - 1) and not call("2.10.0", tokens, trained=False)
    assert not call("2.11.0", tokens) and not call("2.10.0", *[tokens // 4] * 8)
