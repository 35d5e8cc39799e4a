"""The first step's comparison where ranks share sequences and the trainer computes the loss from the last hidden
states, as TRL's trainers do."""

import copy
import gc
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import seqtile
from seqtile import sp
from seqtile.models.forward import mlp as tiled_mlp
from seqtile.models.status import outcome_of
from seqtile.proof.batch import TOKENS
from seqtile.protocols import SHARDED
from sp import images, recurrences
from sp.cases import batch_of_kind
from sp.over_ranks import context
from sp.prefixes import groups
from support.tiny import build
from support.training import with_lora

EQUAL = "gradients below the head equal the untiled model's up to rounding, on "
Batch = dict[str, Tensor]
Step = tuple[Tensor, dict[str, Tensor | None]]
"""A loss, and all gradients."""


class Case(NamedTuple):
    made: Callable[[], tuple[nn.Module, Batch]]
    """Returns a model and a whole batch."""
    batches: str | None = "whole"
    """What `apply_ulysses` is told; None if ranks share no sequences."""
    shares_prefixes: bool = False
    tokens: str = f"{TOKENS} tokens of the batch"
    """The tokens that are compared."""


def llama(batch: Callable[[], Batch], **changes: Any) -> tuple[nn.Module, Batch]:
    return build("llama", num_key_value_heads=4, **changes), batch()


def adapter(batch: Callable[[], Batch]) -> tuple[nn.Module, Batch]:
    model, batch = llama(batch)
    return with_lora(model, "q_proj", "up_proj").get_base_model(), batch


def recurrent(family: str, batch: Callable[[], Batch]) -> tuple[nn.Module, Batch]:
    return recurrences.build(family), batch()


def short() -> Batch:
    ids = torch.randint(3, 200, (1, 9))
    return {"input_ids": ids, "labels": ids}


PACKED, PADDED = partial(batch_of_kind, "packed"), partial(batch_of_kind, "padded")
_ROTARY = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 32}
_TWO_ROWS, _MADE_UP = f"{2 * TOKENS} tokens of the batch", f"{TOKENS} made-up tokens (left out: its own tokens"
CASES = {
    "packed": Case(partial(llama, PACKED)),
    "packed, cut": Case(partial(llama, PACKED), "cut"),
    "padded": Case(partial(llama, PADDED), tokens=_TWO_ROWS),
    "padded, cut": Case(partial(llama, PADDED), "cut", tokens=_TWO_ROWS),
    "short": Case(partial(llama, short), tokens=_MADE_UP),
    "short, cut": Case(partial(llama, short), "cut", tokens=_MADE_UP),
    "prefixes": Case(partial(llama, groups), None, True),
    "prefixes over ranks": Case(partial(llama, groups), "whole", True),
    "adapter": Case(partial(adapter, PACKED)),
    "positions": Case(partial(llama, PACKED, **_ROTARY)),
    "positions, cut": Case(partial(llama, PACKED, **_ROTARY), "cut"),
    **{family: Case(partial(recurrent, family, PACKED)) for family in recurrences.FAMILIES},
    **{f"{kind} images": Case(partial(images.made, kind), tokens=_TWO_ROWS) for kind in images.MODELS},
}


def prepared(case: Case, model: nn.Module, check: bool, **options: Any) -> nn.Module:
    """Returns a copy over ranks, tiled."""
    model = copy.deepcopy(model)
    if case.batches is not None:
        sp.apply_ulysses(model, context(), batches=case.batches)
    seqtile.apply_seqtile(model, chunk_tokens=11, check=check, **options)
    if case.shares_prefixes:
        seqtile.share_prefixes(model, 4)
    return model


def stepped(case: Case, model: nn.Module, batch: Batch) -> Step:
    """A step of a trainer that calls the model below the head, in the forward of the whole, as TRL's do."""

    def forward(labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch: Any = None, **inputs: Any):
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        hidden, weight = model.base_model(**inputs).last_hidden_state, model.get_output_embeddings().weight
        return CausalLMOutput(seqtile.linear_cross_entropy(hidden, weight, shift_labels, reduction="sum") / 100)

    batch = sp.shard(dict(batch), context()) if case.batches == "cut" else batch
    with patch.object(model, "forward", forward):
        loss = model(**batch).loss
    loss = sp.reduce_loss(loss, context()) if case.batches == "cut" else loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


