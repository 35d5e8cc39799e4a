"""docs/compatibility.md says how the part runs around what users plug into a model; every row is run here, or was shown
by the tests of hooks and libraries."""

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN, GELUTanh, SiLUActivation
from transformers.models.llama import modeling_llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import seqtile
from models.layered import assert_equal
from models.test_known import (
    HOOKS,
    Mixing,
    MixingLinear,
    Proxy,
    forward_of_text,
    function_as_activation,
    in_layer,
    mixing_forward,
    mixing_function,
    of_each,
    own_forward,
    steer,
)
from models.test_known_hooks import CHUNKED, DEVICE_MAP, FUSED
from models.test_known_hooks import test_hooks_of_peft_that_hand_over_what_rows_have as hooks_of_rows
from models.test_known_libraries import KNOWN, REFUSED, eight_bits, float8, int8
from models.test_known_libraries import test_the_forward_of_another_layer as forwards_of_xlora
from support.tiny import CHUNK, batch_of, build, loss_and_gradients

peft = pytest.importorskip("peft")
Change = Callable[[nn.Module], Any]  # of a model; returns a context manager if something is to be put back
WAYS = ("fused", "in chunks", "untiled")
PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
TABLES = PAGE.partition("\n## What you plug in\n")[2].partition("\n## ")[0]
CELLS = [line.strip("| ").split(" | ") for line in TABLES.splitlines() if line.startswith("| ")]
ROWS = {what: how for what, how in CELLS if how in WAYS}


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * x


class Plain(nn.Linear):
    pass


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.roll(1, dims=1))


def as_activation(*made: Callable[[], nn.Module]) -> list[Change]:
    return [in_layer("mlp.act_fn", lambda _, each=each: each()) for each in made]


def as_up(*made: Callable[[], nn.Module]) -> list[Change]:
    return [in_layer("mlp.up_proj", lambda _, each=each: each()) for each in made]


def of_up(*made: Callable[[nn.Module], nn.Module]) -> list[Change]:
    return [in_layer("mlp.up_proj", each) for each in made]


def as_function(*functions: Callable) -> list[Change]:
    return [function_as_activation(each) for each in functions]


def own_class(module: nn.Module) -> None:
    module.__class__ = MixingLinear


def declared(change: Change, name: str) -> Change:
    def both(model: nn.Module) -> None:
        change(model)
        seqtile.tokenwise(model.model.layers[0].mlp.get_submodule(name))

    return both


def replaced(owner: Any, name: str, prepare: Change = id) -> Change:
    @contextmanager
    def change(model: nn.Module) -> Iterator[None]:
        prepare(model)
        original = getattr(owner, name)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs))
            yield

    return change


KERNELS = """
class SiLU:
    def forward(self, x):
        return x * x.sigmoid()

class RMSNorm:
    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
"""


def kernelized(name: str, kernel: str | None) -> Change:
    """What the `kernels` package does with a module of a model that is loaded with use_kernels=True."""

    @contextmanager
    def change(model: nn.Module) -> Iterator[None]:
        module = model.model.layers[0].get_submodule(name)
        with pytest.MonkeyPatch.context() as patched:
            home = "activation_0123abcd.layers"  # a name with a hash
            patched.setitem(sys.modules, home, kernels := ModuleType(home))
            exec(KERNELS, vars(kernels))
            cls = type(module) if kernel is None else getattr(kernels, kernel)
            module.forward = MethodType(cls.forward, module)
            yield

    return change


def ligers(model: nn.Module) -> None:
    """What Liger does with a model's MLPs and the norms in its layers; its kernels would need a GPU."""
    liger = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    for layer in model.model.layers:
        liger._patch_swiglu_module(layer.mlp, liger.LigerSwiGLUMLP)
        liger._patch_rms_norm_module(layer.input_layernorm)
        liger._patch_rms_norm_module(layer.post_attention_layernorm)


def several_adapters(layer: nn.Module) -> nn.Module:
    layer.update_layer("second", r=2, lora_alpha=4, config=peft.LoraConfig())
    layer.set_adapter(["default", "second"])
    return layer


