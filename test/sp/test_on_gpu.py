"""On a GPU: kernels that a CPU lacks, flash and flex attention, and nccl collectives, on one rank."""

from collections.abc import Iterator

import pytest
import torch

from seqtile import sp
from seqtile.attention.backends import attend
from seqtile.attention.heads import RankHeads, rank_heads
from sp.attentions import INSTALLED, asked, dense
from sp.cases import WRAPPED, attention_cases, batch_of_kind
from sp.over_ranks import alone
from sp.prefixes import path_mask
from support.assertions import assert_as_exact, relative_error
from support.tiny import build, loss_and_gradients

pytestmark = pytest.mark.gpu
LENGTH = 1000
SEQUENCES = {  # documents, and the ones that they continue
    "documents": (((0, 300), (300, 910)), (None, None)),
    "shared prefix": (((0, 300), (300, 500), (500, 910)), (None, 0, 0)),
}


@pytest.mark.parametrize("implementation", [*INSTALLED, "flash_attention_2"])
@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_attention(implementation: str, window: int | None, rank: int, size: int, sequence: str) -> None:
    """bfloat16, against dense attention in the same dtype and in float64; queries of padding get zeros."""
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(implementation)
    if package:
        pytest.importorskip(package)
    rows = rank_heads(rank, size, 1, 1, ((0, LENGTH),)).rows
    share = RankHeads(slice(0, 4), slice(0, 2), (0, 0, 1, 1), rows)
    index = torch.cat([torch.arange(first, last) for first, last in rows])
    documents, parents = SEQUENCES[sequence]
    seen = path_mask(LENGTH, documents, parents, window)[index]
    operands = [torch.randn(1, heads, LENGTH, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    upstream = torch.randn(1, 4, len(index), 64, device="cuda", dtype=torch.bfloat16)

    def run(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in operands)
        if ours:
            asking = asked(implementation, (documents,), LENGTH, share, window, scaling=None, dropout=0.0)
            asking.layout.parents = () if sequence == "documents" else parents
            out = attend(asking, q[:, :, index], k, v).transpose(1, 2)
        else:
            hidden = ~seen.any(-1, keepdim=True).cuda()
            out = dense(q[:, :, index], k, v, seen.cuda() | hidden, None).masked_fill(hidden, 0)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream.to(dtype))]

    found = zip(run(torch.bfloat16, True), run(torch.bfloat16, False), run(torch.float64, False), strict=True)
    for ours, same_dtype, truth in found:
        assert_as_exact(ours, same_dtype, truth)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[sp.SequenceParallel]:
    yield from alone("nccl")


IN_FLOAT32 = [case for case in attention_cases() if not WRAPPED.get(case[0].split()[0], "").startswith("flash")]


@pytest.mark.on_gpu(
    "a GPU has its own attentions and collectives; of masks the documents are the most",
    only=("*, packed", "gqa*", "flex 6/3, padded, window", "long*", "dynamic*"),
)
@pytest.mark.parametrize(
    ("case", "kind", "arch", "shape"), IN_FLOAT32, ids=[f"{case}, {kind}" for case, kind, *_ in IN_FLOAT32]
)
def test_one_rank_of_nccl(case: str, kind: str, arch: str, shape: dict, one_rank: sp.SequenceParallel) -> None:
    """Loss and gradients of every kind of heads and of sequence, in float32."""
    model = build(arch, device="cuda", **shape)
    batch = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in batch_of_kind(kind).items()}
    loss, gradients = loss_and_gradients(model, **batch)
    model.zero_grad()
    if implementation := WRAPPED.get(case.split()[0]):
        model.set_attn_implementation(implementation)
    sp.apply_ulysses(model, one_rank)
    ours = sp.reduce_loss(model(**sp.shard(batch, one_rank)).loss, one_rank)
    ours.backward()
    assert relative_error(ours, loss) <= 1e-5
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) <= 1e-4, name
