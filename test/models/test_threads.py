"""Threads that share a model, or modules of one; and forwards inside a forward."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import seqtile
from models.layered import assert_equal, on_model_or_classes
from seqtile.models.find import head_of
from seqtile.models.forward.loss import place_of_head
from support.assertions import relative_error, unread
from support.tiny import CHUNK, batch_of, build, loss_and_gradients
from support.training import with_lora

pytestmark = pytest.mark.usefixtures("pristine")
LENGTH = 2 * CHUNK + 3


def run_at_once(*works: Callable[[], object]) -> list:
    """Calls functions in threads of their own, which begin together."""
    barrier = threading.Barrier(len(works))

    def begun(work: Callable[[], object]) -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(begun, work) for work in works]]


def evaluated(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).loss


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=batch["input_ids"]).logits + 0


def generated(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.generate(batch["input_ids"][:1, :9], max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
@pytest.mark.full("of two models", but=("*llama*",))
@on_model_or_classes
def test_threads_evaluate_one_model(arch: str, on_classes: bool) -> None:
    untiled = build(arch).eval()
    batches = [batch_of(1, LENGTH + i) for i in range(6)]
    ways = [evaluated, logits_of, evaluated, generated, evaluated, evaluated]
    tiled = copy.deepcopy(untiled)
    with torch.no_grad():
        expected = [way(untiled, batch) for way, batch in zip(ways, batches, strict=True)]
    apply = getattr(seqtile, f"apply_seqtile_to_{arch}")
    apply(None if on_classes else tiled, layer=arch == "llama", chunk_tokens=CHUNK)

    def work(i: int) -> None:
        for _ in range(8):
            assert relative_error(ways[i](tiled, batches[i]).float(), expected[i].float()) <= 1e-5

    run_at_once(*[lambda i=i: work(i) for i in range(6)])
    assert unread(tiled(**batches[0]).logits)


def sharing(model: nn.Module) -> nn.Module:
    """A copy with adapters of its own, and the same frozen modules."""
    frozen = [part for part in model.modules() if not any(weight.requires_grad for weight in part.parameters())]
    return copy.deepcopy(model, {id(part): part for part in frozen if [*part.parameters()]})


def test_threads_train_adapters_over_one_base() -> None:
    models = [with_lora(build("llama"), "q_proj", "v_proj")]
    models += [sharing(models[0]) for _ in range(2)]
    assert models[0].get_output_embeddings() is models[1].get_output_embeddings()
    for model in models:
        for name, weight in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(weight, std=0.3)
    batches = [batch_of(2, LENGTH + i) for i in range(3)]
    truth = [loss_and_gradients(model, **batch) for model, batch in zip(models, batches, strict=True)]
    for model in models:
        seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK, check=False)

    def train(i: int) -> None:
        for _ in range(2):
            assert_equal(loss_and_gradients(models[i], **batches[i]), truth[i])

    run_at_once(*[lambda i=i: train(i) for i in range(3)])


def test_the_head_during_a_forward() -> None:
    """Other threads find the head itself, and so do the functions that look for it."""
    model = build("llama").eval()
    head, usual, found = model.lm_head, model.loss_function, []
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)

    def look(*_: object) -> None:
        def others() -> None:
            copied, replica = copy.deepcopy(model), model._replicate_for_data_parallel()
            found.append(model.lm_head is head and model.get_output_embeddings() is head)
            found.append(model.loss_function is usual)
            found.append(type(copied.lm_head) is nn.Linear and replica.lm_head is head)
            found.append(not {"lm_head", "_loss_function"} & (vars(copied).keys() | vars(replica).keys()))

        run_at_once(others)
        found.append(head_of(model) is head and place_of_head(model) == (model, "lm_head"))

    model.model.norm.register_forward_hook(look)
    assert unread(model(**batch_of(1, LENGTH)).logits)
    assert found == [True] * 5


class Rereads(LlamaForCausalLM):
    """Calls itself in its own forward, as a model does that scores what it generates."""

    depth = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: object):
        if labels is not None and self.depth == 0:
            self.depth = 1
            more = self.generate(input_ids[:1, :5], max_new_tokens=2, do_sample=False).float().mean()
            inner = self(input_ids=input_ids, labels=labels).loss
            logits = self(input_ids=input_ids).logits
            self.depth = 0
            output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
            output.loss = output.loss + inner + logits.logsumexp(-1).mean() + more
            return output
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def test_a_model_that_calls_itself() -> None:
    untiled = Rereads(build("llama").config).train()
    tiled, batch = copy.deepcopy(untiled), batch_of(1, LENGTH)
    del batch["attention_mask"]
    truth = loss_and_gradients(untiled, **batch)
    seqtile.apply_seqtile(tiled, chunk_tokens=CHUNK, check=False)
    assert seqtile.status(tiled).loss.fused
    assert_equal(loss_and_gradients(tiled, **batch), truth)
