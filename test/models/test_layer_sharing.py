"""Layers tiled whole that write into a container for later layers, as Gemma's do to share keys and values."""

import copy
import inspect
import weakref
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, Olmo2Config, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer

import seqtile
from models import layered
from models.layered import KINDS, assert_equal, gradients_of
from seqtile.models.forward.layer import _FORWARD_CHECKPOINTS, tiled_layer_forward
from seqtile.models.placement import Options
from seqtile.proof.small import small_config
from support.assertions import relative_error
from support.tiny import VOCAB, checkpointing, loss_and_gradients

CHUNK = 8
SIZES = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 48, "hidden_size_per_layer_input": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 13}
SIZES |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
SIZES |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2}

OPTIONS = {
    "gemma4": {"intermediate_size": 70, "global_head_dim": 16},
    "gemma3n": {"intermediate_size": [70] * 4, "laurel_rank": 8, "activation_sparsity_pattern": [0.5] + [0.0] * 3},
}


def built(name: str, **changes: object) -> PreTrainedModel:
    config = AutoConfig.for_model(f"{name}_text", **SIZES | OPTIONS[name] | changes)
    model = AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert sum(layer.self_attn.is_kv_shared_layer for layer in model.model.layers) == 2
    return model


def batch_of(batch_size: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (batch_size, length))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) < 0.2, -100), "use_cache": False}


def tiled_copy(model: nn.Module) -> nn.Module:
    tiled = layered.tiled_copy(model, chunk_tokens=CHUNK, check=False)
    assert seqtile.status(tiled).layer.tiled == len(model.model.layers)
    return tiled


@pytest.mark.full("of 30 models; Gemma 3n takes 4 s", but=("*4-plain-1-32", "*4-ckpt-2-13", "*4-re*-1-29"))
@pytest.mark.parametrize(("batch_size", "length"), [(1, 32), (1, 29), (2, 16), (2, 13), (1, 33)])
@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_shared_keys_and_values(name: str, reentrant: bool | None, batch_size: int, length: int) -> None:
    """At lengths that are a multiple of a chunk and at others, also with a copy of the tiled model."""
    untiled = built(name).double()
    tiled = tiled_copy(untiled)
    batch = batch_of(batch_size, length)
    for model in (untiled, tiled):
        checkpointing(model, reentrant)
    truth = loss_and_gradients(untiled, **batch)
    seen: list[int] = []
    for layer in tiled.model.layers:
        hook = seqtile.tokenwise(lambda module, args, given: seen.append(given["hidden_states"].shape[1]))
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    assert_equal(loss_and_gradients(tiled, **batch), truth)
    assert 0 < max(seen) <= CHUNK, "the layers were called chunk by chunk"
    assert_equal(loss_and_gradients(copy.deepcopy(tiled), **batch), truth)


def test_keys_and_values_are_not_kept_twice() -> None:
    """The dict holds the keys and values that attention got, and nothing holds them after the step."""
    model, held, attended = tiled_copy(built("gemma4")), [], []

    class Shared(UserDict):
        def __setitem__(self, key: object, value: tuple) -> None:
            super().__setitem__(key, value)
            held.extend(weakref.ref(tensor) for tensor in value if tensor.shape[2] == 32)

    def attention(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, **options):
        attended.extend([k.data_ptr(), v.data_ptr()])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, *args, **options)

    AttentionInterface.register("noting", attention)
    model.set_attn_implementation("noting")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma4, "KVSharingDict" if _FORWARD_CHECKPOINTS else "UserDict", Shared)
        loss = model(**batch_of(1, 32)).loss
    assert len(held) == 4 and {tensor().data_ptr() for tensor in held} <= set(attended)
    assert len(set(attended)) == 2 * 2, "two layers of four were given those of others"
    loss.backward()
    del loss
    assert not any(tensor() is not None for tensor in held)


@seqtile.tokenwise
class Noting(Olmo2DecoderLayer):
    """Uses its other arguments after its attention."""

    def forward(self, hidden_states: torch.Tensor, notes: object = None, **options: object) -> torch.Tensor:
        hidden = inspect.unwrap(Olmo2DecoderLayer.forward)(self, hidden_states, **options)
        return self.do(hidden, notes)


def put(hidden: torch.Tensor, notes: dict) -> torch.Tensor:
    notes["after"] = {"twice": 2 * hidden, "rows": (hidden.square().flatten(0, 1), hidden.norm(dim=-1))}
    return hidden


def read(hidden: torch.Tensor, notes: dict) -> torch.Tensor:
    return hidden * notes["before"]