def hooked(*names: str, hook: Callable = steer, register: str = "register_forward_hook") -> list[Change]:
    def on(name: str) -> Change:
        return lambda model: getattr(model.get_submodule(name), register)(hook) and None

    return [on(name) for name in names]


def nothing(module: nn.Module, args: tuple, output: Any) -> None:
    pass


def on_parameters(model: nn.Module) -> None:
    sizes: list[torch.Size] = []
    for parameter in model.model.layers[0].mlp.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)
        parameter.register_post_accumulate_grad_hook(lambda parameter: sizes.append(parameter.shape))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def in_mode(model: nn.Module) -> Iterator[None]:
    with Functions():
        yield


@contextmanager
def on_every_module(model: nn.Module) -> Iterator[None]:
    with register_module_forward_hook(lambda module, args, output: None):
        yield


def pruned(up: nn.Module) -> nn.Module:
    return prune.l1_unstructured(up, "weight", 0.2)


def own_parametrization(up: nn.Module) -> nn.Module:
    return register_parametrization(up, "weight", Double())


LAYER_0 = "model.layers.0"
IN_LAYERS = [f"{LAYER_0}.{name}" for name in ("self_attn", "self_attn.q_proj", "input_layernorm", "mlp")]
MLP, LAYER, HEAD = "mlp", "layer", "loss"
Shown = tuple[Any, ...]
CASES: dict[str, dict[str, list[Change]] | Shown] = {  # beginning of a row -> part -> changes; or what shows it
    "nothing;": {
        MLP: [lambda model: None, *as_activation(nn.SiLU, SiLUActivation, GELUTanh), *as_up(lambda: Plain(64, 48))]
    },
    "of torch.nn the other": {
        MLP: [
            *as_activation(nn.ReLU, nn.Identity, lambda: nn.Dropout(0.0)),
            *as_activation(lambda: nn.LayerNorm(48), lambda: nn.RMSNorm(48)),
            *as_activation(lambda: nn.Sequential(nn.GELU(), nn.Tanh())),
        ]
    },
    "any other module of torch.nn": {MLP: as_activation(lambda: nn.Softmax(-1), lambda: nn.LayerNorm((61, 48)))},
    "another activation of": {
        MLP: as_activation(*(partial(ACT2FN.__getitem__, name) for name in ("gelu_new", "relu2")))
    },
    "a class of transformers' model files": {MLP: as_activation(lambda: Qwen3RMSNorm(48))},
    "a module of your own class": {
        MLP: as_activation(Mixing),
        LAYER: [in_layer("input_layernorm", lambda _: Mixing())],
    },
    "a subclass of a known class": {MLP: [*as_up(lambda: OwnForward(64, 48)), of_each("mlp.up_proj", own_class)]},
    "a module of your own class, declared": {MLP: [declared(*as_activation(Double), "act_fn")]},
    "a function of your own": {MLP: as_function(mixing_function, torch.enable_grad()(mixing_function))},
    "`F.silu`": {MLP: as_function(F.silu, torch.tanh, F.hardswish, partial(F.gelu, approximate="tanh"))},
    "a forward set": {MLP: [own_forward("mlp.act_fn", mixing_forward)]},
    "a function or forward inside": {
        MLP: [*as_function(Proxy(F.silu)), of_each("mlp", forward_of_text)],
        HEAD: [lambda model: setattr(model.lm_head, "forward", Proxy(model.lm_head.forward))],
    },
    "a function of PyTorch": {
        MLP: [
            *(replaced(F, name) for name in ("linear", "silu")),
            replaced(F, "relu", *as_activation(nn.ReLU)),
            replaced(F, "dropout", *as_activation(lambda: nn.Dropout(0.0))),
            replaced(F, "layer_norm", *as_activation(lambda: nn.LayerNorm(48))),
        ],
        HEAD: [replaced(F, "linear")],
    },
    "an active `TorchFunctionMode`": {MLP: [in_mode], LAYER: [in_mode], HEAD: [in_mode]},
    "with `layer=True`: another rotary": {LAYER: [replaced(modeling_llama, "apply_rotary_pos_emb")]},
    "`use_kernels=True`: a module that": {
        MLP: [kernelized("mlp.act_fn", "SiLU")],
        LAYER: [kernelized("input_layernorm", "RMSNorm")],
    },
    "`use_kernels=True`: a module without": {MLP: [kernelized("mlp.act_fn", None)]},
    "`mlp.act_fn = torch.compile": {MLP: [in_layer("mlp.act_fn", torch.compile), *as_function(torch.compile(F.gelu))]},
    "`act_fn.compile()`": {
        MLP: [*(of_each(name, nn.Module.compile) for name in ("mlp.act_fn", "mlp")), in_layer("mlp", torch.compile)]
    },
    "`torch.compile` of": {
        MLP: [*as_activation(lambda: torch.compile(Mixing())), *as_function(torch.compile(mixing_function))]
    },
    "the same, declared": {
        MLP: [
            *as_activation(lambda: seqtile.tokenwise(torch.compile(Double()))),
            *as_activation(lambda: torch.compile(seqtile.tokenwise(Double()))),
        ]
    },
    "what `torch.jit.script` or": {
        MLP: [*as_activation(lambda: torch.jit.script(nn.SiLU())), *as_function(torch.jit.script(scripted))]
    },
    "a checkpoint wrapper": {MLP: [in_layer("mlp.act_fn", checkpoint_wrapper)]},
    "`weight_norm`": {MLP: of_up(parametrizations.weight_norm, parametrizations.orthogonal)},
    "`spectral_norm`": {MLP: of_up(parametrizations.spectral_norm, own_parametrization)},
    "a parametrization of your own, declared": {
        MLP: [declared(*of_up(own_parametrization), "up_proj.parametrizations.weight.0")]
    },
    "with `layer=True`: Liger's": {LAYER: [ligers]},
    "PEFT's LoRA": {MLP: as_up(KNOWN["LoRA"], KNOWN["rslora"])},
    "LoRA with dropout": {
        MLP: [
            *as_up(KNOWN["DoRA"], KNOWN["MiCA"], KNOWN["KaSA"], lambda: several_adapters(KNOWN["LoRA"]())),
            *as_up(lambda: with_dropout(KNOWN["LoRA"]())),
        ]
    },
    "AdaLoRA": {MLP: as_up(KNOWN["HRA"], KNOWN["VeRA"])},
    "aLoRA": {MLP: as_up(*(REFUSED[name][0] for name in ("aLoRA", "Lily", "LoHa with dropout")))},
    "X-LoRA": (forwards_of_xlora, hooks_of_rows),
    "bitsandbytes' 4-bit layers": {MLP: as_up(KNOWN["Linear4bit"], KNOWN["LoRA of 4 bits"])},
    "bitsandbytes' `Linear8bitLt` with a threshold of 0": {MLP: as_up(KNOWN["Linear8bitLt"])},
    "bitsandbytes' `Linear8bitLt` with a threshold,": {MLP: as_up(lambda: eight_bits(6.0))},
    "torchao's weight-only": {MLP: as_up(KNOWN["int8 weights"], KNOWN["torchao's NF4"])},
    "torchao's layers that scale": {MLP: as_up(KNOWN["int8 by token"])},
    "torchao's layers that take": {MLP: as_up(int8("PerTensor"), float8("tensorwise"))},
    "yours on a module inside": {
        MLP: [
            change
            for register, hook in HOOKS.values()
            for change in hooked(f"{LAYER_0}.mlp.act_fn", hook=hook, register=register)
        ],
        HEAD: hooked("lm_head"),
        LAYER: [*hooked(*IN_LAYERS[1:]), *hooked(IN_LAYERS[0], hook=nothing)],
    },
    "the same hook, declared": {
        MLP: [lambda model: hooked(f"{LAYER_0}.mlp.act_fn", hook=seqtile.tokenwise(lambda *_: None))[0](model)]
    },
    "yours on an MLP": {
        MLP: hooked(
            f"{LAYER_0}.mlp", LAYER_0, "", "model", "model.embed_tokens", "model.norm", *IN_LAYERS[:3], hook=nothing
        )
    },
    "yours on parameters": {MLP: [on_parameters], LAYER: [on_parameters]},
    "yours on every module": {MLP: [on_every_module], LAYER: [on_every_module], HEAD: [on_every_module]},
    "of torch.nn.utils": {MLP: of_up(pruned, weight_norm, spectral_norm)},
    "FSDP1, FSDP2": tuple(FUSED[name] for name in ("FSDP1", "FSDP2", "DDP")),
    "`ModuleTracker`": tuple(
        FUSED[name] for name in ("ModuleTracker", "ModTracker", "FlopCounterMode", "CommDebugMode")
    ),
    "PyTorch's composable": (CHUNKED["checkpoint, composable"],),
    "Hugging Face's recorders": (CHUNKED["recorder"],),
    "Accelerate's `device_map`": (CHUNKED[DEVICE_MAP],),
    "TRL's activation offloading": (CHUNKED["TRL's offloading, of the head"],),
    "DeepSpeed's flops profiler": (CHUNKED["DeepSpeed's flops profiler"], CHUNKED["wandb.watch"]),
    "bitsandbytes' cache": (CHUNKED["bitsandbytes' cache"],),
    "PEFT's for aLoRA": (hooks_of_rows,),
}


