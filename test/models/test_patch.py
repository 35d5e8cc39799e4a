"""Apply, restore and status: on classes and on one model, before and after other libraries."""

import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM, LlamaModel
from transformers.models.llama import modeling_llama

import seqtile
from models.layered import LAYERED, assert_equal, assert_same_step, on_model_or_classes, tiled_copy, tiled_model
from seqtile.models import chunked
from seqtile.models.apply import apply
from seqtile.models.find import experts_in, mlps_of
from seqtile.models.forward import layer as layers
from seqtile.models.forward import mlp
from seqtile.models.logits.lazy import LazyLogits
from seqtile.models.model_types import model_classes, model_types
from seqtile.models.placement import Options
from seqtile.models.sharded import gathered
from seqtile.models.status import outcome_of
from seqtile.proof.small import config_for, unfilled
from support.assertions import unread
from support.choice import every_value
from support.tiny import (
    CHUNK,
    CLASSES,
    MLPS,
    apply_liger,
    batch_of,
    build,
    config_of,
    counting,
    loss_and_gradients,
    modeling_of,
    name_of_class,
)

pytestmark = pytest.mark.usefixtures("pristine")
EARLY_MLP = modeling_llama.LlamaMLP  # held by code that imported the class before the patch
APPLY = {arch: getattr(seqtile, f"apply_seqtile_to_{arch}") for arch in CLASSES}


KINDS = ("DecoderLayer", "Model", "RMSNorm")
PARTS = [*((arch, False) for arch in CLASSES), *((arch, True) for arch in LAYERED)]
of_all_parts = pytest.mark.parametrize(("arch", "layer"), PARTS)
some_parts = pytest.mark.full("of 20 models", but=("llama-*", "qwen3-True", "gemma3_text-*", "phi3-*", "qwen3_moe-*"))


def snapshot(model: nn.Module | None = None) -> list[object]:
    """Returns everything that a patch could change."""
    state: list[object] = []
    for arch, (_, causal_lm, _) in CLASSES.items():
        names = [*MLPS[arch], *(name_of_class(arch, kind) for kind in KINDS)]
        classes = [causal_lm, *(getattr(modeling_of(arch), name, None) for name in names)]
        state += [*classes, *(getattr(cls, "forward", None) for cls in classes)]
    for module in model.modules() if model is not None else ():
        state += [type(module), sorted(vars(module)), vars(module).get("forward")]
    return state


def runs_tiled(model: nn.Module, layer: bool = False) -> list[bool]:
    """Whether a training step tiles the loss and the MLPs, or the layers; `status` must agree."""
    functions = [(layers, "decoder_layer")] if layer else [(mlp, "gated_mlp_of"), (chunked, "tiled_part")]
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        for room, name in functions:
            patch.setattr(room, name, counting(calls, getattr(room, name)))
        loss_tiled = unread(model(**batch_of(1, 101)).logits)
    status = seqtile.status(model)
    part = status.layer if layer else status.mlp
    assert (status.loss.tiled, part.tiled if part else 0) == (int(loss_tiled), len(calls))
    return [loss_tiled, len(calls) == 2]


@some_parts
@of_all_parts
def test_model_alone(arch: str, layer: bool) -> None:
    model, other = build(arch), build(arch)
    for fresh in (model, other):
        fresh(**batch_of(1, 101))  # a mixture of experts records its routes at its first call
    before, others_before = snapshot(model), snapshot(other)
    APPLY[arch](model, layer=layer, chunk_tokens=CHUNK, check=False)
    assert runs_tiled(model, layer) == [True, True] and runs_tiled(other, layer) == [False, False]
    assert snapshot(other) == others_before
    seqtile.restore(model)
    assert snapshot(model) == before and runs_tiled(model, layer) == [False, False]


