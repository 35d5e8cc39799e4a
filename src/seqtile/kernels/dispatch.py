"""Chooses between Triton and PyTorch.

The Triton kernels run on a GPU's tensors, the eager versions on all others. There are two exceptions: without Triton
and after `use_triton(False)`, the eager versions run on every device; and in Triton's interpreter
(`TRITON_INTERPRET=1`) the kernels also run on CPU tensors, so that tests need no GPU.

The eager versions compute in blocks of rows: of 1 MiB on a CPU, of 32 MiB on a GPU.
"""

import sys
from subprocess import CalledProcessError
from traceback import walk_tb
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels import LossOptions, RowVectors, eager

try:
    import triton
except ModuleNotFoundError:
    triton = None
else:
    from seqtile.kernels import cross_entropy, divergence, gated_activation, rotary
    from seqtile.kernels import rms_norm as norms

    PROGRAMS = {
        "cross_entropy_": cross_entropy,
        "divergence_": divergence,
        "gated_activation_": gated_activation,
        "gated_activation_backward_": gated_activation,
        "rms_norm": norms,
        "rms_norm_backward": norms,
        "rotary_": rotary,
    }
    """The module of each kernel."""

ACTIVATIONS = ("silu", "gelu_tanh")  # gelu_tanh: Hugging Face's gelu_pytorch_tanh
LAUNCHER_MODULES = ("triton.runtime.build", "triton.runtime.driver")
"""Triton's modules that build, with a C compiler, what launches kernels, and that look for a GPU's driver."""

_triton_wanted = True


def use_triton(wanted: bool) -> None:
    """Chooses what computes on a GPU: Triton kernels, as by default (True), or plain PyTorch (False).

    False is for a GPU on which Triton cannot launch, for want of a C compiler, Python's headers or a driver that it
    finds, and to compare. It holds for the whole process, from the next kernel on. On a CPU nothing changes,
    except in Triton's interpreter.

    PyTorch computes the same up to rounding, slower and with more memory: outside the matmuls it reads and
    writes 6 to 27 times as many bytes as the kernels do (counted, not timed on a GPU), and it takes up to 0.6 GiB more,
    at any length. Raises TypeError for another value.
    """
    global _triton_wanted
    if not isinstance(wanted, bool):
        raise TypeError(f"use_triton: expected True or False, got {wanted!r}")
    _triton_wanted = wanted


def triton_serves(tensor: torch.Tensor) -> bool:
    """Returns whether the Triton kernels, rather than the eager versions, run on `tensor`."""
    if triton is None or not _triton_wanted:
        return False
    return tensor.is_cuda or (triton.knobs.runtime.interpret and not tensor.is_meta)


def run(name: str, tensor: torch.Tensor, *args: Any) -> None:
    """Runs the kernel `name`, or its eager version, on the tensor's device. In a simulation (FakeTensor) it does
    nothing. Raises OSError, with the remedy, if Triton cannot build what launches kernels."""
    if isinstance(tensor, FakeTensor):
        return
    function = getattr(PROGRAMS[name] if triton_serves(tensor) else eager, name)
    try:
        if tensor.is_cuda and tensor.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device_of(tensor):  # Triton launches on the current device
                function(tensor, *args)
        else:
            function(tensor, *args)
    except Exception as error:
        if any(frame.f_globals.get("__name__") in LAUNCHER_MODULES for frame, _ in walk_tb(error.__traceback__)):
            raise OSError(_cannot_launch(error)) from error
        raise


def _cannot_launch(error: Exception) -> str:
    of_compiler = isinstance(error, CalledProcessError)
    reason = f"{error.cmd[0]} failed, and has said why on stderr" if of_compiler else str(error).rstrip(".")
    major, minor = sys.version_info[:2]
    return (
        f"Triton cannot launch kernels on this machine: {reason}. It builds its launcher with a C compiler, Python's "
        "headers (Python.h) and the GPU's driver (libcuda.so.1), and keeps it in a folder (TRITON_CACHE_DIR). Install "
        f"what is missing, on Debian and Ubuntu `apt-get install gcc python{major}.{minor}-dev`; or call "
        "seqtile.use_triton(False) first: PyTorch then computes instead, slower"
    )


def cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    options: LossOptions,
    *,
    write_grad: bool = False,
    **vectors: torch.Tensor | None,
) -> None:
    """Computes the cross-entropy of every row of a chunk of products hidden W', and writes its gradient over them.

    Args:
        logits: [C, V] float32, bfloat16 or float16, last dimension contiguous: products, from which `options` and
            `bias` make logits. **Destroyed** with `write_grad`: it then holds temperature * dL/dz, where
            L = sum(row_scale * losses + lse_scale * lse + entropy_scale * entropies) and z = logit_scale * products +
            bias. The caller still has to multiply it by logit_scale / temperature (for the bias, by 1 / temperature).
            Without `write_grad` it does not change.
        target: [C] int64. The outputs of a row whose target is outside [0, V) are NaN; nothing out of bounds is read.
        losses: [C] float32, **written**: with w = class_weight and s = label_smoothing,
            (1 - s) w[target] (lse - x[target]) + s / V * sum(w (lse - x)) + z_loss * lse**2.
        vectors: the fields of `RowVectors`.

    Vectors are contiguous. Moves C * V elements (3 * C * V with the gradient); allocates nothing (the eager version:
    some blocks of rows).
    """
    opaque = torch.compiler.is_compiling() or isinstance(logits, FakeTensor) or logits.is_meta
    call = torch.ops.seqtile.cross_entropy_ if opaque else _cross_entropy_
    call(logits, target, losses, write_grad, *options, *RowVectors(**vectors))


