"""Code of a rank that compares whole batches, which are cut inside the model, with one process."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForSequenceClassification

import seqtile
from distributed.worker import fsdp2
from seqtile import sp
from seqtile.sp.token_shard import TokenShard
from sp import steps
from sp.attentions import install
from sp.cases import WRAPPED, batch_of_kind
from sp.over_ranks import Traffic, assert_same_step, by_first_rank, context
from support.assertions import relative_error
from support.measure import LiveBytes
from support.tiny import build, checkpointing, config_of, loss_and_gradients

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor")
Batch = dict[str, Tensor]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the collectives inside, except all-to-alls: the number of each, and the bytes of all-gathers and
    all-reduces."""
    found, functions = dict.fromkeys(COLLECTIVES, 0), {name: getattr(dist, name) for name in COLLECTIVES}
    found["gathered bytes"] = found["reduced bytes"] = 0

    def counting(name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            if name == "all_gather":
                found["gathered bytes"] += args[1].numel() * args[1].itemsize
            if name == "all_reduce":
                found["reduced bytes"] += args[0].nbytes
            return functions[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


def of_kind(i: int, case: str, kind: str, arch: str, shape: dict, **options: object) -> None:
    """A step with the model's own loss and `options` applied: its loss, all gradients, and the ranks' communication."""
    install()
    ctx = context()
    torch.manual_seed(i)
    one = build(arch, **shape)
    many = copy.deepcopy(one)
    many.config._attn_implementation = WRAPPED.get(case.split()[0], one.config._attn_implementation)
    batch = batch_of_kind(kind)
    expected = by_first_rank(loss_and_gradients, one, **batch)
    sp.apply_ulysses(many, ctx, batches="whole")
    if options:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options, check=False)
    checkpointing(many, (None, False, True)[i % 3])
    with Traffic() as traffic, counted() as collectives:
        loss = many(**batch).loss
        forward = len(traffic.sent)
    loss.backward()
    assert forward == 2 * many.config.num_hidden_layers
    assert collectives["all_gather"] == 1, "hashes and shapes; documents are those of the whole batch"
    assert collectives["all_reduce"] == 1, "the loss"
    assert_same_step(loss, many, expected, f"{case}, {kind}")
    if case.split()[0] not in WRAPPED:  # they replace a GPU's
        generated(one, many, batch["input_ids"][:1, :9])


def generated(one: nn.Module, many: nn.Module, prompt: Tensor) -> None:
    """The same words, while a model is cut and afterwards."""
    words = [model.eval().generate(prompt, max_new_tokens=3, do_sample=False) for model in (one, many)]
    assert words[0].equal(words[1])


def padded_batch() -> Batch:
    """Two rows of 37 tokens, one padded on the left."""
    ids = torch.randint(3, 200, (2, 37))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :9] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def inputs_of(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def hidden_of(model: nn.Module, batch: Batch) -> Tensor:
    return model.model(**inputs_of(batch), use_cache=False).last_hidden_state


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**inputs_of(batch)).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def both_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The model's loss, and one that reads its logits in several ways."""
    output, counts = model(**batch), batch["attention_mask"]
    sharpness = (output.logits.softmax(-1).square().sum(-1) * counts).mean()
    return output.loss + 0.01 * (counts * output.logits.float().logsumexp(-1).square()).mean() + sharpness


def hidden_states(model: nn.Module, batch: Batch) -> Tensor:
    """Hidden states of all layers, read by a function that needs all tokens, and a slice of them."""
    found = model.model(**inputs_of(batch), use_cache=False, output_hidden_states=True).hidden_states
    counts = batch["attention_mask"][..., None]
    return sum((each.pow(2) * counts).cumsum(1).mean() for each in found) + found[1][:, -3:].std()


