"""Every kernel at the shapes of real models, compiled for every GPU generation: no spills, the 32 lanes of a warp load
512 bytes at once, and the loops of the cross-entropy are short; in a loop over a row no thread waits."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

triton = pytest.importorskip("triton")
NO_COMPILER = "the interpreter replaces the compiler"
pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason=NO_COMPILER),
    pytest.mark.in_interpreter(NO_COMPILER, only=()),
]

from kernels.ahead import TARGETS, compiled  # noqa: E402
from seqtile import kernels  # noqa: E402
from seqtile.kernels import (  # noqa: E402
    LossOptions,
    RowVectors,
    cross_entropy,
    divergence,
    gated_activation,
    rms_norm,
    rotary,
)

MODULES = [import_module(f"seqtile.kernels.{found.name}") for found in iter_modules(kernels.__path__)]
ROWS = 4096
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Launch = Callable[[torch.dtype], object]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def loss(vocab: int, *given: str, write_grad: bool = True, **options: float) -> Launch:
    """Cross-entropy of a chunk with the `given` vectors. Rows are aligned to 16 elements, as in the loss."""

    def launch(dtype: torch.dtype) -> None:
        vectors = {name: empty(ROWS) for name in ("lse", "entropy", "row_scale", "lse_scale", "entropy_scale")}
        vectors |= {"predicted": empty(ROWS, dtype=torch.int64)}
        vectors |= {"bias": empty(vocab, dtype=dtype), "class_weight": empty(vocab)}
        logits = empty(ROWS, -(-vocab // 16) * 16, dtype=dtype)[:, :vocab]
        arguments = {name: vector if name in given else None for name, vector in vectors.items()}
        target, losses = empty(ROWS, dtype=torch.int64), empty(ROWS)
        cross_entropy.cross_entropy_(
            logits, target, losses, LossOptions(**options), RowVectors(**arguments), write_grad
        )

    return launch


def of_two_heads(beta: float, *given: str, write: tuple[bool, bool] = (True, False), **options: float) -> Launch:
    """The divergence of a chunk over Llama's vocabulary, with the `given` vectors."""

    def launch(dtype: torch.dtype) -> None:
        student, teacher = empty(ROWS, 128_256, dtype=dtype), empty(ROWS, 128_256, dtype=dtype)
        vectors = {name: empty(ROWS) for name in ("entropy", "row_scale")}
        vectors |= {name: empty(128_256, dtype=dtype) for name in ("student_bias", "teacher_bias")}
        entropy, row_scale, *biases = (vector if name in given else None for name, vector in vectors.items())
        of_each = (LossOptions(**options),) * 2
        divergence.divergence_(student, teacher, empty(ROWS), beta, of_each, biases, entropy, row_scale, write)

    return launch


def forward(width: int, activation: str) -> Launch:
    """Gate and up side by side, as one product writes them."""

    def launch(dtype: torch.dtype) -> None:
        gate, up = empty(ROWS, 2 * width, dtype=dtype).chunk(2, 1)
        gated_activation.gated_activation_(gate, up, activation)

    return launch


def backward(width: int, activation: str) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        gate, up = empty(ROWS, 2 * width, dtype=dtype).chunk(2, 1)
        gated_activation.gated_activation_backward_(gate, up, empty(ROWS, width, dtype=dtype), activation)

    return launch