def _cross_entropy_(
    logits: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, write_grad: bool, *rest: Any
) -> None:
    options, vectors = LossOptions(*rest[:5]), RowVectors(*rest[5:])
    run("cross_entropy_", logits, target, losses, options, vectors, write_grad)


# Custom ops are opaque to torch.compile and simulations: each writes its arguments and allocates nothing.
torch.library.custom_op(
    "seqtile::cross_entropy_",
    _cross_entropy_,
    mutates_args=("logits", "losses", "lse", "entropy", "predicted", "mean", "squares"),
    schema="(Tensor(a!) logits, Tensor target, Tensor(b!) losses, bool write_grad, float logit_scale, float softcap, "
    "float temperature, float label_smoothing, float z_loss, Tensor? bias, Tensor? class_weight, Tensor(c!)? lse, "
    "Tensor(d!)? entropy, Tensor(e!)? predicted, Tensor(f!)? mean, Tensor(g!)? squares, Tensor? row_scale, "
    "Tensor? lse_scale, Tensor? entropy_scale) -> ()",
).register_fake(lambda *args: None)


def divergence_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    losses: torch.Tensor,
    beta: float,
    options: tuple[LossOptions, LossOptions],
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    entropy: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    write: tuple[bool, bool] = (False, False),
) -> None:
    """Computes the divergence of every row of two chunks of products, and writes its gradients over them.

    Args:
        student, teacher: [C, V] each, any of the three dtypes, last dimension contiguous: products, from which
            `options` and `biases` make logits. **Destroyed** if `write` is True: the chunk then holds
            temperature * dL/dz, where L = sum(row_scale * losses) and z = scale * products + bias.
        losses: [C] float32, **written**.
        beta: 0 for KL(teacher, student), 1 for KL(student, teacher), between them the Jensen-Shannon divergence.
        options: of each head, with one temperature.
        biases: [V] for each head, any of the three dtypes.
        entropy: [C] float32, **written**: the entropy of the student's softmax.
        row_scale: [C] float32; None for ones.
        write: whether to write the student's gradient, and the teacher's.

    Vectors are contiguous. Reads 6 * C * V elements with gradients, 4 without, and writes the requested values.
    Allocates nothing (the eager version: some blocks of rows).
    """
    run("divergence_", student, teacher, losses, beta, options, biases, entropy, row_scale, write)


def gated_activation_(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes act(gate) * up in float32, writes it over `gate`, and returns `gate`.

    Args:
        gate, up: [C, M] of one dtype, last dimension contiguous. `gate` is **destroyed**.
        activation: one of `ACTIVATIONS`.

    Moves 3 * C * M elements, allocates nothing on a GPU (the eager version: some blocks of rows).
    """
    run("gated_activation_", gate, up, activation)
    return gate


def gated_activation_backward_(gate: torch.Tensor, up: torch.Tensor, d_product: torch.Tensor, activation: str) -> None:
    """Computes the backward of act(gate) * up in place, and recomputes the product.

    Args:
        gate, up, d_product: [C, M] of one dtype, last dimension contiguous. All three are **destroyed**: afterwards
            `gate` holds d_gate, `up` holds d_up, and `d_product` holds the product act(gate) * up.
        activation: one of `ACTIVATIONS`.

    Moves 6 * C * M elements, allocates nothing on a GPU (the eager version: some blocks of rows).
    """
    run("gated_activation_backward_", gate, up, d_product, activation)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """Computes x / sqrt(mean(x**2) + eps) * weight of every row in float32, writes it to `out`, and returns `out`.

    Args:
        x, out: [C, W], or [C, H, W] with every head as a row; last dimension contiguous. `out` is **written**; it may
            be `x`, and may have another dtype.
        weight: [W], contiguous, any of the three dtypes.

    Moves 2 * C * H * W elements, allocates nothing on a GPU (the eager version: some blocks of rows).
    """
    run("rms_norm", x, weight, eps, out)
    return out


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    d_y: torch.Tensor,
    out: torch.Tensor,
    *,
    add: torch.Tensor | None = None,
    d_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the gradient of `rms_norm`'s x, plus `add`, writes it to `out`, and returns `out`, which may be `d_y`,
    `add` or `x`.

    Args:
        x, weight, eps: as in `rms_norm`. d_y, out: x's shape, any dtype and strides that `rms_norm` accepts.
        add: [C, W], only if x is [C, W]; last dimension contiguous.
        d_weight: [W] float32; the gradient of the weight is **added** to it.

    Moves 3 * C * H * W elements, 4 with `add`. For the weight's gradient allocates a few hundred rows of W float32 (the
    eager version: some blocks of rows).
    """
    assert add is None or (add.shape == x.shape and x.ndim == 2)
    run("rms_norm_backward", x, weight, eps, d_y, out, add, d_weight)
    return out


def rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
    """Rotates every head of x by the angles of its token, in place; with `backward`, rotates a gradient back.

    Args:
        x: [C, H, K], K even, last dimension contiguous. **Destroyed**, and returned.
        cos, sin: [C, K], last dimension contiguous; any of the three dtypes.

    Moves 2 * C * H * K elements, allocates nothing on a GPU (the eager version: some blocks of rows).
    """
    run("rotary_", x, cos, sin, backward)
    return x