@some_parts
@of_all_parts
def test_classes(arch: str, layer: bool, tmp_path) -> None:
    before, early = snapshot(), build(arch)
    APPLY[arch](layer=layer, head_groups=2 if layer else None, chunk_tokens=CHUNK, check=False)
    model = build(arch)
    assert runs_tiled(model, layer) == [True, True] and type(model) is CLASSES[arch][1]
    assert {type(module).__name__ for module in mlps_of(model) + experts_in(model)} == set(MLPS[arch])
    model.save_pretrained(tmp_path)
    assert f'"{CLASSES[arch][1].__name__}"' in (tmp_path / "config.json").read_text()
    assert runs_tiled(type(model).from_pretrained(tmp_path).train(), layer) == [True, True]
    if not layer:
        assert runs_tiled(early) == [True, False], "built before: its loss is tiled, through the class, its MLPs not"
        assert "it was not built of the tiled classes: apply seqtile to this model" in str(seqtile.status(early))
    seqtile.restore(arch)
    assert snapshot() == before
    assert runs_tiled(model, layer) == [False, False], "a model built meanwhile is untiled too"


@pytest.mark.parametrize("layer", [False, True])
def test_code_that_imported_the_classes_earlier(layer: bool) -> None:
    seqtile.apply_seqtile_to_llama(layer=layer, chunk_tokens=CHUNK)
    model = CLASSES["llama"][1](config_of("llama")).train()
    assert isinstance(model.model.layers[0].mlp, EARLY_MLP) and type(model.model.norm).__name__ == "LlamaRMSNorm"
    assert runs_tiled(model, layer) == runs_tiled(pickle.loads(pickle.dumps(model)), layer) == [True, True]


@pytest.mark.parametrize("part", ["mlp", "loss"])
def test_one_part_alone(part: str) -> None:
    model = tiled_model("llama", **{{"mlp": "loss", "loss": "mlp"}[part]: False})
    assert runs_tiled(model) == [part == "loss", part == "mlp"]


@on_model_or_classes
def test_other_options_replace_the_former(on_classes: bool) -> None:
    """The same options change nothing. Restoring removes all of them, or nothing if there is none."""
    target = None if on_classes else build("llama")
    before = snapshot(target)
    seqtile.restore(target or "llama")
    assert snapshot(target) == before
    layered = ({"layer": True, "head_groups": groups} for groups in (None, 2, "auto", 1))
    for options in ({}, {"chunk_tokens": 7}, *layered):
        seqtile.apply_seqtile_to_llama(target, **(options := {"chunk_tokens": CHUNK} | options))
        status, once = seqtile.status(target or build("llama")), snapshot(target)
        assert status.mlp.chunk_tokens == (options["chunk_tokens"],)
        if groups := options.get("head_groups"):
            assert status.layer.head_groups == (2 if groups == "auto" else groups)
        seqtile.apply_seqtile_to_llama(target, **options)
        assert snapshot(target) == once
    seqtile.restore(target or "llama")
    assert snapshot(target) == before


def test_a_model_of_tiled_classes_with_options_of_its_own() -> None:
    model = tiled_model("llama", True)
    before = snapshot(model)
    for own in (True, False):
        if own:
            seqtile.apply_seqtile(model, chunk_tokens=7)
            assert seqtile.status(model).mlp.chunk_tokens == seqtile.status(model).loss.chunk_tokens == (7,)
        with pytest.warns(UserWarning, match=r"stays tiled by its classes: seqtile.restore\('llama'\)"):
            seqtile.restore(model)
        assert snapshot(model) == before and seqtile.status(model).mlp.chunk_tokens == (CHUNK,)
    assert runs_tiled(model) == [True, True]


def test_in_the_wrapper_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    seqtile.apply_seqtile(wrapped, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True] and unread(wrapped(**batch_of(1, 101)).logits)
    assert str(seqtile.status(wrapped)) == str(seqtile.status(model))
    seqtile.restore(wrapped)
    assert runs_tiled(model) == [False, False]
    seqtile.apply_seqtile_to_llama(wrapped, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True]


def test_liger_on_the_model_afterwards_takes_nothing_of_a_layer_back() -> None:
    """Its norms and MLPs are modules whose weights are read."""
    model = tiled_model("llama", layer=True, loss=False)
    apply_liger("llama", model=model)
    assert seqtile.status(model).layer.tiled == 2 and seqtile.status(model).layer.reason is None


