"""One rank of a distributed run whose loss the user computes from the model's logits."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqtile
from distributed.worker import CHUNK, LAYERS, LENGTHS, STRATEGIES, full, trainable
from seqtile.models.logits import late as late_read
from support.assertions import relative_error, unread
from support.tiny import batch_of, build
from support.training import halved, update, with_lora


def unused(model: nn.Module):
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return wrapped, torch.optim.SGD(trainable(model), lr=1.0)


WRAPPED = STRATEGIES | {"ddp_unused": unused}
OF = {
    "alone": lambda logits, loss: logits[:, :-1].float().logsumexp(-1).sin().mean() + logits[:, ::3].square().mean(),
    "apart": lambda logits, loss: OF["alone"](logits, loss),  # from the loss, which is computed, too
    "beside": lambda logits, loss: loss + logits[..., 5].tanh().mean(),
    "not trained on": lambda logits, loss: loss + logits.argmax(-1).float().mean() * 0,
}


def train(model: nn.Module, strategy: str, of: str, batches: list[dict]) -> tuple[list, dict[str, torch.Tensor]]:
    wrapped, optimizer = WRAPPED[strategy](model)
    found = []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels" or of != "alone"}
        output = wrapped(**inputs)
        loss = OF[of](output.logits, output.loss)
        found.append(loss.detach())
        update(wrapped, optimizer, loss)
    model.eval()
    with torch.no_grad():
        logits = wrapped(input_ids=batches[0]["input_ids"]).logits
        found.append(logits.argmax(-1))
    weights = full(model)
    if wrapped is optimizer:
        wrapped.destroy()
    return found, weights


def same_training(strategy: str, of: str, adapter: bool) -> None:
    """The same losses, updates and generated tokens as untiled."""
    found = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = halved(build("llama", tie_word_embeddings=False, num_hidden_layers=LAYERS))
        if adapter:
            model = with_lora(model, "q_proj", "lm_head", task_type="CAUSAL_LM")
        if tiled:
            seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        torch.manual_seed(dist.get_rank())
        found.append(train(model, strategy, of, [batch_of(1, length) for length in LENGTHS[dist.get_rank()]]))
        if tiled and "fsdp2" in strategy:
            assert seqtile.status(model).loss.chunked == adapter
    (theirs, expected), (ours, weights) = found
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    moved = {name: weight - start[name] for name, weight in expected.items()}
    assert any(each.norm() > 0 for name, each in moved.items() if "lm_head" in name)
    for name, each in moved.items():
        assert relative_error(weights[name] - start[name], each) <= 1e-4, name


def reads_and_other_weights(tiled: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Reads logits of a head in a group of FSDP2's twice in evaluation, gives the head other weights, and trains."""
    torch.manual_seed(0)
    model = halved(build("llama", tie_word_embeddings=False, num_hidden_layers=1))
    if tiled:
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    ids = batch_of(1, 90)["input_ids"]
    wrapped, optimizer = WRAPPED["fsdp2_group"](model)
    with torch.no_grad():
        logits = wrapped.eval()(input_ids=ids).logits
        found = [logits.logsumexp(-1), logits.argmax(-1)]
        model.lm_head.weight.mul_(0.5)  # of this rank's shard
    loss = OF["alone"](wrapped.train()(input_ids=ids).logits, None)
    update(wrapped, optimizer, loss)
    return [*found, loss.detach()], full(model)


def read_on_one_rank(strategy: str) -> None:
    """The error names the missing rank within a time limit, and the other rank continues."""
    model = halved(build("llama", tie_word_embeddings=False, num_hidden_layers=1))
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    wrapped, _ = WRAPPED[strategy](model)
    with torch.no_grad():
        logits = model.eval() and wrapped(input_ids=batch_of(1, 30)["input_ids"]).logits
    assert unread(logits)
    late_read.ARRIVAL_LIMIT = timedelta(seconds=0.5)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"of a sharded head are read on 1 of 2 ranks.*on every rank, or none"):
            logits.argmax(-1)
    dist.barrier()


def steps_between(strategy: str) -> None:
    """Reading a sharded head's logits after a step raises an error."""
    model = halved(build("llama", tie_word_embeddings=False, num_hidden_layers=1))
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    wrapped, optimizer = WRAPPED[strategy](model)
    output = wrapped(**batch_of(1, 60))
    update(wrapped, optimizer, output.loss)
    with pytest.raises(RuntimeError, match="the head's weight changed"):
        output.logits.argmax(-1)


def gathers_of_a_step(strategy: str) -> None:
    """Logits that nobody reads cost no collective."""
    found = []
    for skipped in (True, None):
        model = halved(build("llama", tie_word_embeddings=False, num_hidden_layers=1))
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
        wrapped, optimizer = WRAPPED[strategy](model)
        batch = batch_of(1, 60)
        for counted in (False, True):  # the first step compares itself with the untiled model
            with CollectiveCount() as count:
                output = wrapped(**batch, skip_logits=skipped)
                update(wrapped, optimizer, output.loss)
            found += [count.total] * counted
        if wrapped is optimizer:
            wrapped.destroy()
    assert found[0] == found[1] and sum(found[0].values()) > 0, found


class CollectiveCount(TorchDispatchMode):
    """Counts collectives inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Counter = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.total[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))
