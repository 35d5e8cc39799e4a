"""Applying, restoring, and telling: on classes and on one model, before and after other libraries."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from types import FunctionType, MethodType

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers.models.llama import modeling_llama

import seqtile
import seqtile.models.in_chunks
import seqtile.models.mlp
from seqtile.models.find import experts_in, mlps_of
from seqtile.models.first_step import outcome_of
from seqtile.models.placement import placement_at
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
    modeling_restored,
)

EARLY_MLP = modeling_llama.LlamaMLP  # what code that imported the class before the patch holds
APPLY = {arch: getattr(seqtile, f"apply_seqtile_to_{arch}") for arch in CLASSES}


@pytest.fixture(autouse=True)
def pristine() -> Iterator[None]:
    with modeling_restored():
        yield
        seqtile.restore()


def snapshot(model: nn.Module | None = None) -> list[object]:
    """Everything that a patch could touch."""
    state: list[object] = []
    for arch, (_, causal_lm, _) in CLASSES.items():
        mlps = [getattr(modeling_of(arch), name) for name in MLPS[arch]]
        state += [causal_lm, causal_lm.forward, *mlps, *(mlp.forward for mlp in mlps)]
    for module in model.modules() if model is not None else ():
        state += [type(module), sorted(vars(module)), vars(module).get("forward")]
    return state


def runs_tiled(model: nn.Module) -> list[bool]:
    """Whether the loss and the MLPs are tiled, by what a training step does, and whether `status` says so too."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        for room, name in ((seqtile.models.mlp, "gated_mlp_of"), (seqtile.models.in_chunks, "tiled")):
            function = getattr(room, name)
            patch.setattr(room, name, counting(calls, function))
        loss_tiled = model(**batch_of(1, 101)).logits is None
    status = seqtile.status(model)
    assert (status.loss.tiled, status.mlp.tiled) == (int(loss_tiled), len(calls))
    return [loss_tiled, len(calls) == 2]


@pytest.mark.parametrize("arch", CLASSES)
def test_model_alone(arch: str) -> None:
    model, other = build(arch), build(arch)
    for fresh in (model, other):
        fresh(**batch_of(1, 101))  # a mixture of experts notes at its first call where it records its routes
    before, others_before = snapshot(model), snapshot(other)
    APPLY[arch](model, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True] and runs_tiled(other) == [False, False]
    assert snapshot(other) == others_before
    seqtile.restore(model)
    assert snapshot(model) == before and runs_tiled(model) == [False, False]


@pytest.mark.parametrize("arch", CLASSES)
def test_classes(arch: str, tmp_path) -> None:
    before = snapshot()
    early = build(arch)
    APPLY[arch](chunk_tokens=CHUNK)
    model = build(arch)
    assert runs_tiled(model) == [True, True]
    assert type(model) is CLASSES[arch][1]
    assert {type(module).__name__ for module in mlps_of(model) + experts_in(model)} == set(MLPS[arch])
    model.save_pretrained(tmp_path)
    assert f'"{CLASSES[arch][1].__name__}"' in (tmp_path / "config.json").read_text()
    assert runs_tiled(type(model).from_pretrained(tmp_path).train()) == [True, True]
    assert runs_tiled(early) == [True, False], "built before: its loss is tiled, through the class, its MLPs are not"
    assert "it was not built of the tiled classes: apply seqtile to this model" in str(seqtile.status(early))
    seqtile.restore(arch)
    assert snapshot() == before
    assert runs_tiled(model) == [False, False], "a model built meanwhile is untiled too"


def test_code_that_imported_the_classes_earlier() -> None:
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    model = CLASSES["llama"][1](config_of("llama")).train()
    assert isinstance(model.model.layers[0].mlp, EARLY_MLP)
    assert runs_tiled(model) == [True, True]
    assert runs_tiled(pickle.loads(pickle.dumps(model))) == [True, True]


def test_pickling_a_model_alone() -> None:
    """A pickled model comes back untiled, works, and can be tiled again: seqtile need not be there to load it."""
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    loaded = pickle.loads(pickle.dumps(model))
    assert runs_tiled(loaded) == [False, False]
    seqtile.apply_seqtile(loaded, chunk_tokens=CHUNK)
    assert runs_tiled(loaded) == [True, True]


@pytest.mark.parametrize("part", ["mlp", "loss"])
def test_one_part_alone(part: str) -> None:
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, **{{"mlp": "loss", "loss": "mlp"}[part]: False})
    assert runs_tiled(model) == [part == "loss", part == "mlp"]


