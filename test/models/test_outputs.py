"""A tiled model's outputs in training, its status, and the losses and transforms that it refuses."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM
from transformers.loss import loss_utils
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils import can_return_tuple

import seqtile
from models.layered import in_groups, tiled_copy, whole
from seqtile.models.forward import layer as layers
from seqtile.models.forward import mlp
from seqtile.models.forward import without_cache as base_model
from seqtile.models.forward.loss import _cross_entropy as tiled_cross_entropy
from seqtile.models.forward.loss import head_verdict
from seqtile.models.logits.recipe import LogitsRecipe
from seqtile.ops.head.reduction import divided
from support.assertions import relative_error, unread
from support.choice import every_value
from support.tiny import CHUNK, batch_of, build, checkpointing, config_of

ASKED = {
    "loss": {"use_cache": False},
    "cache": {"use_cache": True},
    "hidden states": {"use_cache": False, "output_hidden_states": True},
    "attentions": {"use_cache": True, "output_hidden_states": True, "output_attentions": True},
}


def assert_same_structure(ours: object, theirs: object) -> None:
    assert isinstance(ours, type(theirs))
    if isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_structure(one, other)
    elif isinstance(theirs, torch.Tensor):
        assert relative_error(ours, theirs) <= 1e-5


@pytest.mark.full("of 8 models", but=("llama-cache", "mixtral-attentions"))
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("arch", ["llama", "mixtral"])
def test_a_tuple_has_the_logits(arch: str, asked: str) -> None:
    untiled = build(arch, attn_implementation="eager")
    batch = batch_of(1, 101) | ASKED[asked] | {"return_dict": False}
    if arch == "mixtral":
        batch["output_router_logits"] = True
    theirs = untiled(**batch)
    seqtile.apply_seqtile(untiled, chunk_tokens=CHUNK)
    ours = untiled(**batch)
    assert len(ours) == len(theirs)
    logits = [i for i, value in enumerate(theirs) if isinstance(value, torch.Tensor) and value.shape[-1:] == (211,)]
    assert [i for i, value in enumerate(ours) if unread(value)] == logits and len(logits) == 1
    assert_same_structure(ours, theirs)
    assert_same_structure(untiled(**batch, skip_logits=False), theirs)
    assert_same_structure(untiled.eval()(**batch), theirs)


def test_labels_have_one_for_each_token() -> None:
    """Flat labels are as Hugging Face's loss takes them; too few of them are refused before there are logits."""
    batch = batch_of(2, 101)
    flat = batch | {"labels": batch["labels"].flatten()}
    tiled = tiled_copy(untiled := build("llama"))
    assert relative_error(tiled(**flat).loss, untiled(**flat).loss) <= 1e-6
    assert unread(tiled(**flat).logits)
    with pytest.raises(ValueError, match=r"labels: expected one for each token, \[2, 101\], got \[2, 100\]"):
        tiled(**batch | {"labels": batch["labels"][:, 1:]})


def other_fixed(source: torch.Tensor, target: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return F.cross_entropy(source, target) * 2


@pytest.mark.parametrize(
    ("owner", "name", "match"),
    [
        (loss_utils, "fixed_cross_entropy", "transformers.loss.loss_utils.fixed_cross_entropy, which"),
        (F, "cross_entropy", "torch.nn.functional.cross_entropy was replaced by"),
    ],
)
def test_a_replaced_cross_entropy_is_refused(owner: object, name: str, match: str, monkeypatch) -> None:
    """On apply and in every forward. Nothing changes, and models that do not use it keep working."""
    tiled, fresh, batch = tiled_copy(build("llama")), build("llama"), whole(101)
    monkeypatch.setattr(owner, name, other_fixed)
    for refused in (lambda: tiled(**batch), lambda: seqtile.apply_seqtile(fresh)):
        with pytest.raises(ValueError, match=f"{match}.*apply with loss=False"):
            refused()
    assert match in seqtile.status(tiled).loss.problem and seqtile.status(fresh).loss.tiled == 0
    seqtile.apply_seqtile(fresh, loss=False)
    monkeypatch.undo()
    assert tiled(**batch).loss.isfinite()


class DecoratedModel(LlamaForCausalLM):
    """Its own forward, inside a Hugging Face wrapper."""

    @can_return_tuple
    def forward(self, *args: object, **kwargs: object):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss * 2
        return output


class DecoratedLayer(LlamaDecoderLayer):
    """Its own forward, inside the wrapper that checkpoints every layer."""

    def forward(self, *args: object, **kwargs: object):
        return super().forward(*args, **kwargs) * 2


def test_a_forward_in_a_wrapper_of_hugging_faces() -> None:
    """It keeps running: around the tiled loss, and untiled where nothing shows that a tiled layer is the same."""
    torch.manual_seed(0)
    model = DecoratedModel(config_of("llama")).train()
    model.model.layers[1].__class__ = DecoratedLayer
    batch = whole(101)
    truth = model(**batch).loss
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=CHUNK)
    assert relative_error(model(**batch).loss, truth) < 1e-5
    status = seqtile.status(model)
    assert (status.loss.fused, status.layer.fused) == (1, 1)
    assert "it is a test.models.test_outputs.DecoratedLayer, which is neither known nor declared" in str(status)


