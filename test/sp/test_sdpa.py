"""What sdpa is asked for where cuDNN may compute it: few lengths, the same in every batch; never cuDNN with a mask."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqtile.attention import by_masks
from seqtile.attention import sdpa_lengths as sdpa
from seqtile.attention.backends import attend
from seqtile.attention.heads import Rows, rank_heads
from sp.attentions import asked

LENGTH = 256


class Asked(NamedTuple):
    """One call of sdpa."""

    tokens: int
    kind: type
    """Of the mask."""
    cudnn: bool
    flash: bool


class Written(TorchDispatchMode):
    """Counts the elements of what operations return, views aside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **kwargs or {})
        if not func.is_view:
            self.elements += sum(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Asked]]:
    """Records the calls as on a GPU, where a mask may also be torch's causal one."""
    found, function = [], F.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
        found.append(Asked(q.shape[2], type(attn_mask), cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()))
        attn_mask = attn_mask._materialize() if isinstance(attn_mask, CausalBias) else attn_mask
        return function(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(by_masks, "may_choose_cudnn", lambda implementation, q: implementation == "sdpa")
    monkeypatch.setattr(by_masks, "is_causal_from_the_end", lambda q, block, reach: block.is_causal(reach))
    yield found
    assert cuda.cudnn_sdp_enabled() and cuda.flash_sdp_enabled(), "what the user had set is set again"


def step(
    documents: tuple[Rows, ...], window: int | None = None, ranks: int = 1, parents: tuple[int | None, ...] = ()
) -> list[Tensor]:
    """Outputs and gradients of the first rank of those that share the heads."""
    length = documents[0][-1][1]
    share = rank_heads(0, ranks, 1, 1, ((0, length),))
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(len(documents), 1, tokens, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for tokens in (sum(stop - start for start, stop in share.rows), length, length)
    )
    asking = asked("sdpa", documents, length, share, window, dropout=0.0)
    asking.layout.parents = parents
    out = attend(asking, q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out).cumsum(1))]


def packed(count: int) -> Rows:
    """A row of `count` documents of random lengths."""
    return tuple(pairwise([0, *sorted((torch.randperm(LENGTH - 1)[: count - 1] + 1).tolist()), LENGTH]))


def test_lengths_are_few_in_all_batches(calls: list[Asked]) -> None:
    """For a few documents those of a grid; for 38, of up to 38 lengths, not by cuDNN; as exact as they
    are without padding."""
    grid = {sdpa.rounded(tokens) for tokens in range(1, LENGTH + 1)}
    assert len(grid) == 16 + 8 * 4 and all(sdpa.rounded(x) == x for x in grid)
    assert all(x <= sdpa.rounded(x) <= 9 / 8 * x for x in range(1, 2000))
    of_cudnn = set()
    for count in (2, 3, 4) * 3:
        calls.clear()
        row = packed(count)
        found = step((row,))
        assert {call.tokens for call in calls} == {sdpa.rounded(stop - start) for start, stop in row}
        assert all(call.cudnn and call.kind is type(None) for call in calls)
        of_cudnn |= {call.tokens for call in calls}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(by_masks, "may_choose_cudnn", lambda *_: False)
            for ours, exact in zip(found, step((row,)), strict=True):
                assert torch.allclose(ours, exact, rtol=1e-12, atol=1e-12)
    assert of_cudnn <= grid
    calls.clear()
    step((packed(38),))
    assert len(calls) == 38 and not any(call.cudnn for call in calls)


@pytest.mark.parametrize("documents", [((0, LENGTH),), ((0, 201),)], ids=["whole", "padded"])
def test_one_document_is_not_copied(documents: Rows, calls: list[Asked]) -> None:
    step((documents,))
    assert calls == [Asked(documents[0][1], type(None), True, True)]


