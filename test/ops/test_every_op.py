"""Properties of all ops: their behaviour under autograd, autocast, the compiler and torch.func's transforms."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from seqtile import gated_mlp, linear_cross_entropy, linear_divergence, linear_log_probs, linear_topk_divergence, tiled
from seqtile.ops.rms_norm import rms_norm
from support.assertions import relative_error
from support.choice import every_value
from support.head_reference import IGNORE
from support.measure import FlopCount, eager_memory

T, D, V, M, CHUNK = 190, 48, 500, 130, 63


class Op(NamedTuple):
    """Tensors that require gradients, first of tokens and then of weights, and a function of them."""

    leaves: list[torch.Tensor]
    call: Callable[..., torch.Tensor]


def drawn(*shapes: tuple[int, ...], device: str) -> list[torch.Tensor]:
    return [(torch.randn(shape, device=device) * shape[-1] ** -0.5).requires_grad_() for shape in shapes]


def labels(device: str, ignored: bool) -> torch.Tensor:
    target = torch.randint(0, V, (T,), device=device)
    target[::3] = IGNORE if ignored else 1
    return target


def head(function: Callable, device: str, ignored: bool = True, part: str = "", **options: object) -> Op:
    """An op of hidden, weight and labels; of several outputs, the sum of `part`."""
    target = labels(device, ignored)
    options = {"chunk_tokens": CHUNK} | options | ({} if ignored else {"ignore_index": None})

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = function(hidden, weight, target, **options)
        if part == "loss":
            return found[0]
        if part == "metrics":
            return found[0].sum() + found[1].logsumexp.square().sum() / 100 - found[1].mean_entropy
        return found[0] * 2 + found[1].entropy if part == "entropy" else found

    return Op(drawn((T, D), (V, D), device=device), call)


def divergence(device: str, **options: object) -> Op:
    teacher = [x.detach() for x in drawn((T, 80), (V, 80), device=device)]

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = (x.to(hidden.dtype) for x in teacher)
        return linear_divergence(hidden, weight, *given, beta=0.5, chunk_tokens=CHUNK, **options)

    return Op(drawn((T, D), (V, D), device=device), call)


def topk(device: str, **options: object) -> Op:
    ids, log_probs = torch.arange(7, device=device).repeat(T, 1), torch.full((T, 7), -3.0, device=device)
    call = partial(linear_topk_divergence, ids=ids, log_probs=log_probs, chunk_tokens=CHUNK, **options)
    return Op(drawn((T, D), (V, D), device=device), call)


def mlp(device: str) -> Op:
    return Op(drawn((T, D), (M, D), (M, D), (D, M), device=device), partial(gated_mlp, chunk_tokens=CHUNK))


def any_function(device: str) -> Op:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return tiled(lambda x: F.linear(x, weight).sin(), x, params=[weight], chunk_tokens=CHUNK)

    return Op(drawn((T, D), (M, D), device=device), call)


CROSS_ENTROPY = {
    "loss": partial(head, linear_cross_entropy),
    "losses": partial(head, linear_cross_entropy, reduction="none"),
    "loss of all tokens": partial(head, linear_cross_entropy, ignored=False, label_smoothing=0.1, softcap=5.0),
    "loss of one chunk": partial(head, linear_cross_entropy, chunk_tokens=None),
    "losses of all tokens": partial(head, linear_cross_entropy, ignored=False, reduction="none"),
}
METRICS = {
    "loss beside metrics": partial(head, linear_cross_entropy, part="loss", return_metrics=True),
    "metrics": partial(head, linear_cross_entropy, part="metrics", return_metrics=True, ignored=False),
    "metrics of losses": partial(
        head, linear_cross_entropy, part="metrics", return_metrics=True, ignored=False, reduction="none"
    ),
}
LOG_PROBS = {
    "log_probs": partial(head, linear_log_probs, ignored=False),
    "entropies": partial(head, linear_log_probs, ignored=False, part="entropy", outputs=["entropy"]),
    "summed": partial(head, linear_log_probs, ignored=False, to_be_summed=True),
}
DIVERGENCES = {
    "divergence": divergence,
    "divergences": partial(divergence, reduction="none"),
    "topk": topk,
    "topks": partial(topk, reduction="none"),
}
HEADS = CROSS_ENTROPY | METRICS | LOG_PROBS | DIVERGENCES
OTHERS = {
    "gated_mlp": mlp,
    "rms_norm": lambda device: Op(drawn((T, D), (D,), device=device), partial(rms_norm, eps=1e-2)),
    "tiled": any_function,
}
OPS = HEADS | OTHERS
SUMS = {
    "loss",
    "loss of all tokens",
    "loss beside metrics",
    "summed",
    "divergence",
    "topk",
}  # ops whose gradients exist early
every_op = pytest.mark.parametrize("name", OPS)
pytestmark = pytest.mark.on_gpu("one graph, whatever the kernels", only=every_value)


def gradients(op: Op, leaves: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, ...]:
    leaves = op.leaves if leaves is None else leaves
    return torch.autograd.grad(op.call(*leaves).float().sum(), leaves)


@every_op
def test_second_derivatives_raise(name: str, device: str) -> None:
    op = OPS[name](device)
    with pytest.raises(RuntimeError, match="has no second derivative; call its backward without create_graph"):
        torch.autograd.grad(op.call(*op.leaves).sum(), op.leaves[0], create_graph=True)


@every_op
@pytest.mark.parametrize("hooks", [False, True])
def test_backward_again_and_again(name: str, hooks: bool, device: str) -> None:
    """With `retain_graph`, also under saved-tensor hooks, for some leaves, and with another upstream gradient."""
    op = OPS[name](device)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if hooks else nullcontext():
        y = op.call(*op.leaves)
    y.sum().backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in op.leaves]
    (only,) = torch.autograd.grad(y.sum(), op.leaves[1], retain_graph=True)
    torch.testing.assert_close(only, first[1], rtol=1e-6, atol=1e-7)
    (y.sum() * -3).backward()
    for leaf, once in zip(op.leaves, first, strict=True):
        assert relative_error(leaf.grad, -2 * once) <= 1e-5


@every_op
def test_a_weight_changed_before_a_backward_raises(name: str, device: str) -> None:
    """As in torch; for a sum in several chunks the first backward already has its gradients."""
    op = OPS[name](device)
    y = op.call(*op.leaves)
    with torch.no_grad():
        op.leaves[1].mul_(2)
    if name in SUMS:
        y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed in place"):
        y.sum().backward()


@every_op
def test_frozen_leaves(name: str, device: str) -> None:
    """A single leaf gets the same gradient as together with the others, and sum() sends back gradients with stride
    0."""
    op = OPS[name](device)
    y = op.call(*op.leaves)
    expected = torch.autograd.grad(y, op.leaves, torch.ones_like(y))
    for i, leaf in enumerate(op.leaves):
        leaves = [leaf if i == j else other.detach() for j, other in enumerate(op.leaves)]
        (gradient,) = torch.autograd.grad(op.call(*leaves).sum(), leaf)
        torch.testing.assert_close(gradient, expected[i])


@every_op
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_gradient_needed(name: str, context: Callable, device: str) -> None:
    op = OPS[name](device)
    with context():
        y = op.call(*op.leaves)
    assert not y.requires_grad
    torch.testing.assert_close(y, op.call(*op.leaves))


@pytest.mark.parametrize("name", [name for name in OPS if name != "rms_norm"])  # autocast does not affect it
def test_autocast(name: str, device: str) -> None:
    """Equal to the op with bfloat16 operands; gradients in float32."""
    op = OPS[name](device)
    with torch.autocast(device, torch.bfloat16):
        y = op.call(*op.leaves)
    half = [leaf.detach().bfloat16().requires_grad_() for leaf in op.leaves]
    torch.testing.assert_close(y, op.call(*half), rtol=0, atol=0)
    ours = torch.autograd.grad(y.float().sum(), op.leaves)
    for gradient, expected in zip(ours, gradients(op, half), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected.float(), rtol=2**-7, atol=2**-7 * expected.abs().max().item())


@every_op
def test_main_grad(name: str, device: str) -> None:
    """Gradients added there are not in .grad; other gradients reach .grad once."""
    op, arrived = OPS[name](device), []
    for i, leaf in enumerate(op.leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, i=i: arrived.append(i))
    op.call(*op.leaves).sum().backward()
    assert sorted(arrived) == list(range(len(op.leaves)))
    _, *expected = (leaf.grad for leaf in op.leaves)
    for leaf in op.leaves:
        leaf.grad = None
    for weight in op.leaves[1:]:
        weight.main_grad = torch.ones_like(weight)
    op.call(*op.leaves).sum().backward()
    assert op.leaves[0].grad is not None
    for weight, gradient in zip(op.leaves[1:], expected, strict=True):
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, gradient + 1)


BREAKS = {  # why a graph breaks; the other ops give one graph
    **dict.fromkeys(
        ("loss", "losses", "loss of one chunk", "loss beside metrics"), "seqtile counts the labelled tokens"
    ),
    **{name: f"seqtile.{name}" for name in OTHERS},
}


@pytest.mark.full("5 s of compiler each", but=("loss", "gated_mlp"))
@pytest.mark.parametrize("name", [name for name in OPS if name not in DIVERGENCES])
def test_compiled_equals_eager(name: str, device: str) -> None:
    """In one graph, or with breaks at one place that give the reason."""
    op = OPS[name](device)

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        return op.call(leaves[0] * 1.0, *leaves[1:]) * 1.5

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=name not in BREAKS)
    torch.testing.assert_close(compiled(*op.leaves), step(*op.leaves))
    torch.testing.assert_close(gradients(Op(op.leaves, compiled)), gradients(Op(op.leaves, step)))
    if name in BREAKS:
        found = torch._dynamo.explain(step)(*op.leaves).break_reasons
        assert len({reason.user_stack[-1].lineno for reason in found}) == 1 and BREAKS[name] in found[0].reason


UNITS = {  # products of labelled tokens, hidden and vocabulary: with a frozen operand, and without
    "loss": (2, 3),
    "losses": (3, 4),
    "loss of all tokens": (2, 3),
    "loss of one chunk": (2, 3),
    "loss beside metrics": (2, 3),
    "metrics": (4, 6),
    "metrics of losses": (3, 4),
    "log_probs": (3, 4),
    "summed": (2, 3),
}


@pytest.mark.parametrize("frozen", ["hidden", "weight", "neither", "both"])
@pytest.mark.parametrize("name", UNITS)
def test_products(name: str, frozen: str) -> None:
    """Only labelled tokens cost products; frozen operands cost none; metrics only if they need gradients."""
    op = OPS[name]("cpu")
    trained = [frozen in ("weight", "neither"), frozen in ("hidden", "neither")]
    leaves = [leaf.detach().requires_grad_(wanted) for leaf, wanted in zip(op.leaves, trained, strict=True)]
    with FlopCount() as flops:
        y = op.call(*leaves)
        if frozen != "both":
            y.sum().backward()
    labelled = T - len(range(0, T, 3)) if name in BREAKS else T
    units = 1 if frozen == "both" else UNITS[name][frozen == "neither"]
    assert flops.total == units * 2 * labelled * D * V and not flops.unknown
    assert [leaf.grad is not None for leaf in leaves] == trained


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gated_mlp", "loss", "losses"])
def test_under_checkpoints(name: str, reentrant: bool, device: str) -> None:
    """Also a checkpoint inside another one, with saved tensors on the CPU."""
    op = OPS[name](device)
    expected = gradients(op)

    def nested(*leaves: torch.Tensor) -> torch.Tensor:
        with nullcontext() if reentrant else torch.autograd.graph.save_on_cpu():
            return checkpoint(op.call, *leaves, use_reentrant=reentrant)

    checkpoint(nested, *op.leaves, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close([leaf.grad for leaf in op.leaves], list(expected))


@eager_memory
@every_op
def test_on_meta(name: str) -> None:
    """Shapes only, as torch's own functions give them."""
    meta, real = OPS[name]("meta"), OPS[name]("cpu")
    y = meta.call(*meta.leaves)
    assert y.is_meta and y.shape == real.call(*real.leaves).shape
    y.sum().backward()
    assert all(leaf.grad.is_meta and leaf.grad.shape == leaf.shape for leaf in meta.leaves)


def vmapped(call: Callable, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(call)(torch.stack((x, x)))


def differentiated(call: Callable, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: call(x).sum())(x)


def pushed_forward(call: Callable, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(call, (x,), (x,))[1]


NAMES = {"loss": "linear_cross_entropy", "log_probs": "linear_log_probs", "tiled": "tiled", "gated_mlp": "gated_mlp"}


@pytest.mark.parametrize("transform", [vmapped, differentiated, pushed_forward])
@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_functions_are_refused(name: str, transform: Callable) -> None:
    """For a sequence that fits in a chunk they work if no code of ours is involved."""
    op = OPS[name]("cpu")
    x, *weights = (leaf.detach() for leaf in op.leaves)
    with pytest.raises(ValueError, match=f"{NAMES[name]} cannot be transformed by torch.vmap or torch.func; loop"):
        transform(lambda x: op.call(x, *weights), x)
    if name in OTHERS:
        assert transform(lambda x: op.call(x, *weights), x[:20]).shape[-2] == 20