def gradient_of_loss(model: nn.Module) -> object:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, kwargs=whole(101)).loss

    return torch.func.grad(loss)(dict(model.named_parameters()))


def mapped_mlp(model: nn.Module) -> object:
    return torch.vmap(model.model.layers[0].mlp)(torch.randn(2, 101, 48))


def mapped_layers(model: nn.Module) -> object:
    return torch.vmap(lambda x: model.model(inputs_embeds=x, use_cache=False)[0])(torch.randn(2, 1, 101, 48))


@pytest.mark.parametrize("transformed", [gradient_of_loss, mapped_mlp, mapped_layers])
def test_transforms_of_functions_are_refused(transformed: Callable[[nn.Module], object]) -> None:
    model = tiled_copy(build("llama"))
    with pytest.raises(ValueError, match=r"torch\.func.*seqtile\.restore\(model\)"):
        transformed(model)
    seqtile.restore(model)
    transformed(model)


def test_transforms_of_what_fits_in_a_tile() -> None:
    model = tiled_copy(build("llama"))
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, CHUNK, 48)
    assert relative_error(torch.vmap(mlp)(x), mlp(x)) <= 1e-6


FITS, KEPT = f"a batch fits in one chunk of {CHUNK} tokens", "activation checkpointing is off"


@pytest.mark.full("of 28 models", but=every_value)
@in_groups
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize(
    "case",
    [
        (False, CHUNK + 1, True, []),
        (False, CHUNK, True, [FITS]),
        (False, CHUNK, False, []),
        (True, CHUNK, True, [FITS]),
        (True, CHUNK + 1, True, []),
        (True, 256, True, [KEPT]),
        (True, 256, False, []),
    ],
)
def test_said(case: tuple, reentrant: bool | None, head_groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 256 tokens a layer saves more than its weights take, with and without groups. Where layers are checkpointed
    nothing is said."""
    layer, length, training, said = case
    found: list[str] = []
    for room in (base_model, layers, mlp):
        monkeypatch.setattr(room.logger, "warning_once", found.append)
    model = build("llama", intermediate_size=70)
    seqtile.apply_seqtile(model, layer=layer, head_groups=head_groups if layer else None, chunk_tokens=CHUNK)
    checkpointing(model, reentrant)
    with torch.set_grad_enabled(training):
        model(**whole(length))
    said = said if reentrant is None else []
    assert [[text in message for text in said] for message in dict.fromkeys(found)] == [[True]] * len(said)


def test_a_short_batch_behind_a_longer_one_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a packed data set, for example. The first step's comparison is no longer batch."""
    found: list[str] = []
    monkeypatch.setattr(mlp.logger, "warning_once", found.append)
    for lengths, said in (((CHUNK + 1, CHUNK), False), ((CHUNK, CHUNK + 1), True)):
        model = build("llama")
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
        for length in lengths:
            model(**whole(length))
        assert sum(FITS in message for message in dict.fromkeys(found)) == said


def test_status_text() -> None:
    model = build("llama")
    assert seqtile.status(model).layer is None
    untiled = "not tiled; the forward that runs is from transformers"
    assert str(seqtile.status(model)).endswith(f"loss  {untiled}\n  mlp   {untiled}")
    seqtile.apply_seqtile(model, layer=True, head_groups=2, chunk_tokens=CHUNK)
    text = str(seqtile.status(model))
    assert "  layer seqtile, 50 tokens a chunk, 2 of 2 fused, attention in 2 head chunks\n" in text
    assert "batches of up to 50 tokens run their MLPs and layers untiled" in text
    assert "activation checkpointing is off, so every layer keeps what its attention saves as well as its input" in text
    checkpointing(model, False)
    assert "checkpointing is off" not in str(seqtile.status(model))
    assert "in evaluation mode" in str(seqtile.status(model.eval()))
    assert "in evaluation mode" not in str(seqtile.status(model.train()))
    checkpointing(model, None)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    why = "attention in head chunks reads its weights, and its activation is GELU"
    assert f"REFUSES: {why}" in str(seqtile.status(model).layer)
    with pytest.raises(ValueError, match=why):
        model(**batch_of(1, 101))


def test_the_number_of_items_may_be_on_another_device() -> None:
    """A head in chunks divides by it wherever it is, as Hugging Face's loss does. On tensors without data."""
    hidden, labels = torch.ones(1, 40, 8, device="meta"), torch.ones(1, 40, dtype=torch.long, device="meta")
    head = nn.Linear(8, 11, device="meta")
    logits, items = LogitsRecipe(hidden, head, head_verdict(head)), torch.tensor([41])
    options = {"chunked": True, "sharded": False, "chunk_tokens": CHUNK, "with_logits": False}
    loss = tiled_cross_entropy(logits, labels, num_items=items, **options)
    assert (loss.device.type, loss.shape) == ("meta", ())
    with FakeTensorMode():
        total, items = torch.ones((), device="cuda:0"), torch.ones(1, device="cuda:1")
        assert divided(total, items).device == total.device