def test_applying_twice_changes_nothing() -> None:
    model = build("llama")
    for target in (model, None):
        seqtile.apply_seqtile_to_llama(target, chunk_tokens=CHUNK)
        once = snapshot(model)
        seqtile.apply_seqtile_to_llama(target, chunk_tokens=CHUNK)
        assert snapshot(model) == once


def test_other_options_replace_the_former() -> None:
    for target in (build("llama"), None):
        before = snapshot(target)
        seqtile.apply_seqtile_to_llama(target, chunk_tokens=CHUNK)
        seqtile.apply_seqtile_to_llama(target, chunk_tokens=7)
        assert seqtile.status(target or build("llama")).mlp.chunk_tokens == (7,)
        seqtile.restore(target or "llama")
        assert snapshot(target) == before


def test_a_model_of_tiled_classes_with_options_of_its_own() -> None:
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    model = build("llama")
    before = snapshot(model)
    seqtile.apply_seqtile(model, chunk_tokens=7)
    assert seqtile.status(model).mlp.chunk_tokens == seqtile.status(model).loss.chunk_tokens == (7,)
    with pytest.warns(UserWarning, match="stays tiled by its classes"):
        seqtile.restore(model)
    assert snapshot(model) == before and seqtile.status(model).mlp.chunk_tokens == (CHUNK,)


def test_a_copy_is_tiled_and_restored_by_itself() -> None:
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    copied = copy.deepcopy(model)
    assert runs_tiled(copied) == [True, True]
    assert copied.forward.__self__ is copied
    seqtile.restore(copied)
    assert runs_tiled(copied) == [False, False] and runs_tiled(model) == [True, True]


def test_restoring_a_model_whose_classes_are_tiled() -> None:
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    model = build("llama")
    with pytest.warns(UserWarning, match=r"stays tiled by its classes: seqtile.restore\('llama'\)"):
        seqtile.restore(model)
    assert runs_tiled(model) == [True, True]


def test_in_the_wrapper_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    seqtile.apply_seqtile(wrapped, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True] and wrapped(**batch_of(1, 101)).logits is None
    assert str(seqtile.status(wrapped)) == str(seqtile.status(model))
    seqtile.restore(wrapped)
    assert runs_tiled(model) == [False, False]
    seqtile.apply_seqtile_to_llama(wrapped, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True]


def test_restoring_what_was_never_applied() -> None:
    model = build("llama")
    before = snapshot(model)
    seqtile.restore(model)
    seqtile.restore("llama")
    assert snapshot(model) == before


def test_after_liger_on_the_model() -> None:
    """Loss and MLP become ours, RMSNorm stays Liger's, and restoring gives Liger its places back."""
    model = build("llama")
    apply_liger("llama", model=model)
    before = snapshot(model)
    norm = model.model.norm.forward
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    status = seqtile.status(model)
    assert (status.loss.tiled, status.mlp.tiled) == (1, 2)
    assert model.model.norm.forward == norm and "liger" in norm.__func__.__module__
    seqtile.restore(model)
    assert snapshot(model) == before
    assert seqtile.status(model).mlp.others == ("liger_kernel",)


def test_after_liger_on_the_classes() -> None:
    apply_liger("llama")
    before = snapshot()
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    model = build("llama")
    assert type(model.model.layers[0].mlp).__name__ == "LigerSwiGLUMLP"
    assert type(model.model.norm).__name__ == "LigerRMSNorm"
    assert seqtile.status(model).mlp.tiled == 2
    assert not hasattr(type(model.model.layers[0].mlp).__base__.forward, "seqtile_placement"), "a shared class is ours"
    seqtile.restore("llama")
    assert snapshot() == before


def test_between_two_ligers_on_the_classes() -> None:
    """Liger before and after: the second takes the classes back, and models of both times can be restored."""
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    first = build("llama")
    apply_liger("llama")
    taken = build("llama")
    status = seqtile.status(taken)
    assert (status.loss.tiled, status.mlp.tiled) == (0, 0) and "liger_kernel took it back" in str(status)
    assert (status.loss.others, status.mlp.others) == (("liger_kernel",), ("liger_kernel",))
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    assert seqtile.status(build("llama")).mlp.tiled == seqtile.status(first).mlp.tiled == 2
    seqtile.restore("llama")
    assert seqtile.status(first).mlp.tiled == 0
    assert modeling_llama.LlamaMLP.__name__ == "LigerSwiGLUMLP"