def rows_of(width: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a model's width, or heads in the buffer of queries, keys and values."""
    return empty(ROWS, heads + 8 if heads > 1 else 1, width, dtype=dtype)[:, :heads]


def norm(width: int, heads: int = 1) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        x = rows_of(width, heads, dtype)
        rms_norm.rms_norm(x, empty(width, dtype=dtype), 1e-6, x)

    return launch


def norm_backward(width: int, heads: int = 1, trained: bool = True) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        x, d_y = rows_of(width, heads, dtype), rows_of(width, heads, dtype)
        add = empty(ROWS, width, dtype=dtype) if heads == 1 else None
        d_weight = empty(width) if trained else None
        rms_norm.rms_norm_backward(x, empty(width, dtype=dtype), 1e-6, d_y, d_y, add, d_weight)

    return launch


def turned(heads: int, backward: bool, of_angles: torch.dtype | None = None) -> Launch:
    def launch(dtype: torch.dtype) -> None:
        cos, sin = (empty(ROWS, 128, dtype=of_angles or dtype) for _ in range(2))
        rotary.rotary_(rows_of(128, heads, dtype), cos, sin, backward)

    return launch


METRICS = ("lse", "entropy", "predicted")
EVERYTHING = (*METRICS, "row_scale", "lse_scale", "entropy_scale", "bias", "class_weight")
OPTIONS = {"temperature": 0.7, "logit_scale": 0.5, "softcap": 30.0}
LAUNCHES: dict[str, Launch] = {
    "loss_llama": loss(128_256),
    "loss_qwen": loss(151_936),
    "loss_gpt2": loss(50_257),
    "loss_gemma2": loss(256_000, softcap=30.0),
    "loss_granite": loss(49_152, logit_scale=0.125),
    "loss_alone": loss(128_256, write_grad=False),
    "loss_metrics": loss(128_256, *METRICS),
    "log_probs_values": loss(128_256, "entropy", "predicted", "mean", "squares", write_grad=False, temperature=0.7),
    "loss_smoothed": loss(128_256, label_smoothing=0.1),
    "log_probs_backward": loss(128_256, "row_scale", "entropy_scale", temperature=0.7),
    "z_loss_by_hand": loss(128_256, "row_scale", "lse_scale"),
    "loss_everything": loss(128_256, *EVERYTHING, **OPTIONS, label_smoothing=0.1, z_loss=1e-4),
    "divergence_forward": of_two_heads(0.0),
    "divergence_reverse": of_two_heads(1.0),
    "divergence_mixed": of_two_heads(0.5),
    "divergence_alone": of_two_heads(0.0, write=(False, False)),
    "divergence_everything": of_two_heads(
        0.5, "entropy", "row_scale", "student_bias", "teacher_bias", write=(True, True), **OPTIONS
    ),
    **{f"gated_{name}": forward(14_336, name) for name in ("silu", "gelu_tanh")},
    **{f"gated_backward_{name}": backward(14_336, name) for name in ("silu", "gelu_tanh")},
    **{f"norm_{width}": norm(width) for width in (2880, 4096, 5120, 8192)},
    **{f"norm_backward_{width}": norm_backward(width) for width in (2880, 4096, 5120, 8192)},
    "norm_backward_frozen": norm_backward(4096, trained=False),
    "norm_heads": norm(128, 32),
    "norm_heads_backward": norm_backward(128, 32),
    "rotary": turned(40, False),
    "rotary_backward": turned(40, True),
    "rotary_float32_angles": turned(40, False, torch.float32),
    "rotary_of_a_group": turned(5, True, torch.float32),
}


DAILY = ("loss_everything", "divergence_everything", "gated_backward_silu", "norm_backward_4096", "rotary_backward")


@pytest.mark.full(
    "the GPU that is measured on, in the dtype that is trained in; make test-all compiles for three others too",
    but=[f"sm_90-{name}-bf16" for name in DAILY],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled_and_loads_are_wide(target: str, name: str, dtype: str) -> None:
    kernel = compiled(target, lambda: LAUNCHES[name](DTYPES[dtype]))
    assert kernel.spilled == 0
    assert kernel.widest_load >= 16 * 32 // TARGETS[target].warp_size  # with 64 lanes, each reads half as many elements
    if name.startswith(("loss", "log_probs", "divergence")) and (target, dtype) == ("sm_90", "bf16"):
        assert all(loop.count("BAR") == 0 for loop in kernel.loops), "a thread waits inside a loop"


@pytest.mark.full("half a second each", but=("loss_llama", "loss_gpt2"))
@pytest.mark.parametrize("name", ["loss_llama", "loss_qwen", "loss_gpt2"])
def test_loops_of_the_loss(name: str) -> None:
    """Both passes take 20 instructions per element, no thread waits for another, and a multiprocessor is full."""
    kernel = compiled("sm_90", lambda: LAUNCHES[name](torch.bfloat16))
    assert len(kernel.loops) == 2
    assert sum(len(loop.instructions) for loop in kernel.loops) <= 20 * cross_entropy.COLUMNS
    assert all(loop.count("BAR") == loop.count("SHFL") == 0 for loop in kernel.loops)
    assert all(loop.count("LDG.E.128") == loop.count("LDG") == 1 for loop in kernel.loops)
    assert kernel.resident == 2048 // (32 * cross_entropy.NUM_WARPS)


@pytest.mark.parametrize("width", [4096, 5120, 8192])
def test_blocks_of_the_norm_that_a_multiprocessor_holds(width: int) -> None:
    kernel = compiled("sm_90", lambda: LAUNCHES[f"norm_backward_{width}"](torch.bfloat16))
    assert kernel.resident == rms_norm.RESIDENT[kernel.num_warps]


def test_every_kernel_is_launched() -> None:
    """And no other: helpers that only kernels call have no name that ends like a kernel's."""
    existing = {
        value.fn.__name__
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    launched = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", lambda self, *args, **options: launched.add(self.fn.__name__))
        for launch in LAUNCHES.values():
            launch(torch.bfloat16)
    assert launched == existing
