"""The one choice between Triton and PyTorch.

A tensor on a GPU is served by the Triton kernels, any other by their eager twins. Two exceptions: where Triton is not
installed the eager twins serve every device, and under Triton's interpreter (`TRITON_INTERPRET=1`) the kernels serve
CPU tensors too, which is how they are tested without a GPU.
"""

from dataclasses import astuple
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensor

from seqtile.kernels import eager
from seqtile.kernels.loss_options import LossOptions

try:
    import triton
except ModuleNotFoundError:
    triton = None
else:
    from seqtile.kernels import cross_entropy as triton_cross_entropy
    from seqtile.kernels import gated_activation as triton_gated_activation
    from seqtile.kernels import rms_norm as triton_rms_norm
    from seqtile.kernels import rotary as triton_rotary


ACTIVATIONS = ("silu", "gelu_tanh")  # gelu_tanh: Hugging Face's gelu_pytorch_tanh


def triton_serves(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels, rather than their eager twins, run on `tensor`."""
    return triton is not None and (tensor.is_cuda or (triton.knobs.runtime.interpret and not tensor.is_meta))


def cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    options: LossOptions,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    predicted: torch.Tensor | None = None,
    write_grad: bool = False,
    row_scale: torch.Tensor | None = None,
    lse_scale: torch.Tensor | None = None,
    entropy_scale: torch.Tensor | None = None,
) -> None:
    """Cross-entropy of every row of a tile of products hidden W', and its gradient written over them.

    Args:
        logits: [C, V] float32, bfloat16 or float16, last dimension contiguous: products, which `options` and `bias`
            make logits. **Destroyed**: with `write_grad` it holds afterwards the gradient of
            sum(row_scale * losses + lse_scale * lse + entropy_scale * entropies) with respect to the capped logits'
            argument, times `temperature`: what is left to multiply is logit_scale / temperature (for the bias,
            1 / temperature). Without, it is as it was.
        target: [C] int64. A row whose target lies outside [0, V) is poisoned with NaN; nothing out of bounds is read.
        losses: [C] float32, **written**: with w = class_weight and s = label_smoothing,
            (1 - s) w[target] (lse - x[target]) + s / V * sum(w (lse - x)) + z_loss * lse**2.
        bias: [V], any of the three dtypes. class_weight: [V] float32.
        lse, entropy: [C] float32, predicted: [C] int64, **written** if given: log-sum-exp of the logits, entropy of
            their softmax, index of the largest.
        row_scale: [C] float32, None for ones. lse_scale, entropy_scale: [C] float32, None for zeros.

    Vectors are contiguous. Moves C * V elements (3 * C * V with the gradient); allocates nothing (the eager twin: some
    blocks of rows of 1 MiB).
    """
    vectors = (bias, class_weight, lse, entropy, predicted, row_scale, lse_scale, entropy_scale)
    opaque = torch.compiler.is_compiling() or isinstance(logits, FakeTensor) or logits.is_meta
    run = torch.ops.seqtile.cross_entropy_ if opaque else _cross_entropy_
    run(logits, target, losses, *vectors, write_grad, *astuple(options))


def _cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    lse: torch.Tensor | None,
    entropy: torch.Tensor | None,
    predicted: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    lse_scale: torch.Tensor | None,
    entropy_scale: torch.Tensor | None,
    write_grad: bool,
    logit_scale: float,
    softcap: float,
    temperature: float,
    label_smoothing: float,
    z_loss: float,
) -> None:
    backend: ModuleType = triton_cross_entropy if triton_serves(logits) else eager
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        backend.cross_entropy_(
            logits,
            target,
            losses,
            LossOptions(logit_scale, softcap, temperature, label_smoothing, z_loss),
            bias=bias,
            class_weight=class_weight,
            lse=lse,
            entropy=entropy,
            predicted=predicted,
            write_grad=write_grad,
            row_scale=row_scale,
            lse_scale=lse_scale,
            entropy_scale=entropy_scale,
        )


# The same, opaque to torch.compile and to simulations: a call that writes what it is given and allocates nothing.
torch.library.custom_op(
    "seqtile::cross_entropy_", _cross_entropy_, mutates_args=("logits", "losses", "lse", "entropy", "predicted")
).register_fake(lambda *args: None)


def gated_activation_(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, computed in float32 and written over `gate`, which is returned.

    Args:
        gate, up: [C, M] of one dtype, last dimension contiguous. `gate` is **destroyed**.
        activation: one of `ACTIVATIONS`.

    Moves 3 * C * M elements, allocates nothing on a GPU (the eager twin: some blocks of rows of 1 MiB).
    """
    if isinstance(gate, FakeTensor):
        return gate  # a simulation stands for a GPU, and has no values
    backend: ModuleType = triton_gated_activation if triton_serves(gate) else eager
    with torch.cuda.device_of(gate):
        return backend.gated_activation_(gate, up, activation)


def gated_activation_backward_(gate: torch.Tensor, up: torch.Tensor, d_product: torch.Tensor, activation: str) -> None:
    """Backward of act(gate) * up, in place, the product recomputed on the way.

    Args:
        gate, up, d_product: [C, M] of one dtype, last dimension contiguous. All three are **destroyed**: afterwards
            `gate` holds d_gate, `up` holds d_up, and `d_product` holds the product act(gate) * up.
        activation: one of `ACTIVATIONS`.

    Moves 6 * C * M elements, allocates nothing on a GPU (the eager twin: some blocks of rows of 1 MiB).
    """
    if isinstance(gate, FakeTensor):
        return
    backend: ModuleType = triton_gated_activation if triton_serves(gate) else eager
    with torch.cuda.device_of(gate):
        backend.gated_activation_backward_(gate, up, d_product, activation)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight of every row, in float32, **written** to `out`, which is returned.

    Args:
        x, out: [C, W], or [C, H, W] of which every head is a row; last dimension contiguous. `out` may be `x`, and may
            have another dtype.
        weight: [W], contiguous, any of the three dtypes.

    Moves 2 * C * H * W elements, allocates nothing on a GPU (the eager twin: some blocks of rows of 1 MiB).
    """
    if not isinstance(x, FakeTensor):
        backend: ModuleType = triton_rms_norm if triton_serves(x) else eager
        with torch.cuda.device_of(x):
            backend.rms_norm(_heads(x), weight, eps, _heads(out))
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
    """The gradient of `rms_norm`'s x, plus `add`, **written** to `out`, which is returned; may be `d_y`, `add` or `x`.

    Args:
        x, weight, eps: as in `rms_norm`. d_y, out: of x's shape, in any dtype and strides that `rms_norm` takes.
        add: [C, W], where x is [C, W]; last dimension contiguous.
        d_weight: [W] float32; the gradient of the weight is **added** there.

    Moves 3 * C * H * W elements, 4 with `add`; allocates for the weight's a few hundred rows of W float32 (the eager
    twin: some blocks of rows of 1 MiB).
    """
    assert add is None or (add.shape == x.shape and x.dim() == 2)
    if not isinstance(x, FakeTensor):
        backend: ModuleType = triton_rms_norm if triton_serves(x) else eager
        with torch.cuda.device_of(x):
            backend.rms_norm_backward(_heads(x), weight, eps, _heads(d_y), _heads(out), add, d_weight)
    return out


def rotary_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
    """Turns every head of x by the angles of its token, or with `backward` a gradient back; in place.

    Args:
        x: [C, H, K], K even, last dimension contiguous. **Destroyed**, and returned.
        cos, sin: [C, K], last dimension contiguous; any of the three dtypes.

    Moves 2 * C * H * K elements, allocates nothing on a GPU (the eager twin: some blocks of rows of 1 MiB).
    """
    if not isinstance(x, FakeTensor):
        backend: ModuleType = triton_rotary if triton_serves(x) else eager
        with torch.cuda.device_of(x):
            backend.rotary_(x, cos, sin, backward)
    return x


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 3 else x.unsqueeze(1)
