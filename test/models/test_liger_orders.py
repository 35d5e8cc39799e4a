"""Liger-Kernel and seqtile in every order, with Liger's kernels: on a GPU, or in Triton's interpreter.

Every case checks which code runs, that `status` says so, that one call of `apply_seqtile(model)` restores the parts
that Liger replaced, that loss and gradients equal those of an untouched Hugging Face model, and the effect of
`restore`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import seqtile
from models.layered import assert_equal
from models.liger_orders import HF, LIGER, ORDERS, SEQTILE, TOOK
from seqtile.kernels.dispatch import triton
from seqtile.models.forward import loss, mlp
from seqtile.models.functions import package_of
from seqtile.models.placement import original_forward
from support.assertions import relative_error
from support.tiny import (
    CLASSES,
    MLPS,
    InterpretedFloat,
    batch_of,
    build,
    interpreted,
    liger_or_skip,
    loss_and_gradients,
    modeling_of,
)

pytest.importorskip("triton")
liger = pytest.importorskip("liger_kernel.transformers")
from liger_kernel.ops import rms_norm as rms_norm_kernels  # noqa: E402
from liger_kernel.ops import swiglu as swiglu_kernels  # noqa: E402
from liger_kernel.transformers import functional, rms_norm, rope, swiglu  # noqa: E402
from liger_kernel.transformers.model import llama, mistral, qwen3  # noqa: E402

DAILY = (
    "llama-liger, seqtile, build",
    "*build, liger model, seqtile",
    "mistral-seqtile*",
    "*liger, build, seqtile model",
)
DAILY += ("model", "llama-classes")
ALL = "every answer of status and every way back are among these"
pytestmark = [
    pytest.mark.usefixtures("pristine", "watched"),
    pytest.mark.filterwarnings("ignore:this model stays tiled by its classes"),
    pytest.mark.full("Liger's kernels need a GPU or the interpreter"),
    pytest.mark.on_gpu(ALL, only=DAILY),
    pytest.mark.in_interpreter(ALL, only=DAILY),
]

CHUNK = 7  # tokens per chunk: the interpreter is slow
LENGTHS = LONG, SHORT = 8, 6  # more tokens than a chunk, and fewer; the first five have no label
LCE_FORWARDS = {"llama": llama.lce_forward, "mistral": mistral.lce_forward, "qwen3": qwen3.lce_forward}
CALLS: Counter[tuple[str, str]] = Counter()  # (part, package): how often the package computed that part


def ligers_forwards() -> list[Callable]:
    lce_forwards = [module.lce_forward for module in (llama, mistral, qwen3)]
    return [swiglu.LigerSwiGLUMLP.forward, rms_norm.LigerRMSNorm.forward, *lce_forwards]


UNTOUCHED = ligers_forwards()


def counted(part: str, package: str, function: Callable) -> Callable:
    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        CALLS[part, package] += package != SEQTILE or kwargs["chunk_tokens"] == CHUNK
        if interpreted():  # which passes plain floats to kernels
            args = tuple(InterpretedFloat(arg) if isinstance(arg, float) else arg for arg in args)
        return function(*args, **kwargs)

    return call


@pytest.fixture
def watched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts which code computes the parts of a model; adapts Liger's kernels to Triton's interpreter."""
    liger_or_skip("llama", device)
    for part, package, module, name in (
        ("loss", SEQTILE, loss, "linear_cross_entropy"),
        ("mlp", SEQTILE, mlp, "gated_mlp_of"),
        ("loss", LIGER, functional, "liger_fused_linear_cross_entropy"),
        ("rope", LIGER, rope, "dispatch"),
    ):
        monkeypatch.setattr(module, name, counted(part, package, getattr(module, name)))
    for part, module, name in (("mlp", swiglu, "LigerSiLUMulFunction"), ("norm", rms_norm, "LigerRMSNormFunction")):
        apply = counted(part, LIGER, getattr(module, name).apply)
        monkeypatch.setattr(module, name, SimpleNamespace(apply=apply))
    if interpreted():
        monkeypatch.setattr(rms_norm_kernels, "rsqrt", lambda x: triton.language.rsqrt(x))
        monkeypatch.setattr(swiglu_kernels, "float", InterpretedFloat, raising=False)