def preferences(model: nn.Module, batch: Batch) -> Tensor:
    """DPO's loss, as written for one GPU."""
    hidden = hidden_of(model, batch)
    log_probs = seqtile.linear_log_probs(hidden[:, :-1], model.lm_head.weight, batch["labels"][:, 1:], chunk_tokens=7)
    chosen, rejected = log_probs.sum(1)
    return -F.logsigmoid(0.1 * (chosen - rejected)) + 0.01 * chosen


def chosen_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probabilities and entropies of the tokens that a mask selects."""
    counts = batch["labels"][:, 1:] != -100
    hidden, labels = hidden_of(model, batch)[:, :-1][counts], batch["labels"][:, 1:][counts]
    outputs = {"outputs": ("entropy", "is_largest"), "ignore_index": None}
    log_probs, values = seqtile.linear_log_probs(hidden, model.lm_head.weight, labels, **outputs)
    return -(log_probs * torch.linspace(0, 1, len(labels))).sum() / 50 - 0.1 * values.entropy.mean()


def metrics(model: nn.Module, batch: Batch) -> Tensor:
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    weight, options = model.lm_head.weight, {"return_metrics": True, "label_smoothing": 0.1}
    loss, found = seqtile.linear_cross_entropy(hidden_of(model, batch), weight, labels, **options)
    assert found.predicted_tokens.shape == labels.shape and 0 <= found.token_accuracy <= 1
    return loss + 0.1 * found.mean_entropy + 0.01 * found.logsumexp.square().mean()


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    classes, weight = torch.linspace(0.5, 2, model.config.vocab_size), model.lm_head.weight
    hidden = hidden_of(model, batch)
    mean = seqtile.linear_cross_entropy(hidden, weight, labels, class_weight=classes)
    each = seqtile.linear_cross_entropy(hidden, weight, labels, reduction="none")
    return mean + (each * torch.linspace(0, 1, labels.shape[1])).mean()


def distillation(model: nn.Module, batch: Batch) -> Tensor:
    """From hidden states of a teacher that every rank has whole, and from its k most likely tokens."""
    hidden, weight, mask = hidden_of(model, batch), model.lm_head.weight, batch["labels"] != -100
    torch.manual_seed(5)
    teacher, head = torch.randn(hidden.shape), torch.randn(weight.shape)
    ids = torch.stack([torch.randperm(len(weight))[:4] for _ in range(mask.numel())]).view(*mask.shape, 4)
    loss = seqtile.linear_divergence(hidden, weight, teacher, head, beta=0.5, mask=mask)
    own = seqtile.linear_divergence(hidden, weight, hidden.detach(), head, mask=mask, reduction="sum") / 100
    return loss + own + seqtile.linear_topk_divergence(hidden, weight, ids, torch.randn(*mask.shape, 4) - 9, mask=mask)


def values(model: nn.Module, batch: Batch) -> Tensor:
    """A head with few outputs on selected tokens, which are normalised first, with a value computed from all tokens."""
    hidden = hidden_of(model, batch)[batch["labels"] != -100]
    found = F.linear(F.layer_norm(hidden, hidden.shape[-1:]), model.lm_head.weight[:5]) * torch.linspace(0, 1, 5)
    return (found - found.mean(0)).square().mean() + 0.1 * found.softmax(-1).amax(-1).mean()


def weighed(model: nn.Module, batch: Batch) -> Tensor:
    """Hidden states multiplied by values read from logits and from all hidden states."""
    output = model(**inputs_of(batch), output_hidden_states=True)
    hidden, counts = output.hidden_states[-1], batch["attention_mask"][..., None]
    sharpness = output.logits.softmax(-1).amax(-1, keepdim=True)
    common = (counts * hidden).square().mean()
    return (counts * hidden * sharpness * common).square().mean() + 0.1 * (hidden * common * counts).std()


def of_one_token(model: nn.Module, batch: Batch) -> Tensor:
    """Dimensions counted from the front, of one token and of one row."""
    logits, hidden = model(**inputs_of(batch)).logits, hidden_of(model, batch)
    one, row = hidden[1, -1], hidden[1]
    assert one.argmax(0).dim() == 0 and row.argmax(1).shape == row.shape[:1]
    last = logits[1, -1].softmax(0).square().sum() + logits[1, 7:].log_softmax(1).square().mean()
    return last + row.mean(1).square().sum() + row.mean(0).square().sum() + hidden[1:].softmax(2)[..., 0].sum()


def fed_back(model: nn.Module, batch: Batch) -> Tensor:
    """Hidden states that the text model gets as embeddings, and a norm computed in a checkpoint."""
    ids = batch["input_ids"][1:]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    again = model.model(inputs_embeds=torch.cat([hidden * 0.5, hidden[:, -3:]], 1), use_cache=False).last_hidden_state
    size = checkpoint(lambda hidden: hidden.norm(dim=-1, keepdim=True), hidden, use_reentrant=True)
    return again.square().mean() + (hidden / size)[..., :3].square().mean() + F.dropout(again, 0.0).std()


def of_gradients(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that uses the gradient of another loss as a number."""
    hidden = hidden_of(model, batch)
    [gradient] = torch.autograd.grad(
        (hidden.pow(2) * batch["attention_mask"][..., None]).sum(), hidden, retain_graph=True
    )
    counts = batch["attention_mask"][..., None]
    return (hidden * gradient * counts).mean() + (gradient * counts).square().sum() * (hidden * counts).square().mean()