def test_status_says_that_liger_took_something_back() -> None:
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    apply_liger("llama", model=model)
    status = seqtile.status(model)
    assert (status.loss.tiled, status.mlp.tiled) == (0, 0)
    assert str(status).count("liger_kernel took it back: apply seqtile to this model, last") == 2
    taken = [vars(module).get("forward") for module in model.modules()]
    seqtile.restore(model)
    assert [vars(module).get("forward") for module in model.modules()] == taken, "another library's work is left alone"
    assert seqtile.status(model).mlp.others == ("liger_kernel",)
    apply_liger("llama", model=model)
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    assert seqtile.status(model).mlp.tiled == 2


def test_status_text() -> None:
    model = build("qwen3")
    assert str(seqtile.status(model)) == (
        "Qwen3ForCausalLM\n  loss  not tiled: transformers\n  mlp   not tiled: transformers"
    )
    seqtile.apply_seqtile(model)
    assert str(seqtile.status(model)) == (
        "Qwen3ForCausalLM\n  loss  seqtile, 2048 tokens a chunk, fused\n"
        "  mlp   seqtile, 2048 tokens a chunk, 2 of 2 fused\n"
        "  note: in training the loss is computed without logits, which are None; skip_logits=False asks for them\n"
        "  note: a sequence of at most 2048 tokens fits in a chunk: its MLPs run untiled"
    )


def test_under_accelerates_autocast_wrapper() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test's, in this process
    model = build("llama")
    before = snapshot(model)
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    assert seqtile.status(prepared).loss.tiled == 1
    assert prepared(**batch_of(1, 101)).logits is None
    wrapped = snapshot(model)
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)  # still there: nothing to do
    for refused in (lambda: seqtile.restore(model), lambda: seqtile.apply_seqtile(model, chunk_tokens=7)):
        with pytest.raises(ValueError, match="wrapped by another library's"):
            refused()
    assert snapshot(model) == wrapped
    seqtile.restore(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
    after = snapshot(model)
    assert [a for a, b in zip(after, before, strict=True) if isinstance(a, FunctionType | MethodType) and a != b] == []
    assert runs_tiled(model) == [False, False]


def test_classes_behind_a_wrapper_on_the_model() -> None:
    """What stands on the model is the wrapper alone; the classes' forward behind it is not the model's to restore."""
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK)
    model = build("llama")
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(type(model).forward), model)
    wrapped = snapshot(model)
    with pytest.warns(UserWarning, match="stays tiled by its classes"):
        seqtile.restore(model)
    assert snapshot(model) == wrapped
    assert str(seqtile.status(model)).count("seqtile, 50 tokens a chunk") == 2, (
        "autocast's wrapper passes everything on"
    )
    assert "around it" not in str(seqtile.status(model))


@pytest.mark.parametrize("on_classes", [False, True], ids=["model", "classes"])
@pytest.mark.parametrize("layer", [False, True])
def test_the_first_step_compares_below_hooks_and_wrappers_put_on_later(on_classes: bool, layer: bool) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    if on_classes:
        seqtile.apply_seqtile_to_llama(layer=layer, chunk_tokens=CHUNK)
    model = build("llama")
    if not on_classes:
        seqtile.apply_seqtile(model, layer=layer, chunk_tokens=CHUNK)
    for module in (*model.model.layers, *mlps_of(model)):
        hooks.add_hook_to_module(module, hooks.ModelHook())
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16, enabled=False)(type(model).forward), model)
    assert model(**batch_of(1, 101)).logits is None
    assert "equal the untiled model's" in outcome_of(model)


def test_what_is_applied_to_a_model_stays_when_its_classes_are_restored() -> None:
    early = build("llama")
    seqtile.apply_seqtile_to_llama(chunk_tokens=CHUNK, loss=False)
    with warnings.catch_warnings(action="error"):
        seqtile.restore(early)
    model = build("llama")
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    with pytest.warns(UserWarning, match="stays tiled by its classes"):
        seqtile.restore(model)
    assert runs_tiled(model) == [False, True]
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    seqtile.restore("llama")
    assert runs_tiled(model) == [True, True]
    seqtile.restore(model)
    assert runs_tiled(model) == [False, False]


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


def test_a_copy_that_peft_saves() -> None:
    """PEFT trains a copy of a module to save and leaves the original in its place."""
    peft = pytest.importorskip("peft")
    for arch, name in (("llama", "mlp"), ("mixtral", "experts")):
        model = build(arch)
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[name])
        wrapped = peft.get_peft_model(model, config)
        assert runs_tiled(model) == [True, True], arch
        with wrapped.disable_adapter():
            assert runs_tiled(model) == [True, True], arch
        after = peft.get_peft_model(build(arch), config)
        seqtile.apply_seqtile(after, chunk_tokens=CHUNK)
        assert runs_tiled(after.get_base_model()) == [True, True], arch


