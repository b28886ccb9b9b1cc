"""Kernels compiled for a chip that is not here: the launches that the library would make, and what they take."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist.kernels import divergence, gradient, panel, product, rows, statistics, target

MODULES = (statistics, gradient, product, rows, target, panel, divergence)
# KiB of shared memory that a program can have
SHARED = {
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "gfx90a": 64, "gfx942": 64, "gfx950": 160,
}  # fmt: skip
_SCALARS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    """What a launcher hands to a kernel."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Resources(NamedTuple):
    """Bytes of shared memory of a program, registers of a thread, and bytes of them that it keeps in memory."""

    shared: int
    registers: int
    spilled: int


class Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append(Launch(self.kernel, args, kwargs))


@contextmanager
def recorded(chip: str) -> Iterator[list[Launch]]:
    """Inside, launchers given CPU tensors believe that these are on ``chip``; their launches go to the list."""
    launches: list[Launch] = []
    believed = {
        "triton_serves": lambda tensor: True,
        "target_of": lambda device: chip,
        "multiprocessors": lambda device: 64,
    }
    with ExitStack() as stack:
        for module in MODULES:
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                    stack.enter_context(mock.patch.object(module, name, Recorder(value, launches)))
                elif name in believed:
                    stack.enter_context(mock.patch.object(module, name, believed[name]))
        yield launches


def compiled(launch: Launch, chip: str) -> Any:
    """The kernel as ``launch`` would compile it: arguments specialised as Triton's launcher specialises them."""
    kernel, options = launch.kernel, dict(launch.kwargs)
    options = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, launch.args, strict=False)) | {k: v for k, v in launch.kwargs.items() if k in names}
    assert values.keys() == set(names), f"{kernel.__name__}: {set(names) - values.keys()} not passed"
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{_SCALARS[value.base.dtype]}[{block}]>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_SCALARS[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    gpu = GPUTarget("cuda", int(chip[3:]), 32) if chip.startswith("sm_") else GPUTarget("hip", chip, 64)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=gpu, options=options)


def disassembly(binary: Any, *options: str) -> str:
    """What Triton's ``cuobjdump`` says of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        return subprocess.run([tool, *options, cubin], capture_output=True, text=True, check=True, timeout=60).stdout


def resources(binary: Any) -> Resources:
    """What the compiled kernel takes."""
    if "amdgcn" in binary.asm:
        code = binary.asm["amdgcn"]
        registers = max(map(int, re.findall(r"\.vgpr_count:\s*(\d+)", code)), default=0)
        spilled = 4 * sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code)))
        return Resources(binary.metadata.shared, registers, spilled)
    report = disassembly(binary, "--dump-resource-usage")
    (registers,), (stack,) = re.findall(r"REG:(\d+)", report), re.findall(r"STACK:(\d+)", report)
    return Resources(binary.metadata.shared, int(registers), int(stack))