def of_the_comparison() -> set[int]:
    """Tensors with a graph, or with as many tokens as are compared, which no batch here has."""
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    return {id(each) for each in tensors if each.grad_fn is not None or TOKENS in each.shape}


def watched(case: Case, model: nn.Module, batch: Batch) -> tuple[Step, dict[str, Any]]:
    """A step that leaves no tensor of the comparison, and the state of what cuts sequences."""
    gc.collect()
    gc.disable()
    try:
        before = of_the_comparison()
        found = stepped(case, model, batch)
        assert not of_the_comparison() - before
    finally:
        gc.enable()
    plain = (int, bool, str, tuple, type(None))
    sharding = vars(model)[SHARDED]
    every = vars(sharding) | vars(sharding.forward)
    state = {name: value for name, value in every.items() if isinstance(value, plain)}
    return found, state | {"attention": model.config.get_text_config()._attn_implementation}


def assert_same(found: Step, expected: Step) -> None:
    assert found[0].equal(expected[0])
    for name, gradient in expected[1].items():
        same = found[1][name] is None if gradient is None else found[1][name].equal(gradient)
        assert same, name


def compared(name: str, options: dict[str, Any]) -> None:
    """Compared on every rank; the step is bitwise that of an uncompared model, and nothing of the comparison stays."""
    case = CASES[name]
    model, batch = case.made()
    expected, state = watched(case, prepared(case, model, False, **options), batch)
    ours = prepared(case, model, True, **options)
    found, after = watched(case, ours, batch)
    said = str(outcome_of(ours))
    assert said.startswith("the last hidden states and ") and EQUAL + case.tokens in said, said
    assert_same(found, expected)
    assert after == state


@contextmanager
def scaled_mlps(only_on: int | None):
    """Tiled MLPs whose result is 10 % off, on one rank or on all."""
    right = tiled_mlp.gated_mlp_of

    def wrong(*args: Any, **options: Any) -> Tensor:
        return right(*args, **options) * (1.1 if only_on in (None, dist.get_rank()) else 1.0)

    with patch.object(tiled_mlp, "gated_mlp_of", wrong):
        yield


def refused(name: str, only_on: int | None) -> None:
    """A wrong MLP stops every rank before anything is trained; the next step, with the right one, is compared again."""
    case = CASES[name]
    model, batch = case.made()
    ours = prepared(case, model, True)
    named = r"something else than the untiled one on .*the part is mlp \(.*\)\. Nothing was trained"
    with scaled_mlps(only_on), pytest.raises(ValueError, match=named):
        stepped(case, ours, batch)
    assert "stopped the training: ValueError: the tiled model computes something else" in str(outcome_of(ours))
    found = stepped(case, ours, batch)
    assert EQUAL in str(outcome_of(ours))
    assert_same(found, stepped(case, prepared(case, model, False), batch))


def fails(name: str, in_backward: bool) -> None:
    """Where the untiled model fails on few tokens on one rank alone, no rank compares, and all of them train."""
    case = CASES[name]
    model, batch = case.made()
    ours = prepared(case, model, True)
    attention = ours.model.layers[1].self_attn
    attend = attention.forward

    def fail(*_: Any) -> None:
        raise IndexError("too few tokens")

    def forward(hidden_states: Tensor, **options: Any) -> Any:
        output, weights = attend(hidden_states, **options)
        if dist.get_rank() == 1 and hidden_states.shape[1] == TOKENS:
            output.register_hook(fail) if in_backward else fail()
        return output, weights

    attention.forward = forward
    found = stepped(case, ours, batch)
    reason = "IndexError: too few tokens" if dist.get_rank() == 1 else "OtherRankFailed"
    assert f"the untiled model fails on a few tokens of it ({reason}" in str(outcome_of(ours)), outcome_of(ours)
    assert_same(found, stepped(case, prepared(case, model, False), batch))