def test_under_accelerates_autocast_wrapper() -> None:
    model = build("llama")
    before = snapshot(model)
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    accelerator, wrapper = prepared(model)
    assert seqtile.status(wrapper).loss.tiled == 1 and unread(wrapper(**batch_of(1, 101)).logits)
    wrapped = snapshot(model)
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)  # still there: nothing to do
    for refused in (lambda: seqtile.restore(model), lambda: seqtile.apply_seqtile(model, chunk_tokens=7)):
        with pytest.raises(ValueError, match="wrapped by another library's"):
            refused()
    assert snapshot(model) == wrapped
    seqtile.restore(accelerator.unwrap_model(wrapper, keep_fp32_wrapper=False))
    after = snapshot(model)
    assert [a for a, b in zip(after, before, strict=True) if isinstance(a, FunctionType | MethodType) and a != b] == []
    assert runs_tiled(model) == [False, False]


def test_classes_behind_a_wrapper_on_the_model() -> None:
    """The model itself only has the wrapper. Restoring the model must not change the classes' forward inside it."""
    model = tiled_model("llama", True)
    autocast(model)
    wrapped = snapshot(model)
    with pytest.warns(UserWarning, match="stays tiled by its classes"):
        seqtile.restore(model)
    assert snapshot(model) == wrapped
    status = str(seqtile.status(model))
    assert status.count("seqtile, 50 tokens a chunk") == 2, "autocast's wrapper passes everything on"
    assert "inside a forward of" not in status


@pytest.mark.full("of four", but=every_value)
@on_model_or_classes
@pytest.mark.parametrize("layer", [False, True])
def test_the_first_step_compares_below_hooks_and_wrappers_put_on_later(on_classes: bool, layer: bool) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiled_model("llama", on_classes, layer=layer)
    for module in (*model.model.layers, *mlps_of(model)):
        hooks.add_hook_to_module(module, hooks.ModelHook())
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16, enabled=False)(type(model).forward), model)
    assert unread(model(**batch_of(1, 101)).logits)
    assert "equal the untiled model's" in outcome_of(model)


def test_what_is_applied_to_a_model_stays_when_its_classes_are_restored() -> None:
    early = build("llama")
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK, loss=False)
    with warnings.catch_warnings(action="error"):
        seqtile.restore(early)
    model = tiled_model("llama")
    with pytest.warns(UserWarning, match="stays tiled by its classes"):
        seqtile.restore(model)
    assert runs_tiled(model) == [False, True]
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    seqtile.restore("llama")
    assert runs_tiled(model) == [True, True]
    seqtile.restore(model)
    assert runs_tiled(model) == [False, False]


def test_restored_classes_look_up_head_and_loss_as_before() -> None:
    """So do those of a model that is tiled by itself, which goes on without logits."""

    def own() -> dict[str, object]:
        return {name: vars(LlamaForCausalLM).get(name) for name in ("forward", "lm_head", "loss_function")}

    before, batch = own(), batch_of(2, 61)
    model = build("llama")
    untiled = loss_and_gradients(model, **batch)
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    loss_and_gradients(model, **batch)
    assert isinstance(model(**batch).logits, LazyLogits) and own() != before
    alone = tiled_copy(model)
    seqtile.restore("llama")
    assert own() == before
    assert_equal(loss_and_gradients(model, **batch), untiled)
    assert isinstance(alone(**batch).logits, LazyLogits) and own() == before
    seqtile.restore(alone)
    assert own() == before and not isinstance(alone(**batch).logits, LazyLogits)


def test_a_forward_of_another_models_in_a_wrapper_is_not_this_models() -> None:
    teacher, student = build("llama"), build("llama")
    seqtile.apply_seqtile(teacher, chunk_tokens=CHUNK)

    def distilled(theirs: MethodType, own: MethodType) -> FunctionType:
        def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
            theirs(*args, **kwargs)
            return own(*args, **kwargs)

        return forward

    student.forward = MethodType(distilled(teacher.forward, student.forward), student)
    assert seqtile.status(student).loss.tiled == 0
    assert refused("the forward of LlamaForCausalLM is from", student)