def with_dropout(layer: nn.Module) -> nn.Module:
    layer.lora_dropout["default"] = nn.Dropout(1e-12)  # drops nothing, and a forward does not know that
    return layer


def step(model: nn.Module, batch: dict) -> tuple:
    """Loss and gradients. What the step draws and counts is afterwards as before."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = loss_and_gradients(model, **batch)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    return found


def begins(row: str) -> str:
    """The longest of the cases' names with which a row begins."""
    return max((name for name in CASES if row.startswith(name)), key=len, default="")


def test_each_case_has_a_row() -> None:
    assert len(ROWS) > 40 and sorted(map(begins, ROWS)) == sorted(CASES)


def test_each_tuner_of_the_page_was_read() -> None:
    known, refused = (next(row for row in ROWS if begins(row) == name) for name in ("AdaLoRA", "aLoRA"))
    assert set(known.split(", ")) <= KNOWN.keys()
    always, _, in_training = refused.partition("; in training ")
    names = {*always.split(", "), *re.split(", | and ", in_training.removesuffix(" with dropout"))}
    assert names == {name.removesuffix(" with dropout") for name in REFUSED} & names and len(names) == 8


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("row", ROWS, ids=begins)
def test_a_row(row: str) -> None:
    case = CASES[begins(row)]
    if isinstance(case, tuple):
        assert case
        return
    for where, change in [(where, change) for where, changes in case.items() for change in changes]:
        model = build("llama", hidden_size=64, intermediate_size=48, num_hidden_layers=1, tie_word_embeddings=False)
        batch, plain = batch_of(2, 61), copy.deepcopy(model)
        context = change(model)
        with torch.compiler.set_stance("force_eager"), context if hasattr(context, "__exit__") else nullcontext():
            truth = step(plain if change is ligers else model, batch)
            seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=False, layer=where == LAYER)
            part = getattr(seqtile.status(model), where)
            ways = {"fused": part.fused, "in chunks": part.chunked, "untiled": part.tiled - part.fused - part.chunked}
            assert ways == dict.fromkeys(WAYS, 0) | {ROWS[row]: 1}, f"{where}: {part}"
            rounds = "torchao's layers" in row  # a gradient that is by a hair another may be rounded to another number
            assert_equal(step(model, batch), truth, 1e-5, 1e-3 if rounds else 2e-5)


@pytest.mark.parametrize("layer", [False, True])
def test_a_parametrization_of_ones_own_is_not_called_more_often(layer: bool) -> None:
    """Its class may count."""
    calls: list[int] = []

    class Counting(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return weight * 2

    model, batch = build("llama"), batch_of(2, 61)
    for module in (model.model.layers[0].mlp.up_proj, model.lm_head, model.model.layers[1].self_attn.q_proj):
        register_parametrization(module, "weight", Counting())
    calls.clear()
    model(**batch).loss.backward()
    untiled, calls[:] = len(calls), []
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=False, layer=layer)
    assert "Counting, which is neither known nor declared" in str(seqtile.status(model)) and not calls
    model(**batch).loss.backward()
    assert len(calls) == untiled
