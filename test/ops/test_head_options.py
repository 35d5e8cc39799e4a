"""Every option with every other: linear_cross_entropy and linear_log_probs against float64, on drawn examples."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqtile import linear_cross_entropy, linear_log_probs
from support.assertions import floor_of, relative_error
from support.head_reference import (
    IGNORE,
    cross_entropy_reference,
    entropies_of,
    logits_of,
    losses_of,
    values_and_gradients,
)


@st.composite
def heads(draw) -> dict:
    """hidden, weight, bias and target, their dtype, and options that all ops over a head share.

    Entries are small integers, so that products are exact in every dtype. Differences to float64 then come from the
    operations after the products. Sizes are large enough for rounding errors to average out.
    """
    tokens, size, vocab = draw(st.integers(60, 130)), draw(st.integers(16, 40)), draw(st.integers(100, 300))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    hidden, weight = (torch.randint(-1, 2, (rows, size)).to(dtype) for rows in (tokens, vocab))
    target = torch.randint(0, vocab, (tokens,))
    ignore_index = draw(st.sampled_from([IGNORE, None, 3]))
    if ignore_index is not None:
        keep = draw(st.sampled_from([tokens // 2, tokens]))
        target[target == ignore_index] = 0
        target[torch.randperm(tokens)[keep:]] = ignore_index
    return {
        "operands": (hidden, weight, target),
        "dtype": dtype,
        "options": {
            "bias": torch.randint(-2, 3, (vocab,)).to(dtype) if draw(st.booleans()) else None,
            "ignore_index": ignore_index,
            "softcap": draw(st.sampled_from([None, 3.0, 30.0])),
            "logit_scale": draw(st.sampled_from([1.0, 0.25, -0.7])),
        },
        "tiling": {
            "chunk_tokens": draw(st.integers(1, tokens + 10)),
            "accumulate_dtype": torch.float32
            if dtype != torch.float32
            else draw(st.sampled_from([torch.float32, None])),
        },
    }


def check(function, reference, head: dict, device: str, upstream: torch.Tensor | float, **options: object) -> None:
    """Values and gradients of `function` against those of `reference` in the same dtype and in float64.

    One draw in ten thousand exceeds the bound by chance; such a draw is compared over nine draws together.
    """
    common = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in (head["options"] | options).items()}
    common["upstream"] = upstream.to(device) if isinstance(upstream, torch.Tensor) else upstream
    hidden, weight, target = (operand.to(device) for operand in head["operands"])
    errors = errors_of(function, reference, head, hidden, weight, target, **common)
    floor = floor_of(head["dtype"])
    if not all(ours <= 2 * same + floor for ours, same in errors):
        for _ in range(8):
            hidden, weight = (torch.randint_like(x, -1, 2) for x in (hidden, weight))
            more = errors_of(function, reference, head, hidden, weight, target, **common)
            errors = [list(map(math.hypot, one, other)) for one, other in zip(errors, more, strict=True)]
        for ours, same in errors:
            assert ours <= 2 * same + 3 * floor, f"relative errors of nine draws {ours:.2e}, torch's {same:.2e}"


def errors_of(function, reference, head: dict, *operands: torch.Tensor, **options: object) -> list[list[float]]:
    """The relative errors of `function` and of `reference` in the same dtype, for the value and every gradient."""
    same = values_and_gradients(reference, *operands, dtype=head["dtype"], **options)
    truth = values_and_gradients(reference, *operands, dtype=torch.float64, **options)
    ours = values_and_gradients(function, *operands, dtype=head["dtype"], **options, **head["tiling"])
    pairs = zip(zip(ours, same, strict=True), truth, strict=True)
    return [[relative_error(value, true) for value in pair] for pair, true in pairs]


def loss_options(data: st.DataObject, vocab: int, reduction: str) -> dict:
    return {
        "reduction": reduction,
        "num_items": data.draw(st.sampled_from([None, 37])) if reduction == "mean" else None,
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "class_weight": torch.rand(vocab) + 0.1 if data.draw(st.booleans()) else None,
        "z_loss": data.draw(st.sampled_from([0.0, 1e-4, 0.1])),
    }


@given(head=heads(), data=st.data())
def test_linear_cross_entropy(device: str, head: dict, data: st.DataObject) -> None:
    vocab, tokens = head["operands"][1].shape[0], head["operands"][0].shape[0]
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    options = loss_options(data, vocab, reduction)
    upstream = torch.randn(tokens) if reduction == "none" else data.draw(st.sampled_from([1.0, -3.0, 1 / 32]))

    def ours(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        loss, metrics = linear_cross_entropy(*operands, **arguments, return_metrics=True)
        assert loss.equal(linear_cross_entropy(*operands, **arguments))
        assert metrics.logsumexp.isfinite().all() and 0 <= metrics.token_accuracy <= 1
        return loss

    check(ours, cross_entropy_reference, head, device, upstream, **options)


def metrics_reference(hidden, weight, target, *, bias, softcap, logit_scale, ignore_index, **options):
    """[n + 2]: the sum of the losses, the mean entropy, and every token's log-sum-exp."""
    head = {"bias": bias, "softcap": softcap, "logit_scale": logit_scale}
    loss = cross_entropy_reference(hidden, weight, target, **head, ignore_index=ignore_index, **options)
    logits = logits_of(hidden @ weight.T, **head)
    labelled = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    entropies = entropies_of(logits)[labelled]
    return torch.cat([loss.sum()[None], entropies.mean()[None], logits.logsumexp(1) * labelled])


@given(head=heads(), data=st.data())
def test_metrics(device: str, head: dict, data: st.DataObject) -> None:
    """Their values and their gradients, alone or together with the loss's."""
    vocab, tokens = head["operands"][1].shape[0], head["operands"][0].shape[0]
    options = loss_options(data, vocab, data.draw(st.sampled_from(["mean", "sum", "none"])))
    upstream = torch.cat([torch.randn(2), torch.randn(tokens) / tokens])
    upstream[:2] *= torch.tensor(data.draw(st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])))

    def ours(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        loss, metrics = linear_cross_entropy(*operands, **arguments, return_metrics=True)
        return torch.cat([loss.sum()[None], metrics.mean_entropy[None], metrics.logsumexp])

    check(ours, metrics_reference, head, device, upstream, **options)


def log_probs_reference(hidden, weight, target, *, bias, ignore_index, softcap, logit_scale, temperature, outputs, **_):
    """Log-probabilities [T], or with the entropies [2, T]."""
    logits = logits_of(hidden @ weight.T, bias, softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    log_probs = -losses_of(logits, target, ignore_index=ignore_index)
    labelled = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    return torch.stack([log_probs, entropies_of(logits) * labelled]) if outputs else log_probs


@given(head=heads(), data=st.data())
def test_linear_log_probs(device: str, head: dict, data: st.DataObject) -> None:
    outputs = data.draw(st.sampled_from([(), ("entropy",)]))
    options = {"temperature": data.draw(st.sampled_from([1.0, 0.6, 2.0])), "outputs": outputs}
    options["to_be_summed"] = data.draw(st.booleans())
    tokens = head["operands"][0].shape[0]

    def ours(*operands: torch.Tensor, **arguments: object) -> torch.Tensor:
        result = linear_log_probs(*operands, **arguments)
        return torch.stack([result[0], result[1].entropy]) if outputs else result

    check(
        ours, log_probs_reference, head, device, torch.randn(2, tokens) if outputs else torch.randn(tokens), **options
    )
