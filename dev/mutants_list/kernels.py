"""Mutants of the kernels: the Triton programs, run by the interpreter, and their eager twins."""

from functools import partial

from mutants_list.mutant import Mutant

CROSS_ENTROPY = ("kernels/test_cross_entropy.py",)
ACTIVATION = ("kernels/test_gated_activation.py",)
NORM = ("kernels/test_rms_norm.py",)
DISPATCH = ("kernels/test_dispatch.py",)
ROTARY = ("kernels/test_rotary.py",)
Program = partial(Mutant, interpreted=True)

MUTANTS = (
    Program(
        "cross-entropy kernel: the sum is not rescaled to a new maximum",
        "_add_step",
        "total = total * decay + tl.sum(exponentials, 1)",
        "total = total + tl.sum(exponentials, 1)",
        CROSS_ENTROPY,
        select="real_vocabularies or extreme_logits",
    ),
    Program(
        "cross-entropy kernel: half the gradient of the z-loss",
        "_cross_entropy_kernel",
        "softmax_coef = target_coef + 2.0 * z_loss * lse",
        "softmax_coef = target_coef + z_loss * lse",
        CROSS_ENTROPY,
        select="values_and_gradient",
    ),
    Program(
        "cross-entropy kernel: the predicted token counts from the start of its block",
        "_add_step",
        "start + tl.arange(0, THREADS) * COLUMNS + place",
        "tl.arange(0, THREADS) * COLUMNS + place",
        CROSS_ENTROPY,
        select="predicted",
    ),
    Program(
        "cross-entropy kernel: a sign in the polynomial of tanh",
        "_tanh",
        "square * (-17 / 315",
        "square * (17 / 315",
        CROSS_ENTROPY,
        select="softcap_",
    ),
    Program(
        "cross-entropy kernel: offsets of rows in 32 bits",
        "_cross_entropy_kernel",
        "row = tl.program_id(0).to(tl.int64)",
        "row = tl.program_id(0)",
        CROSS_ENTROPY,
        select="int64",
    ),
    Program(
        "activation kernel: the slope of GELU's argument is left out",
        "_gated_activation_backward_kernel",
        "(1.0 + gate * (1.0 - sigmoid) * slope)",
        "(1.0 + gate * (1.0 - sigmoid))",
        ACTIVATION,
    ),
    Program(
        "norm kernel: programs go over each other's rows",
        "_rms_norm_backward_kernel",
        "rows, tl.num_programs(0) * ROWS)",
        "rows, ROWS)",
        NORM,
    ),
    Program(
        "rotary kernel: the backward takes the first half's sine for the second's",
        "_rotary_kernel",
        "sin1, sin2 = -sin2, -sin1",
        "sin1, sin2 = -sin1, -sin1",
        ROTARY,
    ),
    Mutant(
        "eager cross-entropy: log-probabilities lose digits in a subtraction",
        "cross_entropy_",
        "logp = x.log_softmax(dim=1).masked_fill_(~in_range, torch.nan)",
        "logp = x - row_lse",
        CROSS_ENTROPY,
    ),
    Mutant(
        "eager cross-entropy: smoothing forgets the class weights in the gradient",
        "cross_entropy_",
        "gradient -= class_coef * weights",
        "gradient -= class_coef",
        CROSS_ENTROPY,
    ),
    Mutant(
        "eager cross-entropy: a sign in the entropy's gradient",
        "cross_entropy_",
        "(logp + row_entropy)",
        "(logp - row_entropy)",
        CROSS_ENTROPY,
    ),
    Mutant(
        "eager activation: a factor in the slope of GELU's argument",
        "_sigmoid",
        "root + 3 * root * 0.044715 * square",
        "root + root * 0.044715 * square",
        ACTIVATION,
    ),
    Mutant(
        "eager norm: not in float32",
        "rms_norm",
        "        part = x[rows].float()\n",
        "        part = x[rows]\n",
        NORM,
    ),
    Mutant(
        "eager norm: the gradient that is to be added is lost",
        "rms_norm_backward",
        "d_x if add is None else d_x.add_(add[rows])",
        "d_x",
        NORM,
    ),
    Mutant(
        "eager rotary: the backward turns the same way as the forward",
        "rotary_",
        "torch.cat((turned[..., half:], -turned[..., :half]), -1)",
        "torch.cat((-turned[..., half:], turned[..., :half]), -1)",
        ROTARY,
    ),
    Mutant(
        "use_triton(False) is not read",
        "triton_serves",
        "triton is None or not _triton_wanted",
        "triton is None",
        DISPATCH,
    ),
    Mutant(
        "what Triton lacks to build its launcher is not told from other errors",
        "run",
        'frame.f_globals.get("__name__") in LAUNCHER_MODULES',
        "False",
        DISPATCH,
    ),
    Mutant(
        "first step: what Triton lacks is blamed on a part",
        "_outcome",
        "except (OSError, torch.OutOfMemoryError):",
        "except ZeroDivisionError:",
        DISPATCH,
    ),
)