def test_tiles_of_a_mixture_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert is to meet 2048 tokens of a chunk; dense layers keep their own chunk."""
    original, lengths = seqtile.models.in_chunks.tiled, set()

    def recorded(*args: object, **options: object) -> object:
        lengths.add(options["chunk_tokens"])
        return original(*args, **options)

    model = build("qwen3_moe")
    seqtile.apply_seqtile(model)
    assert "seqtile, 2048 or 5461 tokens a chunk, 1 of 2 fused; 1 of 2 in chunks: " in str(seqtile.status(model))
    untiled = build("mixtral", max_position_embeddings=4200)
    tiled = copy.deepcopy(untiled)
    seqtile.apply_seqtile(tiled, check=False)
    assert seqtile.status(tiled).mlp.chunk_tokens == (4096,)
    monkeypatch.setattr(seqtile.models.in_chunks, "tiled", recorded)
    batch = batch_of(1, 4150)  # a chunk of 4 experts, 2 of them a token, and a remainder
    (loss, theirs), (tiled_loss, ours) = loss_and_gradients(untiled, **batch), loss_and_gradients(tiled, **batch)
    assert abs(tiled_loss / loss - 1) <= 1e-6
    assert all((ours[name] - theirs[name]).norm() <= 1e-5 * theirs[name].norm() for name in theirs)
    assert lengths == {4096}


def refused(match: str, target: nn.Module | None, function=None, **options: object) -> bool:
    """Whether nothing changed; fails where it is not refused with these words."""
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


def test_refused_wrapped_forwards() -> None:
    """A wrapper that calls itself by the wrapped function's name is a wrapper all the same."""
    model = build("llama")
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(type(model).forward), model)
    assert refused("the forward of LlamaForCausalLM is from torch", model)


def test_refused_models() -> None:
    assert refused("expected a qwen3 model, got 'llama'", build("llama"), seqtile.apply_seqtile_to_qwen3)
    assert refused("leave nothing to tile", build("llama"), mlp=False, loss=False)
    assert refused("chunk_tokens", build("llama"), chunk_tokens=0)
    assert refused("chunk_tokens", None, seqtile.apply_seqtile_to_llama, chunk_tokens=0)
    assert refused(
        "LlamaModel: expected a model with a head over a vocabulary, got none", LlamaModel(config_of("llama"))
    )
    with pytest.raises(TypeError, match="expected a Hugging Face model, got a Linear"):
        seqtile.apply_seqtile(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a Hugging Face model"):
        seqtile.apply_seqtile(None)
    wrapper = nn.Sequential(build("llama"))
    for function in (seqtile.apply_seqtile, seqtile.status, seqtile.restore):
        with pytest.raises(TypeError, match="not a wrapper around it"):
            function(wrapper)
    with pytest.raises(ValueError, match="model type 'vit' has no head over a vocabulary"):
        seqtile.restore("vit")


def test_refused_hooked_model() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("llama")
    hooks.add_hook_to_module(model, hooks.ModelHook())
    assert refused("the forward of LlamaForCausalLM is a partial", model)
    model = build("llama")
    hooks.add_hook_to_module(model.model.layers[1].mlp, hooks.ModelHook())
    assert refused("the forward of LlamaMLP is a partial", model)


def test_refused_after_accelerates_autocast_wrapper() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test's, in this process
    model = build("llama")
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert refused("the forward of LlamaForCausalLM is from accelerate", model)


class OwnForward(LlamaForCausalLM):
    def forward(self, *args: object, **kwargs: object):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 1
        return output


class NoForward(LlamaForCausalLM):
    pass


def test_subclasses() -> None:
    model = OwnForward(config_of("llama")).train()  # which goes on around the tiled loss
    truth = model(**(batch := batch_of(1, 101))).loss
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True]
    assert abs(model(**batch).loss - truth) < 1e-4
    model = NoForward(config_of("llama")).train()
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    assert runs_tiled(model) == [True, True]


def test_other_heads_take_a_tiled_mlp() -> None:
    model = LlamaForSequenceClassification(config_of("llama"))
    seqtile.apply_seqtile(model, loss=False, chunk_tokens=CHUNK)
    status = seqtile.status(model)
    assert status.loss is None and status.mlp.tiled == 2
    assert placement_at(model.model.layers[0].mlp) is not None
