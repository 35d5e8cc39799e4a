"""For test_liger_orders: an untouched model as the truth, and who really computed each part of another one.

Importing it patches nothing of Hugging Face's or Liger's classes; `watch` counts calls below every forward.
"""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace

import torch
from liger_kernel import transformers as liger
from liger_kernel.ops import rms_norm as rms_norm_kernels
from liger_kernel.ops import swiglu as swiglu_kernels
from liger_kernel.transformers import functional, rms_norm, rope, swiglu
from liger_kernel.transformers.model import llama, mistral, qwen3
from torch import nn

import seqtile
from seqtile.kernels.dispatch import triton
from seqtile.models import loss, mlp
from seqtile.models.placement import original_forward, package_of
from support.assertions import relative_error
from support.tiny import CLASSES, MLPS, InterpretedFloat, batch_of, build, interpreted, loss_and_gradients, modeling_of

SEQTILE, LIGER, HF = "seqtile", "liger_kernel", "transformers"
CHUNK = 10  # tokens a chunk: the interpreter is slow
LENGTHS = LONG, SHORT = 11, 7  # more tokens than a chunk, and fewer
LCE_FORWARDS = {"llama": llama.lce_forward, "mistral": mistral.lce_forward, "qwen3": qwen3.lce_forward}
CALLS: Counter[tuple[str, str]] = Counter()  # (part, package): how often it computed that part


def ligers_forwards() -> list[Callable]:
    lce_forwards = [module.lce_forward for module in (llama, mistral, qwen3)]
    return [swiglu.LigerSwiGLUMLP.forward, rms_norm.LigerRMSNorm.forward, *lce_forwards]


UNTOUCHED = ligers_forwards()


def counted(part: str, package: str, function: Callable) -> Callable:
    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        CALLS[part, package] += package != SEQTILE or kwargs["chunk_tokens"] == CHUNK
        if interpreted():  # which hands kernels plain floats
            args = tuple(InterpretedFloat(arg) if isinstance(arg, float) else arg for arg in args)
        return function(*args, **kwargs)

    return call


def watch() -> None:
    """Counts what computes the parts of a model; fits Liger's kernels to Triton's interpreter."""
    for part, package, module, name in (
        ("loss", SEQTILE, loss, "linear_cross_entropy"),
        ("mlp", SEQTILE, mlp, "gated_mlp_of"),
        ("loss", LIGER, functional, "liger_fused_linear_cross_entropy"),
        ("rope", LIGER, rope, "dispatch"),
    ):
        setattr(module, name, counted(part, package, getattr(module, name)))
    for part, module, name in (("mlp", swiglu, "LigerSiLUMulFunction"), ("norm", rms_norm, "LigerRMSNormFunction")):
        setattr(module, name, SimpleNamespace(apply=counted(part, LIGER, getattr(module, name).apply)))
    if interpreted():
        rms_norm_kernels.rsqrt = lambda x: triton.language.rsqrt(x)
        swiglu_kernels.float = InterpretedFloat


def check_ran(model: nn.Module, expected: list[str], lengths: tuple[int, ...]) -> None:
    """`expected`: who computed loss, MLPs and norms of batches of these lengths, all of a part. RoPE must have been
    Liger's; a batch that fits in a chunk runs the forwards of MLPs that were there before seqtile's."""
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


def check_status(model: nn.Module, ran: list[str], text: str | None) -> None:
    """`text`: what is said of each part that seqtile was applied to and does not run; None if there is none."""
    status = seqtile.status(model)
    for part, package in zip((status.loss, status.mlp), ran, strict=False):
        ours = package == SEQTILE
        assert (part.tiled, part.others) == ((part.total, ()) if ours else (0, (package,))), str(status)
        assert str(part).startswith(f"seqtile, {CHUNK} tokens a chunk" if ours else f"not tiled: {package}")
        assert (part.reason, part.problem) == (None, None), str(status)
        if ours or text is None:
            assert "apply seqtile" not in str(part) and "took" not in str(part), str(status)
        else:
            assert text in str(part) and str(part).endswith(": apply seqtile to this model, last"), str(status)


def own_forwards(model: nn.Module) -> dict[str, Callable]:
    return {name: vars(module)["forward"] for name, module in model.named_modules() if "forward" in vars(module)}


class Truth:
    """An untouched model, made before anything is patched: its weights, and what it computes with them."""

    def __init__(self, arch: str, device: str, scale: float = 1.0) -> None:
        self.name, self.device = arch, device
        self.model = build(arch, device)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(scale)
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.batches = {length: batch_of(1, length, device) for length in LENGTHS}
        self.steps = {length: loss_and_gradients(self.model, **batch) for length, batch in self.batches.items()}
        with torch.no_grad():
            self.logits = self.model.eval()(**self.batches[SHORT]).logits
        self.model.train()
        self.forward, self.mlp_class = CLASSES[self.name][1].forward, self.mlp_class_now()
        self.mlp_forward = self.mlp_class.forward

    def mlp_class_now(self) -> type:
        (name,) = MLPS[self.name]
        return getattr(modeling_of(self.name), name)

    def copy(self) -> nn.Module:
        """A model of the same weights, of the classes as they are now."""
        model = build(self.name, self.device)
        model.load_state_dict(self.weights)
        return model

    def liger(self, model: nn.Module | None = None) -> None:
        getattr(liger, f"apply_liger_kernel_to_{self.name}")(model=model)

    def seqtile(self, model: nn.Module | None = None) -> None:
        getattr(seqtile, f"apply_seqtile_to_{self.name}")(model, chunk_tokens=CHUNK, check=False)

    def check(
        self, model: nn.Module, ran: list[str], text: str | None = None, lengths: tuple[int, ...] = (LONG,)
    ) -> None:
        """Loss and gradients are the untouched model's, `ran` (loss, MLPs, norms) computed them, `status` says so."""
        CALLS.clear()
        for length in lengths:
            loss, gradients = self.steps[length]
            found_loss, found = loss_and_gradients(model, **self.batches[length])
            check_ran(model, ran, (length,))
            assert (error := relative_error(found_loss, loss)) <= 1e-6, f"loss: relative error {error:.1e}"
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                error = relative_error(found[name], gradient)
                assert error <= 1e-5, f"{name}: relative error {error:.1e}"
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