def called(layer: nn.Module, do: Callable, notes: object, tiled: bool, shape=(2, 13, 64)) -> torch.Tensor:
    layer.do = do
    forward = type(layer).forward
    forward = tiled_layer_forward(Options(layer=True, chunk_tokens=CHUNK), forward) if tiled else forward
    x = torch.arange(torch.Size(shape).numel()).sin().view(shape)
    angles = (x[:1, :, :16].cos(), x[:1, :, :16].sin())
    return forward(layer, x, notes=notes, position_embeddings=angles, attention_mask=None)


def noting_layer() -> Noting:
    torch.manual_seed(0)
    config = small_config(Olmo2Config())
    config._attn_implementation = "sdpa"
    return Noting(config, 0).train()


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_what_is_put_into_a_dict(kind: type) -> None:
    """A layer that writes after its attention, with gradients; nothing of a chunk stays in the dict."""
    found = []
    for tiled in (False, True):
        layer, notes = noting_layer(), kind({"before": 1.0})
        hidden = called(layer, put, notes, tiled)
        assert list(notes) == ["before", "after"] and list(notes["after"]) == ["twice", "rows"]
        made = [notes["after"]["twice"], *notes["after"]["rows"]]
        (hidden.sum() + sum(tensor.square().sum() for tensor in made)).backward()
        found.append((torch.cat([tensor.flatten() for tensor in made]).detach(), gradients_of(layer)))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("of", [lambda hidden: 2 * hidden, lambda hidden: hidden.norm(dim=-1)], ids=["rows", "norms"])
def test_what_a_layer_returns_besides(of: Callable) -> None:
    found = []
    for tiled in (False, True):
        layer = noting_layer()
        hidden, nothing, rest = called(layer, lambda hidden, _: (hidden, None, of(hidden)), None, tiled)
        (hidden.sum() + rest.square().sum()).backward()
        assert nothing is None
        found.append((rest.detach(), gradients_of(layer)))
    assert_equal(found[1], found[0])


def test_what_cannot_be_put_together_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a Noting is computed chunk by chunk: .*, got a float; apply with layer=False"
    ):
        called(noting_layer(), lambda hidden, _: (hidden, 3.0), None, True)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_what_is_read_from_a_dict(kind: type) -> None:
    """A factor per token is cut if it comes from an argument. Whole tensors in a custom dict class are for attention
    only."""
    factor, layer = torch.rand(2, 13, 1), noting_layer()
    if kind is dict:
        tiled, truth = (called(layer, read, kind(before=factor), tiled) for tiled in (True, False))
        assert relative_error(tiled, truth) <= 1e-6
    else:
        with pytest.raises((ValueError, RuntimeError)):
            called(layer, read, kind(before=factor), True)


def test_as_many_rows_as_tokens() -> None:
    """[3, B, S], such as positions of three axes, is cut along the tokens, [B, S, S] along the first S."""

    def weighted(hidden: torch.Tensor, notes: dict) -> torch.Tensor:
        return hidden * notes["axes"].sum(0)[..., None] + notes["pairs"].sum(-1, keepdim=True)

    notes, layer = {"axes": torch.rand(3, 9, 9), "pairs": torch.rand(9, 9, 9)}, noting_layer()
    truth = called(layer, weighted, notes, False, shape=(9, 9, 64))
    assert relative_error(called(layer, weighted, notes, True, shape=(9, 9, 64)), truth) <= 1e-6


CHANGES = {
    "a list": ([], lambda hidden, notes: notes.append(hidden)),
    "a list in a dict": (UserDict(seen=[]), lambda hidden, notes: notes["seen"].append(hidden)),
    "an attribute": (SimpleNamespace(), lambda hidden, notes: setattr(notes, "seen", hidden)),
    "a dict that loses a key": ({"seen": 1}, lambda hidden, notes: notes.pop("seen")),
    "a number in a dict": ({}, lambda hidden, notes: notes.update(seen=1.5)),
    "a sum over tokens": ({}, lambda hidden, notes: notes.update(seen=hidden.sum(1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_are_refused(change: str) -> None:
    notes, do = CHANGES[change]
    before = copy.deepcopy(notes)

    def changing(hidden: torch.Tensor, notes: object) -> torch.Tensor:
        do(hidden, notes)
        return hidden

    with pytest.raises(ValueError, match=r"computed chunk by chunk.*apply with layer=False"):
        called(noting_layer(), changing, notes, True)
    if change in ("a list", "a dict that loses a key", "a number in a dict", "a sum over tokens"):
        assert notes == before


def test_hidden_states_without_a_dimension_of_tokens_are_refused() -> None:
    layer = noting_layer()
    forward = tiled_layer_forward(Options(layer=True, chunk_tokens=CHUNK), Noting.forward)
    for shape in ((13, 64), (2, 13, 4, 64), (1, 2, 3, 13, 64)):
        with pytest.raises(ValueError, match=r"a Noting is given hidden states \[.*apply with layer=False"):
            forward(layer, torch.randn(shape))
