import pytest
import torch

from seqtile import linear_log_probs
from seqtile.ops.head.log_probs import TokenValues
from support.assertions import assert_all_as_exact
from support.choice import every_value
from support.head_reference import IGNORE, D, V, entropies_of, logits_of, losses_of, make
from support.measure import FlopCount


@pytest.mark.in_interpreter("one end-to-end case of each op and dtype", only=every_value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype, device: str) -> None:
    """Gradients of log-probabilities and entropies; the other values have none."""
    hidden, weight, target = make(90, dtype, device)
    labelled, largest = target != IGNORE, (hidden @ weight.T).argmax(1)
    target[:20] = largest[:20].where(labelled[:20], IGNORE)  # some predictions are right
    upstream, results = torch.randn(2, 90, device=device), []
    for d in (dtype, torch.float64):
        leaves = [x.detach().to(d).requires_grad_() for x in (hidden, weight)]
        logits = logits_of(leaves[0] @ leaves[1].T, temperature=0.8)
        found = [-losses_of(logits, target), entropies_of(logits), logits.mean(1), logits.softmax(1).square().sum(1)]
        found = [value * labelled for value in found]
        loss = (found[0] * upstream[0] + found[1] * upstream[1]).sum()
        results.append([*found, *torch.autograd.grad(loss, leaves)])
    options = {"temperature": 0.8, "chunk_tokens": 40}
    log_probs, values = linear_log_probs(hidden, weight, target, outputs=TokenValues._fields, **options)
    gradients = torch.autograd.grad((log_probs * upstream[0] + values.entropy * upstream[1]).sum(), (hidden, weight))
    ours = [log_probs, values.entropy, values.mean_logit, values.sum_squared_probs]
    assert all(value.dtype == torch.float32 and not value[~labelled].any() for value in ours)
    assert_all_as_exact([*ours, *gradients], *results)
    assert values.is_largest.equal((largest == target) & labelled) and values.is_largest.any()
    assert [value.requires_grad for value in values] == [True, False, False, False]
    again, some = linear_log_probs(hidden, weight, target, outputs=["mean_logit"], **options)
    assert again.equal(log_probs) and some.mean_logit.equal(values.mean_logit)
    assert (some.entropy, some.is_largest) == (None, None)


@pytest.mark.parametrize("summed", [False, True])
def test_only_entropies_are_differentiated(summed: bool, device: str) -> None:
    hidden, weight, target = make(190, device=device)
    _, values = linear_log_probs(hidden, weight, target, outputs=["entropy"], to_be_summed=summed, chunk_tokens=63)
    ours = torch.autograd.grad(values.entropy.sum(), (hidden, weight))
    results = []
    for dtype in (torch.float32, torch.float64):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        entropy = entropies_of(h @ w.T) * (target != IGNORE)
        results.append(torch.autograd.grad(entropy.sum(), (h, w)))
    assert_all_as_exact(ours, *results)


@pytest.mark.parametrize("summed", [False, True])
def test_no_token_labelled(summed: bool, device: str) -> None:
    hidden, weight, _ = make(63, device=device)
    target = torch.full((63,), IGNORE, device=device)
    log_probs, values = linear_log_probs(hidden, weight, target, outputs=TokenValues._fields, to_be_summed=summed)
    assert all(value.count_nonzero() == 0 for value in (log_probs, *values))
    (log_probs.sum() + (0 if summed else values.entropy.sum())).backward()
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("upstream", ["equal", "different", "with entropies"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_be_summed(dtype: torch.dtype, upstream: str, device: str) -> None:
    """The same gradients for any upstream gradients; for 3 u if these are those of one sum."""
    hidden, weight, target = make(190, dtype, device)
    factors = torch.full((190,), -0.25, device=device)
    if upstream == "different":
        factors += torch.randn(190, device=device)
    elif upstream == "equal":
        factors[target == IGNORE] = 7.0  # for tokens that do not count

    def gradients(dtype: torch.dtype, **options: object) -> list[torch.Tensor]:
        operands = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        log_probs, values = linear_log_probs(*operands, target, outputs=["entropy"], chunk_tokens=63, **options)
        loss = (log_probs * factors).sum() + (values.entropy.sum() if upstream == "with entropies" else 0)
        return torch.autograd.grad(loss, operands)

    unit = 2 * int((target != IGNORE).sum()) * D * V
    with FlopCount() as flops:
        ours = gradients(dtype, to_be_summed=True)
    assert flops.total == (3 if upstream == "equal" else 6) * unit
    assert_all_as_exact(ours, gradients(dtype), gradients(torch.float32))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "temperature is 0.0, expected more than 0"),
        ({"temperature": torch.ones(())}, TypeError, "temperature is tensor"),
        ({"ignore_index": None}, ValueError, "target holds -100, expected 0 <= target < 1000; pass ignore_index"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"outputs": ["entropies"]}, ValueError, r"outputs is \['entropies'\], expected some of entropy, is_largest"),
        ({"outputs": "entropy"}, ValueError, "outputs is 'entropy', expected some of"),
    ],
    ids=str,
)
def test_bad_input(options: dict, error: type[Exception], message: str) -> None:
    hidden, weight, target = make(63)
    target[0] = IGNORE
    with pytest.raises(error, match=f"linear_log_probs: {message}"):
        linear_log_probs(hidden, weight, target, **options)
