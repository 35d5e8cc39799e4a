"""Logits that a model returns: a tensor that is computed when it is read, with the values of the forward."""

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import seqtile
from models.layered import assert_equal, whole
from seqtile.models.forward.loss import head_verdict
from seqtile.models.logits.lazy import LazyGradient, LazyLogits, lazy_logits
from seqtile.models.logits.recipe import LogitsRecipe
from support.assertions import relative_error, unread
from support.measure import FlopCount, LiveBytes
from support.tiny import batch_of, build, loss_and_gradients, tiled_copy
from support.training import with_lora

B, S, D, V = 2, 5, 8, 11
LABELS, KEPT = torch.arange(B * S).view(B, S) % V, torch.arange(B * S).view(B, S) % 3 > 0
STEPS: dict[str, Callable] = {
    "plain": lambda x: x,
    "capped": lambda x: torch.tanh(x / 5) * 5,
    "cut, cast and scaled": lambda x: x[:, :].double() * 2,
}
READERS: dict[str, Callable] = {
    "squares": lambda x: x.double() ** 2,
    "shifted": lambda x: x[:, :-1] * torch.ones(V) * x[:, 1:].exp(),
    "a mask": lambda x: x[KEPT].sin(),
    "a loss": lambda x: F.cross_entropy(x[:, :-1].contiguous().view(-1, V), LABELS[:, 1:].reshape(-1)),
    "a weighted loss": lambda x: F.cross_entropy(
        x.flatten(0, 1), LABELS.flatten(), weight=torch.arange(1, V + 1).double(), ignore_index=3, label_smoothing=0.1
    ),
    "log-probabilities": lambda x: x.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1),
    "argmax": lambda x: x.argmax(-1),
    "logsumexp of rows": lambda x: torch.stack([torch.logsumexp(row, -1) for row in x]),
    "the last token": lambda x: x[:, -1, :].tanh() * 2 + 0,
    "a slice in place": lambda x: (x[:, 1:].div_(2.0), x * 1)[1],
    "three readers": lambda x: x.logsumexp(-1).sum() + x.sin().sum() + x[0].sum(),
    "an entry in place": lambda x: (x.__setitem__((slice(None), slice(None), 3), 0.0), x * 1)[1],
    "over a batch": lambda x: torch.cat([x, x]).amax(-1),
}


class CountedHead(nn.Linear):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(x)


def made() -> tuple[CountedHead, torch.Tensor]:
    return CountedHead(D, V, dtype=torch.double), torch.randn(B, S, D, dtype=torch.double, requires_grad=True)


def logits_of(head: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return lazy_logits(LogitsRecipe(x * 2, head, head_verdict(head)))


@pytest.mark.parametrize(
    "step",
    [
        lambda x: torch.mul(input=x, other=2.0),
        lambda x: torch.softmax(input=x, dim=-1),
        lambda x: torch.reshape(input=x, shape=(B * S, V)),
        lambda x: torch.split(tensor=x, split_size_or_sections=1, dim=0)[1],
    ],
)
def test_steps_by_name(step: Callable) -> None:
    head, x = made()
    found, expected = step(logits_of(head, x)), step(head(x * 2))
    assert unread(found) and head.runs == 1
    torch.testing.assert_close(torch.logsumexp(input=found, dim=-1), expected.logsumexp(-1))
    torch.testing.assert_close(torch.nn.functional.relu(input=found, inplace=False), expected.relu())


def ds_head() -> tuple[nn.Linear, torch.Tensor]:
    """A head that is marked as DeepSpeed marks what ZeRO-3 shards, and hidden states."""
    head, x = nn.Linear(D, V), torch.randn(B, S, D, requires_grad=True)
    head.ds_id = 0
    for weight in head.parameters():
        weight.ds_id, weight.ds_status = 0, SimpleNamespace(name="AVAILABLE")
    return head, x


def test_a_forward_of_a_sharded_heads_own() -> None:
    """It stays where it is, and is called when logits are read."""
    head, x = ds_head()
    own = head.forward = lambda hidden: F.linear(hidden, head.weight, head.bias) * 3
    found, expected = logits_of(head, x), own(x * 2)
    assert vars(head)["forward"] is own
    torch.testing.assert_close(found + 0, expected)
    gradients = torch.autograd.grad(found.sin().sum(), [x, head.weight])
    assert vars(head)["forward"] is own
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sin().sum(), [x, head.weight]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), nullcontext])
def test_hooks_read_gradients_whatever_was_on_when_this_was_imported(mode: Callable) -> None:
    spec = importlib.util.find_spec("seqtile.models.logits.lazy")
    module = importlib.util.module_from_spec(spec)
    with mode():
        spec.loader.exec_module(module)
    head, x = made()
    seen = []
    logits = module.lazy_logits(LogitsRecipe(x * 2, head, head_verdict(head)))
    logits.register_hook(lambda gradient: seen.append(gradient * 1))
    logits.logsumexp(-1).sum().backward()
    torch.testing.assert_close(seen[0], head(x * 2).softmax(-1))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("reader", READERS)
