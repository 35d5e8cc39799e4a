"""On a GPU: torch's kernel for documents of several lengths, which a CPU lacks."""

import pytest
import torch

from attention.documents import CASES, Case, Documents
from seqtile.attention.torch_varlen import reason_against
from support.assertions import assert_each_as_exact

pytestmark = pytest.mark.gpu
MANY = {
    "many documents": Case((8, 2), (128, 128)),
    "wide heads, window": Case((4, 2), (256, 256), 100),
    "a width of which torch 2.11 is said to write too much": Case((4, 4), (160, 160)),
    "a width of 224": Case((4, 2), (224, 224)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES, *MANY])
def test_documents(case: str, dtype: torch.dtype) -> None:
    """Output and gradients, also of sinks, against dense attention in the same dtype and in float64."""
    drawn = Documents.drawn((CASES | MANY)[case], dtype, "cuda", number=40 if case in MANY else 5, most=500)
    if (reason := reason_against(drawn.operands["q"], drawn.operands["v"], {})) is not None:
        pytest.skip(reason)
    same_dtype, truth = drawn.results(drawn.dense), drawn.results(drawn.dense, torch.float64)
    assert_each_as_exact(drawn.results(drawn.by_kernel), same_dtype, truth)