def test_rows_of_several_lengths(calls: list[Asked]) -> None:
    """Each row of a padded batch has its length; more than four leave cuDNN out."""
    for count, lengths, cudnn in ((4, [112, 208, 224, 256], True), (5, [111, 150, 199, 211, 250], False)):
        calls.clear()
        step(tuple(((0, tokens),) for tokens in (250, 211, 199, 111, 150)[:count]))
        assert sorted(call.tokens for call in calls) == lengths and {call.cudnn for call in calls} == {cudnn}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ({"window": 33}, Tensor),
        ({"ranks": 2}, CausalBias),
        ({"ranks": 2, "window": 64}, Tensor),
        ({"parents": (None, 0, 0)}, CausalBias),
    ],
)
def test_never_cudnn_with_a_mask(case: dict, kind: type, calls: list[Asked]) -> None:
    """Nor when attention is called again in the backward, nor a backend that the user switched off: with a mask cuDNN's
    gradient may be NaN."""
    documents = (((0, 100), (100, 164), (164, LENGTH)),)
    step(documents, **case)
    masked = [call for call in calls if call.kind is not type(None)]
    assert masked and masked[: len(masked) // 2] == masked[len(masked) // 2 :], "in forward and backward"
    assert not any(call.cudnn for call in masked) and kind in {call.kind for call in masked}
    calls.clear()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        step(documents, **case)
    assert not any(call.flash or (call.cudnn and call.kind is not type(None)) for call in calls)
    calls.clear()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):  # without cudnn scores of length x length
        step(documents, **case)
    assert all(call.cudnn for call in calls)


def test_gradients_of_documents_are_joined_once() -> None:
    """38 documents write at most thrice as many elements as one, since some are padded to fewer lengths; gradients of
    slices would write 38 times as many."""
    written = []
    for count in (1, 38):
        with Written() as counted:
            step((packed(count),))
        written.append(counted.elements)
    assert written[1] <= 3 * written[0]


def test_causal_from_the_end_takes_no_memory_of_pairs() -> None:
    """torch's function, at these lengths, asks for 8 TiB."""
    bias = sdpa.causal_from_the_end(2**20, 2**20)
    assert bias.untyped_storage().nbytes() == 0
    assert (bias.seq_len_q, bias.seq_len_kv) == (2**20, 2**20)
    few, same = sdpa.causal_from_the_end(5, 7), causal_lower_right(5, 7)
    assert few.variant == same.variant and torch.equal(few._materialize(), same._materialize())


def test_padded_documents_are_laid_out_tokens_first() -> None:
    """As they were: sdpa's output follows q, and in another layout cuDNN's backward would copy the gradient."""
    q, k, v = (torch.randn(2, 5, 3, 4).transpose(1, 2) for _ in range(3))
    seen = []

    def attention(*padded: Tensor) -> Tensor:
        seen.extend(padded)
        return padded[0].transpose(1, 2)

    out = sdpa.in_lengths({5: 6}, attention, q, k, v)
    assert torch.equal(out, q.transpose(1, 2))
    assert all(x.shape == (2, 3, 6, 4) and x.transpose(1, 2).is_contiguous() for x in seen)


def test_one_query_at_the_end_needs_no_mask(calls: list[Asked]) -> None:
    """Hugging Face lays the queries of one token out by kv heads, and would do so with a mask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_masks, "is_causal_from_the_end", lambda *_: False)
        masked = step((((0, 8), (8, 9), (9, 10)),), parents=(None, 0, 0))
    calls.clear()
    for ours, there in zip(step((((0, 8), (8, 9), (9, 10)),), parents=(None, 0, 0)), masked, strict=True):
        assert torch.allclose(ours, there, rtol=1e-12, atol=1e-12)
    assert {call.kind for call in calls} == {type(None)}


def test_long_documents_are_not_padded() -> None:
    long = sdpa.LONG + 1
    assert sdpa.lengths_for_cudnn({100, long}) == {100: 104, long: long}
