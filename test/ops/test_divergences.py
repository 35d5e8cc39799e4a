"""A student's divergence from a teacher: over the whole vocabulary, and over the teacher's most likely tokens."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seqtile import linear_divergence, linear_topk_divergence
from support.assertions import assert_all_as_exact, assert_each_as_exact, relative_error
from support.choice import every_pair, every_value
from support.head_reference import divergences_of, entropies_of, logits_of
from support.measure import FlopCount, LiveBytes, eager_memory
from support.tiny import interpreted

V, K = 1000, 7
WIDTHS = (48, 80)  # of the student, of the teacher
BETAS = (0.0, 0.3, 1.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WHOLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "caps and scales": {"student_softcap": 4.0, "teacher_softcap": 6.0, "student_scale": 1.3, "teacher_scale": -0.7},
    "biases": {"student_bias": True, "teacher_bias": True, "student_scale": 0.5, "teacher_scale": 0.6}
    | {"temperature": 0.8},
}
TOP: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "cap and scale": {"softcap": 4.0, "logit_scale": -0.7},
    "bias": {"bias": True, "softcap": 8.0, "temperature": 0.8},
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


def top(tokens: int, dtype: torch.dtype, device: str, **options: Any) -> dict[str, Any]:
    """A head, and a teacher's most likely tokens; in some rows one of them does not count."""
    hidden = torch.randn(tokens, WIDTHS[0], device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, WIDTHS[0], device=device) * 0.4).to(dtype).requires_grad_()
    if options.get("bias"):
        options["bias"] = torch.randn(V, device=device).to(dtype).requires_grad_()
    log_probs, ids = (torch.randn(tokens, V, device=device) * 3).log_softmax(1).topk(K, dim=1)
    log_probs[: tokens // 3, -1] = -torch.inf
    return {"hidden": hidden, "weight": weight, "ids": ids, "log_probs": log_probs} | options


def leaves_of(given: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in given.values() if isinstance(value, torch.Tensor) and value.requires_grad]


def cast(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """New leaves in a dtype; integers and non-leaves are not cast."""
    return {
        name: value.detach().to(dtype).requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in given.items()
    }


def of_heads(given: dict[str, Any]) -> list[torch.Tensor]:
    """Divergences and the student's entropies of all tokens in plain torch."""
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
    return [divergences_of(*(x.log_softmax(1) for x in logits), given["beta"]), entropies_of(logits[0])]


def of_top(given: dict[str, Any]) -> list[torch.Tensor]:
    """The divergence of every token in plain torch; the tail is the sum over all tokens that are not among the k."""
    options = {name: given[name] for name in ("softcap", "logit_scale", "temperature") if name in given}
    logp = logits_of(given["hidden"] @ given["weight"].T, given.get("bias"), **options).log_softmax(1)
    logq = given["log_probs"].to(logp.dtype)
    q = logq.exp()
    terms = torch.where(q == 0, 0.0, q * (logq.clamp(min=-1e3) - logp.gather(1, given["ids"])))
    rest = (1 - q.sum(1)).clamp(min=0) * given["tail"]
    log_tail = logp.scatter(1, given["ids"], -torch.inf).logsumexp(1)
    return [terms.sum(1) + torch.where(rest == 0, 0.0, rest * (rest.log() - log_tail))]


def compare(given: dict[str, Any], reduction: str, chunk_tokens: int) -> None:
    """By the tolerance law: divergences, entropies and all gradients, with some tokens that do not count."""
    whole = "student_hidden" in given
    hidden = given["student_hidden" if whole else "hidden"]
    op, reference = (linear_divergence, of_heads) if whole else (linear_topk_divergence, of_top)
    tokens, device = len(hidden), hidden.device
    mask = torch.rand(tokens, device=device) < 0.7
    upstream = torch.randn(tokens, device=device) if reduction == "none" else torch.full((tokens,), -0.3, device=device)
    results = []
    for dtype in (hidden.dtype, torch.float64):
        own = cast({k: v for k, v in given.items() if k != "log_probs"}, dtype) | {"log_probs": given.get("log_probs")}
        values = reference(own)
        total = (values[0] * mask * upstream.to(values[0].dtype)).sum()
        results.append([*(value * mask for value in values), *torch.autograd.grad(total, leaves_of(own))])

    def run(reduction: str) -> list[torch.Tensor]:
        options = {"mask": mask, "reduction": reduction, "chunk_tokens": chunk_tokens}
        return list(op(**given, **options, return_entropy=True)) if whole else [op(**given, **options)]

    found, *entropies = run(reduction)
    every = found if reduction == "none" else run("none")[0]
    assert found.dtype == every.dtype == torch.float32 and not any(each.requires_grad for each in entropies)
    torch.testing.assert_close(found, every if reduction == "none" else every.sum())
    gradients = torch.autograd.grad((found * (upstream if reduction == "none" else -0.3)).sum(), leaves_of(given))
    ours = [every, *entropies, *gradients]
    if whole:  # a few tokens' divergences dominate their norm: too few numbers
        assert_each_as_exact(*(dict(enumerate(values)) for values in (ours, *results)))
        return
    assert_all_as_exact(ours, *results)


@pytest.mark.full("of 165 cases", but=every_pair)
@pytest.mark.parametrize(
    ("beta", "options", "trained", "dtype"),
    [
        (beta, WHOLE[name], trained, dtype)
        for i, (beta, name, trained) in enumerate(itertools.product(BETAS, WHOLE, [False, True]))
        for dtype in (DTYPES if i % 3 == 0 else [torch.float32])
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_whole(reduction: str, beta: float, options: dict, trained: bool, dtype: torch.dtype, device: str) -> None:
    compare(heads(150, dtype, device, trained, beta=beta, **options), reduction, 40)


@pytest.mark.full("of 165 cases", but=every_pair)
@pytest.mark.parametrize(
    ("tail", "options", "dtype"),
    [
        (tail, TOP[name], dtype)
        for tail, name in itertools.product([True, False], TOP)
        for dtype in (DTYPES if name == "bias" else [torch.float32])
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_top(reduction: str, tail: bool, options: dict, dtype: torch.dtype, device: str) -> None:
    compare(top(150, dtype, device, tail=tail, **options), reduction, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_both_heads_in_one_chunk(reduction: str, dtype: torch.dtype, device: str) -> None:
    compare(heads(190, dtype, device, trained=True, beta=0.4, **WHOLE["biases"]), reduction, 200)


@pytest.mark.full("of 40 draws, other ones in every run", but=("*-0", "*-1", "*-2"))
@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=("*-0",))
@pytest.mark.parametrize("draw", range(20))
@pytest.mark.parametrize("make", [heads, top], ids=["whole", "top"])
def test_random_options(make: Callable, draw: int, device: str) -> None:
    rng = random.Random(int(torch.randint(2**31, ())))
    options: dict[str, Any] = {"temperature": rng.uniform(0.5, 2.5)}
    for head in ("student_", "teacher_") if make is heads else ("",):
        options[f"{head}softcap"] = rng.choice([None, rng.uniform(3, 30)])
        options[f"{head}scale" if head else "logit_scale"] = rng.choice([-1, 1]) * rng.uniform(0.3, 1.5)
        options[f"{head}bias"] = rng.choice([None, True])
    if make is heads:
        options |= {"beta": rng.choice([0.0, rng.random(), 1.0]), "trained": rng.random() < 0.5}
    else:
        options |= {"tail": rng.random() < 0.5}
    dtype, tokens = rng.choice(DTYPES), rng.randrange(60, 80) if interpreted() else rng.randrange(100, 200)
    print(dtype, options)
    compare(make(tokens, dtype, device, **options), rng.choice(["sum", "none"]), rng.randrange(20, 250))


def test_equal_heads_diverge_by_nothing(device: str) -> None:
    hidden, weight = torch.randn(70, 48, device=device), torch.randn(V, 48, device=device)
    for beta in BETAS:
        student = hidden.clone().requires_grad_()
        found = linear_divergence(student, weight, hidden, weight, beta=beta, reduction="none")
        assert found.abs().max() <= 1e-6
        found.sum().backward()
        assert student.grad.abs().max() <= 1e-5


def test_far_apart(device: str) -> None:
    """Where a distribution is 0 in float32 it contributes nothing, and the reverse divergence is finite."""
    student, teacher = torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device)
    student[0, 0], teacher[0, 1] = 200.0, 200.0
    for beta in BETAS:
        leaf = student.clone().requires_grad_()
        found = linear_divergence(leaf, torch.eye(3, device=device), teacher, torch.eye(3, device=device), beta=beta)
        found.backward()
        assert found.isfinite() and leaf.grad.isfinite().all() and (found > 0.05)


def test_one_token_of_no_sequence(device: str) -> None:
    given = top(1, torch.float32, device)
    one = {name: value if name == "weight" else value[0] for name, value in given.items()}
    for reduction in ("sum", "none"):
        expected = linear_topk_divergence(**given, reduction=reduction).squeeze()
        torch.testing.assert_close(linear_topk_divergence(**one, reduction=reduction), expected, rtol=0, atol=0)


def test_all_but_one_is_the_whole_divergence(device: str) -> None:
    """With all tokens but one given, the tail is that one: the divergence over the whole vocabulary."""
    hidden, weight = torch.randn(70, 48, device=device).requires_grad_(), torch.randn(V, 48, device=device) * 0.4
    teacher = torch.randn(70, 80, device=device), torch.randn(V, 80, device=device) * 0.3
    log_probs, ids = (teacher[0] @ teacher[1].T).log_softmax(1).topk(V - 1, dim=1)
    found = linear_topk_divergence(hidden, weight, ids, log_probs, reduction="none")
    expected = linear_divergence(hidden, weight, *teacher, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(value.sum(), hidden)[0] for value in (found, expected))
    assert relative_error(ours, theirs) <= 1e-4


def test_a_tail_that_is_nearly_nothing(device: str) -> None:
    """A student that is almost certain of the teacher's tokens: the tail's small probability keeps its precision."""
    hidden, weight = torch.zeros(1, V, device=device), torch.eye(V, device=device)
    hidden[0, 3] = 18.0
    log_probs = torch.tensor([[0.9]], device=device).log()
    ids = torch.tensor([[3]], device=device)
    found = linear_topk_divergence(hidden.clone().requires_grad_(), weight, ids, log_probs, reduction="sum")
    logp = hidden.double().log_softmax(1)[0]
    tail = logp[torch.arange(V, device=device) != 3].logsumexp(0)
    expected = 0.9 * (log_probs.double()[0, 0] - logp[3]) + 0.1 * (torch.tensor(0.1).double().log() - tail)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("reduction", "trained", "units"), [
    ("mean", None, (3,)), ("mean", False, (3, 1)), ("mean", True, (3, 3)),
    ("none", None, (4,)), ("none", False, (4, 2)), ("none", True, (4, 4)),
])  # fmt: skip
def test_products(reduction: str, trained: bool | None, units: tuple[int, ...]) -> None:
    """Only tokens that count cost products. None: there is no teacher head."""
    op = linear_topk_divergence if trained is None else linear_divergence
    given = top(190, torch.float32, "cpu") if trained is None else heads(190, torch.float32, "cpu", trained, beta=0.5)
    mask = torch.rand(190) < 0.6
    with FlopCount() as flops:
        op(**given, mask=mask, reduction=reduction, chunk_tokens=50).sum().backward()
    expected = sum(times * 2 * int(mask.sum()) * V * width for times, width in zip(units, WIDTHS, strict=False))
    assert flops.total == expected and not flops.unknown
    with FlopCount() as flops, torch.no_grad():
        op(**given, reduction=reduction)
    assert flops.total == 2 * 190 * V * sum(WIDTHS[: len(units)])


@pytest.mark.full("two seconds each", but=every_value)
@eager_memory
@pytest.mark.parametrize("trained", [None, False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory(reduction: str, trained: bool | None) -> None:
    """Simulated with Llama-3.1-8B's and 3.2-1B's heads at 8 and 128 thousand tokens. Beyond inputs, d_hidden, d_weight
    in float32 with its rounded copy and a few bytes per token: a chunk of logits of each head and 5 %."""
    vocab, chunk = 128256, 4096
    widths = (4096,) if trained is None else (2048, 4096)
    for tokens in (8192, 2**17):
        with FakeTensorMode():
            tensors = []
            for width, needs in zip(widths, (True, trained), strict=False):
                for rows in (tokens, vocab):
                    tensors.append(torch.empty(rows, width, dtype=torch.bfloat16).requires_grad_(needs))
            op, options = linear_divergence, {"beta": 0.5, "reduction": reduction}
            if trained is None:
                op, options = linear_topk_divergence, {"reduction": reduction}
                tensors += [torch.empty(tokens, 64, dtype=torch.int64), torch.empty(tokens, 64)]
            with LiveBytes() as memory:
                op(*tensors, **options).sum().backward()
        of_heads = sum(widths if trained else widths[:1])
        logits, rounded = len(widths) * 2 * chunk * vocab, 2 * vocab * of_heads
        assert memory.peak <= (2 * tokens + 4 * vocab) * of_heads + 32 * tokens + 1.05 * max(logits, rounded)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("op", [linear_divergence, linear_topk_divergence], ids=["whole", "top"])
def test_nothing_counts(op: Callable, reduction: str, device: str) -> None:
    whole = op is linear_divergence
    given = heads(30, torch.float32, device, beta=0.5) if whole else top(30, torch.float32, device)
    found = op(**given, mask=torch.zeros(30, dtype=torch.bool, device=device), reduction=reduction)
    found.sum().backward()
    assert found.isnan() if reduction == "mean" else not found.any()
    assert not any(leaf.grad.any() for leaf in leaves_of(given))


def test_num_items(device: str) -> None:
    given = heads(60, torch.float32, device, beta=0.5)
    expected = torch.autograd.grad(linear_divergence(**given, reduction="sum") / 7, leaves_of(given))
    found = linear_divergence(**given, num_items=torch.tensor(7), chunk_tokens=20)
    torch.testing.assert_close(torch.autograd.grad(found, leaves_of(given)), expected)


IDS = torch.arange(K).repeat(60, 1)
LOG_PROBS = torch.full((60, K), -3.0)


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
        ({"ids": IDS + V - 3}, ValueError, "ids holds 1000, expected 0 <= id < 1000"),
        ({"ids": IDS - 1}, ValueError, "ids holds -1"),
        ({"ids": IDS // 2}, ValueError, "ids holds a token twice in a row"),
        ({"ids": IDS[:5]}, ValueError, "ids has shape .*, expected .60, 'k'."),
        ({"ids": IDS.float()}, TypeError, "ids is torch.float32"),
        ({"log_probs": LOG_PROBS + 3}, ValueError, "log_probs of a token have a total probability of 7"),
        ({"log_probs": LOG_PROBS * torch.nan}, ValueError, "total probability of nan, expected at most 1"),
        ({"log_probs": LOG_PROBS[:, :3]}, ValueError, "expected the same"),
        ({"log_probs": LOG_PROBS.clone().requires_grad_()}, ValueError, "log_probs requires a gradient"),
        ({"log_probs": IDS}, TypeError, "log_probs is torch.int64"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale is 0"),
        ({"mask": LOG_PROBS[:, 0], "ids": IDS}, TypeError, "mask is torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    if {"ids", "log_probs", "logit_scale"} & changes.keys():
        given = top(60, torch.float32, "cpu") | {"ids": IDS, "log_probs": LOG_PROBS}
        op = linear_topk_divergence
    else:
        op, given = linear_divergence, heads(60, torch.float32, "cpu")
    with pytest.raises(error, match=f"{op.__name__}: .*{message}"):
        op(**given | changes)
