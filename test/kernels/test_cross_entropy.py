import pytest
import torch

from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import cross_entropy_
from support.assertions import assert_all_as_exact, assert_as_exact, poisoned, relative_error
from support.choice import every_pair, every_value
from support.head_reference import entropies_of, logits_of, losses_of

PLAIN = LossOptions()
VECTORS = ("bias", "class_weight", "row_scale", "lse_scale", "entropy_scale")
NONE: dict[str, torch.Tensor | None] = dict.fromkeys(VECTORS)
OPTIONS = {
    "plain": PLAIN,
    "softcap": LossOptions(softcap=4.0),
    "scale": LossOptions(logit_scale=-0.3, temperature=1.7),
    "smoothing": LossOptions(label_smoothing=0.2),
    "z_loss": LossOptions(z_loss=0.01),
    "all": LossOptions(logit_scale=1.3, softcap=5.0, temperature=0.6, label_smoothing=0.1, z_loss=1e-3),
}


def inputs(rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A chunk of products, the buffer around it (whose row stride exceeds the row length), and targets."""
    slab = poisoned(rows, vocab + 5, dtype=dtype, device=device)
    products = slab[:, :vocab].copy_(torch.randn(rows, vocab, device=device) * 5)
    target = torch.randint(0, vocab, (rows,), device=device)
    target[0] = vocab - 1
    return products, slab, target


def reference(
    products: torch.Tensor, target: torch.Tensor, options: LossOptions, vectors: dict[str, torch.Tensor | None]
) -> list[torch.Tensor]:
    """Losses, log-sum-exps, entropies, the gradient as the kernel writes it, sums of squares and means."""
    leaf = products.detach().clone().requires_grad_()
    scales = {"logit_scale": options.logit_scale, "softcap": options.softcap, "temperature": options.temperature}
    logits = logits_of(leaf, vectors["bias"], **scales)
    more = {"label_smoothing": options.label_smoothing, "z_loss": options.z_loss}
    losses = losses_of(logits, target, class_weight=vectors["class_weight"], **more)
    entropies = entropies_of(logits)
    total = losses if vectors["row_scale"] is None else losses * vectors["row_scale"]
    lse = logits.logsumexp(1)
    for values, scale in ((lse, vectors["lse_scale"]), (entropies, vectors["entropy_scale"])):
        if scale is not None:
            total = total + values * scale
    (gradient,) = torch.autograd.grad(total.sum() * options.temperature / options.logit_scale, leaf)
    return [losses, lse, entropies, gradient, logits.softmax(1).square().sum(1), logits.mean(1)]


def run(
    products: torch.Tensor, target: torch.Tensor, options: LossOptions = PLAIN, **arguments
) -> dict[str, torch.Tensor]:
    """Returns all of the kernel's outputs, in buffers that were filled with NaN."""
    rows, device = products.shape[0], str(products.device)
    names = ("losses", "lse", "entropy", "squares", *(("mean",) if arguments.get("class_weight") is None else ()))
    outputs = {name: poisoned(rows, dtype=torch.float32, device=device) for name in names}
    outputs["predicted"] = torch.full_like(target, -7)
    others = {name: vector for name, vector in outputs.items() if name != "losses"}
    cross_entropy_(products, target, outputs["losses"], options, **others, **arguments)
    return outputs


def values_of(ours: dict[str, torch.Tensor], products: torch.Tensor) -> list[torch.Tensor]:
    """The kernel's outputs in the reference's order; with class weights it has no means."""
    means = [ours["mean"]] if "mean" in ours else []
    return [ours["losses"], ours["lse"], ours["entropy"], products, ours["squares"], *means]


@pytest.mark.full("of 180 cases of one kernel's twin", but=every_pair)
@pytest.mark.on_gpu("every case of a kernel")
@pytest.mark.in_interpreter("of 396 cases of two kernels", only=every_value)
@pytest.mark.parametrize(
    "given", [(), ("bias", "class_weight"), ("row_scale", "entropy_scale"), ("lse_scale",), VECTORS], ids=str
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab"), [(33, 1000), (17, 4097)])
def test_values_and_gradient(
    rows: int, vocab: int, dtype: torch.dtype, options: LossOptions, given: tuple[str, ...], device: str
) -> None:
    products, slab, target = inputs(rows, vocab, dtype, device)
    vectors = {name: torch.randn(rows, device=device) for name in VECTORS}
    vectors |= {"bias": torch.randn(vocab, device=device).to(dtype), "class_weight": torch.rand(vocab, device=device)}
    vectors = {name: value if name in given else None for name, value in vectors.items()}
    same = reference(products, target, options, vectors)
    truth = reference(products.double(), target, options, vectors)

    ours = run(products, target, options, write_grad=True, **vectors)

    for value, theirs, true in zip(values_of(ours, products), same, truth, strict=False):
        assert_as_exact(value, theirs, true)
    assert slab[:, vocab:].isnan().all(), "wrote past a row"


@pytest.mark.parametrize(("rows", "vocab"), [(3, 49152), (2, 128256)])
def test_real_vocabularies(rows: int, vocab: int, device: str) -> None:
    products, _, target = inputs(rows, vocab, torch.bfloat16, device)
    same, truth = (reference(chunk, target, PLAIN, NONE) for chunk in (products, products.double()))
    ours = run(products, target, write_grad=True)
    assert_all_as_exact(values_of(ours, products), same, truth)


@pytest.mark.parametrize("vocab", [1000, 5000, 12289])
def test_predicted(vocab: int, device: str) -> None:
    products, _, target = inputs(9, vocab, torch.float32, device)
    products[3, 0] = products[4, vocab - 1] = 1e3
    expected = products.argmax(1)
    assert run(products, target)["predicted"].equal(expected)


def test_losses_alone(device: str) -> None:
    products = torch.randn(9, 1000, device=device)
    target = torch.randint(0, 1000, (9,), device=device)
    options = OPTIONS["all"]
    with_gradient = run(products.clone(), target, options, write_grad=True)
    alone, before = poisoned(9, dtype=torch.float32, device=device), products.clone()
    cross_entropy_(products, target, alone, options)
    # A GPU's compiler may fuse the sums of the two kernels differently.
    torch.testing.assert_close(alone, with_gradient["losses"], rtol=1e-6 if device == "cuda" else 0, atol=0)
    assert products.equal(before)


@pytest.mark.parametrize("outside", [1000, -1, 2**40])
def test_target_out_of_range_poisons_its_row_alone(outside: int, device: str) -> None:
    products = torch.randn(5, 1000, device=device)
    target = torch.tensor([1, outside, 3, 4, 5], device=device)
    ours = run(products, target, OPTIONS["all"], write_grad=True)
    bad = torch.tensor([False, True, False, False, False], device=device)
    assert ours["losses"].isnan().equal(bad) and ours["lse"].isnan().equal(bad)
    assert products.isnan().all(1).equal(bad) and products.isnan().any(1).equal(bad)


def test_extreme_logits(device: str) -> None:
    """A row with a one-hot softmax, a flat row, and a row with masked (-inf) columns."""
    products = torch.zeros(3, 5000, device=device)
    products[0, 4999] = 1e4
    products[2, :4500] = -torch.inf
    target = torch.tensor([4999, 17, 4600], device=device)
    leaf = products.clone().requires_grad_()
    torch.nn.functional.cross_entropy(leaf, target, reduction="sum").backward()
    ours = run(products, target, write_grad=True)
    expected = torch.tensor([0.0, 5000.0, 500.0], dtype=torch.float64)
    expected[1:] = expected[1:].log()
    for name in ("losses", "entropy"):
        torch.testing.assert_close(ours[name].double().cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(products, leaf.grad, rtol=1e-5, atol=1e-7)


def test_logits_far_from_zero(device: str) -> None:
    """A constant added to all logits of a row costs no precision."""
    products = torch.randn(17, 1000, device=device) + 3000
    target = torch.randint(0, 1000, (17,), device=device)
    truth = reference(products.double(), target, PLAIN, NONE)
    ours = run(products, target, write_grad=True)
    for value, true in zip((ours["losses"], ours["entropy"], products), (truth[0], *truth[2:4]), strict=True):
        assert relative_error(value, true) <= 1e-6


def test_softcap_of_small_and_large_logits(device: str) -> None:
    """tanh has float32 precision where it cancels (near 0) and where it saturates."""
    products = torch.logspace(-6, 3, 4000, device=device).repeat(2, 1) * torch.tensor([[1.0], [-1.0]], device=device)
    target = torch.tensor([0, 3999], device=device)
    same, truth = (reference(chunk, target, OPTIONS["softcap"], NONE) for chunk in (products, products.double()))
    ours = run(products, target, OPTIONS["softcap"], write_grad=True)
    assert_all_as_exact((ours["losses"], products), (same[0], same[3]), (truth[0], truth[3]))


def test_softcap_where_its_polynomial_ends(device: str) -> None:
    """tanh has float32 precision on both sides of 0.25, where its Taylor polynomial ends."""
    products = torch.linspace(0.05, 0.45, 41, device=device)[:, None] * torch.tensor([100.0, -100.0], device=device)
    target = torch.ones(41, dtype=torch.int64, device=device)
    expected = torch.nn.functional.cross_entropy((products.double() / 100).tanh() * 100, target, reduction="none")
    ours = run(products, target, LossOptions(softcap=100.0))
    torch.testing.assert_close(ours["losses"].double(), expected, rtol=2e-6, atol=0)


@pytest.mark.alone
def test_row_offsets_are_int64(device: str) -> None:
    """Row 3 starts at element 3 * 2**30 > 2**31. The buffer is virtual memory: only four rows of it are touched."""
    stride, vocab = 2**30, 1000
    slab = torch.empty(3 * stride + vocab, dtype=torch.bfloat16, device=device)
    products = slab.as_strided((4, vocab), (stride, 1))
    products.copy_(torch.randn(4, vocab, device=device))
    target = torch.randint(0, vocab, (4,), device=device)
    losses, _, _, gradient, *_ = reference(products.contiguous(), target, PLAIN, NONE)
    ours = run(products, target, write_grad=True)
    torch.testing.assert_close(ours["losses"], losses)
    torch.testing.assert_close(products.contiguous(), gradient)


@pytest.mark.parametrize("which", ["losses", "everything"])
def test_the_custom_op_is_sound(which: str, device: str) -> None:
    """As torch.compile sees it: the op writes exactly the arguments that it declares."""
    products, target = torch.randn(5, 100, device=device), torch.randint(0, 100, (5,), device=device)
    losses, lse, entropy, mean, squares = torch.empty(5, 5, device=device).unbind()
    outputs = (lse, entropy, torch.empty_like(target), mean, squares) if which == "everything" else (None,) * 5
    bias = torch.randn(100, device=device)
    arguments = (products, target, losses, True, 1.0, 0.0, 1.0, 0.0, 0.0, bias, None, *outputs, None, None, None)
    torch.library.opcheck(torch.ops.seqtile.cross_entropy_, arguments)
