"""Every Triton kernel compiles for every GPU generation, with the constants it is launched with, and spills nothing."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter replaces the compiler")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from seqtile.kernels import cross_entropy, gated_activation, rms_norm, rotary  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = ("fp32", "bf16", "fp16")
FLAGS = ("HAS_BIAS", "CAPPED", "HAS_CLASS_WEIGHT", "SMOOTHED", "STORE_LSE", "STORE_ENTROPY", "STORE_PREDICTED")
FLAGS += ("WRITE_GRAD", "SCALE_ROWS", "LSE_GRAD", "ENTROPY_GRAD")
MODULES = (cross_entropy, gated_activation, rms_norm, rotary)
# Llama-8B's hidden size, Llama-70B's, one that is no power of two; heads of 128, whose number is no constant.
NORMS = {"4096": (4096, {"heads": 1}), "8192": (8192, {"heads": 1}), "2880": (2880, {"heads": 1}), "heads": (128, {})}
LOSS_VARIANTS = {
    "plain": ("WRITE_GRAD",),
    "alone": (),
    "metrics": ("WRITE_GRAD", "STORE_LSE", "STORE_ENTROPY", "STORE_PREDICTED"),
    "log_probs_backward": ("WRITE_GRAD", "SCALE_ROWS", "ENTROPY_GRAD"),
    "z_loss_by_hand": ("WRITE_GRAD", "SCALE_ROWS", "LSE_GRAD"),
    "everything": FLAGS,
}


def kernels(dtype: str) -> dict[str, tuple]:
    """name -> (kernel, signature, constants, number of warps), as the launchers launch them."""
    pointer = f"*{dtype}"
    rows = {"logits_ptr": pointer, "logits_row_stride": "i32", "target_ptr": "*i64", "predicted_ptr": "*i64"}
    rows |= {"bias_ptr": pointer, "class_weight_ptr": "*fp32", "vocab": "i32"}
    rows |= {f"{name}_ptr": "*fp32" for name in ("loss", "lse", "entropy", "row_scale", "lse_scale", "entropy_scale")}
    rows |= {name: "fp32" for name in ("logit_scale", "softcap", "temperature", "label_smoothing", "z_loss")}
    forward = {"gate_ptr": pointer, "up_ptr": pointer, "gate_row_stride": "i32", "up_row_stride": "i32", "width": "i32"}
    backward = {name: pointer for name in ("gate_ptr", "up_ptr", "product_ptr")}
    backward |= {name: "i64" for name in ("gate_row_stride", "up_row_stride", "product_row_stride")} | {"width": "i32"}
    loss, activation = cross_entropy, gated_activation
    return {
        **{
            f"cross_entropy_{name}": (
                loss._cross_entropy_kernel,
                rows,
                {flag: flag in on for flag in FLAGS} | {"BLOCK": loss.BLOCK},
                loss.NUM_WARPS,
            )
            for name, on in LOSS_VARIANTS.items()
        },
        **{
            f"gated_activation{name}_{function}": (
                getattr(activation, f"_gated_activation{name}_kernel"),
                signature,
                {"GELU": function == "gelu", "BLOCK": activation.BLOCK},
                activation.NUM_WARPS,
            )
            for name, signature in (("", forward), ("_backward", backward))
            for function in ("silu", "gelu")
        },
        **norms(pointer),
        **rotaries(pointer),
    }


def norms(pointer: str) -> dict[str, tuple]:
    forward, backward = rms_norm._rms_norm_kernel, rms_norm._rms_norm_backward_kernel
    found = {}
    for name, (width, of_heads) in NORMS.items():
        constants = rms_norm._block(width) | of_heads
        num_warps = constants.pop("num_warps")
        found[f"rms_norm_{name}"] = (forward, signature(forward, pointer), constants, num_warps)
        # What there is not comes as None; heads are normed without a residual.
        added = {"ADD": True} if of_heads else {"ADD": False, "add_ptr": None}
        types = signature(backward, pointer, d_weight_ptr="*fp32")
        for trained, of_weight in (("", {"OF_WEIGHT": True}), ("_frozen", {"OF_WEIGHT": False, "d_weight_ptr": None})):
            found[f"rms_norm_backward_{name}{trained}"] = (backward, types, constants | added | of_weight, num_warps)
    return found


def rotaries(pointer: str) -> dict[str, tuple]:
    """Of heads of 128: 5 in Llama-8B's group, 40 in all; their number is no constant."""
    kernel = rotary._rotary_kernel
    return {
        f"rotary{direction}{name}": (
            kernel,
            signature(kernel, pointer, cos_ptr=angles, sin_ptr=angles),
            {"BACKWARD": direction == "_backward"} | rotary._block(128),
            rotary.NUM_WARPS,
        )
        for direction in ("", "_backward")
        for name, angles in (("", pointer), ("_float32_angles", "*fp32"))
    }


def signature(kernel, pointer: str, **others: str) -> dict[str, str]:
    """Of a kernel whose arguments are tensors of one dtype but `others`, eps, and integers."""
    types = {name: pointer if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    return types | {"eps": "fp32"} | others


def compile_for(target: GPUTarget, kernel, signature: dict[str, str], constants: dict, num_warps: int):
    """Compiled as Triton specialises a launch on a model's shapes: pointers, strides and widths divisible by 16."""
    names = kernel.arg_names
    signature = signature | {name: "constexpr" for name in constants}
    of_shape = [name for name in names if name.endswith(("_ptr", "_stride")) or name in ("width", "vocab", "half")]
    aligned = [name for name in of_shape if name not in constants]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernel, {name: signature[name] for name in names}, {(names.index(n),): v for n, v in constants.items()}, attrs
    )
    return triton.compile(source, target=target, options={"num_warps": num_warps})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", kernels("fp32"))
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills_and_loads_wide(target: str, name: str, dtype: str, tmp_path: Path) -> None:
    compiled = compile_for(TARGETS[target], *kernels(dtype)[name])
    if target == "gfx942":
        assert compiled.asm["hsaco"]
        return
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    command = [cuobjdump, "-res-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK", "LOCAL"))
    assert registers > 0 and stack == 0 and local == 0, usage
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"]), "loads are not 16 bytes wide"


def test_every_kernel_is_listed() -> None:
    listed = {entry[0].fn.__name__ for entry in kernels("fp32").values()}
    existing = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    assert listed == existing