def check_ran(model: nn.Module, expected: Sequence[str], lengths: tuple[int, ...]) -> None:
    """`expected`: the packages that must compute the loss, MLPs and norms of batches of these lengths. Liger must
    compute RoPE. A batch that fits in a chunk runs the MLP forwards from before seqtile."""
    layers = model.config.num_hidden_layers
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    totals = {"loss": 1, "mlp": layers, "norm": norms, "rope": layers}
    for (part, total), who in zip(totals.items(), [*expected, LIGER], strict=True):
        calls = {package: CALLS[part, package] for package in (SEQTILE, LIGER) if CALLS[part, package]}
        wanted = Counter({who: len(lengths) * total})
        if part == "mlp" and who == SEQTILE:
            before = package_of(original_forward(model.model.layers[0].mlp))
            wanted = Counter(who if length > CHUNK else before for length in lengths for _ in range(total))
        assert calls == {package: count for package, count in wanted.items() if package != HF}, f"{part}: {calls}"
    CALLS.clear()


def check_status(model: nn.Module, ran: Sequence[str], text: str | None) -> None:
    """`text`: the status of each part that seqtile was applied to and does not run; None if there is none."""
    status = seqtile.status(model)
    for part, package in zip((status.loss, status.mlp), ran, strict=False):
        ours = package == SEQTILE
        assert (part.tiled, part.others) == ((part.total, ()) if ours else (0, (package,))), str(status)
        untiled = f"not tiled; the forward that runs is from {package}"
        assert str(part).startswith(f"seqtile, {CHUNK} tokens a chunk" if ours else untiled), str(status)
        assert (part.reason, part.problem) == (None, None), str(status)
        if ours or text is None:
            assert "apply seqtile" not in str(part) and "took" not in str(part), str(status)
        else:
            assert text in str(part) and str(part).endswith(": apply seqtile to this model, last"), str(status)


def own_forwards(model: nn.Module) -> dict[str, Callable]:
    return {name: vars(module)["forward"] for name, module in model.named_modules() if "forward" in vars(module)}


class Truth:
    """An untouched model, made before any patch: its weights, and its results."""

    def __init__(self, arch: str, device: str) -> None:
        self.name, self.device = arch, device
        model = build(arch, device, num_hidden_layers=1)
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.batches = {length: batch_of(1, length, device) for length in LENGTHS}
        self.steps = {length: loss_and_gradients(model, **batch) for length, batch in self.batches.items()}
        with torch.no_grad():
            self.logits = model.eval()(**self.batches[SHORT]).logits.clone()  # now: modules change
        model.train()
        self.forward, self.mlp_class = CLASSES[self.name][1].forward, self.mlp_class_now()
        self.mlp_forward = self.mlp_class.forward

    def mlp_class_now(self) -> type:
        (name,) = MLPS[self.name]
        return getattr(modeling_of(self.name), name)

    def copy(self) -> nn.Module:
        """A model with the same weights, built of the current classes."""
        model = build(self.name, self.device, num_hidden_layers=1)
        model.load_state_dict(self.weights)
        return model

    def liger(self, model: nn.Module | None = None) -> None:
        getattr(liger, f"apply_liger_kernel_to_{self.name}")(model=model)

    def seqtile(self, model: nn.Module | None = None) -> None:
        getattr(seqtile, f"apply_seqtile_to_{self.name}")(model, chunk_tokens=CHUNK, check=False)

    def check(self, model: nn.Module, ran: Sequence[str], text: str | None = None, lengths=(LONG,)) -> None:
        """Loss and gradients equal the untouched model's, `ran` (loss, MLPs, norms) computed them, and `status` says
        so."""
        CALLS.clear()
        for length in lengths:
            found = loss_and_gradients(model, **self.batches[length])
            check_ran(model, ran, (length,))
            assert_equal(found, self.steps[length])
        check_status(model, ran, text)
        assert ligers_forwards() == UNTOUCHED, "a class or a forward of Liger's was changed"
        assert not any(hasattr(forward, "seqtile_placement") for forward in UNTOUCHED), "a forward of Liger's is marked"

    def check_eval(self, model: nn.Module) -> None:
        with torch.no_grad():
            outputs = model.eval()(**self.batches[SHORT])
        model.train()
        assert relative_error(outputs.logits, self.logits) <= 1e-5
        assert relative_error(outputs.loss, self.steps[SHORT][0]) <= 1e-6

    def check_restored(self, liger_on_classes: bool) -> None:
        """The classes are what they would be without seqtile."""
        assert CLASSES[self.name][1].forward is (LCE_FORWARDS[self.name] if liger_on_classes else self.forward)
        assert self.mlp_class_now() is swiglu.LigerSwiGLUMLP
        assert self.mlp_class.forward is self.mlp_forward


OTHERS = [("mistral", "seqtile, build, liger"), ("qwen3", "seqtile, build, liger model")]