LOSSES = (
    of_one_token,
    own_loss,
    both_losses,
    fed_back,
    of_gradients,
    values,
    weighed,
    hidden_states,
    preferences,
    chosen_tokens,
    metrics,
    weighted,
    distillation,
)


def by_one(loss_of: Callable[..., Tensor], model: nn.Module, *arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(model, *arguments)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def loss_of_ones_own(loss_of: Callable[..., Tensor], options: dict | None) -> None:
    """An unchanged loss that was written for one process."""
    ctx, one, batch = context(), build("llama", num_key_value_heads=4), padded_batch()
    many = copy.deepcopy(one)
    expected = by_first_rank(by_one, loss_of, one, batch)
    sp.apply_ulysses(many, ctx, batches="whole")
    if options is not None:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options)
    loss = loss_of(many, batch)
    loss.backward()
    assert_same_step(loss, many, expected, loss_of.__name__)


def classification() -> None:
    """A head with few outputs after the text model, on the last token of each row."""
    ctx, batch = context(), padded_batch()
    batch["labels"] = torch.tensor([1, 0])
    one = LlamaForSequenceClassification(config_of("llama", num_labels=3)).train()
    many = copy.deepcopy(one)
    expected = by_first_rank(loss_and_gradients, one, **batch)
    sp.apply_ulysses(many, ctx, batches="whole")
    loss = many(**batch).loss
    loss.backward()
    assert_same_step(loss, many, expected)


def short() -> None:
    """Fewer tokens than the ranks have room for: some ranks have none, and all of them continue."""
    ctx = context()
    for length in (3, 5, 9):
        one = build("llama")
        many, ids = copy.deepcopy(one), torch.randint(3, 200, (2, length))
        expected = by_first_rank(loss_and_gradients, one, input_ids=ids, labels=ids)
        sp.apply_ulysses(many, ctx, batches="whole")
        seqtile.apply_seqtile(many)
        loss = many(input_ids=ids, labels=ids).loss
        loss.backward()
        assert_same_step(loss, many, expected, f"{length} tokens")