def test_as_plain_logits(reader: str, steps: str) -> None:
    read, then = READERS[reader], STEPS[steps]
    head, x = made()
    expected, leaves = read(then(head(x * 2))), (x, head.weight, head.bias)
    head.runs = 0
    logits = lazy_logits(then(LogitsRecipe(x * 2, head, head_verdict(head))))
    assert unread(logits) and logits.requires_grad and head.runs == 0
    found = read(logits)
    assert not isinstance(found, LazyLogits) and found.requires_grad == expected.requires_grad
    torch.testing.assert_close(found, expected)
    if found.requires_grad:
        gradients = (torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected))
        assert all(relative_error(*pair) <= 1e-6 for pair in zip(*gradients, strict=True))  # weights have float32 sums


def test_what_is_known_without_computing() -> None:
    head, x = made()
    logits = logits_of(head, x)
    assert isinstance(logits, torch.Tensor) and torch.is_tensor(logits) and logits.shape == (B, S, V)
    assert (logits.dtype, logits.device, logits.ndim, len(logits)) == (torch.double, x.device, 3, B)
    assert repr(logits) == "LazyLogits([2, 5, 11], torch.float64, not computed)"
    same = tree_map(lambda tensor: tensor, {"logits": logits})["logits"]
    for lazy in (same, logits.detach(), logits.data, logits[:, 1:], logits[KEPT], logits.float()):
        assert unread(lazy)
    assert not logits.detach().requires_grad and head.runs == 0
    torch.testing.assert_close((logits + 0, logits.sin()), (head(2 * x), head(2 * x).sin()))
    assert head.runs == 3 and "not" not in repr(logits), "once, whoever reads"


def test_copies_and_files() -> None:
    head, x = made()
    logits, expected, file = logits_of(head, x).detach(), head(2 * x).detach(), io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    for read in (copy.deepcopy(logits), pickle.loads(pickle.dumps(logits)), torch.load(file)):
        assert type(read) is torch.Tensor and read.equal(expected)
    assert (logits.numpy() == expected.numpy()).all() and logits.tolist() == expected.tolist()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_mode_of_the_reader_counts(mode: Callable) -> None:
    head, x = made()
    expected, logits = head(2 * x), logits_of(head, x)
    with mode():
        assert not (logits * 1).requires_grad and not logits.logsumexp(-1).requires_grad
        inside = logits_of(head, x)
        assert unread(inside) and inside.equal(expected) and inside.argmax(-1).equal(expected.argmax(-1))
    assert (logits * 1).requires_grad


