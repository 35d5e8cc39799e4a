import itertools
import random
from typing import Any

import pytest
import torch

from seqtile import linear_divergence
from support.assertions import assert_each_as_exact
from support.choice import every_pair
from support.head_reference import entropies_of, logits_of
from support.measure import FlopCount, LiveBytes, eager_memory

V = 1000
WIDTHS = (48, 80)  # of the student, of the teacher
BETAS = (0.0, 0.3, 1.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "caps and scales": {"student_softcap": 4.0, "teacher_softcap": 6.0, "student_scale": 1.3, "teacher_scale": -0.7},
    "biases": {
        "student_bias": True,
        "teacher_bias": True,
        "student_scale": 0.5,
        "teacher_scale": 1.4,
        "temperature": 0.8,
    },
}


def heads(tokens: int, dtype: torch.dtype, device: str, trained: bool = False, **options: Any) -> dict[str, Any]:
    """Tensors of both heads, the teacher's without gradients unless it is trained, and other arguments."""
    found: dict[str, Any] = {}
    for name, width in zip(("student", "teacher"), WIDTHS, strict=True):
        needs = trained or name == "student"
        found[f"{name}_hidden"] = torch.randn(tokens, width, device=device).to(dtype).requires_grad_(needs)
        found[f"{name}_weight"] = (torch.randn(V, width, device=device) * 0.4).to(dtype).requires_grad_(needs)
        if options.get(f"{name}_bias"):
            options[f"{name}_bias"] = torch.randn(V, device=device).to(dtype).requires_grad_(needs)
    return found | options