def read() -> None:
    """Values are gathered only when they are read: shapes and dtypes cost nothing, a slice costs only itself."""
    ctx, model, batch = context(), build("llama").eval(), padded_batch()
    whole = by_first_rank(lambda: model(**inputs_of(batch)).logits.detach())
    counts = batch["attention_mask"].bool()
    sp.apply_ulysses(model, ctx, batches="whole")
    with torch.no_grad():
        hidden = hidden_of(model, batch)
        with counted() as collectives:
            assert isinstance(hidden, TokenShard) and hidden.shape == (2, 37, 48) and "on this rank" in repr(hidden)
            half = hidden[:, 3:20].bfloat16().float() * 2
            assert half.shape == (2, 17, 48) and half.dtype == torch.float32 and half.device == hidden.device
            plain = torch.zeros(2, 37, 48)
            for same in (hidden.view_as(plain), hidden.expand_as(hidden), hidden.reshape_as(hidden)):
                assert isinstance(same, TokenShard) and same.shape == hidden.shape
            assert plain.view_as(hidden).equal(plain)
        assert not any(collectives.values())
        with counted() as collectives:
            last = hidden[:, -1] + 0
            assert last.norm().isfinite()
        most = -(-2 // 1)  # both rows' last tokens are on one rank
        assert collectives["gathered bytes"] == most * 48 * 4 and collectives["all_gather"] == 1
        logits = model(**inputs_of(batch)).logits
        with counted() as collectives:
            best = logits.argmax(-1)
        assert collectives["gathered bytes"] == -(-37 // ctx.size) * 2 * 8, "an index a token"
        assert best.equal(whole.argmax(-1).where(counts, best))
        assert torch.allclose(logits[counts], whole[counts], atol=1e-5)
        for change in (lambda: hidden.mul_(2), lambda: torch.exp(hidden, out=hidden), hidden.data_ptr):
            with pytest.raises(RuntimeError, match="cannot be changed in place; use a copy"):
                change()
        with pytest.raises(ValueError, match=r"expected values of the tokens \[2, 37\], got \[37, 2\]"):
            seqtile.linear_cross_entropy(hidden, model.lm_head.weight, batch["labels"].T)
    assert len(logits.tolist()) == 2


def head_of_its_own() -> None:
    """A head that FSDP2 shards by itself, whose hooks return views of what they get: no rank gathers all tokens."""
    ctx, one, batch = context(), build("llama", tie_word_embeddings=False), padded_batch()
    many = copy.deepcopy(one)
    expected = by_first_rank(by_one, own_loss, one, batch)
    sp.apply_ulysses(many, ctx, batches="whole")
    wrapped, _ = fsdp2(many, head=True)
    with counted() as collectives:
        loss = own_loss(wrapped, batch)
    loss.backward()
    assert collectives["gathered bytes"] == 8 * 9, "hashes and shapes"
    assert relative_error(loss.detach(), expected[0]) <= 1e-5
    for name, parameter in wrapped.named_parameters():
        assert relative_error(parameter.grad.full_tensor(), expected[1][name]) <= 1e-5, name


def sent_bytes() -> None:
    """The bytes that a step sends, by formula, with the model's loss and with log-probabilities."""
    ctx, model, (rows, length) = context(), build("llama", num_key_value_heads=4), (2, 37)
    ids = torch.randint(3, 200, (rows, length))
    local = -(-length // ctx.size)
    sp.apply_ulysses(model, ctx, batches="whole")
    seqtile.apply_seqtile(model, chunk_tokens=11, check=False)
    of_batch = 8 * 9  # compared between ranks
    of_heads = (4 + 2 * 4 + 4) * 12 * 4 * (ctx.size - 1) // ctx.size  # q, k and v there, the output back; to others
    nothing, layers = dict.fromkeys((*COLLECTIVES, "gathered bytes", "reduced bytes"), 0), 2

    def log_probs() -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return seqtile.linear_log_probs(hidden, model.lm_head.weight, ids, chunk_tokens=7).mean()

    for loss_of, expected in (
        (lambda: model(input_ids=ids, labels=ids).loss, {"all_reduce": 1, "reduced bytes": 4}),
        (log_probs, {"all_gather": 2, "gathered bytes": of_batch + 4 * rows * local}),
    ):
        with Traffic() as traffic, counted() as forward:
            loss = loss_of()
        assert forward == nothing | {"all_gather": 1, "gathered bytes": of_batch} | expected
        assert sum(traffic.sent) == layers * rows * local * of_heads
        with Traffic() as traffic, counted() as backward:
            loss.backward()
        assert backward == nothing
        assert sum(traffic.sent) == layers * rows * local * of_heads


def live_bytes() -> None:
    """A rank's peak is that of a step whose batch was cut before the model, plus the whole ids and labels."""
    ctx, length = context(), 2048
    ids = torch.randint(3, 200, (1, length))
    batch, peaks = {"input_ids": ids, "labels": ids}, {}
    for batches in ("cut", "whole"):
        torch.manual_seed(0)
        model = build("llama", max_position_embeddings=length)
        sp.apply_ulysses(model, ctx, batches=batches)
        seqtile.apply_seqtile(model, chunk_tokens=128, layer=True, check=False)
        checkpointing(model, False)
        given = batch if batches == "whole" else sp.shard(batch, ctx)
        of_steps = []
        for _ in range(6):
            with LiveBytes() as live:
                loss = model(**given, use_cache=False).loss
                (loss if batches == "whole" else sp.reduce_loss(loss, ctx)).backward()
            of_steps.append(live.peak)
            model.zero_grad()
        peaks[batches] = min(of_steps)  # gloo's thread now and then holds a collective's buffers a little longer
    integers = 10 * 8 * length  # for whole sequences: ids, labels, positions, the owner of each token, and their hashes
    assert peaks["whole"] <= peaks["cut"] + integers, peaks  # hidden states of all tokens would add 17 %


def refused() -> None:
    """By name, on every rank, and none waits; nothing changes."""
    ctx, batch = context(), padded_batch()
    steps.refused_models(ctx, r"leave this model whole|get_decoder\(\)", batches="whole")
    model = build("llama")
    with pytest.raises(ValueError, match="batches is 'half', expected one of 'cut', 'whole'"):
        sp.apply_ulysses(model, ctx, batches="half")
    sp.apply_ulysses(model, ctx, batches="whole")
    sp.apply_ulysses(model, ctx, batches="whole")
    with pytest.raises(ValueError, match="over other ranks already, or for other batches"):
        sp.apply_ulysses(model, ctx)
    loss = model(**batch).loss
    ids = batch["input_ids"]
    for changes, match in (
        ({"input_ids": ids + (ids == ids[0, 9]) * ctx.rank}, "expected the same whole batch on every rank of a group"),
        ({"input_ids": ids[:, : 30 + ctx.rank], "attention_mask": None, "labels": None}, "batches of different shapes"),
        ({"attention_mask": torch.ones(2, 1, 37, 37)}, "attention_mask of LlamaModel has its tokens in an unknown"),
        ({"batch_hash": torch.tensor(7)}, "this batch is a shard already"),
        ({"attention_mask": torch.arange(37).expand(2, -1) != 7}, "attention_mask has a hole"),
    ):
        with pytest.raises(ValueError, match=match):
            model(**batch | changes)
        assert model(**batch).loss.equal(loss), "after a failure"
    twice = model.model.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        model.model.forward = twice
        model.model(input_ids=ids, use_cache=False)
        return twice(*args, **kwargs)

    model.model.forward = again
    with pytest.raises(ValueError, match="LlamaModel is called twice in a forward"):
        model(**batch)
    assert model(**batch).loss.equal(loss)
    compiled = torch.compile(lambda hidden: hidden.square().mean(), backend="eager")
    with pytest.raises(RuntimeError, match=r"cannot be compiled; pass their \.whole\(\)"):
        compiled(hidden_of(model, batch))
    with pytest.raises(ValueError, match="has the same config object"):
        sp.apply_ulysses(type(model)(model.config), ctx, batches="whole")
    sp.restore(model)
    assert model.config._attn_implementation == "sdpa" and not isinstance(hidden_of(model, batch), TokenShard)