@pytest.mark.parametrize(("arch", "operations"), [*(("llama", order) for order in ORDERS), *OTHERS])
def test_order(arch: str, operations: str, device: str) -> None:
    ran, later_ran, text = ORDERS[operations]
    truth = Truth(arch, device)
    model = stood = None
    for operation in (operations := operations.split(", ")):
        if operation == "build":
            model = truth.copy()
        elif operation.endswith(" model"):
            stood = own_forwards(model) if operation == "seqtile model" else stood
            getattr(truth, operation.removesuffix(" model"))(model)
        else:
            getattr(truth, operation)()
    later = truth.copy()
    truth.check(model, ran, text)
    truth.check(later, later_ran, text if "seqtile" in operations else None)

    if ran[:2] != (SEQTILE, SEQTILE):
        stood = own_forwards(model)
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=False)
    seqtile.apply_seqtile(later, chunk_tokens=CHUNK, check=False)
    truth.check(model, [SEQTILE, SEQTILE, ran[2]], lengths=LENGTHS)
    truth.check(later, [SEQTILE, SEQTILE, LIGER])
    truth.check_eval(model)

    for target in (model, later, None):
        seqtile.restore(target)
    assert own_forwards(model) == (stood or {}) and own_forwards(later) == {}
    truth.check_restored("liger" in operations)
    truth.check(model, [LIGER, ran[2], ran[2]])  # its norms are Liger's, its MLPs were too


def test_two_architectures(device: str) -> None:
    """Both with Liger's one MLP class: seqtile on one model does not change the other."""
    truth, others = Truth("llama", device), Truth("mistral", device)
    ours, ligers = [SEQTILE, SEQTILE, LIGER], [LIGER, LIGER, LIGER]
    truth.liger()
    others.liger()
    truth.seqtile()
    model, neighbour = truth.copy(), others.copy()
    truth.check(model, ours)
    others.check(neighbour, ligers)
    seqtile.apply_seqtile(neighbour, chunk_tokens=CHUNK, check=False)
    others.check(neighbour, ours, lengths=LENGTHS)
    others.check(others.copy(), ligers)
    others.seqtile()
    tiled = others.copy()
    seqtile.restore("llama")
    truth.check(model, ligers)
    others.check(tiled, ours)
    seqtile.restore()
    others.check(tiled, ligers)
    for restored in (truth, others):
        restored.check_restored(liger_on_classes=True)


def train(truth: Truth, target: str, config: dict | None, ran: Sequence[str], text: str | None, output: Path) -> None:
    """Trainer applies Liger to a model that is already tiled, by its classes or alone (`target`)."""
    if target == "classes":
        truth.seqtile()
    model = truth.copy()
    if target == "model":
        truth.seqtile(model)
    rows = [{name: truth.batches[LONG][name][0].cpu() for name in ("input_ids", "labels")}]
    options = {
        "use_liger_kernel": True,
        "liger_kernel_config": config,
        "use_cpu": truth.device == "cpu",
        "report_to": [],
    }
    options |= {"max_steps": 1, "learning_rate": 0.0, "save_strategy": "no", "prediction_loss_only": True}
    trainer = Trainer(model, TrainingArguments(str(output), **options), train_dataset=rows, eval_dataset=rows)
    losses = [trainer.train().training_loss]
    CALLS.clear()
    losses.append(trainer.evaluate()["eval_loss"])
    assert CALLS["loss", ran[0]] == 1, "evaluated without logits"
    for found, allowed in zip(losses, (1e-6, 1e-5), strict=True):  # training, evaluation
        assert abs(found / truth.steps[LONG][0] - 1) <= allowed, f"loss {found}"
    truth.check(model.train(), ran, text)
    if ran[0] == LIGER:
        stood = own_forwards(model)
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=False)
        truth.check(model, [SEQTILE, SEQTILE, LIGER], lengths=LENGTHS)
        seqtile.restore(model)
        assert own_forwards(model) == stood


@pytest.mark.parametrize("target", ["classes", "model"])
def test_trainer_takes_both_back(target: str, device: str, tmp_path: Path) -> None:
    train(Truth("llama", device), target, None, [LIGER, LIGER, LIGER], TOOK, tmp_path)


@pytest.mark.parametrize(
    ("arch", "target"), [("llama", "classes"), ("llama", "model"), ("mistral", "classes"), ("gemma2", "model")]
)
def test_trainer_leaves_both(arch: str, target: str, device: str, tmp_path: Path) -> None:
    config = {"swiglu": False, "geglu": False, "fused_linear_cross_entropy": False}
    train(Truth(arch, device), target, config, [SEQTILE, SEQTILE, LIGER], None, tmp_path)
