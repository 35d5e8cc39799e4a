"""The host's cost of a training step: calls of Python functions and builtins per decoder layer, beyond the untiled
model.

This law needs no clock. Absolute numbers depend on Python and torch, so the test limits the difference to the untiled
model in the same run. It leaves out the eager kernels, which no GPU runs: a stub launches the kernels.
"""

import cProfile
import gc
import pstats
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import seqtile
from seqtile.kernels import dispatch
from support.tiny import OLDEST

CHUNK = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4}
SIZES |= {"num_experts_per_tok": 2}
WAYS: dict[str, dict[str, Any] | None] = {"untiled": None, "mlp": {}, "layer": {"layer": True}}
WAYS |= {"groups": {"layer": True, "head_groups": 2}}


class Stub:
    """A kernel launch that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: None


@contextmanager
def stub_launcher() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(dispatch, "triton_serves", lambda tensor: True))
        for program in dispatch.PROGRAMS.values():
            for name in [name for name in vars(program) if name.endswith("_kernel")]:
                stack.enter_context(patch.object(program, name, Stub()))
        yield


def model_of(model_type: str, layers: int) -> nn.Module:
    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, use_cache=False, **SIZES)
    return AutoModelForCausalLM.from_config(config).train()


def calls_of_step(kind: str, layers: int, tokens: int, checkpointed: bool, way: str) -> int:
    model_type = "llama" if kind.startswith("lora") else kind
    model = model_of(model_type, layers)
    if kind.startswith("lora"):
        dropout = 0.1 if kind == "lora with dropout" else 0.0
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear")).train()
    if WAYS[way] is not None:
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK, **WAYS[way])
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if kind.startswith("lora"):
            model.enable_input_require_grads()
    ids = torch.randint(0, SIZES["vocab_size"], (1, tokens))

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()  # compares itself with the untiled model, and decides how each module is computed
    with stub_launcher(), cProfile.Profile() as profile:
        profile.disable()
        step()
        gc.disable()  # other libraries' callbacks of the collector are calls, too
        profile.enable()
        step()
        profile.disable()
        gc.enable()
    return pstats.Stats(profile).total_calls


@cache
def calls_a_layer(kind: str, tokens: int, checkpointed: bool, way: str) -> float:
    few, many = (calls_of_step(kind, layers, tokens, checkpointed, way) for layers in (1, 2))
    return many - few


BEYOND = [
    (0.5, False, {"mlp": 53, "layer": 53, "groups": 53}),
    # attention of the oldest transformers makes fewer calls, and its checkpoint calls a layer's forward twice
    (0.5, True, {"mlp": 80, "layer": 106, "groups": 106} if OLDEST else {"mlp": 66, "layer": 74, "groups": 74}),
    (2, True, {"mlp": 1_415, "layer": 3_915, "groups": 5_415}),
]


@pytest.mark.full("of a sequence that fits in a chunk no way but one is taken", but=("*-True-*-groups", "2-*"))
@pytest.mark.parametrize(
    ("chunks", "checkpointed", "limit", "way"),
    [(chunks, checkpointed, limit, way) for chunks, checkpointed, limits in BEYOND for way, limit in limits.items()],
)
def test_calls_beyond_untiled(chunks: float, checkpointed: bool, way: str, limit: int) -> None:
    tiled, untiled = (calls_a_layer("llama", int(chunks * CHUNK), checkpointed, each) for each in (way, "untiled"))
    assert tiled - untiled <= limit


@pytest.mark.parametrize(("way", "limit"), [("mlp", 120), ("layer", 256), ("groups", 356)])
def test_calls_of_a_further_chunk(way: str, limit: int) -> None:
    two, four = (calls_a_layer("llama", chunks * CHUNK, True, way) for chunks in (2, 4))
    assert (four - two) / 2 <= limit


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("lora", 6_962), ("lora with dropout", 25_051), ("gemma3_text", 13_759), ("qwen3_moe", 10_170)],
)
def test_calls_beyond_untiled_of_other_layers(kind: str, limit: int) -> None:
    """At most a third of the calls before verdicts were cached."""
    tiled, untiled = (calls_a_layer(kind, 2 * CHUNK, True, way) for way in ("layer", "untiled"))
    assert tiled - untiled <= limit


def own_calls(layers: int) -> tuple[Counter[str], Counter[str]]:
    """Returns the calls of seqtile's functions in a forward and in its backward, by file. Each item that a generator
    yields counts, too."""
    model, ids = model_of("llama", layers), torch.randint(0, SIZES["vocab_size"], (1, 2 * CHUNK))
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, layer=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    home, calls = str(Path(seqtile.__file__).parent), (Counter(), Counter())

    def step(profile: Callable[[Callable | None], None]) -> None:
        def counted(where: Counter[str], frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and (file := frame.f_code.co_filename).startswith(home):
                where[file.removeprefix(home)] += 1

        profile(partial(counted, calls[0]))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        profile(partial(counted, calls[1]))
        loss.backward()
        profile(None)

    step(lambda _: None)  # compares itself with the untiled model
    with stub_launcher():
        step(lambda _: None)
        step(sys.setprofile)
    return calls


def test_calls_of_our_functions() -> None:
    """Of a layer of Llama in two chunks, checkpointed: three layers minus two; and of the rest of a forward."""
    two, three = own_calls(2), own_calls(3)
    forward, backward = (many - few for few, many in zip(two, three, strict=True))
    rest = two[0] - forward - forward
    assert forward.total() <= 300
    assert backward.total() <= (550 if OLDEST else 545)
    assert rest.total() <= 315
