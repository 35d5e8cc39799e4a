"""Compiles kernels as their launchers launch them, for GPUs that are not present.

Meta tensors replace a GPU's tensors, with the same shapes, strides and alignment. Triton specialises the launch as it
would on the GPU, but launches nothing.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
REGISTERS = 65_536  # of a multiprocessor, for 2048 threads


class Loop(NamedTuple):
    """The instructions between a label and the last jump back to it."""

    instructions: list[str]

    def count(self, name: str) -> int:
        return sum(name in instruction for instruction in self.instructions)


class Compiled:
    """A kernel compiled for a target, with statistics from its machine code."""

    def __init__(self, function: JITFunction, kernel: Any, num_warps: int) -> None:
        self.name, self.asm, self.num_warps = function.fn.__name__, kernel.asm, num_warps

    def _tool(self, tool: str, *options: str) -> str:
        with tempfile.TemporaryDirectory() as directory:
            cubin = Path(directory) / "kernel.cubin"
            cubin.write_bytes(self.asm["cubin"])
            command = [getattr(triton.knobs.nvidia, tool).path, *options, str(cubin)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @cached_property
    def usage(self) -> dict[str, int]:
        """REG: registers per thread; STACK, LOCAL: spilled bytes per thread; SHARED: bytes per block."""
        said = self._tool("cuobjdump", "-res-usage")
        return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", said)}

    @cached_property
    def disassembled(self) -> str:
        return self._tool("nvdisasm", "-c")

    @property
    def resident(self) -> int:
        """The number of blocks for which a multiprocessor has registers and threads."""
        threads = 32 * self.num_warps
        return min(2048 // threads, REGISTERS // (-(-self.usage["REG"] // 8) * 8 * threads))

    @cached_property
    def loops(self) -> list[Loop]:
        """The innermost loops, in order."""
        labels: dict[str, int] = {}
        instructions: list[str] = []
        for line in self.disassembled.splitlines():
            if label := re.match(r"(\.L_x_\w+):", line.strip()):
                labels[label[1]] = len(instructions)
            elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                instructions.append(instruction[1])
        found = []
        for end, instruction in enumerate(instructions):
            jump = re.search(r"BRA.*?`\((\.L_x_\w+)\)", instruction)
            start = labels.get(jump[1], end) if jump else end
            if end - start > 5:  # the last loop of a program jumps to itself
                found.append(Loop(instructions[start : end + 1]))
        return found

    @cached_property
    def widest_load(self) -> int:
        """Bytes that a thread reads from global memory in one instruction."""
        if "cubin" in self.asm:
            return max(int(bits) for bits in re.findall(r"LDG\.E\.(\d+)", self.disassembled)) // 8
        return 4 * max(int(n) for n in re.findall(r"(?:global|buffer)_load_dwordx(\d)", self.asm["amdgcn"]))

    @property
    def spilled(self) -> int:
        """Bytes or registers per thread that are spilled to memory."""
        if "cubin" in self.asm:
            return self.usage["STACK"] + self.usage["LOCAL"]
        return sum(int(n) for n in re.findall(r"[vs]gpr_spill_count:\s*(\d+)", self.asm["amdgcn"]))


class _Driver:
    """Answers Triton's questions about a GPU that is not present."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        """A separate device number for every target, because compiled kernels are cached by device."""
        return 1000 + list(TARGETS.values()).index(self.target)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def launches(target: str) -> Iterator[list[Compiled]]:
    """Inside, kernels are compiled for `target` and listed instead of launched."""
    found: list[Compiled] = []

    def run(self: JITFunction, *arguments: object, grid: object, warmup: bool, **options: Any) -> None:
        found.append(
            Compiled(self, original(self, *arguments, grid=grid, warmup=True, **options), options["num_warps"])
        )

    def address(tensor: torch.Tensor) -> int:
        return tensor.storage_offset() * tensor.element_size()

    original = JITFunction.run
    with (
        patch.object(JITFunction, "run", run),
        patch.object(torch.Tensor, "data_ptr", address),
        patch.object(driver, "_active", _Driver(TARGETS[target])),
    ):
        yield found


def compiled(target: str, launch: Callable[[], object]) -> Compiled:
    """Returns the one kernel that `launch` launches on meta tensors."""
    with launches(target) as found:
        launch()
    (kernel,) = found
    return kernel