def reference(arguments: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Divergences and the student's entropies of all tokens in plain torch, and the operands of which there are
    gradients."""
    given = {
        name: value.detach().to(dtype).requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name not in ("mask", "reduction", "num_items", "chunk_tokens")
    }
    logits = [
        logits_of(
            given[f"{name}_hidden"] @ given[f"{name}_weight"].T,
            given.get(f"{name}_bias"),
            softcap=given.get(f"{name}_softcap"),
            logit_scale=given.get(f"{name}_scale", 1.0),
            temperature=given.get("temperature", 1.0),
        )
        for name in ("student", "teacher")
    ]
    logp, logq = (x.log_softmax(1) for x in logits)
    beta = given["beta"]
    if beta == 0:
        divergence = (logq.exp() * (logq - logp)).sum(1)
    elif beta == 1:
        divergence = (logp.exp() * (logp - logq)).sum(1)
    else:
        logm = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
        divergence = beta * (logq.exp() * (logq - logm)).sum(1) + (1 - beta) * (logp.exp() * (logp - logm)).sum(1)
    leaves = [value for value in given.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    return divergence, entropies_of(logits[0]), leaves


def leaves_of(arguments: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]


@pytest.mark.full("of 165 cases", but=every_pair)
@pytest.mark.parametrize(
    ("beta", "options", "trained", "dtype"),
    [
        (beta, OPTIONS[name], trained, dtype)
        for i, (beta, name, trained) in enumerate(itertools.product(BETAS, OPTIONS, [False, True]))
        for dtype in ([torch.float32, torch.bfloat16, torch.float16] if i % 3 == 0 else [torch.float32])
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_values_and_gradients(
    reduction: str, beta: float, options: dict, trained: bool, dtype: torch.dtype, device: str
) -> None:
    compare(heads(150, dtype, device, trained, beta=beta, **options), reduction, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_both_heads_in_one_chunk(reduction: str, dtype: torch.dtype, device: str) -> None:
    compare(heads(190, dtype, device, trained=True, beta=0.4, **OPTIONS["biases"]), reduction, 200)


@pytest.mark.full("of 40 draws, other ones in every run", but=tuple("012345"))
@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=("0",))
@pytest.mark.parametrize("draw", range(24))
def test_random_options(draw: int, device: str) -> None:
    rng = random.Random(int(torch.randint(2**31, ())))
    options: dict[str, Any] = {"beta": rng.choice([0.0, rng.random(), 1.0]), "temperature": rng.uniform(0.5, 2.5)}
    for head in ("student", "teacher"):
        options[f"{head}_softcap"] = rng.choice([None, rng.uniform(3, 30)])
        options[f"{head}_scale"] = rng.choice([-1, 1]) * rng.uniform(0.3, 1.5)
        options[f"{head}_bias"] = rng.choice([None, True])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    arguments = heads(rng.randrange(100, 200), dtype, device, rng.random() < 0.5, **options)
    print(dtype, options)
    compare(arguments, rng.choice(["sum", "none"]), rng.randrange(20, 250))


def compare(arguments: dict[str, Any], reduction: str, chunk_tokens: int) -> None:
    """By the tolerance law: divergences, entropies, all gradients, where some tokens do not count."""
    hidden = arguments["student_hidden"]
    tokens, dtype, device = len(hidden), hidden.dtype, hidden.device
    mask = torch.rand(tokens, device=device) < 0.7
    upstream = torch.randn(tokens, device=device) if reduction == "none" else torch.full((tokens,), -0.3, device=device)
    results = []
    for reference_dtype in (dtype, torch.float64):
        divergence, entropies, leaves = reference(arguments, reference_dtype)
        gradients = torch.autograd.grad((divergence * mask * upstream.to(divergence.dtype)).sum(), leaves)
        results.append([divergence * mask, entropies * mask, *gradients])
    found, entropies = linear_divergence(
        **arguments, mask=mask, reduction=reduction, return_entropy=True, chunk_tokens=chunk_tokens
    )
    assert found.dtype == entropies.dtype == torch.float32 and not entropies.requires_grad
    gradients = torch.autograd.grad((found * (upstream if reduction == "none" else -0.3)).sum(), leaves_of(arguments))
    if reduction == "sum":  # of one number it would be luck which is nearer to the truth
        every = linear_divergence(**arguments, mask=mask, reduction="none", chunk_tokens=chunk_tokens)
        torch.testing.assert_close(found, every.sum())
        found = every
    names = ["divergences", "entropies", *(f"gradient {i}" for i in range(len(gradients)))]
    ours, same, truth = (dict(zip(names, x, strict=True)) for x in ([found, entropies, *gradients], *results))
    assert_each_as_exact(ours, same, truth)  # divergences of a few tokens are most of their norm: too few numbers


def test_equal_heads_diverge_by_nothing(device: str) -> None:
    hidden, weight = torch.randn(70, 48, device=device), torch.randn(V, 48, device=device)
    for beta in BETAS:
        student = hidden.clone().requires_grad_()
        found = linear_divergence(student, weight, hidden, weight, beta=beta, reduction="none")
        assert found.abs().max() <= 1e-6
        found.sum().backward()
        assert student.grad.abs().max() <= 1e-5


def test_far_apart(device: str) -> None:
    """Where a distribution is 0 to float32 it counts for nothing, and the other way round it is finite."""
    student, teacher = torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device)
    student[0, 0], teacher[0, 1] = 200.0, 200.0
    for beta in BETAS:
        leaf = student.clone().requires_grad_()
        found = linear_divergence(leaf, torch.eye(3, device=device), teacher, torch.eye(3, device=device), beta=beta)
        found.backward()
        assert found.isfinite() and leaf.grad.isfinite().all() and (found > 0.05)


@pytest.mark.parametrize(("reduction", "trained", "units"), [
    ("mean", False, (3, 1)), ("mean", True, (3, 3)), ("none", False, (4, 2)), ("none", True, (4, 4))
])  # fmt: skip
def test_products(reduction: str, trained: bool, units: tuple[int, int]) -> None:
    arguments = heads(190, torch.float32, "cpu", trained, beta=0.5)
    mask = torch.rand(190) < 0.6
    with FlopCount() as flops:
        linear_divergence(**arguments, mask=mask, reduction=reduction, chunk_tokens=50).sum().backward()
    expected = sum(times * 2 * int(mask.sum()) * V * width for times, width in zip(units, WIDTHS, strict=True))
    assert flops.total == expected and not flops.unknown
    with FlopCount() as flops, torch.no_grad():
        linear_divergence(**arguments, reduction=reduction)
    assert flops.total == 2 * 190 * V * sum(WIDTHS)


@eager_memory
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory(reduction: str, trained: bool) -> None:
    """Simulated at Llama-3.1-8B's and 3.2-1B's heads: beyond inputs, d_hidden, d_weight in float32 with its rounding
    and a few numbers a token, a chunk of logits of each head and 5 %, at 8 thousand tokens and at a million."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    vocab, widths, chunk = 128256, (2048, 4096), 4096
    for tokens in (8192, 2**20):
        with FakeTensorMode():
            tensors = []
            for width, needs in zip(widths, (True, trained), strict=True):
                for rows in (tokens, vocab):
                    tensors.append(torch.empty(rows, width, dtype=torch.bfloat16).requires_grad_(needs))
            with LiveBytes() as memory:
                found = linear_divergence(*tensors, beta=0.5, reduction=reduction)
                found.sum().backward()
        of_heads = widths if trained else widths[:1]
        hidden = sum(2 * tokens * width for width in of_heads)
        weights = sum(4 * vocab * width for width in of_heads)
        rounded = sum(2 * vocab * width for width in of_heads)
        logits = 2 * 2 * chunk * vocab
        assert memory.peak <= hidden + weights + 32 * tokens + 1.05 * max(logits, rounded)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_counts(reduction: str, device: str) -> None:
    arguments = heads(30, torch.float32, device, beta=0.5)
    found = linear_divergence(**arguments, mask=torch.zeros(30, dtype=torch.bool, device=device), reduction=reduction)
    found.sum().backward()
    assert found.isnan() if reduction == "mean" else not found.any()
    assert not any(leaf.grad.any() for leaf in leaves_of(arguments))


def test_num_items_main_grad_and_a_second_backward(device: str) -> None:
    arguments = heads(60, torch.float32, device, beta=0.5)
    leaves = leaves_of(arguments)
    expected = torch.autograd.grad(linear_divergence(**arguments, reduction="sum") / 7, leaves)
    found = linear_divergence(**arguments, num_items=torch.tensor(7), chunk_tokens=20)
    for _ in range(2):
        for value, same in zip(torch.autograd.grad(found, leaves, retain_graph=True), expected, strict=True):
            torch.testing.assert_close(value, same)
    weight = arguments["student_weight"]
    weight.main_grad = torch.zeros_like(weight)
    linear_divergence(**arguments, num_items=7).backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, expected[1])
    with pytest.raises(RuntimeError, match="linear_divergence has no second derivative"):
        torch.autograd.grad(linear_divergence(**arguments), leaves[:1], create_graph=True)


