import pytest
import torch

from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import divergence_
from support.assertions import assert_all_as_exact, assert_as_exact, poisoned
from support.choice import every_pair, every_value
from support.head_reference import divergences_of, entropies_of, logits_of

Options = tuple[float, tuple[LossOptions, LossOptions]]
PLAIN = (LossOptions(), LossOptions())
CAPPED = (LossOptions(1.3, 4.0, 0.8), LossOptions(0.7, 6.0, 0.8))
OPTIONS: dict[str, Options] = {
    "forward": (0.0, PLAIN),
    "reverse": (1.0, PLAIN),
    "mixed": (0.3, PLAIN),
    "all": (0.6, (LossOptions(1.3, 4.0, 1.7), LossOptions(-0.7, 6.0, 1.7))),
    "forward, caps": (0.0, CAPPED),
    "reverse, caps": (1.0, CAPPED),
}


def inputs(rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A chunk of products of each head, and the buffers around them, whose row stride exceeds the row length."""
    slabs = [poisoned(rows, vocab + extra, dtype=dtype, device=device) for extra in (5, 11)]
    return [slab[:, :vocab].copy_(torch.randn(rows, vocab, device=device) * 3) for slab in slabs], slabs


def reference(
    products: list[torch.Tensor], options: Options, biases: list, row_scale: torch.Tensor | None
) -> list[torch.Tensor]:
    """Divergences, the student's entropies, and the gradients as the kernel writes them."""
    leaves = [part.detach().clone().requires_grad_() for part in products]
    beta, of_heads = options
    logits = [
        logits_of(leaf, bias, softcap=own.softcap, logit_scale=own.logit_scale, temperature=own.temperature)
        for leaf, bias, own in zip(leaves, biases, of_heads, strict=True)
    ]
    losses = divergences_of(*(x.log_softmax(1) for x in logits), beta)
    total = (losses if row_scale is None else losses * row_scale.to(losses.dtype)).sum()
    gradients = torch.autograd.grad(total * of_heads[0].temperature, leaves)
    return [losses, entropies_of(logits[0]), *(d / own.logit_scale for d, own in zip(gradients, of_heads, strict=True))]


@pytest.mark.full("of 216 cases of one kernel's twin", but=every_pair)
@pytest.mark.on_gpu("every case of a kernel")
@pytest.mark.in_interpreter("of 396 cases of two kernels", only=every_value)
@pytest.mark.parametrize("write", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["plain", "biases and row scale"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab"), [(33, 1000), (33, 4097)])  # with fewer rows, rounding errors vary too much
def test_values_and_gradients(
    rows: int, vocab: int, dtype: torch.dtype, options: Options, given: bool, write: tuple, device: str
) -> None:
    products, slabs = inputs(rows, vocab, dtype, device)
    biases = [torch.randn(vocab, device=device).to(dtype) if given else None for _ in products]
    row_scale = torch.randn(rows, device=device) if given else None
    before = [part.clone() for part in products]
    same = reference(products, options, biases, row_scale)
    truth = reference([part.double() for part in products], options, biases, row_scale)
    losses, entropy = (poisoned(rows, dtype=torch.float32, device=device) for _ in range(2))

    divergence_(*products, losses, *options, biases=biases, entropy=entropy, row_scale=row_scale, write=write)

    assert_as_exact(losses, same[0], truth[0])
    assert_as_exact(entropy, same[1], truth[1])
    for part, asked, theirs, true, old in zip(products, write, same[2:], truth[2:], before, strict=True):
        if asked:
            assert_as_exact(part, theirs, true)
        else:
            assert part.equal(old)
    for slab in slabs:
        assert slab[:, vocab:].isnan().all(), "wrote past a row"


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_losses_alone(beta: float, device: str) -> None:
    """Without gradients the products do not change, and the losses are the same."""
    products, _ = inputs(9, 1000, torch.float32, device)
    before = [part.clone() for part in products]
    found = [poisoned(9, dtype=torch.float32, device=device) for _ in range(2)]
    divergence_(*products, found[0], beta, PLAIN)
    assert all(part.equal(old) for part, old in zip(products, before, strict=True))
    divergence_(*products, found[1], beta, PLAIN, write=(True, True))
    assert found[0].equal(found[1])


def test_a_real_vocabulary(device: str) -> None:
    products, _ = inputs(2, 49_152, torch.bfloat16, device)
    options = OPTIONS["mixed"]
    same, truth = (
        reference(parts, options, [None, None], None) for parts in (products, [p.double() for p in products])
    )
    losses = poisoned(2, dtype=torch.float32, device=device)
    divergence_(*products, losses, *options, write=(True, True))
    assert_all_as_exact([losses, *products], [same[0], *same[2:]], [truth[0], *truth[2:]])
