import itertools
import random
from typing import Any

import pytest
import torch

from seqtile import linear_divergence, linear_topk_divergence
from support.assertions import assert_as_exact, relative_error
from support.choice import every_pair
from support.head_reference import logits_of
from support.measure import FlopCount, LiveBytes, eager_memory

D, V, K = 48, 1000, 7
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "cap and scale": {"softcap": 4.0, "logit_scale": -0.7},
    "bias": {"bias": True, "softcap": 8.0, "temperature": 0.8},
}


def arguments_of(tokens: int, dtype: torch.dtype, device: str, **options: Any) -> dict[str, Any]:
    """A head, and what a teacher says of its likeliest tokens; of one of them, in some rows, nothing."""
    hidden = torch.randn(tokens, D, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device=device) * 0.4).to(dtype).requires_grad_()
    found = {"hidden": hidden, "weight": weight}
    if options.get("bias"):
        options["bias"] = torch.randn(V, device=device).to(dtype).requires_grad_()
    log_probs, ids = (torch.randn(tokens, V, device=device) * 3).log_softmax(1).topk(K, dim=1)
    log_probs[: tokens // 3, -1] = -torch.inf
    return found | {"ids": ids, "log_probs": log_probs} | options


def reference(given: dict[str, Any], tail: bool, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The divergence of every token in plain torch, the tail as a sum over all that are not among the k."""
    cast = {
        name: value.detach().to(dtype).requires_grad_(value.requires_grad)
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    names = ("softcap", "logit_scale", "temperature")
    options = {name: given[name] for name in names if name in given}
    logp = logits_of(cast["hidden"] @ cast["weight"].T, cast.get("bias"), **options).log_softmax(1)
    logq = given["log_probs"].to(logp.dtype)
    q = logq.exp()
    terms = torch.where(q == 0, 0.0, q * (logq.clamp(min=-1e3) - logp.gather(1, given["ids"])))
    rest = (1 - q.sum(1)).clamp(min=0) * tail
    log_tail = logp.scatter(1, given["ids"], -torch.inf).logsumexp(1)
    return terms.sum(1) + torch.where(rest == 0, 0.0, rest * (rest.log() - log_tail)), list(cast.values())


def leaves_of(given: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in given.values() if isinstance(value, torch.Tensor) and value.requires_grad]


@pytest.mark.full("of 165 cases", but=every_pair)
@pytest.mark.parametrize(
    ("tail", "options", "dtype"),
    [
        (tail, OPTIONS[name], dtype)
        for tail, name in itertools.product([True, False], OPTIONS)
        for dtype in ([torch.float32, torch.bfloat16, torch.float16] if name == "bias" else [torch.float32])
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_values_and_gradients(reduction: str, tail: bool, options: dict, dtype: torch.dtype, device: str) -> None:
    compare(arguments_of(150, dtype, device, **options), tail, reduction, 40)


@pytest.mark.full("of 40 draws, other ones in every run", but=tuple("012345"))
@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=("0",))
@pytest.mark.parametrize("draw", range(16))
def test_random_options(draw: int, device: str) -> None:
    rng = random.Random(int(torch.randint(2**31, ())))
    options = {
        "softcap": rng.choice([None, rng.uniform(3, 30)]),
        "logit_scale": rng.choice([-1, 1]) * rng.uniform(0.3, 1.5),
        "temperature": rng.uniform(0.5, 2.5),
        "bias": rng.choice([None, True]),
    }
    dtype, tail = rng.choice([torch.float32, torch.bfloat16, torch.float16]), rng.random() < 0.5
    given = arguments_of(rng.randrange(100, 200), dtype, device, **options)
    print(dtype, options)
    compare(given, tail, rng.choice(["sum", "none"]), rng.randrange(20, 250))


def compare(given: dict[str, Any], tail: bool, reduction: str, chunk_tokens: int) -> None:
    """By the tolerance law: divergences and all gradients, where some tokens do not count."""
    tokens, dtype, device = len(given["hidden"]), given["hidden"].dtype, given["hidden"].device
    mask = torch.rand(tokens, device=device) < 0.7
    upstream = torch.randn(tokens, device=device) if reduction == "none" else torch.full((tokens,), -0.3, device=device)
    results = []
    for reference_dtype in (dtype, torch.float64):
        divergence, leaves = reference(given, tail, reference_dtype)
        gradients = torch.autograd.grad((divergence * mask * upstream.to(divergence.dtype)).sum(), leaves)
        results.append([divergence * mask, *gradients])
    every = linear_topk_divergence(**given, tail=tail, mask=mask, reduction="none", chunk_tokens=chunk_tokens)
    found = linear_topk_divergence(**given, tail=tail, mask=mask, reduction=reduction, chunk_tokens=chunk_tokens)
    assert every.dtype == torch.float32
    torch.testing.assert_close(found, every if reduction == "none" else every.sum())
    gradients = torch.autograd.grad((found * (upstream if reduction == "none" else -0.3)).sum(), leaves_of(given))
    for value, same, true in zip([every, *gradients], *results, strict=True):
        assert_as_exact(value, same, true)


def test_one_token_of_no_sequence(device: str) -> None:
    given = arguments_of(1, torch.float32, device)
    one = {name: value if name == "weight" else value[0] for name, value in given.items()}
    for reduction in ("sum", "none"):
        found = linear_topk_divergence(**one, reduction=reduction)
        expected = linear_topk_divergence(**given, reduction=reduction).squeeze()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_all_but_one_is_the_whole_divergence(device: str) -> None:
    """With all tokens but one given, the tail is that one: the divergence over the whole vocabulary."""
    hidden, weight = torch.randn(70, D, device=device).requires_grad_(), torch.randn(V, D, device=device) * 0.4
    teacher = torch.randn(70, 80, device=device), torch.randn(V, 80, device=device) * 0.3
    log_probs, ids = (teacher[0] @ teacher[1].T).log_softmax(1).topk(V - 1, dim=1)
    found = linear_topk_divergence(hidden, weight, ids, log_probs, reduction="none")
    expected = linear_divergence(hidden, weight, *teacher, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(value.sum(), hidden)[0] for value in (found, expected))
    assert relative_error(ours, theirs) <= 1e-4


def test_a_tail_that_is_nearly_nothing(device: str) -> None:
    """A student that is all but certain of what the teacher knows: the probability of the rest keeps its digits."""
    hidden, weight = torch.zeros(1, V, device=device), torch.eye(V, device=device)
    hidden[0, 3] = 18.0
    leaf, ids = hidden.clone().requires_grad_(), torch.tensor([[3]], device=device)
    log_probs = torch.tensor([[0.9]], device=device).log()
    found = linear_topk_divergence(leaf, weight, ids, log_probs, reduction="sum")
    logp = hidden.double().log_softmax(1)[0]
    tail = logp[torch.arange(V, device=device) != 3].logsumexp(0)
    expected = 0.9 * (log_probs.double()[0, 0] - logp[3]) + 0.1 * (torch.tensor(0.1).double().log() - tail)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("reduction", "units"), [("mean", 3), ("none", 4)])
def test_products(reduction: str, units: int) -> None:
    given, mask = arguments_of(190, torch.float32, "cpu"), torch.rand(190) < 0.6
    with FlopCount() as flops:
        linear_topk_divergence(**given, mask=mask, reduction=reduction, chunk_tokens=50).sum().backward()
    assert flops.total == units * 2 * int(mask.sum()) * D * V and not flops.unknown


@eager_memory
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory(reduction: str) -> None:
    """Simulated at Llama-3.1-8B's head: beyond inputs, d_hidden, d_weight in float32 with its rounding and a few
    numbers a token, a chunk of logits and 5 %, at 8 and at 128 thousand tokens."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    vocab, width, chunk = 128256, 4096, 4096
    for tokens in (8192, 2**17):
        with FakeTensorMode():
            hidden, weight = (torch.empty(n, width, dtype=torch.bfloat16).requires_grad_() for n in (tokens, vocab))
            ids, log_probs = torch.empty(tokens, 64, dtype=torch.int64), torch.empty(tokens, 64)
            with LiveBytes() as memory:
                linear_topk_divergence(hidden, weight, ids, log_probs, reduction=reduction).sum().backward()
        assert memory.peak <= (2 * tokens + 4 * vocab) * width + 32 * tokens + 1.05 * 2 * chunk * vocab


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_counts(reduction: str, device: str) -> None:
    given = arguments_of(30, torch.float32, device)
    mask = torch.zeros(30, dtype=torch.bool, device=device)
    found = linear_topk_divergence(**given, mask=mask, reduction=reduction)
    found.sum().backward()
    assert found.isnan() if reduction == "mean" else not found.any()
    assert not any(leaf.grad.any() for leaf in leaves_of(given))


IDS = torch.arange(K).repeat(60, 1)
LOG_PROBS = torch.full((60, K), -3.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids": IDS + V - 3}, ValueError, "ids holds 1000, expected 0 <= id < 1000"),
        ({"ids": IDS - 1}, ValueError, "ids holds -1"),
        ({"ids": IDS // 2}, ValueError, "ids holds a token twice in a row"),
        ({"ids": IDS[:5]}, ValueError, "ids has shape .*, expected .60, 'k'."),
        ({"ids": IDS.float()}, TypeError, "ids is torch.float32"),
        ({"log_probs": LOG_PROBS + 3}, ValueError, "log_probs of a token are of probability 7 in all"),
        ({"log_probs": LOG_PROBS * torch.nan}, ValueError, "of probability nan in all, expected at most 1"),
        ({"log_probs": LOG_PROBS[:, :3]}, ValueError, "expected the same"),
        ({"log_probs": LOG_PROBS.clone().requires_grad_()}, ValueError, "log_probs requires a gradient"),
        ({"log_probs": IDS}, TypeError, "log_probs is torch.int64"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale is 0"),
        ({"mask": LOG_PROBS[:, 0]}, TypeError, "mask is torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(changes: dict, error: type[Exception], message: str) -> None:
    given = arguments_of(60, torch.float32, "cpu") | {"ids": IDS, "log_probs": LOG_PROBS}
    with pytest.raises(error, match=f"linear_topk_divergence: .*{message}"):
        linear_topk_divergence(**given | changes)
