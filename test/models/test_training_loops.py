"""Training loops that users may write around a tiled model: gradient scaling, micro-batches, compiled layers."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from models.layered import KINDS, assert_equal
from support.assertions import assert_each_as_exact
from support.choice import every_value
from support.tiny import CHUNK, batch_of, checkpointing, gentle, loss_and_gradients, tiled_copy

pytestmark = pytest.mark.on_gpu("a CPU trains all of them by the same lines", only=every_value)

Batch = dict[str, torch.Tensor]


def three(arch: str, device: str, reentrant: bool | None = None, **changes: object) -> list[nn.Module]:
    """The same model tiled, untiled, and untiled in float64."""
    untiled = gentle(arch, device, **changes)
    models = [tiled_copy(untiled), untiled, copy.deepcopy(untiled).double()]
    for model in models:
        checkpointing(model, reentrant)
    return models


def autocast(model: nn.Module, dtype: torch.dtype) -> torch.autocast | nullcontext:
    """Autocast for a float32 model; none for the float64 model, which is the reference."""
    wanted = dtype != torch.float32 and model.dtype == torch.float32
    return torch.autocast(model.device.type, dtype) if wanted else nullcontext()


@pytest.mark.full("of 27 cases, half a second each", but=every_value)
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", ["llama", "gemma2", "phi3"])
def test_micro_batches_under_autocast(arch: str, dtype: torch.dtype, reentrant: bool | None, device: str) -> None:
    """Micro-batches longer and shorter than a chunk, with a common token count; float16 with a scaled loss."""
    models = three(arch, device, reentrant)
    batches = [batch_of(1, 31, device), batch_of(3, 101, device), batch_of(1, CHUNK, device), batch_of(2, 77, device)]
    items = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    for model in models:
        scaler = torch.amp.GradScaler(device, init_scale=2.0**9, enabled=dtype == torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for batch in batches:
            with autocast(model, dtype):
                loss = model(**batch, num_items_in_batch=items).loss
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    assert_each_as_exact(*({name: p.grad for name, p in model.named_parameters()} for model in models))


def poison_last_token(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
    """A forward hook that makes one element of its output's gradient infinite, in the last chunk."""

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[-1, -1, 7] = torch.inf
        return gradient

    output.register_hook(poisoned)


def scaled_steps(model: nn.Module, batches: list[Batch]) -> tuple[list[tuple[float, bool]], dict[str, torch.Tensor]]:
    """Trains in float16 with a scaler. Returns the scale after every step, whether the step was taken, and all updates.
    The first step's scale overflows; in the third, one token's gradient is infinite. The float64 model skips both
    steps."""
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    exact = model.dtype == torch.float64
    options = {"init_scale": 2.0**32, "backoff_factor": 2.0**-17, "growth_interval": 2}
    scaler = torch.amp.GradScaler(model.device.type, enabled=not exact, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    history = []
    mlp = model.model.layers[1].mlp
    for index, batch in enumerate(batches):
        if exact and index in (0, 2):
            continue
        before = [parameter.detach().clone() for parameter in model.parameters()]
        hook = mlp.register_forward_hook(poison_last_token) if index == 2 else None
        with autocast(model, torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
            assert not any(p.grad.isfinite().all() for p in mlp.parameters()), "the infinity was lost"
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pairs = zip(before, model.parameters(), strict=True)
        history.append((scaler.get_scale(), not all(old.equal(new) for old, new in pairs)))
    return history, {name: parameter.detach() - start[name] for name, parameter in model.named_parameters()}


@pytest.mark.full("two seconds each", but=("phi3",))
@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_scaler_skips_the_same_steps(arch: str, device: str) -> None:
    models = three(arch, device)
    batches = [batch_of(2, length, device) for length in (101, 64, 90, 101, 59, 77)]
    (ours, our_moves), (theirs, their_moves), (_, true_moves) = [scaled_steps(model, batches) for model in models]
    overflowed, infinite = (2.0**15, False), (2.0**-2, False)
    assert theirs == [overflowed, (2.0**15, True), infinite, (2.0**-2, True), (0.5, True), (0.5, True)] == ours
    assert_each_as_exact(our_moves, their_moves, true_moves)


def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


BREAK = "seqtile.gated_mlp saves its input in a node of its own"


@pytest.mark.full("10 s of compiler each, of the same graph", but=("llama",))
@pytest.mark.parametrize("arch", ["llama", "gemma2", "phi3"])
def test_compiled_layers(arch: str, device: str) -> None:
    """The graph of a layer breaks only at the MLP, and not at all if a sequence fits in a chunk."""
    eager = tiled_copy(gentle(arch, device, num_hidden_layers=1))
    for length, breaks in ((101, 1), (CHUNK, 0)):
        fresh_compiler()
        compiled = copy.deepcopy(eager)
        compiled.model.layers[0].compile(backend="aot_eager")
        batch = batch_of(1, length, device)
        assert_equal(loss_and_gradients(compiled, **batch), loss_and_gradients(eager, **batch))
        assert counters["stats"]["unique_graphs"] == breaks + 1
        assert len(counters["graph_break"]) == breaks and all(BREAK in reason for reason in counters["graph_break"])


@pytest.mark.full("10 s of compiler each, of the same graph")
@pytest.mark.parametrize(
    ("how", "reentrant"),
    [("model", None), ("torch.compile", None), *(("layer.compile", reentrant) for reentrant in (None, False, True))],
)
def test_compiled_of_any_length(how: str, reentrant: bool | None, device: str) -> None:
    """Sequences of new lengths, longer and shorter than a chunk, are right. Under checkpointing, the code that Hugging
    Face checkpoints inside the compiled layer runs eagerly where the MLP breaks the graph."""
    fresh_compiler()
    eager = tiled_copy(gentle("llama", device, num_hidden_layers=1))
    checkpointing(eager, reentrant)
    compiled = copy.deepcopy(eager)
    layers = compiled.model.layers
    for index, layer in enumerate(layers):
        if how == "torch.compile":
            layers[index] = torch.compile(layer, backend="aot_eager")
    for module in {"model": [compiled], "layer.compile": layers}.get(how, []):
        module.compile(backend="aot_eager")
    for batch_size, length in ((1, 41), (2, 101), (1, 83), (1, 30)):
        batch = batch_of(batch_size, length, device)
        loss, gradients = loss_and_gradients(compiled, **batch)
        gradients = {name.replace("._orig_mod", ""): gradient for name, gradient in gradients.items()}
        assert_equal((loss, gradients), loss_and_gradients(eager, **batch))
    assert counters["stats"]["unique_graphs"] > 0
    assert how == "model" or (counters["graph_break"] and all(BREAK in reason for reason in counters["graph_break"]))