def test_hooks_and_kept_gradients() -> None:
    head, x = made()
    logits, seen = logits_of(head, x), []
    logits.retain_grad()
    logits.register_hook(seen.append)
    (logits.sin().sum() + logits[:, 1:].logsumexp(-1).sum()).backward()
    assert isinstance(seen[0], LazyGradient)
    plain = head(2 * x).detach().requires_grad_()
    (plain.sin().sum() + plain[:, 1:].logsumexp(-1).sum()).backward()
    torch.testing.assert_close(logits.grad + 0, plain.grad)
    torch.testing.assert_close(logits.grad / 2, plain.grad / 2)


def stepped(head: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        head.weight.add_(1)


def past_the_version(head: nn.Module, x: torch.Tensor) -> None:
    head.weight.data.mul_(2)


def hidden_changed(head: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


CHANGES: dict[str, tuple[Callable, str]] = {
    "a step": (stepped, "the head's weight changed"),
    "data": (past_the_version, "the head's weight changed"),
    "hidden states": (hidden_changed, "the hidden states changed|modified by an inplace operation"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_late_read_is_right_or_refused(change: str) -> None:
    apply, said = CHANGES[change]
    head, x = made()
    logits, before, another = (lazy_logits(LogitsRecipe(x, head, head_verdict(head))) for _ in range(3))
    read, later = before.sin(), another.logsumexp(-1)
    apply(head, x)
    for late in (logits.sin, lambda: logits.argmax(-1), logits.detach().exp, read.sum().backward, later.sum().backward):
        with pytest.raises(RuntimeError, match=said):
            late()
    assert before.detach().shape == (B, S, V), "what was computed stays"


class Waits(TorchDispatchMode):
    """Counts the operations that make the host wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += function.overloadpacket.__name__ in ("equal", "_local_scalar_dense", "is_nonzero")
        return function(*args, **kwargs or {})


def test_a_read_and_its_backward_wait_once_each() -> None:
    """Whatever the number of weights."""
    head, x = made()  # a weight and a bias
    logits = lazy_logits(LogitsRecipe(x, head, head_verdict(head)))
    with Waits() as reading:
        read = logits.logsumexp(-1).sum() + logits.sin().sum()
    with Waits() as backward:
        read.backward()
    assert (reading.count, backward.count) == (2, 2)


def test_autocast_dropout_and_training_as_in_the_forward() -> None:
    head, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, V)), torch.randn(B, S, D, requires_grad=True)
    head.weight = head[1].weight
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_of(head, x)
    assert logits.dtype == torch.bfloat16
    head.eval()
    state = torch.get_rng_state()
    total = logits.float().sum()
    total.backward()
    assert torch.get_rng_state().equal(state) and not head[0].training
    again = logits.detach().abs() * logits.detach().sign()
    assert again.dtype == torch.bfloat16 and relative_error(again.float().sum(), total) < 1e-2
    dropped = (logits.detach() - head[1].bias.bfloat16()).float()
    assert relative_error(dropped.sum(-1), (x.grad * x).sum(-1)) < 0.1, "of the same mask"


@pytest.mark.full("7 s of a compiler")
def test_logits_for_who_follows_a_forward() -> None:
    """Transforms, tracing and compilers get plain logits from a forward without labels."""
    untiled, ids = build("llama", num_hidden_layers=1).eval(), whole(60)["input_ids"]
    tiled, plain = tiled_copy(untiled, mlp=False), untiled(input_ids=ids).logits
    forward = lambda of: lambda weights: torch.func.functional_call(of, weights, (ids,)).logits.square().sum()  # noqa: E731
    gradients = [torch.func.grad(forward(of))(dict(of.named_parameters())) for of in (tiled, untiled)]
    assert all(relative_error(gradients[0][name], theirs) <= 1e-5 for name, theirs in gradients[1].items())
    torch._dynamo.reset()
    compiled = torch.compile(tiled, backend="eager", fullgraph=True)(input_ids=ids).logits
    assert type(compiled) is torch.Tensor and relative_error(compiled, plain) <= 1e-5


@pytest.mark.parametrize("read", [lambda x: x.sin(), lambda x: x.logsumexp(-1)], ids=["all", "by rows"])
def test_products_of_a_read_and_its_gradients(read: Callable) -> None:
    """One product in the forward; three in the backward, which recomputes the logits."""
    head, x = nn.Linear(D, V), torch.randn(B, S, D, requires_grad=True)
    u, logits = 2 * B * S * D * V, lazy_logits(LogitsRecipe(x, head, head_verdict(head)))
    with FlopCount() as forward:
        total = read(logits).sum()
    with FlopCount() as backward:
        total.backward()
    assert (forward.total, backward.total) == (u, 3 * u)


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits[:, :-1].float().log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None]).square().mean()


@pytest.mark.full("of 8 models", but=("llama-*", "*-True"))
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "cohere", "granite"])
def test_a_loss_of_ones_own(arch: str, training: bool, device: str) -> None:
    """With soft caps, scales and plain heads, next to the model's loss, with labels and without."""
    untiled, batch, found = build(arch, device), batch_of(2, 101, device), []
    tiled = tiled_copy(untiled)
    for labels in (batch["labels"], None):
        for model in (untiled.train(training), tiled.train(training)):
            model.zero_grad()
            output = model(**batch | {"labels": labels})
            assert model is untiled or unread(output.logits)
            loss = own_loss(output.logits, batch["labels"]) + (0 if labels is None else output.loss)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for ours, theirs in zip(*found[-2:], strict=True):
            assert relative_error(ours, theirs) <= 1e-4


def test_an_adapter_on_the_head(device: str) -> None:
    untiled = with_lora(build("llama", device), "lm_head", "q_proj")
    tiled, batch, found = tiled_copy(untiled), batch_of(1, 101, device), []
    for model in (untiled, tiled):
        own_loss(model(**batch).logits, batch["labels"]).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and any("lm_head" in name for name in found[0])
    assert all(relative_error(found[1][name], found[0][name]) <= 1e-4 for name in found[0])
    output, read = tiled(**batch), tiled(**batch).logits.sum()
    tiled.get_submodule("base_model.model.lm_head").register_forward_hook(lambda *_: None)
    with tiled.disable_adapter():
        assert relative_error(output.logits.sum(), read) <= 1e-6, "of the forward's adapter, without the hook"


@pytest.mark.parametrize("factor", [None, 1.1], ids=["leaves", "computed"])
def test_logits_that_are_read_after_a_functional_call(factor: float | None) -> None:
    untiled, ids, found = build("llama", num_hidden_layers=1), whole(60)["input_ids"], []
    for model in (untiled, tiled_copy(untiled)):
        weights = {name: p.detach().requires_grad_() for name, p in untiled.named_parameters()}
        given = {name: weight * factor for name, weight in weights.items()} if factor else weights
        output = torch.func.functional_call(model, given, (ids,))
        output.logits.sin().mean().backward()
        found.append({name: weight.grad for name, weight in weights.items()})
    assert all(relative_error(found[1][name], gradient) <= 1e-5 for name, gradient in found[0].items())


def head_flops(model: nn.Module, of: Callable[[], object]) -> int:
    with FlopCount() as alone:
        model.model(input_ids=whole(100)["input_ids"], use_cache=False)
    with FlopCount() as count:
        of()
    return count.total - alone.total


@torch.no_grad()
def test_what_evaluation_computes() -> None:
    """The loss alone costs one product of the head, reading the logits another one; a forward that reads neither,
    none."""
    model, ids = tiled_copy(build("llama")).eval(), {"input_ids": whole(100)["input_ids"]}
    batch = ids | {"labels": ids["input_ids"]}
    u = 2 * ids["input_ids"].numel() * model.lm_head.weight.numel()
    assert head_flops(model, lambda: model(**batch).loss) == 0.99 * u, "but of the last token"
    assert head_flops(model, lambda: model(**batch).logits.argmax(-1)) == 1.99 * u
    assert head_flops(model, lambda: model(**ids).logits.shape) == 0
    assert head_flops(model, lambda: model(**ids).logits + 1) == u


def both(of: Callable) -> tuple[Any, Any]:
    """Returns the result of `of` for lazy logits and for plain ones. `of` also gets a function that computes input
    gradients."""
    found = []
    for lazy in (True, False):
        torch.manual_seed(3)
        head, x = made()
        logits = logits_of(head, x) if lazy else head(x * 2)
        found.append(of(logits, lambda y, x=x, head=head: torch.autograd.grad(y.sum(), (x, head.weight))))
    return tuple(found)


def shift_and_scale(logits: torch.Tensor, gradients: Callable) -> Any:
    shifted = logits[..., :-1, :].contiguous()
    shifted /= 2
    return logits.sin(), shifted + 0, gradients(shifted.sin())


def copied_by_reshape(logits: torch.Tensor, gradients: Callable) -> Any:
    part = logits[:, :-1]
    part.reshape(-1, V).mul_(2)
    return part + 0, logits + 0


def view_of_a_view(logits: torch.Tensor, gradients: Callable) -> Any:
    part = logits[:, 2:4][0]
    part.zero_()
    return logits + 0, gradients(logits.sin())


def a_view_made_before(logits: torch.Tensor, gradients: Callable) -> Any:
    part = logits[:, 2]
    logits.mul_(3)
    return part + 0, gradients(part.sin())


def read_before_it_changes(logits: torch.Tensor, gradients: Callable) -> Any:
    part, read = logits[:, 2], logits.sin()
    logits.mul_(3)
    return part + 0, read, gradients(part.sin() + 0)


def through_detach(logits: torch.Tensor, gradients: Callable) -> Any:
    logits.detach()[..., 0] = -9
    logits.data[..., 1] = 7
    return logits + 0, gradients(logits.square())


def a_cast_that_casts_nothing(logits: torch.Tensor, gradients: Callable) -> Any:
    same = logits.double()
    same[..., 2] = 5
    return logits + 0


def inplace_by_a_keyword(logits: torch.Tensor, gradients: Callable) -> Any:
    part = logits[0]
    F.relu(part, inplace=True)
    return logits + 0


def out(logits: torch.Tensor, gradients: Callable) -> Any:
    made = torch.empty(B, S, V, dtype=torch.double)
    return torch.softmax(logits.detach(), -1, out=made), made


def transposes(logits: torch.Tensor, gradients: Callable) -> Any:
    return logits.mT, logits[0].T, logits[0].H, logits.nbytes, logits[0, -1].argmax(-1), logits[0, -1].logsumexp(-1)


def added_with_a_gradient(logits: torch.Tensor, gradients: Callable) -> Any:
    bias = torch.zeros(V, dtype=torch.double, requires_grad=True)
    (of_bias,) = torch.autograd.grad((logits + bias).sin().sum(), bias, retain_graph=True)
    later = torch.ones(V, dtype=torch.double)
    added = logits + later
    later.zero_()
    return of_bias, added + 0, gradients((logits + logits[0, 0]).sin())


def of_the_logits(logits: torch.Tensor, gradients: Callable) -> Any:
    y = F.cross_entropy(logits.view(-1, V), LABELS.flatten()) + logits.sin().mean() + logits[:, :-1].square().sum()
    return torch.autograd.grad(y, logits)[0] + 0


def gradient_changed_by_a_hook(logits: torch.Tensor, gradients: Callable) -> Any:
    logits.register_hook(lambda gradient: gradient.mul_(2))
    logits.retain_grad()
    found = gradients(logits.sin())
    return found


def a_leaf_of_its_own(logits: torch.Tensor, gradients: Callable) -> Any:
    leaf = logits.detach().requires_grad_()
    leaf.sin().sum().backward()
    return leaf.grad + 0


def other_dtypes_and_indices(logits: torch.Tensor, gradients: Callable) -> Any:
    indices = (logits[torch.ones(B, dtype=torch.uint8)], logits[KEPT.numpy()], logits[[0, 1], [2, 3]], logits[..., [1]])
    return logits.to(torch.long) / 2, *indices, logits[None, :, -1], logits[torch.tensor([1, 0])]


UNUSUAL = (shift_and_scale, copied_by_reshape, view_of_a_view, a_view_made_before, read_before_it_changes)
UNUSUAL += (through_detach, a_cast_that_casts_nothing, inplace_by_a_keyword, out, transposes, added_with_a_gradient)
UNUSUAL += (of_the_logits, gradient_changed_by_a_hook, a_leaf_of_its_own, other_dtypes_and_indices)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("of", UNUSUAL)
def test_what_else_is_done_to_logits(of: Callable) -> None:
    torch.testing.assert_close(*both(of), rtol=1e-6, atol=1e-6)


def test_what_is_read_with_them_must_not_change() -> None:
    head, x = made()
    targets = LABELS.flatten().clone()
    loss = F.cross_entropy(logits_of(head, x).view(-1, V), targets)
    targets.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    kept = KEPT.clone()
    masked = logits_of(head, x)[kept]
    kept.zero_()
    assert masked.sum().item() == pytest.approx(head(x * 2)[KEPT].sum().item())
    with pytest.raises(RuntimeError, match="cannot be given other data"):
        logits_of(head, x).data = torch.zeros(B, S, V)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("reader", [True, False])
@pytest.mark.parametrize("of", ["cross_entropy", "log_softmax", "logsumexp"])
def test_autocast_of_the_reader(of: str, reader: bool, forward: bool) -> None:
    head, x = nn.Linear(D, V), torch.randn(B, S, D)
    head, x = (head, x) if forward else (head.bfloat16(), x.bfloat16())
    read = {
        "cross_entropy": lambda logits: F.cross_entropy(logits.view(-1, V), LABELS.flatten()),
        "log_softmax": lambda logits: logits.log_softmax(-1).gather(-1, LABELS[..., None]),
        "logsumexp": lambda logits: logits.logsumexp(-1),
    }[of]
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        lazy, plain = lazy_logits(LogitsRecipe(x, head, head_verdict(head))), head(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=reader):
        found, expected = read(lazy), read(plain)
    assert found.dtype == expected.dtype
    truth = read(plain.double())
    precision = 1e-6 if found.dtype == torch.float32 else 2**-7
    error, allowed = (found - truth).norm(), 2 * (expected - truth).norm() + precision * truth.norm()
    assert error <= allowed


def test_inference_mode_around_the_forward_alone() -> None:
    model, ids = tiled_copy(build("llama")).eval(), whole(60)["input_ids"]
    for around, inside in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        with around():
            logits = model(input_ids=ids).logits
        with inside():
            found = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[0, 1:])
            assert logits[ids > 50].argmax(-1).shape == (int((ids > 50).sum()),)
        assert found.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(48, 2), nn.Linear(2, 211)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(
    "head",
    [lambda head: nn.Sequential(nn.LayerNorm(48), head), lambda head: seqtile.tokenwise(LowRank(head))],
    ids=["sequence", "declared"],
)
def test_a_head_of_several_modules_makes_no_logits_of_all_tokens(head: Callable) -> None:
    untiled, batch = build("llama", tie_word_embeddings=False), batch_of(2, 101)
    untiled.lm_head = head(untiled.lm_head)
    model = tiled_copy(untiled, layer=False)
    with LiveBytes() as memory:
        found = loss_and_gradients(model, **batch)
    assert_equal(found, loss_and_gradients(untiled, **batch))
    logits = 4 * 211 * batch["input_ids"].numel()
    assert memory.largest < logits and model(**batch).logits.shape == (2, 101, 211)