def test_autocast(device: str) -> None:
    arguments = heads(60, torch.float32, device, beta=0.5)
    with torch.autocast(device, torch.bfloat16):
        found = linear_divergence(**arguments, chunk_tokens=20)
    found.backward()
    half = {
        k: v.detach().bfloat16().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for k, v in arguments.items()
    }
    torch.testing.assert_close(found, linear_divergence(**half, chunk_tokens=20), rtol=0, atol=0)
    assert arguments["student_weight"].grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"teacher_weight": torch.randn(V + 24, WIDTHS[1])}, ValueError, "1000 tokens and the teacher one of 1024"),
        ({"teacher_hidden": torch.randn(59, WIDTHS[1])}, ValueError, "teacher_hidden has shape .* the tokens"),
        ({"teacher_hidden": torch.randn(60, 3)}, ValueError, "teacher_weight has shape .*, expected .* D = 3"),
        ({"beta": 1.5}, ValueError, "beta is 1.5, expected at least 0 and at most 1"),
        ({"temperature": 0}, ValueError, "temperature is 0, expected more than 0"),
        ({"mask": torch.ones(60)}, TypeError, "mask is torch.float32, expected torch.bool"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask has shape"),
        ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean'"),
        ({"student_bias": torch.randn(3)}, ValueError, "student_bias has shape"),
        ({"student_weight": torch.randn(V, WIDTHS[0]).double()}, TypeError, "student_weight is torch.float64"),
        ({"student_hidden": torch.randn(0, WIDTHS[0])}, ValueError, "expected .* with tokens"),
        ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap is -1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"linear_divergence: .*{message}"):
        linear_divergence(**heads(60, torch.float32, "cpu") | changes)