@pytest.mark.parametrize(("arch", "name"), [("llama", "mlp"), ("mixtral", "experts")])
def test_a_copy_that_peft_saves(arch: str, name: str) -> None:
    """PEFT trains a copy of a module, to save it, and keeps the original."""
    peft = pytest.importorskip("peft")
    model = build(arch)
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[name])
    wrapped = peft.get_peft_model(model, config)
    assert runs_tiled(model) == [True, True]
    with wrapped.disable_adapter():
        assert runs_tiled(model) == [True, True]
    after = peft.get_peft_model(build(arch), config)
    seqtile.apply_seqtile(after, chunk_tokens=CHUNK)
    assert runs_tiled(after.get_base_model()) == [True, True]


def test_tiles_of_a_mixture_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert should get 2048 tokens of a chunk; dense layers keep their own chunk size."""
    original, lengths = chunked.tiled_part, set()

    def recorded(*args: object, **options: object) -> object:
        lengths.add(options["chunk_tokens"])
        return original(*args, **options)

    model = build("qwen3_moe")
    seqtile.apply_seqtile(model)
    assert "seqtile, 2048 or 5461 tokens a chunk, 1 of 2 fused; 1 of 2 in chunks: " in str(seqtile.status(model))
    untiled = build("mixtral", max_position_embeddings=4200, num_hidden_layers=1)
    tiled = tiled_copy(untiled, layer=False, chunk_tokens=None, check=False)
    assert seqtile.status(tiled).mlp.chunk_tokens == (4096,)
    monkeypatch.setattr(chunked, "tiled_part", recorded)
    assert_same_step(tiled, untiled, batch_of(1, 4150))  # a chunk of 4 experts, 2 per token, and a remainder
    assert lengths == {4096}


def refused(match: str, target: nn.Module | None, function=None, **options: object) -> bool:
    """Whether nothing changed. Fails unless the call is refused with these words."""
    before = snapshot(target)
    with pytest.raises(ValueError, match=match):
        (function or seqtile.apply_seqtile)(target, **options)
    return snapshot(target) == before


def test_refused_losses() -> None:
    model = build("llama")
    model.loss_function = lambda **_: None
    assert refused("model.loss_function is", model)
    seqtile.apply_seqtile(model, loss=False)
    assert seqtile.status(model).mlp.tiled == 2


def by_default(model_type: str) -> list[nn.Module]:
    config = CONFIG_MAPPING[model_type]()
    return [unfilled(cls, config_for(cls, config)) for cls in model_classes(model_type)]


def tiles_by_groups(model_type: str, targets: Sequence[nn.Module | None]) -> str | None:
    """The error of a type whose attention is asked for in head chunks; None if there is none."""
    try:
        for target in targets:
            apply(model_type, target, Options(layer=True, head_groups="auto"))
    except ValueError as error:
        return str(error)
    finally:
        for target in targets:
            seqtile.restore(model_type if target is None else target)
    return None


# One that is tiled, one whose attention cannot be, one without a head, two that no default config builds, and one whose
# class is built from the config of another type.
TYPES = ("llama", "gpt_neox", "pi0", "reformer", "gemma4_assistant", "shieldgemma2")


@pytest.mark.full("each type of Hugging Face's", but=TYPES)
@pytest.mark.parametrize("model_type", model_types())
def test_groups_of_heads_by_classes_are_refused_as_by_models(model_type: str) -> None:
    try:
        models = by_default(model_type)
    except Exception:  # raised by Hugging Face's code
        assert refused(
            f"model type '{model_type}': its default config builds no model",
            None,
            partial(apply, model_type),
            options=Options(),
        )
        return
    expected = tiles_by_groups(model_type, models)
    assert tiles_by_groups(model_type, [None]) == expected
    assert model_type != "gpt_neox" or "attention in head chunks reads its weights, and " in expected
    assert model_type != "pi0" or "expected a model with a head over a vocabulary, got none" in expected


def test_marks_for_zero_3_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that DeepSpeed or the user set stay."""
    of_deepspeed = ModuleType("deepspeed.runtime.zero.of_a_test")
    monkeypatch.setitem(sys.modules, of_deepspeed.__name__, of_deepspeed)
    exec("def gather(module, args): pass", vars(of_deepspeed))
    model = build("llama")
    before, (first, second) = snapshot(model), (layer.mlp for layer in model.model.layers)
    seqtile.apply_seqtile(model)
    second._z3_leaf = True
    for mlp_ in (first, second):
        mlp_.down_proj.weight.ds_id = 0
        hook = mlp_.register_forward_pre_hook(of_deepspeed.gather)
        gathered(mlp_, lambda x: x, torch.ones(1, 48))
        hook.remove()
        assert getattr(mlp_, "_z3_leaf", False)
    seqtile.restore(model)
    assert vars(second).pop("_z3_leaf") is True
    assert snapshot(model) == before


def autocast(model: nn.Module) -> None:
    """A wrapper that calls itself by the wrapped function's name is still recognised as a wrapper."""
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(type(model).forward), model)


def hooked(model: nn.Module) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model, hooks.ModelHook())


def prepared(model: nn.Module) -> tuple:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test's, in this process
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    return accelerator, accelerator.prepare(model)


@pytest.mark.parametrize(
    ("wrap", "match"),
    [
        (autocast, "the forward of LlamaForCausalLM is from torch"),
        (hooked, "the forward of LlamaForCausalLM is a partial"),
        (lambda model: hooked(model.model.layers[1].mlp), "the forward of LlamaMLP is a partial"),
        (prepared, "the forward of LlamaForCausalLM is from accelerate"),
    ],
)
def test_refused_wrapped_forwards(wrap: Callable, match: str) -> None:
    model = build("llama")
    wrap(model)
    assert refused(match, model)


def test_refused_models() -> None:
    assert refused("expected a qwen3 model, got 'llama'", build("llama"), seqtile.apply_seqtile_to_qwen3)
    assert refused("leave nothing to tile", build("llama"), mlp=False, loss=False)
    assert refused("chunk_tokens", build("llama"), chunk_tokens=0)
    assert refused("chunk_tokens", None, seqtile.apply_seqtile_to_llama, chunk_tokens=0)
    headless = "LlamaModel: expected a model with a head over a vocabulary, got none"
    assert refused(headless, LlamaModel(config_of("llama")))
    with pytest.raises(TypeError, match="expected a Hugging Face model, got a Linear"):
        seqtile.apply_seqtile(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a Hugging Face model"):
        seqtile.apply_seqtile(None)
    for function in (seqtile.apply_seqtile, seqtile.status, seqtile.restore):
        with pytest.raises(TypeError, match="not a wrapper around it"):
            function(nn.Sequential(build("llama")))
    with pytest.raises(ValueError, match="model type 'vit' has no head over a vocabulary"):
        seqtile.restore("vit")


class OwnForward(LlamaForCausalLM):
    def forward(self, *args: object, **kwargs: object):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 1
        return output


class NoForward(LlamaForCausalLM):
    pass


@pytest.mark.parametrize("cls", [OwnForward, NoForward])
def test_subclasses(cls: type) -> None:
    """Its own forward keeps running around the tiled loss."""
    model, batch = cls(config_of("llama")).train(), batch_of(1, 101)
    truth = model(**batch).loss
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True]
    assert abs(model(**batch).loss - truth) < 1e-4


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm", "LlamaDecoderLayer", "LlamaModel", "LlamaForCausalLM"])
@on_model_or_classes
def test_a_forward_that_its_class_gets_afterwards(on_classes: bool, name: str, mode: str) -> None:
    """It runs, or the next forward says that it would not; once seqtile is restored, it runs."""
    cls, (model, batch) = getattr(modeling_llama, name), (build("llama"), batch_of(1, 37))
    seqtile.apply_seqtile_to_llama(None if on_classes else model, layer=True, chunk_tokens=CHUNK)
    model = getattr(build("llama") if on_classes else model, mode)()
    before, calls = cls.forward, []
    model(**batch)

    def counted(self, *args: object, **kwargs: object):
        calls.append(name)
        return before(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "forward", counted)
        if on_classes and cls in seqtile.models.apply._CLASSES["llama"].classes:
            assert model(**batch).loss > 0 and calls, "it took the place of the tiled forward"
            return
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{name}.forward was replaced, by one from .*, after"):
                model(**batch)
        seqtile.restore("llama" if on_classes else model)
        assert model(**batch).loss > 0 and calls
    model(**batch)
